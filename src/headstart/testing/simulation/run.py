"""Run: carries out one history, and says what was wrong."""

from __future__ import annotations

import logging
import os
import shutil
import sqlite3
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from headstart.errors import HeadstartError
from headstart.interfaces.tokens import BlockId
from headstart.prefix_cache.quota import owner_of
from headstart.prefix_cache.blocks import root_id
from headstart.serving.runtime import Runtime
from headstart.testing.fake_engine import FakeEngine
from headstart.testing.simulation import checks as checking
from headstart.testing.simulation import filesystem, kernel
from headstart.testing.simulation.checks import Checks, Violation, require
from headstart.testing.simulation.database import restore, snapshot
from headstart.testing.simulation.disk import VirtualDisk
from headstart.testing.simulation.faults import Faults
from headstart.testing.simulation.filesystem import ROOT, FileSystem
from headstart.testing.simulation.history import Event, History
from headstart.testing.simulation.kernel import Stuck, World
from headstart.testing.simulation.server import Call, Server, disk_budget, options
from headstart.testing.simulation.talks import Talk
from headstart.testing.simulation.threads import TIME
from headstart.tiers.disk import Disk, FormatError, format

FREE = 4 << 30
SHARED_MEMORY = Path("/dev/shm")
OVER = 3600.0
"""Virtual seconds after which a history must be over."""


@dataclass
class Result:
    """What a history has shown.

    Attributes:
        violation: what was wrong; "" if nothing was.
        requests: calls of clients, by outcome.
        faults: faults that were met, by kind.
        seen: other things that happened, by kind.
    """

    history: History
    violation: str = ""
    requests: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    seen: Counter[str] = field(default_factory=Counter)
    steps: int = 0
    virtual: float = 0.0
    seconds: float = 0.0


class _Alarm(logging.Handler):
    """Log lines about exceptions that nothing of a history may cause."""

    NEVER = ("failed", "could not be")

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.heard: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR and record.exc_info and record.name != "headstart.disk":
            error = record.exc_info[1]
            if "request failed" in record.msg:
                return
            self.heard.append(f"{record.name}: {record.getMessage()}: {error!r}")


