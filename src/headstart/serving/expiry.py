"""Expiry: what has been kept for long enough, or was deleted from the disk, leaves memory and the slots too.

Pieces go one by one. What only saves milliseconds (texts with their tokens, spellings, grammars) goes as a whole, once the
oldest of it may be due. Used from the engine thread only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from headstart.explain.history import History
from headstart.explain.record import Record
from headstart.interfaces.engine import Engine
from headstart.interfaces.tokens import BlockId
from headstart.prefix_cache.blocks import Chain, root_id
from headstart.prefix_cache.index import Entry
from headstart.prefix_cache.quota import owner_of
from headstart.prompt.builder import Prompter
from headstart.serving.cache import Cache
from headstart.serving.settle import Settling, Turn
from headstart.serving.slots import Slot

RECENT = 1 << 16
"""Pieces that were erased last, and may yet turn out to have been somebody's wish."""


@dataclass(frozen=True, slots=True)
class Erasure:
    """What those who keep callers' texts have to forget.

    Attributes:
        due: whether what was written under a salt at a time (seconds since 1970) has to go.
        stay: if somebody has deleted a chain, salts and ids of the answers that have nothing to do with it; else None.
        hints: whether what would be missed for milliseconds only has to go too, whatever its age.
    """

    due: Callable[[str, float], bool]
    stay: Collection[tuple[str, str]] | None
    hints: bool


class Expiry:
    """Looks now and then for what has to go.

    Args:
        empty: forgets what a slot holds.
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
        self._tell: list[Callable[[Erasure], None]] = []
        self._since = cache.store.wall()  # when what goes as a whole began
        self._recent: set[BlockId] = set()
        self._read: dict[BlockId, Entry] = {}  # by the disk, just now; they go afterwards
        self._late: set[int] = set()  # slots that are in use; they are looked at afterwards
        self._looked, self._version = -math.inf, -1

    def observe(self, tell: Callable[[Erasure], None]) -> None:
        """Adds somebody who keeps callers' texts; called on the engine thread."""
        self._tell.append(tell)

    @property
    def pause(self) -> float:
        """Seconds until it wants to look, unless something happens; infinite if it need not."""
        return max(0.0, self._looked + self._terms.look - self._cache.store.wall())

    def step(self) -> None:
        """Forgets what has to go."""
        offload, now, news = self._cache.store.offload, self._cache.store.wall(), bool(self._cache.store.offload.erased)
        self._terms.before = min(self._terms.before, now)  # the clock may have been set back since
        if news:
            self._recent = self._recent | offload.erased if len(self._recent) < RECENT else offload.erased
            self._drop([entry for key in offload.erased if (entry := self._cache.index.get(key)) is not None])
            offload.erased = set()
        if offload.wiped or offload.before > self._terms.before:
            self._terms.before = max(self._terms.before, offload.before)
            self._terms.obeyed, offload.before = max(self._terms.obeyed, offload.before), -math.inf
            erased, self._recent = self._recent if offload.wiped else set(), set()
            offload.wiped = False
            self._look(now, erased, hints=True)
        elif abs(now - self._looked) >= self._terms.look or self._version != self._terms.version:  # clocks may go back
            self._version, self._since = self._terms.version, min(self._since, now)
            if self._terms.shortest < math.inf:
                self._look(now, frozenset(), hints=self._since <= self._terms.due(b"", now))
            self._looked = now
            if not news:  # whose wish it was has been told by now
                self._recent = set()
        self._drop([entry for entry in self._read.values() if not entry.pins])
        for number in [number for number in self._late if not self._slots[number].busy]:
            self._late.remove(number)
            self._leave(self._slots[number], now)

    def _look(self, now: float, erased: Collection[BlockId], *, hints: bool) -> None:
        """Forgets what is due, and what has to do with pieces that were `erased` by somebody's wish."""
        index, memory = self._cache.index, self._cache.memory
        hanging = self._hanging(erased)
        here = [entry for key in memory if (entry := index.get(key)) is not None]
        self._drop([entry for entry in here if entry.id in hanging or self._cache.store.spent(entry)])
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
            if due(record.salt, record.written):
                return True
            return bool(erased) and not set(Chain(record.root, index.block_size, record.tokens).ids).isdisjoint(erased)

        def given_up(turn: Turn) -> bool:
            return due(turn.prompt.salt, turn.written) or not set(turn.ids).isdisjoint(erased)

        self._history.forget(over)
        self._settle.forget(given_up)
        stay = {(record.salt, record.alias) for record in self._history} if erased else None
        for tell in self._tell:
            tell(Erasure(due, stay, hints))

    def _hanging(self, erased: Collection[BlockId]) -> set[BlockId]:
        """Pieces that are only in memory, as open tails are, and hang on some of these."""
        found: set[BlockId] = set()
        for entry in sorted(self._cache.index, key=lambda entry: (entry.start, entry.state)) if erased else ():
            if self._cache.disk.name not in entry.copies and (entry.parent in erased or entry.parent in found):
                found.add(entry.id)
        return found

    def late(self, slot: Slot) -> bool:
        """Whether nothing may be remembered any more of the request that uses a slot."""
        return slot.forsaken or slot.now <= self._terms.due(owner_of(slot.root), self._cache.store.wall())

    def _leave(self, slot: Slot, now: float) -> None:
        """Empties a slot whose content is due, or was erased; later, if it is in use."""
        if not (slot.forsaken or slot.written() <= self._terms.due(owner_of(slot.root), now)):
            return
        if slot.busy:
            self._late.add(slot.number)
            return
        self._cache.saves.save(slot)  # what of it is younger
        self._empty(slot)

    def _drop(self, entries: Sequence[Entry]) -> None:
        """Drops pieces from memory; those that the disk is reading, as soon as it has done so."""
        for entry in entries:
            self._read.pop(entry.id, None)
            if self._cache.memory.name not in entry.copies:
                continue
            if entry.pins:
                self._read[entry.id] = entry
                self._cache.store.offload.leave([entry.id])
            else:
                self._cache.store.erase(entry)
