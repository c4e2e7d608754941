"""Expiry: removes entries from memory and the slots when their time is over, or when they were deleted from the disk.

Entries go one by one, in portions between the engine's steps. Memos that only save milliseconds (tokenised texts, reply tokens,
grammars) are cleared as a whole, also in portions, once the oldest of them may be due. Used from the engine thread only.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass

from headstart.explain.history import History
from headstart.explain.record import Record
from headstart.interfaces.engine import Engine
from headstart.interfaces.tokens import BlockId
from headstart.prefix_cache.blocks import Chain, checkpoint_id, root_id
from headstart.prefix_cache.entry import Entry
from headstart.prefix_cache.quota import owner_of
from headstart.prompt.builder import Prompter
from headstart.serving.barred import Owners
from headstart.serving.cache import Cache
from headstart.serving.erased_text import ErasedText
from headstart.serving.portions import LongWork, Portions
from headstart.serving.request import Report
from headstart.serving.settle import Settling
from headstart.serving.shared_audit import SharedAudit
from headstart.serving.slots import Slot
from headstart.serving.turn import Turn

DROPS = 8
"""Entries that are dropped in one piece."""
LOOKED_AT = 512
"""Entries that are looked at in one piece."""


@dataclass(frozen=True, slots=True)
class Erasure:
    """What must be deleted from the memories that hold texts of callers.

    Attributes:
        due: whether a text that was written under a salt, at a time in seconds since 1970, must be deleted.
        stay: if a user has deleted chains here, the salts and ids of the answers that do not belong to them; else None.
        hints: whether memos that only save milliseconds must be deleted too, at any age.
        chains: whether a user has deleted chains, here or in another process.
    """

    due: Callable[[str, float], bool]
    stay: Collection[tuple[str, str]] | None
    hints: bool
    chains: bool


class Expiry:
    """Looks from time to time for entries that must be deleted, and deletes them in portions.

    What is due, or was deleted by a user, is of no use from the moment at which this is known: slots are emptied, memories of
    texts forget it, and no request loads an entry of it (`KvStore.usable`). Entries and ghosts then go piece by piece.

    Args:
        empty: empties a slot.
        unpin: takes an entry from the requests that have pinned it and wait.
        portions: does the pieces.

    Attributes:
        deletion_count: grows when a user deletes something, and again when the shared store has deleted it.
    """

    def __init__(
        self,
        engine: Engine,
        cache: Cache,
        slots: Sequence[Slot],
        prompter: Prompter,
        settle: Settling,
        audit: SharedAudit,
        history: History,
        empty: Callable[[Slot], None],
        unpin: Callable[[BlockId], None],
        portions: Portions,
    ) -> None:
        self._engine = engine
        self._cache = cache
        self._store = cache.store
        self._terms = cache.store.terms
        self._slots = slots
        self._prompter = prompter
        self._settle = settle
        self._audit = audit
        self._history = history
        self._empty = empty
        self._unpin = unpin
        self._portions = portions
        self.deletion_count = 0
        self._wiped = -math.inf  # when that was last
        self._observers: list[Callable[[Erasure], None]] = []
        self._since = cache.store.wall()  # the time of the oldest memo
        self._to_drop: deque[BlockId] = deque()  # barred until they are dropped
        self._read: dict[BlockId, Entry] = {}  # the disk is reading these; they go afterwards
        self._nothing = ErasedText(cache.index.block_size)
        self._late: set[int] = set()  # slots in use; they are checked afterwards
        self._walk_again = False  # entries may be due
        self._owners_again = False  # some owners' entries must go that only memory has
        self._under_way: dict[Callable[[], LongWork[None]], Future[None]] = {}
        self._looked, self._version = -math.inf, -1

    def observe(self, observer: Callable[[Erasure], None]) -> None:
        """Adds the `forget` of a memory that holds texts of callers. It is called on the engine thread."""
        self._observers.append(observer)

    @property
    def pause(self) -> float:
        """Seconds until the next look; infinite if there is none."""
        return max(0.0, self._looked + self._terms.look - self._store.wall())

    @property
    def busy(self) -> bool:
        """Whether something is left of what the last look found."""
        left = self._to_drop or self._read or self._store.barred.owners
        return bool(left) or not all(done.done() for done in self._under_way.values())

    def delete(self, keys: Set[BlockId], tails: Iterable[tuple[BlockId, bytes]] = ()) -> LongWork[None]:
        """Deletes entries on request of their owner, here, with every trace of them. The caller deletes them from the disk.

        The caller also bars them, from before this begins until the disk has deleted them. At the end nothing is left of them
        but what the disk is still reading (`busy`).

        Args:
            tails: see `ErasedText`; without those that another entry, which stays, begins with.
        """
        self._mark(self._store.wall(), ErasedText(self._cache.index.block_size, keys, tails), hints=True)
        yield from self._bar_following(keys)
        for number, key in enumerate(keys, 1):
            self._drop(key)
            if number % DROPS == 0:
                yield
        yield from self._drop_barred()
        yield from self._forget_hints()

    def deletion_ended(self) -> None:
        """The disk and the shared store have deleted it too. What was fetched until then may be of that."""
        if self._cache.shared.on:
            self.deletion_count += 1

    def delete_read(self) -> LongWork[None]:
        """Drops what the disk was reading until now."""
        self._take_read()
        yield from self._drop_barred()

    def drop_unsaved(self, keys: Iterable[BlockId]) -> None:
        """Drops soon those of these entries that only memory has."""
        entries = (self._cache.index.get(key) for key in keys)
        self._bar([entry.id for entry in entries if entry is not None and self._cache.disk.name not in entry.copies])

    def drop_wrong(self, keys: Sequence[BlockId]) -> None:
        """Drops entries whose content is wrong, here and from the disk, also those that are pinned or still being read."""
        offload, disk = self._store.offload, self._cache.disk
        self._store.pins.unpin(keys)
        disk.unpin(keys).add_done_callback(lambda _: disk.discard(keys))  # the disk spares what is pinned
        for key in keys:
            offload.discard(key)
            offload.gone(key)
        self._bar(keys)

    def step(self) -> None:
        """Begins to remove everything that is due now."""
        for work, ended in [(work, done) for work, done in self._under_way.items() if done.done()]:
            del self._under_way[work]
            ended.result()  # raises what has ended it
        offload, now = self._store.offload, self._store.wall()
        self._terms.before = min(self._terms.before, now)  # the clock may have been set back
        if offload.erased:
            self._bar(key for key in offload.erased if self._cache.index.get(key) is not None)
            offload.erased = set()
        owners, offload.owners_erased = offload.owners_erased, None
        if owners is not None or offload.before > self._terms.before:
            if offload.before > self._terms.before:
                self._walk_again = True
                for slot in self._slots:
                    slot.restored = 0
            self._terms.before = max(self._terms.before, offload.before)
            self._terms.obeyed, offload.before = max(self._terms.obeyed, offload.before), -math.inf
            self._owners_again |= owners is not None
            self._mark(now, self._nothing, owners, hints=True)
            self._begin(self._forget_hints)
        elif abs(now - self._looked) >= self._terms.look or self._version != self._terms.version:  # clocks may go back
            self._version, self._since = self._terms.version, min(self._since, now)
            if self._terms.shortest < math.inf:
                hints = self._since <= self._terms.due(b"", now)
                self._mark(now, self._nothing, hints=hints)
                self._walk_again = True
                if hints:
                    self._begin(self._forget_hints)
                self._terms.forget(now)
            self._looked = now
        self._take_read()
        if self._terms.shortest < math.inf:
            for slot in self._slots:
                if not slot.busy:
                    self._leave(slot, now)
        for number in [number for number in self._late if not self._slots[number].busy]:
            self._late.remove(number)
            self._leave(self._slots[number], now)
        if self._to_drop:
            self._begin(self._drop_barred)
        if self._walk_again:
            self._begin(self._walk)
        if self._owners_again:
            self._begin(self._walk_owners)

    def _begin(self, work: Callable[[], LongWork[None]]) -> None:
        """Begins work, unless it is under way."""
        if work not in self._under_way:
            self._under_way[work] = self._portions.add(work())

    def _mark(self, now: float, erased: ErasedText, owners: Owners | None = None, *, hints: bool) -> None:
        """Empties the slots, and lets the memories of texts forget, where something is due or belongs to entries that a user
        `erased`, or to `owners` of whom another process has deleted something. Entries remain, but they are of no use any more.
        """
        whose = Owners() if owners is None else owners
        chains = bool(erased or whose)
        if chains:
            self.deletion_count += 1  # before anything is forgotten: see `must_forget_turn`
            self._wiped = now
        for slot in self._slots:
            slot.unsavable |= erased.within(slot)
            slot.unsavable |= len(slot) > 0 and owner_of(slot.root) in whose
            self._leave(slot, now)
        if hints:
            self._since = now
        limits: dict[str, float] = {}  # by salt

        def due(salt: str, written: float) -> bool:
            if salt not in limits:
                owner = owner_of(root_id(self._engine.fingerprint, salt))
                limits[salt] = math.inf if owner in whose else self._terms.due(owner, now)
            return written <= limits[salt]

        def over(record: Record) -> bool:
            quoted = _quoted(record.reports)
            if due(record.salt, min(record.written, quoted)):
                return True
            return bool(erased) and (quoted < math.inf or erased.within(record))

        def given_up(turn: Turn) -> bool:
            return due(turn.prompt.salt, turn.written) or erased.within(turn.record)

        def unchecked(chain: Chain, written: float) -> bool:
            owner = owner_of(chain.root)
            return owner in whose or written <= self._terms.due(owner, now) or erased.within(chain)

        self._history.forget(over)
        self._settle.forget(given_up)
        self._audit.forget(unchecked)
        stay = {(record.salt, record.alias) for record in self._history} if erased else None
        for observer in self._observers:
            observer(Erasure(due, stay, hints, chains))

    # ── entries, in pieces ───────────────────────────────────────────────────────────────────────────────────────────

    def _take_read(self) -> None:
        """Drops soon what no tier reads any more."""
        for key in self._read:
            self._unpin(key)
        for key in [key for key, entry in self._read.items() if not entry.holds]:
            del self._read[key]
            self._to_drop.append(key)

    def _bar(self, keys: Iterable[BlockId]) -> None:
        """Bars entries, and drops them soon."""
        for key in keys:
            self._store.barred.add([key])
            self._to_drop.append(key)

    def _bar_following(self, keys: Collection[BlockId]) -> LongWork[None]:
        """Drops the entries that follow one of these and are only in memory, as open tails are."""
        index, disk, seen, above = self._cache.index, self._cache.disk.name, set[BlockId](), list(keys)
        while above:
            for _ in range(min(LOOKED_AT // 8, len(above))):
                key = above.pop()
                state = index.get(checkpoint_id(key))
                after = [entry.id for entry in (*index.children(key), *([state] if state else ())) if disk not in entry.copies]
                new = [one for one in after if one not in seen]
                seen.update(new)
                above += new
                self._bar(new)
            yield

    def _drop_barred(self) -> LongWork[None]:
        while self._to_drop:
            for _ in range(min(DROPS, len(self._to_drop))):
                key = self._to_drop.popleft()
                self._drop(key)
                self._store.barred.lift([key])
            yield

    def _walk(self) -> LongWork[None]:
        """Passes over all entries, and drops those that are due. The owners of many entries are few."""
        while self._walk_again:
            self._walk_again = False
            for piece in self._cache.index.pieces():
                for first in range(0, len(piece), LOOKED_AT):
                    now, limits, dropped = self._store.wall(), dict[bytes, float](), 0
                    for entry in piece[first : first + LOOKED_AT]:
                        limit = limits.get(entry.owner)
                        if limit is None:
                            limit = limits[entry.owner] = self._terms.due(entry.owner, now)
                        if entry.written <= limit and self._cache.index.get(entry.id) is entry and self._store.spent(entry):
                            self._drop(entry.id)
                            dropped += 1
                            if dropped % DROPS == 0:
                                yield
                    yield

    def _walk_owners(self) -> LongWork[None]:
        """Drops what only memory has of the owners that are barred, and nobody has pinned."""
        index, disk, pins, barred = self._cache.index, self._cache.disk.name, self._store.pins, self._store.barred
        while self._owners_again:
            self._owners_again = False
            for piece in index.pieces():
                for first in range(0, len(piece), LOOKED_AT):
                    dropped = 0
                    for entry in piece[first : first + LOOKED_AT]:
                        if entry.owner not in barred.owners or disk in entry.copies or entry.id in pins:
                            continue
                        if index.get(entry.id) is entry:
                            self._drop(entry.id)
                            dropped += 1
                            if dropped % DROPS == 0:
                                yield
                    yield
        barred.owners = self._store.offload.owners_erased or Owners()  # those of whom it has heard meanwhile

    def _drop(self, key: BlockId) -> None:
        """Drops an entry from memory. If a tier is reading it, it goes as soon as the tier has read it.

        If it is due, it also leaves the index: a disk that fails, or hangs, deletes it later.
        """
        entry = self._cache.index.get(key)
        if entry is None:
            return
        spent = self._store.spent(entry)
        if self._cache.memory.name in entry.copies:
            if entry.holds:
                self._unpin(key)
            if not entry.holds:
                self._store.erase(entry)
            elif key not in self._read:
                self._store.barred.add([key])
                self._read[key] = entry
                self._store.offload.leave([key])
        if spent:
            self._store.offload.over(key)

    def _forget_hints(self) -> LongWork[None]:
        """Clears the memos that only save milliseconds, and the ghosts."""
        self._engine.forget_grammars()
        yield from self._prompter.clearing()
        yield from self._store.forget_hints()

    def must_forget(self, slot: Slot, reports: Mapping[int, object]) -> bool:
        """Whether the request that uses a slot must leave no record. `reports`: of all its choices."""
        quoted = _quoted(reports)
        if slot.unsavable or (quoted < math.inf and slot.now <= self._wiped):
            return True
        return min(slot.now, quoted) <= self._terms.due(owner_of(slot.root), self._cache.store.wall())

    def must_forget_turn(self, turn: Turn) -> bool:
        """Whether a turn must leave no record: it is due, or something was deleted since then, which may be its text.

        May be called on any thread. If this is false, a later erasure also removes all that the turn has recorded until then.
        """
        return turn.deletion_count != self.deletion_count or turn.written <= self._terms.due(
            owner_of(turn.chain.root), self._cache.store.wall()
        )

    def _leave(self, slot: Slot, now: float) -> None:
        """Empties a slot whose content is due or was erased. A slot in use is emptied later."""
        over = slot.written() <= self._terms.cut(owner_of(slot.root), now) or slot.written(slot.restored) <= self._terms.before
        if not (slot.unsavable or over):
            return
        if slot.busy:
            self._late.add(slot.number)
            return
        self._cache.kv_save.save(slot)  # the younger part of it
        self._empty(slot)


def _quoted(reports: Mapping[int, object]) -> float:
    """When the oldest text was first stored that the explanations of a request quote; infinite if they quote none.

    They have some characters of an earlier request, which may be a deleted one.
    """
    found = [report.explanation for report in reports.values() if isinstance(report, Report)]
    return min((explanation.quoted for explanation in found if explanation is not None), default=math.inf)
