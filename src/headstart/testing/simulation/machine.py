"""Machine: the servers of a history on their machine, which loses power, and whose processes are killed."""

from __future__ import annotations

import os
import sqlite3
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from headstart.interfaces.tokens import BlockId
from headstart.prefix_cache.blocks import Chain
from headstart.prefix_cache.entry import Entry
from headstart.serving.runtime import Runtime
from headstart.testing.simulation import checks as checking
from headstart.testing.simulation import filesystem
from headstart.testing.simulation.checks import Checks
from headstart.testing.simulation.database import keys_of, restore, snapshot, tear
from headstart.testing.simulation.disk import Inode, VirtualDisk
from headstart.testing.simulation.engine import UntimedEngine
from headstart.testing.simulation.erasures import Deletion, Erasures
from headstart.testing.simulation.faults import Faults
from headstart.testing.simulation.filesystem import ROOT, FileSystem
from headstart.testing.simulation.history import Scenario
from headstart.testing.simulation.kernel import World
from headstart.testing.simulation.lifetimes import Lifetimes
from headstart.testing.simulation.oracle import Oracle
from headstart.testing.simulation.pinned import PinnedChains, limits
from headstart.testing.simulation.server import SimulatedServer, disk_budget, options
from headstart.testing.simulation.shared_checks import SharedChecks
from headstart.testing.simulation.shared_store import StoreSite
from headstart.testing.simulation.tasks import Process, Task
from headstart.testing.simulation.violation import Violation, require
from headstart.tiers.disk import Disk, FormatError, format

FREE = 4 << 30
"""Bytes that are free on the disk."""


