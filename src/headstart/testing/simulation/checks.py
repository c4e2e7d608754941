"""Checks: what must hold at every moment. A check that fails is a violation, and ends the history."""

from __future__ import annotations

import sqlite3
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from headstart.interfaces.tier import KV, STATE
from headstart.interfaces.tokens import BlockId, Tokens, as_tokens
from headstart.prefix_cache.blocks import root_id
from headstart.prefix_cache.entry import Entry
from headstart.prefix_cache.index import Index
from headstart.prefix_cache.quota import owner_of
from headstart.prefix_cache.siblings import WIDTH
from headstart.serving.held_prefix import HeldPrefix
from headstart.serving.job import Job
from headstart.serving.listener import NoListener
from headstart.serving.slots import Slot
from headstart.testing.fake_engine import LOW
from headstart.testing.simulation.disk import Inode
from headstart.testing.simulation.engine import UNCHANGED, SimulatedEngine
from headstart.testing.simulation.erasures import Erasures
from headstart.testing.simulation.faults import SQL_CODES
from headstart.testing.simulation.filesystem import ROOT, FileSystem
from headstart.testing.simulation.lifetimes import Lifetimes
from headstart.testing.simulation.oracle import Oracle
from headstart.testing.simulation.pinned import PinnedChains
from headstart.testing.simulation.shared_checks import SharedChecks
from headstart.testing.simulation.threads import TIME
from headstart.testing.simulation.violation import Violation, require
from headstart.tiers.disk import FormatError, Label, format
from headstart.tiers.disk.store import RESERVE
from headstart.tiers.write_behind import WriteBehind

if TYPE_CHECKING:
    from headstart.serving.runtime import Runtime

_LENGTH = 4


class CheckedSlot(NamedTuple):
    """A slot that was right.

    Attributes:
        tokens: four bytes each.
        canonical: leading tokens whose KV is canonical.
        written: the time of the text that is added.
    """

    tokens: bytes = b""
    canonical: int = 0
    written: float = 0.0


NOTHING = CheckedSlot()