class Run:
    """One history on its way."""

    def __init__(self, history: History, real: Path) -> None:
        self.history, self.setup = history, history.setup
        self.result = Result(history)
        self.here = World(history.seed)
        self.faults = Faults()
        self.disk = VirtualDisk(FREE)
        self._folder = real
        self._lives = 0
        (real / "0").mkdir()
        self.files = FileSystem(self.disk, self.faults, real / "0")
        self.files.crash = self._crash
        self.files.synced = lambda: checking.space(self.files, disk_budget(self.setup))
        self.salts = [f"tenant {who}" for who in range(self.setup.tenants)]
        self.cold = FakeEngine(**options(self.setup))  # type: ignore[arg-type]
        self.checks = Checks(_oracle(self.cold), self.salts)
        self.tenants = checking.Tenants(self.cold.traits.block_size)
        self.clients = self.here.process("clients")
        self.servers: list[Server] = []
        self._processes: list[Server] = []
        self.talks: dict[tuple[int, int], Talk] = {}
        self.calls: list[Call] = []
        self._open = 0
        self._promised: dict[BlockId, bool] = {}
        self._spoiled = 0
        self.violation: Violation | None = None

    # ── the whole ────────────────────────────────────────────────────────────────────────────────────────────────────

    def carry_out(self) -> None:
        self._begin()
        self.here.spawn(self._play, "events", self.clients)
        self._until(lambda: self._played and not self._open, "requests")
        self.faults.disarm()
        self._until(self._quiet, "rest")
        self._end()

    _played = False

    def _begin(self) -> None:
        self.here.spawn(lambda: self._serve("server"), "begin", self.clients)
        self._until(lambda: any(server.ready for server in self.servers), "start")

    def _until(self, over: Callable[[], bool], what: str) -> None:
        def reached() -> bool:
            self._raise()
            return over()

        try:
            self.here.run(reached, OVER)
        except Stuck as error:
            raise Violation(f"{what}: {error}") from None

    def _raise(self) -> None:
        for server in self.servers:
            if server.watch.violation is not None:
                raise server.watch.violation
        for name, error in self.here.errors:
            if isinstance(error, Violation):
                raise error
            raise Violation(f"{name} ended with {error!r}") from error
        if self.violation is not None:
            raise self.violation

    def _quiet(self) -> bool:
        """Whether nothing is left to do: no request, and no entry that waits for the disk."""
        return all(server.ready and not server.closing and self._idle(server) for server in self.servers)

    def _idle(self, server: Server) -> bool:
        runtime = server.runtime
        assert runtime is not None
        store = runtime.cache.store
        return runtime.scheduler.idle and not (store.offload.writing or store.offload._queued) and self._tidied(server)

    def _tidied(self, server: Server) -> bool:
        disk = server.disk
        works = disk._disk is not None and TIME.monotonic() >= disk._failing_until
        if not (works and disk._tidied > float("-inf")) or disk._hangs:
            return False
        assert disk._disk is not None
        assert server.runtime is not None
        return _replaced(disk._disk) or checking.agrees(server.runtime, disk._disk.catalog._db)

    def _end(self) -> None:
        for server in self.servers:
            runtime = server.runtime
            assert runtime is not None
            rested = self.here.spawn(
                lambda runtime=runtime: runtime.scheduler.call(lambda: self._rest(runtime)).result(), "rest", server.process
            )
            self._until(lambda rested=rested: rested.ended, "rest")
            disk = server.disk._disk
            assert disk is not None
            if not _replaced(disk):
                self.checks.rows(self.files, disk.catalog._db)
        self._check_promises()
        for server in self.servers:
            server.close()
        self._until(lambda: all(server.closed for server in self.servers), "stop")
        self._until(lambda: not any(server.process.tasks for server in self.servers), "threads")
        self.checks.objects(self.files)
        for call in self.calls:
            require(call.outcome in ("answered", "aborted", "refused", "failed", "lost"), f"a request is {call.outcome or 'open'}")
            require(call.outcome not in ("refused", "failed") or call.reason, "a refusal without a reason")
        failed = sum(call.outcome == "failed" and call.reason == "EngineError" for call in self.calls)
        spoiled = self._spoiled + sum(server.engine.spoiled for server in self.servers)
        require(failed <= spoiled, f"{failed} requests failed, but the engine has spoiled {spoiled}")

    def _rest(self, runtime: Runtime) -> None:
        """What must hold on the engine thread when nothing is left to do."""
        self.checks.memory(runtime)
        require(not any(slot.busy for slot in runtime.scheduler.slots), "a slot is stuck")
        lent = {cell for _, cell in runtime.cache.prefetch._lent}
        require(runtime.cache.memory._open == lent, "a cell is allocated for ever")
        require(not runtime.scheduler.queued and not runtime.scheduler.running, "a request is forgotten")

    # ── servers and crashes ──────────────────────────────────────────────────────────────────────────────────────────

    def _serve(self, name: str) -> None:
        self._lives += 1
        server = Server(self.here, self.faults, self.setup, self.checks, self.tenants, f"{name} {self._lives}")
        server.process.exits.append(lambda: self.files.leave(server.process))
        self.servers.append(server)
        self._processes.append(server)

    def _crash(self, kind: str) -> None:
        """The machine loses power, or the process of the present call is killed."""
        task = self.here.task
        living = [one for one in self._processes if one.process.alive]
        dying = [one for one in living if kind == "power_loss" or (task and one.process is task.process)]
        if not dying:
            return
        self._promised = self._promises(dying)
        for server in dying:
            self._leave(server)
        if kind == "power_loss":
            self._lose_power()
        for server in dying:
            if not server.closing:
                name = server.process.name.rpartition(" ")[0]
                self.here.spawn(lambda name=name: self._again(name), "start again", self.clients)

    def _leave(self, server: Server) -> None:
        """A process ends, with all its threads."""
        self.here.kill(server.process)
        self.servers.remove(server)
        self._spoiled += server.engine.spoiled

    def _again(self, name: str) -> None:
        self.here.sleep(0.5 + 2 * self.here.dice.random())
        self._serve(name)

    def _lose_power(self) -> None:
        self.disk.lose_power(self.here.dice)
        self.files.lose_power()
        kept, self.files.after_crash = self.files.after_crash, None
        kept = snapshot(self.files.real) if kept is None else kept
        self.files.real = self._folder / f"{self._lives}p{self.faults.counts['power_loss']}"
        restore(self.files.real, kept)
        try:
            for key, canonical in self._promised.items():
                self._durable(key, canonical)
        except Violation as error:
            self.violation = self.violation or error

    def _promises(self, dying: list[Server]) -> dict[BlockId, bool]:
        """What is on disk, as these servers believe, and what nobody has deleted meanwhile."""
        found: dict[BlockId, bool] = {}
        for server in dying:
            if server.runtime is None:
                continue
            for entry in server.runtime.cache.index:
                if (canonical := entry.copies.get("disk")) is not None and self._file(entry.id) is not None:
                    found[entry.id] = canonical
        return found

    def _file(self, key: BlockId) -> filesystem.File | None:
        return self.disk.names.get(f"{ROOT}/objects", {}).get(f"{key.hex()}.rows")

    def _durable(self, key: BlockId, canonical: bool) -> None:
        file = self._file(key)
        if key in self.files.missing:
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

    def _check_promises(self) -> None:
        """What was stored before the last crash, and is still there, has its row again."""
        if not self.servers:
            return
        disk = self.servers[-1].disk._disk
        assert disk is not None
        if _replaced(disk):
            return
        rows = {key for (key,) in sqlite3.Connection.execute(disk.catalog._db, "SELECT key FROM objects")}
        for key in self._promised:
            file = self._file(key)
            require(file is None or file.rotten or key in rows, "forgotten after a crash: an object that was stored")

    # ── events ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _play(self) -> None:
        for event in self.history.events:
            if event.at > self.here.now:
                self.here.sleep(event.at - self.here.now)
            self._happens(event)
        self._played = True

    def _happens(self, event: Event) -> None:
        self.here.say(repr(event))
        seen = self.result.seen
        match event.what:
            case "ask":
                seen[event.how] += 1
                self._open += 1
                self.here.spawn(lambda: self._ask(event), f"client {event.who}.{event.talk}", self.clients)
            case "abort":
                running = [one for one in self.calls if (one.who, one.talk) == (event.who, event.talk) and not one.outcome]
                for call in running[-1:]:
                    seen["abort"] += 1
                    call.abort()
            case "fault":
                self.faults.arm(event.how, event.size)
            case "clock":
                self.faults.counts["clock_jump"] += 1
                self.here.skew += event.size
            case "space":
                self.faults.counts["little_space"] += 1
                self.disk.free = event.size
            case "second":
                self._second(event)
            case "restart":
                for server in [one for one in self.servers if one.ready and not one.closing][:1]:
                    seen["restart"] += 1
                    server.closing = True
                    self.here.spawn(lambda server=server: self._restart(server), "restart", self.clients)
            case _:
                self._open += 1
                self.here.spawn(lambda: self._operate(event), "operator", self.clients)

    def _second(self, event: Event) -> None:
        others = [one for one in self.servers if one.process.name.startswith("second")]
        if event.how != "stop" and not others:
            self.faults.counts["second_process"] += 1
            self._serve("second")
        elif event.how == "stop":
            for server in others:
                if server.ready and not server.closing:
                    server.closing = True
                    self.here.spawn(lambda server=server: self._stop(server), "stop second", self.clients)

    def _stop(self, server: Server) -> None:
        self._open += 1
        server.close()
        while not server.closed and server.process.alive:
            self.here.sleep(0.5)
        if server.process.alive:
            self._leave(server)
        self._open -= 1

    def _restart(self, server: Server) -> None:
        self._stop(server)
        self._serve(server.process.name.rpartition(" ")[0])

    def _ready(self) -> Server:
        """A server that takes requests. There may be none for a while."""
        while not (ready := [server for server in self.servers if server.ready]):
            self.here.sleep(0.3)
        return self.here.dice.choice(ready)

    def _ask(self, event: Event) -> None:
        talk = self.talks.setdefault((event.who, event.talk), Talk())
        flood = event.how == "flood"
        while talk.busy and not flood:
            self.here.sleep(0.1)
        talk.busy = True
        try:
            if not flood or not talk.messages:
                talk.go_on(event)
            for attempt in range(4):
                call = self._call(event, talk, event.seed + attempt)
                self.result.requests[call.outcome] += 1
                if call.outcome == "answered" and not flood:
                    talk.answered(call.reply)
                    assert call.finished is not None
                    turn = call.finished.turn
                    talk.ids = talk.ids if turn is None else turn.ids
                if call.outcome not in ("lost", "refused") or call.reason == "ContextTooLong":
                    if call.reason == "ContextTooLong":
                        talk.messages = []
                    break
                self.result.seen["retry"] += 1
                self.here.sleep(1.0 + self.here.dice.random())
        finally:
            talk.busy = False
            self._open -= 1

    def _call(self, event: Event, talk: Talk, seed: int) -> Call:
        server = self._ready()
        call = Call(event.who, event.talk, seed, event.reply)
        self.calls.append(call)
        server.serve(call, talk.conversation(self.salts[event.who]))
        while not call.outcome:
            self.here.sleep(0.05)
            if not server.process.alive and not call.outcome:
                call.outcome = "lost"
        return call

    def _operate(self, event: Event) -> None:
        """An owner, or the operator, does something to what is stored."""
        server = self._ready()
        runtime = server.runtime
        assert runtime is not None
        talk = self.talks.get((event.who, event.talk))
        owner = owner_of(root_id(self.cold.fingerprint, self.salts[event.who]))

        def act() -> None:
            try:
                if event.what == "term":
                    runtime.keep(self.salts[event.who], float(event.size))
                elif event.what == "erase slot":
                    runtime.erase(event.who % self.setup.slots)
                elif talk is not None and talk.ids:
                    chain = runtime.stored.get(talk.ids[-1], owner)
                    getattr(runtime.stored, event.what)(talk.ids[-1], owner)
                    if event.what == "delete":
                        gone = {one.id for one in (*chain.entries, *chain.checkpoints)} - runtime.cache.index._entries.keys()
                        require(not any(map(self._file, gone)), "a deleted object is still on disk")
                self.result.seen[event.what] += 1
            except HeadstartError as error:
                self.result.seen[f"{event.what}: {type(error).__name__}"] += 1

        done = self.here.spawn(act, "operation", server.process)
        while not done.ended:
            self.here.sleep(0.1)
        self._open -= 1


