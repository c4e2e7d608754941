"""Pinned: what owners have pinned. Nothing may evict, delete or lose it, on disk or in memory, also if the machine crashes."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from headstart.interfaces.tokens import BlockId
from headstart.prefix_cache.quota import PinLimits
from headstart.testing.simulation.filesystem import ROOT, FileSystem
from headstart.testing.simulation.violation import require
from headstart.tiers.disk.store import RESERVE

if TYPE_CHECKING:
    from headstart.serving.runtime import Runtime
    from headstart.serving.stored import CachedChain


@dataclass(frozen=True, slots=True)
class PinnedChain:
    """A chain whose owner has the answer that it is pinned.

    Attributes:
        model: the fingerprint.
        last: its open tail, or its last full block.
        full: its last full block, where a server that does not have the open tail sees its end.
        whole: its full blocks and their checkpoints. They are on disk.
        tail: the open tail, which only the memory of this server has.
        faults: imports that had failed in this server until then. Each costs the entries that it was given: one may be bad.
        named: blocks that unpins of other chains have named. They stay pinned for what continues them: if the disk damages
            that, nothing shows that this chain needs them.
    """

    model: bytes
    owner: bytes
    last: BlockId
    full: BlockId
    whole: frozenset[BlockId]
    tail: tuple[BlockId, Runtime] | None
    faults: int
    named: frozenset[BlockId] = frozenset()


class PinnedChains:
    """All pins of a history.

    Args:
        limits: of the disk.
        expires: whether everything has a term, which pins do not outlive.
    """

    def __init__(self, limits: PinLimits, *, expires: bool) -> None:
        self._limits = limits
        self._expires = expires
        self._chains: dict[BlockId, PinnedChain] = {}
        self._free: set[BlockId] = set()  # what was unpinned
        self._released = 0
        self._unknown = 0  # pins of which nobody knows whether they hold: other chains may need what is unpinned
        self._unpinning: dict[int, Runtime] = {}  # what was asked and not answered: a pin may come before it, or after it
        self._withdrawn: dict[int, dict[BlockId, PinnedChain]] = {}  # the chains of what was asked
        self._expiring: set[bytes] = set()
        self._spent: set[BlockId] = set()  # what those had pinned: it stays until its term is over

    def __len__(self) -> int:
        return len(self._chains)

    # ── what owners do ───────────────────────────────────────────────────────────────────────────────────────────────

    def asked(self) -> int:
        """An owner asks for a pin, which may come without an answer.

        Returns a number for `answered`: of what is unpinned meanwhile, nothing is known.
        """
        self._free.clear()
        self._unknown += 1
        return self._released

    def answered(self, asked: int, chain: CachedChain, runtime: Runtime, files: FileSystem) -> None:
        """The owner knows that a chain is pinned. So what this server was asked before has been done, or refused."""
        self._unpinning = {number: one for number, one in self._unpinning.items() if one is not runtime or number > asked}
        if asked != self._released or self._unpinning or self._expires or chain.owner in self._expiring:
            return
        self._unknown -= 1
        size, pins = runtime.engine.traits.block_size, runtime.cache.store.pins
        blocks = [entry.id for entry in chain.entries if entry.length == size]
        whole = {*blocks} | {state.id for state in chain.checkpoints if state.id in pins and state.length == size}
        last = chain.entries[-1]
        tail = (last.id, runtime) if last.id not in whole else None
        self._chains[chain.id] = PinnedChain(
            runtime.engine.fingerprint,
            chain.owner,
            last.id,
            blocks[-1] if blocks else last.id,
            frozenset(whole),
            tail,
            _failed_imports(runtime),
        )
        self.rows(files)

    def failed(self, *, refused: bool) -> None:
        """A pin was refused, or its answer is not known: it may still come and go."""
        self._released += 1
        self._unknown -= refused

    def unpins(self, path: Collection[BlockId], runtime: Runtime) -> int:
        """An owner asks that a chain be unpinned, which has these blocks. Other chains still need some of them."""
        self._released += 1
        known = runtime.cache.index.get
        gone = {last: one for last, one in self._chains.items() if (last if known(last) is not None else one.full) in path}
        self._chains = {
            last: replace(one, named=one.named | one.whole.intersection(path))
            for last, one in self._chains.items()
            if last not in gone
        }
        self._unpinning[self._released], self._withdrawn[self._released] = runtime, gone
        return self._released

    def not_unpinned(self, asked: int) -> None:
        """It was refused: nothing was unpinned, and nothing will be. So chains that it would have unpinned are still pinned."""
        self._unpinning.pop(asked, None)
        for last, chain in self._withdrawn.pop(asked, {}).items():
            if chain.owner not in self._expiring:
                self._chains.setdefault(last, replace(chain, tail=None))

    def left(self, runtime: Runtime) -> None:
        """A server has ended: it does no more of what it was asked."""
        self._unpinning = {number: one for number, one in self._unpinning.items() if one is not runtime}

    def unpinned(self, asked: int, path: Collection[BlockId], files: FileSystem) -> None:
        """That was done. `asked`: the number of `unpins`."""
        self._unpinning.pop(asked, None)
        self._withdrawn.pop(asked, None)
        if asked == self._released and not self._unknown:
            self._free |= {*path} - self._promised() - self._spent
            self.rows(files)

    def deleted(self, keys: Collection[BlockId], files: FileSystem) -> None:
        """The owner of a chain has deleted it."""
        require(self._kept(files).isdisjoint(keys), "a pinned chain was deleted")

    def expires(self, owner: bytes) -> None:
        """What an owner has pinned does not outlive a term."""
        self._expiring.add(owner)
        self._spent.update(*(chain.whole for chain in self._chains.values() if chain.owner == owner))
        self._chains = {last: chain for last, chain in self._chains.items() if chain.owner != owner}

    def lost(self) -> None:
        """The catalogue was damaged: no pin is left."""
        self._chains.clear()
        self._withdrawn.clear()
        self._free.clear()
        self._released += 1

    def forgotten(self) -> None:
        """Servers have to forget everything up to now, except on disk."""
        for last, chain in [*self._chains.items()]:
            self._chains[last] = replace(chain, tail=None)

    def _promised(self) -> frozenset[BlockId]:
        return frozenset().union(*(chain.whole for chain in self._chains.values()))

    def _kept(self, files: FileSystem, model: bytes | None = None) -> frozenset[BlockId]:
        """Those that are pinned for certain, of one model or all: the disk may have damaged the others."""
        damaged = files.missing | files.put_aside
        return frozenset().union(
            *(
                chain.whole - damaged - (chain.named if chain.whole & damaged else frozenset())
                for chain in self._chains.values()
                if model in (None, chain.model)
            )
        )

    # ── checks ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def files(self, files: FileSystem) -> None:
        """Each pinned object is on disk, unless the disk has damaged it."""
        if not self._chains:
            return
        names = files.disk.names.get(f"{ROOT}/objects", {})
        for key in self._kept(files):
            require(f"{key.hex()}.rows" in names, "a pinned object is lost")

    def rows(self, files: FileSystem) -> None:
        """The catalogue knows of all pins, and of no other, and they are within their limits."""
        if not (self._chains or self._free):
            return
        found = _pins(files.real)
        files.real_changes()
        for key in self._kept(files):
            require(key in found, "a pin is not in the catalogue")
        require(self._free.isdisjoint(found), "an unpinned object is still pinned")
        held: dict[bytes, int] = {}
        for owner, allocated in found.values():
            held[owner] = held.get(owner, 0) + allocated
        total = sum(held.values())
        require(all(self._limits.fits(size, total) for size in held.values()), "more is pinned on disk than may be")

    def known(self, runtime: Runtime, files: FileSystem) -> None:
        """A server that rests knows all that is pinned on disk, so that it can use it, and its owner can unpin it."""
        index, disk = runtime.cache.index, runtime.cache.disk.name
        for key in self._kept(files, runtime.engine.fingerprint):
            entry = index.get(key)
            require(entry is not None and disk in entry.copies, "a server does not know a pinned object")

    def server(self, runtime: Runtime) -> None:
        """Memory holds what only memory has, and not more than may be pinned there."""
        store = runtime.cache.store
        held = store.pins._held
        require(all(store.pins._limits.fits(size, store.pins.held) for size in held.values()), "too much is pinned in memory")
        for chain in self._chains.values():
            if chain.tail is not None and chain.tail[1] is runtime and chain.faults == _failed_imports(runtime):
                entry = store.index.get(chain.tail[0])
                require(entry is not None and store.memory.name in entry.copies, "a pinned open tail is lost")


def _failed_imports(runtime: Runtime) -> int:
    return runtime.cache.store.counters["fault_import"]


def _pins(folder: Path) -> dict[bytes, tuple[bytes, int]]:
    """The owners and bytes of pinned objects, by key. There are none while a damaged catalogue is replaced."""
    path = folder / "index.sqlite"
    if not path.exists():
        return {}
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
        return {
            key: (owner, size)
            for key, owner, size in database.execute("SELECT key, owner, allocated FROM objects WHERE pinned")
        }


def limits(share: float, budget: int) -> PinLimits:
    return PinLimits.of(share, budget, RESERVE)