class SimulatedMachine:
    """What all servers of a history share.

    Attributes:
        servers: those that run or are starting.
        programs: other processes that use the folder.
        returning: crashed servers that somebody will start again.
        violation: what a crash has shown.
        evicted: entries by tier, of servers that have ended.
        shared: what the shared tier has counted, of these servers.
    """

    def __init__(self, history: Scenario, real: Path) -> None:
        self.history, self.setup = history, history.setup
        self.here = World(history.seed)
        self.faults = Faults()
        if self.setup.shared:
            self.here.store = self.site = StoreSite(self.setup.shared, self.setup.store, self.faults, self.here)
        self.disk = VirtualDisk(FREE)
        self._folder = real
        self._lives = 0
        (real / "0").mkdir()
        self.files = FileSystem(self.disk, self.faults, real / "0")
        self.files.crash = self._crash
        self.files.synced = self._synced
        self.salts = [f"tenant {who}" for who in range(self.setup.tenants)]
        models = [self.setup, replace(self.setup, model=1)] if self.setup.foreign else [self.setup]
        oracles = [Oracle(UntimedEngine(**{**options(one), "slots": 2})) for one in models]
        self.cold = oracles[0].engine
        term, size = float("inf") if self.setup.expire is None else self.setup.expire, self.cold.traits.block_size
        lifetimes = Lifetimes(term, size, lambda: self.here.now, self.files.now)
        pinned = PinnedChains(limits(self.setup.share, disk_budget(self.setup)), expires=self.setup.expire is not None)
        self.checks = Checks(oracles, self.salts, Erasures(size, lifetimes.made), lifetimes, pinned)
        self.files.dropped = pinned.lost
        if self.setup.shared:
            self.checks.shared = SharedChecks(self.site, self.checks.oracles, self.salts, encrypt=self.setup.encrypt)
            self.checks.erasures.returned = self.checks.shared.returned
        self.tenants = checking.Tenants()
        self.clients = self.here.process("clients")
        self.servers: list[SimulatedServer] = []
        self.programs: list[Process] = []
        self.returning = 0
        self._processes: list[SimulatedServer] = []
        self._promised: dict[BlockId, bool] = {}
        self._left: set[bytes] = set()  # objects without a row that killed processes have left
        self._spoiled = 0
        self.violation: Violation | None = None
        self.evicted: Counter[str] = Counter()
        self.shared: Counter[str] = Counter()

    def _synced(self) -> None:
        task = self.here.task
        try:
            if task is None or task.process not in self.programs:  # they evict nothing of what a power failure has brought back
                known, elsewhere = set[bytes](), set[bytes]()
                for one in (server for server in self.servers if server.runtime is not None):
                    if one.disk is not None and one.disk._disk is not None:
                        whose = known if task is not None and one.process is task.process else elsewhere
                        whose.update(one.disk._disk._strange)
                checking.space(self.files, disk_budget(self.setup), known, elsewhere, lambda: self._unknown(task))
            self.checks.pinned.files(self.files)
        except Violation as error:  # a server would take it for an error of the disk
            self.violation = self.violation or error
            raise

    def _serve(self, name: str) -> None:
        self._lives += 1
        setup = self.setup.of_server(self._lives, name)
        server = SimulatedServer(self.here, self.faults, setup, self.checks, self.tenants, f"{name} {self._lives}")
        server.process.exits.append(lambda: self.files.leave(server.process))
        server.deletes = partial(self._deletes, server)
        server.hot = self._hot
        self.servers.append(server)
        self._processes.append(server)

    def _hot(self, runtime: Runtime) -> Iterable[Chain]:
        """What a server that starts brings from the shared store."""
        return ()

    def _deletes(self, server: SimulatedServer, keys: Collection[BlockId], tails: Sequence[Entry]) -> None:
        """A server deletes entries, on its engine thread. From now on nothing of them is used any more."""
        deletion = Deletion.of(keys, self.files.now(), self.here.now, server.process.name)
        server.deletions.append(deletion)
        assert server.runtime is not None
        try:
            self.checks.erasures.begun(server.runtime, deletion, tails)
        except Violation as error:  # the scheduler would take it for an error of a request
            self.violation = self.violation or error

    def _processes_alive(self) -> list[SimulatedServer]:
        return [one for one in self._processes if one.process.alive]

    def _crash(self, kind: str) -> None:
        """The machine loses power, or the process of the present call is killed."""
        task = self.here.task
        for program in self.programs:
            if kind == "power_loss" or (task and program is task.process):
                self.here.kill(program)
        living = self._processes_alive()
        dying = [one for one in living if kind == "power_loss" or (task and one.process is task.process)]
        if dying or kind == "power_loss":
            believed = self._believed(living) if dying else ()
            lasting = ((key, canonical) for key, canonical in believed if key not in self.files.renewed)
            self._promised = {key: canonical for key, canonical in lasting if self._file(key) is not None}
        for server in dying:
            self._leave(server)
        if kind == "power_loss":
            self._lose_power()
        else:
            self._left |= self._unlisted()
            if not dying:  # a program, of which a server hears at its next start only: it may have deleted something halfway
                self._promised = {key: canonical for key, canonical in self._promised.items() if key not in self._left}
        for server in dying:
            if not server.closing:
                name = server.process.name.rpartition(" ")[0]
                self.returning += 1
                self.here.spawn(partial(self._again, name), "start again", self.clients)

    def _unknown(self, task: Task | None) -> set[bytes]:
        """The objects without a row of which the one who writes need not know, because others have left them: processes that
        were killed, or could not delete them before their disk failed.
        """
        others = {key for key, process in self.files.undeleted.items() if task is None or process is not task.process}
        return (self._left | others) & self._unlisted()

    def _unlisted(self) -> set[bytes]:
        """The objects without a row."""
        names = self.disk.names.get(f"{ROOT}/objects", {})
        return {bytes.fromhex(name.split(".")[0]) for name in names} - keys_of(self.files.real)

    def _believed(self, servers: Collection[SimulatedServer]) -> Iterator[tuple[BlockId, bool]]:
        """What all servers of a model believe to be on disk."""
        for model in self.checks.oracles:
            runtimes = [
                one.runtime for one in servers if one.runtime is not None and one.engine.fingerprint == model and one.disk
            ]
            yield from checking.believed([runtime.cache.index for runtime in runtimes]).items()

    def _leave(self, server: SimulatedServer) -> None:
        """A process ends, with all its threads."""
        self.here.kill(server.process)
        self.servers.remove(server)
        if server.runtime is not None:
            self.checks.pinned.left(server.runtime)
        self._count(server)
        self._spoiled += server.engine.spoiled

    def _count(self, server: SimulatedServer) -> None:
        if server.runtime is None:
            return
        self.evicted["memory"] += server.runtime.cache.store.counters["evicted"]
        if server.disk is not None:
            self.evicted["disk"] += server.disk.counters["evicted"]
        if server.runtime.cache.shared.on:
            self.shared += server.runtime.cache.shared.counters

    def _again(self, name: str) -> None:
        self.here.sleep(0.5 + 2 * self.here.dice.random())
        self._serve(name)
        self.returning -= 1

    def _lose_power(self) -> None:
        self.disk.lose_power(self.here.dice)
        if self.files.after_crash is None and self.files.unsynced is not None:
            tear(self.files, self.files.unsynced, self.here.dice)
        self.files.lose_power()
        kept, self.files.after_crash = self.files.after_crash, None
        kept = snapshot(self.files.real) if kept is None else kept
        self.files.real = self._folder / f"{self._lives}p{self.faults.total}"
        restore(self.files.real, kept)
        try:
            self.checks.erasures.files(self.files)
            self.checks.pinned.files(self.files)
            for key, canonical in self._promised.items():
                self._durable(key, canonical)
        except Violation as error:
            self.violation = self.violation or error

    def _file(self, key: BlockId) -> Inode | None:
        return self.disk.names.get(f"{ROOT}/objects", {}).get(f"{key.hex()}.rows")

    def _durable(self, key: BlockId, canonical: bool) -> None:
        file = self._file(key)
        if key in self.files.gone:
            return
        require(file is not None, "lost in a power failure: an object that was stored")
        assert file is not None
        if file.rotten:
            return
        try:
            header = format.decode(bytes(file.data[: format.header_size(bytes(file.data[:32]))]), len(file.data))
        except FormatError as error:
            raise Violation(f"damaged in a power failure: an object that was stored ({error})") from None
        payload = np.frombuffer(bytes(file.data[header.at :]), np.uint8)
        require(format.checksum(payload) == header.checksum, "torn in a power failure: an object that was stored")
        require(header.label.canonical >= canonical, "lost in a power failure: a canonical object")

    def _forgotten(self) -> bool:
        """Whether something that was stored before the last crash is still there without a row, as while it is evicted."""
        disks = [one.disk._disk for one in self.servers if one.disk]
        disk = disks[-1] if disks else None
        if disk is None or replaced(disk):
            return False
        rows = {key for (key,) in sqlite3.Connection.execute(disk.catalog._db, "SELECT key FROM objects")}
        # What a server can neither delete nor give its row again counts until it can.
        known = rows.union(*(one._strange for one in disks if one is not None))
        files = (self._file(key) for key in self._promised if key not in known)
        return any(file is not None and not file.rotten for file in files)


def replaced(disk: Disk) -> bool:
    """Whether another process has replaced the catalogue, which this one has not noticed yet."""
    path = disk.folder / "index.sqlite"
    found = filesystem.system().is_real(str(path))
    assert found is not None
    there = os.stat(found) if os.path.exists(found) else None
    return there is None or disk._lock._opened[path] != (there.st_dev, there.st_ino)
