"""Expiry: removes entries from memory and the slots when their time is over, or when they were deleted from the disk.

Entries go one by one. Memos that only save milliseconds (tokenised texts, reply tokens, grammars) are cleared as a whole, once
the oldest of them may be due. Used from the engine thread only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from headstart.explain.history import History
from headstart.explain.record import Record
from headstart.interfaces.engine import Engine
from headstart.interfaces.tokens import BlockId
from headstart.prefix_cache.blocks import Chain, checkpoint_id, root_id
from headstart.prefix_cache.index import Entry
from headstart.prefix_cache.quota import owner_of
from headstart.prompt.builder import Prompter
from headstart.serving.cache import Cache
from headstart.serving.request import Report
from headstart.serving.settle import Settling
from headstart.serving.slots import Slot
from headstart.serving.turn import Turn

RECENT = 1 << 16
"""Most erased entries that are remembered until a notice says whether a user deleted them."""
NOTICE = 60.0
"""Seconds after which such a notice would have come. A large catalogue is compared piece by piece."""


@dataclass(frozen=True, slots=True)
class Erasure:
    """What must be deleted from the memories that hold texts of callers.

    Attributes:
        due: whether a text that was written under a salt, at a time in seconds since 1970, must be deleted.
        stay: if a user has deleted chains, the salts and ids of the answers that do not belong to them; else None.
        hints: whether memos that only save milliseconds must be deleted too, at any age.
    """

    due: Callable[[str, float], bool]
    stay: Collection[tuple[str, str]] | None
    hints: bool


class Expiry:
    """Looks from time to time for entries that must be deleted, and deletes them.

    Args:
        empty: empties a slot.

    Attributes:
        wipes: how many times a user has deleted something.
    """

    def __init__(
        self,
        engine: Engine,
        cache: Cache,
        slots: Sequence[Slot],
        prompter: Prompter,
        settle: Settling,
        history: History,
        empty: Callable[[Slot], None],
    ) -> None:
        self._engine = engine
        self._cache = cache
        self._terms = cache.store.terms
        self._slots = slots
        self._prompter = prompter
        self._settle = settle
        self._history = history
        self._empty = empty
        self.wipes = 0
        self._wiped = -math.inf  # when that was last
        self._observers: list[Callable[[Erasure], None]] = []
        self._since = cache.store.wall()  # the time of the oldest memo
        self._recent: set[BlockId] = set()
        self._news = -math.inf  # when the last of them was found
        self._read: dict[BlockId, Entry] = {}  # the disk is reading these; they go afterwards
        self._late: set[int] = set()  # slots in use; they are checked afterwards
        self._looked, self._version = -math.inf, -1

    def observe(self, observer: Callable[[Erasure], None]) -> None:
        """Adds the `forget` of a memory that holds texts of callers. It is called on the engine thread."""
        self._observers.append(observer)

    @property
    def pause(self) -> float:
        """Seconds until the next look; infinite if there is none."""
        return max(0.0, self._looked + self._terms.look - self._cache.store.wall())

    def delete(self, keys: Collection[BlockId]) -> None:
        """Deletes entries on request of their owner, here, with every trace of them. The caller deletes them from the disk."""
        self._cache.store.offload.erased.update(keys)
        self._cache.store.offload.wiped = True
        self.step()

    def step(self) -> None:
        """Removes everything that is due now."""
        offload, now = self._cache.store.offload, self._cache.store.wall()
        self._terms.before = min(self._terms.before, now)  # the clock may have been set back
        if offload.erased:
            self._recent = self._recent | offload.erased if len(self._recent) < RECENT else offload.erased
            self._drop([entry for key in offload.erased if (entry := self._cache.index.get(key)) is not None])
            offload.erased, self._news = set(), now
        if offload.wiped or offload.before > self._terms.before:
            all_old = offload.before > self._terms.before
            self._terms.before = max(self._terms.before, offload.before)
            self._terms.obeyed, offload.before = max(self._terms.obeyed, offload.before), -math.inf
            erased, self._recent = self._recent if offload.wiped else set(), set()
            offload.wiped = False
            self._look(now, erased, hints=True, entries=all_old)
        elif abs(now - self._looked) >= self._terms.look or self._version != self._terms.version:  # clocks may go back
            self._version, self._since = self._terms.version, min(self._since, now)
            if self._terms.shortest < math.inf:
                self._look(now, frozenset(), hints=self._since <= self._terms.due(b"", now))
                self._terms.forget(now)
            self._looked = now
            if abs(now - self._news) > NOTICE:
                self._recent = set()
        self._drop([entry for entry in self._read.values() if not entry.pins])
        for number in [number for number in self._late if not self._slots[number].busy]:
            self._late.remove(number)
            self._leave(self._slots[number], now)

    def _look(self, now: float, erased: Collection[BlockId], *, hints: bool, entries: bool = True) -> None:
        """Removes everything that is due, and everything that belongs to entries that a user `erased`.

        `entries`: whether other entries in memory may be due.
        """
        if erased:
            self.wipes += 1  # before anything is forgotten: see `passed`
            self._wiped = now
        index, memory = self._cache.index, self._cache.memory if entries else ()
        self._drop([entry for key in self._hanging(erased) if (entry := index.get(key)) is not None])
        here = [entry for key in memory if (entry := index.get(key)) is not None]
        self._drop([entry for entry in here if self._cache.store.spent(entry)])
        for slot in self._slots:
            slot.forsaken |= not set(slot.ids).isdisjoint(erased)
            self._leave(slot, now)
        if hints:
            self._since = now
            self._prompter.clear()
            self._engine.forget_grammars()
            self._cache.store.forget_hints()

        def due(salt: str, written: float) -> bool:
            return written <= self._terms.due(owner_of(root_id(self._engine.fingerprint, salt)), now)

        def over(record: Record) -> bool:
            quoted = _quoted(record.reports)
            if due(record.salt, min(record.written, quoted)):
                return True
            if not erased:
                return False
            return quoted < math.inf or not set(Chain(record.root, index.block_size, record.tokens).ids).isdisjoint(erased)

        def given_up(turn: Turn) -> bool:
            return due(turn.prompt.salt, turn.written) or not set(turn.ids).isdisjoint(erased)

        self._history.forget(over)
        self._settle.forget(given_up)
        stay = {(record.salt, record.alias) for record in self._history} if erased else None
        for observer in self._observers:
            observer(Erasure(due, stay, hints))

    def _hanging(self, erased: Collection[BlockId]) -> set[BlockId]:
        """Entries that follow one of these and are only in memory, as open tails are."""
        index, disk, found, above = self._cache.index, self._cache.disk.name, set[BlockId](), list(erased)
        while above:
            key = above.pop()
            state = index.get(checkpoint_id(key))
            after = {entry.id for entry in (*index.children(key), *([state] if state else ())) if disk not in entry.copies}
            above += after - found
            found |= after
        return found

    def late(self, slot: Slot, reports: Mapping[int, object]) -> bool:
        """Whether the request that uses a slot must leave no record. `reports`: of all its choices."""
        quoted = _quoted(reports)
        if slot.forsaken or (quoted < math.inf and slot.now <= self._wiped):
            return True
        return min(slot.now, quoted) <= self._terms.due(owner_of(slot.root), self._cache.store.wall())

    def passed(self, turn: Turn) -> bool:
        """Whether a turn must leave no record: it is due, or something was deleted since then, which may be its text.

        May be called on any thread. If this is false, a later erasure also removes all that the turn has recorded until then.
        """
        return turn.wipes != self.wipes or turn.written <= self._terms.due(owner_of(turn.chain.root), self._cache.store.wall())

    def _leave(self, slot: Slot, now: float) -> None:
        """Empties a slot whose content is due or was erased. A slot in use is emptied later."""
        if not (slot.forsaken or slot.written() <= self._terms.due(owner_of(slot.root), now)):
            return
        if slot.busy:
            self._late.add(slot.number)
            return
        self._cache.kv_save.save(slot)  # the younger part of it
        self._empty(slot)

    def _drop(self, entries: Sequence[Entry]) -> None:
        """Drops entries from memory. Those that the disk is reading go as soon as it has read them."""
        for entry in entries:
            self._read.pop(entry.id, None)
            if self._cache.memory.name not in entry.copies:
                continue
            if entry.pins:
                self._read[entry.id] = entry
                self._cache.store.offload.leave([entry.id])
            else:
                self._cache.store.erase(entry)


def _quoted(reports: Mapping[int, object]) -> float:
    """When the oldest text was first stored that the explanations of a request quote; infinite if they quote none.

    They have some characters of an earlier request, which may be a deleted one.
    """
    found = [report.explanation for report in reports.values() if isinstance(report, Report)]
    return min((explanation.quoted for explanation in found if explanation is not None), default=math.inf)