class Checks:
    """What is known of the model's KV, for all servers of a history.

    Attributes:
        erasures: what owners have deleted.
        lifetimes: how old blocks are.
        pinned: what owners have pinned.
        oracles: by the fingerprint of their model.
        shared: what the shared store may hold, if there is one.
        steps: steps of a scheduler that were checked.
    """

    def __init__(
        self, oracles: Sequence[Oracle], salts: Sequence[str], erasures: Erasures, lifetimes: Lifetimes, pinned: PinnedChains
    ) -> None:
        engine = oracles[0].engine
        self.oracles = {oracle.engine.fingerprint: oracle for oracle in oracles}
        self._block_size = engine.traits.block_size
        self._width, self._low = engine._width, min(engine.shape.kv_bytes_per_token, LOW)
        self._tokens: dict[bytes, Tokens] = {root_id(model, salt): as_tokens([]) for model in self.oracles for salt in salts}
        self._good: dict[tuple[bytes, bool], bytes] = {}
        self.erasures, self.lifetimes, self.pinned = erasures, lifetimes, pinned
        self.shared: SharedChecks | None = None
        self.steps = 0

    # ── content ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def entry(self, label: Label | Entry, found: bytes, canonical: bool, where: str, oracle: Oracle) -> None:
        """The content of an entry must be the KV, or the state, of the tokens that its id stands for."""
        key = label.id if isinstance(label, Entry) else label.key
        if self._good.get((key, canonical)) == found:
            return
        state = label.state if isinstance(label, Entry) else label.kind == STATE
        if state:
            before = self._tokens.get(label.parent)
            if before is None:
                return  # its beginning is gone, so nothing of it can be used
            known = oracle.kv(before)
            require(int.from_bytes(found[:_LENGTH], "little") == len(before), f"{where}: a checkpoint of another length")
            require(found[_LENGTH + LOW :] == known.state_high, f"{where}: a checkpoint of other tokens")
            if canonical:
                require(found[_LENGTH : _LENGTH + LOW] == known.state_low, f"{where}: derived state as canonical")
        else:
            above = self._tokens.get(label.parent)
            require(above is not None or label.start, f"{where}: an entry under a root of nobody")
            if above is None:
                return
            tokens = np.concatenate([above, as_tokens(label.tokens)])
            self._tokens.setdefault(key, tokens)
            known, count = oracle.kv(tokens), len(label.tokens)
            high = known.high[len(above) :].tobytes()
            require(found[: count * self._width] == high, f"{where}: KV of other tokens")
            if canonical:
                low = found[count * self._width : count * (self._width + self._low)]
                require(low == known.low[len(above) :].tobytes(), f"{where}: derived KV as canonical")
        self._good[key, canonical] = found

    def slot(self, engine: SimulatedEngine, slot: Slot, before: CheckedSlot) -> CheckedSlot:
        """A slot of the engine must hold what the scheduler believes.

        Args:
            before: what this has returned for the slot before. What is as it was then is not looked at again.
        """
        held = engine._slots[slot.number]
        if held.length != len(slot):
            raise Violation(f"slot {slot.number} holds {held.length} tokens, not {len(slot)}")
        changed, canonical, data = engine.changed[slot.number], min(slot.canonical, held.length), slot.tokens.tobytes()
        found = CheckedSlot(data, canonical, slot.now)
        if changed == UNCHANGED and found == before:
            return before
        engine.changed[slot.number] = UNCHANGED
        if not data:
            return found
        tokens = np.frombuffer(data, np.int32)
        known = self.oracles[engine.fingerprint].kv(tokens)
        same = min(changed, len(before.tokens) // WIDTH if data.startswith(before.tokens) else 0)
        high = held.high[same : held.length].tobytes() == known.high[same:].tobytes()
        require(high, f"slot {slot.number} holds KV of other tokens")
        timed = same if slot.now == before.written else 0
        same = min(same, before.canonical)
        low = held.low[same:canonical].tobytes() == known.low[same:canonical].tobytes()
        require(low, f"slot {slot.number} holds derived KV as canonical")
        if not engine.traits.sliceable:
            require(held.state_high == known.state_high, f"slot {slot.number} holds the state of other tokens")
        for number, key in enumerate(slot.ids):
            if key not in self._tokens:
                self._tokens[key] = tokens[: (number + 1) * self._block_size]
        self.lifetimes.computed(engine, slot, timed)
        return found

    # ── moments ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def parts(self, runtime: Runtime) -> None:
        """`check` of every part of the store, and its quotas."""
        store = runtime.cache.store
        try:
            store.check(_prefixes(runtime))
        except AssertionError as error:
            raise Violation(f"check(): {error!r}") from error
        if store.memory.quota.on:
            held: Counter[bytes] = Counter()
            for cell in store.memory.cells():
                held[cell.owner] += store.memory.size(cell.kind)
            require(all(store.memory.quota.held(owner) == size for owner, size in held.items()), "a quota is counted wrongly")
        self.pinned.server(runtime)

    def memory(self, runtime: Runtime) -> None:
        """The content of all entries in memory."""
        memory, oracle = runtime.cache.memory, self.oracles[runtime.engine.fingerprint]
        cells = {
            kind: (arena.size, arena._bytes[: arena._fresh * arena.size].tobytes()) for kind, arena in memory._arenas.items()
        }
        width, good, name = self._width + self._low, self._good, memory.name
        for entry in runtime.cache.index:
            canonical = entry.copies.get(name)
            if canonical is not None:
                state, place = entry.state, entry.cell
                if place is None:
                    raise Violation("an entry without a cell")
                size, data = cells[STATE if state else KV]
                begin = (place >> 1) * size
                used = memory._sizes.get(place, size) if state else entry.length * width
                require(place & 1 == state, "an entry in a cell of another kind")
                found = data[begin : begin + used]
                if good.get((entry.id, canonical)) != found:
                    self.entry(entry, found, canonical, "memory", oracle)

    def objects(self, files: FileSystem) -> None:
        """All objects on disk that a reader would take for good."""
        for name, file in files.disk.names.get(f"{ROOT}/objects", {}).items():
            if file.rotten:
                continue
            try:
                header = format.decode(bytes(file.data[: format.header_size(bytes(file.data[:32]))]), len(file.data))
            except FormatError:
                raise Violation(f"disk: {name[:12]} is no object, though nothing has damaged it") from None
            payload = bytes(file.data[header.at :])
            same = format.checksum(np.frombuffer(payload, np.uint8)) == header.checksum
            require(same, "disk: an object with another content than it says")
            require(header.label.key.hex() == name.split(".")[0], "disk: an object under another name")
            self.entry(header.label, payload, header.label.canonical, "disk", self.oracles[header.label.fingerprint])

    def store(self) -> None:
        """All entries of the shared store that a server would take for good."""
        found = [*self.shared.entries()] if self.shared is not None else []
        if self.shared is not None and self.shared.expires:
            self.lifetimes.shared(one.label.key for one in found)
        for one in found:
            oracle = self.oracles[one.label.fingerprint]
            self.entry(one.label, one.payload, True, "the shared store", oracle)
            left = self.shared is not None and self.shared.told and self.erasures.left(one.label)
            require(not left, "a deleted entry is in the shared store")

    def rows(self, files: FileSystem, database: sqlite3.Connection) -> None:
        """Each row of the catalogue has its object. For moments at which nobody writes."""
        names = files.disk.names.get(f"{ROOT}/objects", {})
        failed = any(files.faults.counts[kind] for kind in SQL_CODES)
        for key, allocated in sqlite3.Connection.execute(database, "SELECT key, allocated FROM objects"):
            file = names.get(f"{key.hex()}.rows")
            if file is None:
                stays = failed and key in files.put_aside  # its row goes after it, and could not
                require(stays or key in files.gone, "disk: a row without an object")
            elif not file.rotten:
                require(file.allocated == allocated, "disk: a row with another size than its object")


def _prefixes(runtime: Runtime) -> list[HeldPrefix]:
    """What the jobs of a server hold."""
    scheduler = runtime.scheduler
    preload = [] if scheduler._preloading is None else [scheduler._preloading._held]
    return [job.held for job in (*scheduler.waiting, *scheduler.jobs)] + preload


def agrees(runtime: Runtime, disk: WriteBehind, database: sqlite3.Connection) -> bool:
    """Whether a server has heard of all objects, pins and deletions, and all that its index believes to be on disk has a row
    that is as good.
    """
    query, watch = "SELECT MAX(number) FROM objects WHERE fingerprint = ?", disk._watch
    (newest,) = sqlite3.Connection.execute(database, query, (runtime.engine.fingerprint,)).fetchone()
    (pins,) = sqlite3.Connection.execute(database, "SELECT pins FROM totals").fetchone()
    if (newest or 0) > watch._seen or pins != watch._pins:
        return False
    (last,) = sqlite3.Connection.execute(database, "SELECT seq FROM sqlite_sequence WHERE name = 'tombstones'").fetchone()
    wiped = sqlite3.Connection.execute(database, "SELECT before, times FROM erased").fetchone()
    if (disk._tombstone, disk.deletions) != (last, wiped or (0.0, 0)) or disk._notices:
        return False
    rows = dict(sqlite3.Connection.execute(database, "SELECT key, canonical FROM objects").fetchall())
    believed = ((entry.id, entry.copies["disk"]) for entry in runtime.cache.index if "disk" in entry.copies)
    return all(rows.get(key, -1) >= canonical for key, canonical in believed)


def unknown(runtime: Runtime, database: sqlite3.Connection, but: Collection[bytes]) -> bool:
    """Whether the catalogue lists an object of a model that an index lacks, although its time is not over.

    `but`: owners with several terms. A server may have forgotten what the disk had not yet deleted, and a longer one spares.
    """
    query = "SELECT key, owner, written FROM objects WHERE fingerprint = ?"
    rows = sqlite3.Connection.execute(database, query, (runtime.engine.fingerprint,)).fetchall()
    store, index = runtime.cache.store, runtime.cache.index
    there = {entry.id for entry in index if "disk" in entry.copies}
    lacking = [(owner, written) for key, owner, written in rows if key not in there and owner not in but]
    now = store.wall()
    return any(written > store.terms.earliest_cut(owner, now) for owner, written in lacking)


def believed(indexes: Sequence[Index]) -> dict[BlockId, bool]:
    """What is on disk, and whether it is canonical, as all of these indexes say.

    One alone may not know yet that another process has evicted an object, and has stored a derived one in its place.
    """
    copies = [{entry.id: entry.copies["disk"] for entry in index if "disk" in entry.copies} for index in indexes]
    common = [key for key in (copies[0] if copies else ()) if all(key in one for one in copies)]
    return {key: all(one[key] for one in copies) for key in common}


class Tenants:
    """What each tenant has sent, and what it was answered. What it reuses beyond that would be another tenant's."""

    def __init__(self) -> None:
        self._texts: defaultdict[int, list[tuple[object, Tokens]]] = defaultdict(list)

    def adds(self, who: int, tokens: Tokens, call: object = None) -> None:
        """A text of a tenant: the prompt of a call, or a prompt with its reply."""
        self._texts[who].append((call, tokens))

    def known(self, who: int, tokens: Tokens, call: object) -> int:
        """With how many of these tokens a text of the tenant begins that is not the call's own."""
        most = 0
        for whose, text in self._texts[who]:
            size = min(len(text), len(tokens))
            if whose is not call and size > most:
                differs = np.flatnonzero(text[:size] != tokens[:size])
                most = max(most, int(differs[0]) if len(differs) else size)
        return most


def space(
    files: FileSystem,
    budget: int,
    known: Collection[bytes],
    elsewhere: Collection[bytes],
    left: Callable[[], Collection[bytes]] = frozenset,
) -> None:
    """The hard budget of the disk.

    Args:
        left: keys of objects without a row that killed processes have left. A server finds them at its next clean-up.
        known: keys of objects without a row of which the server that writes knows. Of one that has just lost its row to another
            process, because bit rot has made it look like one of a later version, it will know after its next clean-up.
        elsewhere: those of which another server knows. So it will with them.
    """
    used = sum(files.disk.used(f"{ROOT}/{folder}") for folder in ("objects", "tmp", "quarantine"))
    if used > budget - RESERVE:
        objects = files.disk.names.get(f"{ROOT}/objects", {}).items()
        strange, others = {bytes.fromhex(name.split(".")[0]): file for name, file in objects}, {*elsewhere, *left()}
        used -= sum(file.allocated for key, file in strange.items() if key not in known and (key in others or _later(file)))
    require(used <= budget - RESERVE, f"disk: {used} bytes, but {budget - RESERVE} may be used")


def _later(file: Inode) -> bool:
    """Whether an object says that a later version has written it."""
    try:
        format.decode(bytes(file.data[: format.header_size(bytes(file.data[:32]))]), len(file.data))
    except FormatError as error:
        return error.reason == "newer"
    return False


class Watch(NoListener):
    """Checks a server after each step of its scheduler. The parts of its store need it only when something has changed there.

    Attributes:
        terms: terms of owners in seconds, the longest that they may have, and when they were set here, in virtual seconds.
    """

    def __init__(self, checks: Checks, engine: SimulatedEngine) -> None:
        self._checks = checks
        self._engine = engine
        engine.leaves = self._leaves
        self.runtime: Runtime | None = None
        self.violation: Violation | None = None
        self.terms: dict[bytes, tuple[float, float]] = {}
        self._changed = True
        self._held: tuple[int, ...] = ()
        self._slots: dict[int, CheckedSlot] = {}

    def _leaves(self, number: int) -> None:
        if self.runtime is not None:
            self._checks.lifetimes.saved(self._engine, self.runtime.scheduler.slots[number])

    def added(self, entry: Entry, tier: str) -> None:
        self._changed = True

    def removed(self, entry: Entry, tier: str) -> None:
        self._changed = True

    def pinned(self, keys: Collection[BlockId]) -> None:
        self._changed = True

    def _parts(self, runtime: Runtime) -> None:
        """Checks the parts of the store, unless no copy, pin or cell has come or gone since."""
        store = runtime.cache.store
        held = store.memory.used, len(store.memory._open), len(store.offload.writing), store.pins.held
        if self._changed or held != self._held:
            self._changed, self._held = False, held
            self._checks.parts(runtime)

    def began(self, job: Job) -> None:
        try:
            self._checks.lifetimes.used(job, self.terms.get(owner_of(job.root)), TIME.monotonic())
        except Violation as error:
            self.violation = self.violation or error

    def stepped(self, slots: Sequence[Slot], running: Sequence[Job], waiting: Iterable[Job]) -> None:
        checks = self._checks
        checks.steps += 1
        try:
            for slot in slots:
                self._slots[slot.number] = checks.slot(self._engine, slot, self._slots.get(slot.number, NOTHING))
            held = {id(job.slot) for job in running}
            require(id(None) not in held and len(held) == len(running), "two replies in one slot")
            same = [slot.busy for slot in slots] == [id(slot) in held for slot in slots]
            require(same, "a slot is busy for nobody, or free for a reply")
            if self.runtime is not None:
                self._parts(self.runtime)
                checks.memory(self.runtime)
        except Violation as error:  # the scheduler would take it for an error of a listener
            self.violation = self.violation or error