def _replaced(disk: Disk) -> bool:
    """Whether another process has replaced the catalogue, which this one has not noticed yet."""
    path = disk.folder / "index.sqlite"
    found = filesystem.system().is_real(str(path))
    assert found is not None
    there = os.stat(found) if os.path.exists(found) else None
    return there is None or disk._lock._opened[path] != (there.st_dev, there.st_ino)


def _oracle(engine: FakeEngine) -> checking.Oracle:
    return checking.Oracle(engine)


def run(history: History, trace: Callable[[str], None] | None = None) -> Result:
    """Carries out a history. The stand-ins must be installed. `trace` gets a line about each call."""
    begun = time.perf_counter()
    alarm, logger = _Alarm(), logging.getLogger("headstart")
    before, spreads = logger.level, logger.propagate
    logger.setLevel(logging.ERROR)
    logger.propagate = False
    logger.addHandler(alarm)
    real = Path(tempfile.mkdtemp(prefix="headstart-", dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None))
    found = Run(history, real)
    found.here.trace = trace
    kernel.enter(found.here)
    filesystem._systems.append(found.files)
    try:
        found.carry_out()
        require(not alarm.heard, f"an internal error: {alarm.heard[:1]}")
    except Violation as error:
        found.result.violation = str(error)
    finally:
        for server in found.servers:
            found.here.kill(server.process)
        found.here.kill(found.clients)
        found.here.stop()
        filesystem._systems.pop()
        kernel.leave()
        shutil.rmtree(real, ignore_errors=True)
        logger.removeHandler(alarm)
        logger.setLevel(before)
        logger.propagate = spreads
    result = found.result
    result.faults = found.faults.counts + found.disk.lost
    result.seen["step"] = found.checks.steps
    result.steps, result.virtual = found.here.steps, found.here.now
    result.seconds = time.perf_counter() - begun
    return result
