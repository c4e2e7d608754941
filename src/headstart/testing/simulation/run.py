"""Run: carries out one history, and says what was wrong."""

from __future__ import annotations

import contextlib
import gc
import logging
import shutil
import sqlite3
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from headstart.errors import EngineError
from headstart.serving.kv_store import KvStore
from headstart.serving.runtime import Runtime
from headstart.testing.fake_engine import INJECTED
from headstart.testing.simulation import checks as checking
from headstart.testing.simulation import filesystem, kernel
from headstart.testing.simulation.clients import Clients
from headstart.testing.simulation.history import Scenario
from headstart.testing.simulation.install import IN_PIECES, limits
from headstart.testing.simulation.machine import replaced
from headstart.testing.simulation.server import SimulatedServer
from headstart.testing.simulation.tasks import Stuck
from headstart.testing.simulation.threads import TIME
from headstart.testing.simulation.violation import Violation, require
from headstart.tiers.shared.tier import StoreTier

SHARED_MEMORY = Path("/dev/shm")
OVER = 3600.0
"""Virtual seconds after which a history must be over."""
EVICTED = 1.0
"""Virtual seconds in which an eviction that has begun is over."""
ASKED = 10.0
"""Virtual seconds in which a server knows what is on disk: it may have to ask once more."""


@dataclass
class Result:
    """What a history has shown.

    Attributes:
        violation: what was wrong; "" if nothing was.
        requests: calls of clients, by outcome.
        faults: faults that were met, by kind.
        lost: what power failures have taken, by kind.
        seen: other things that happened, by kind.
        virtual: seconds of the virtual clock.
        seconds: CPU time.
    """

    history: Scenario
    violation: str = ""
    requests: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)
    seen: Counter[str] = field(default_factory=Counter)
    steps: int = 0
    virtual: float = 0.0
    seconds: float = 0.0


class _Alarm(logging.Handler):
    """Log lines about errors that nothing of a history may cause: internal ones, and an engine that is called wrongly."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.heard: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is None and isinstance(record.args, tuple):
            error = next((one for one in record.args if isinstance(one, EngineError)), None)
        wanted = isinstance(error, Violation) or (isinstance(error, EngineError) and str(error).startswith(INJECTED))
        if error is not None and not wanted:
            self.heard.append(f"{record.name}: {record.getMessage()}: {error!r}")


class HistoryRun(Clients):
    """One history on its way."""

    def carry_out(self) -> None:
        self._begin()
        self.here.spawn(self._play, "events", self.clients)
        self._until(lambda: self._played and not self._open, "requests")
        self.faults.disarm()
        self._until(self._quiet, "rest")
        self._end()

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
        """Whether nothing is left to do: no request, no entry that waits for the disk, and no server that comes back later."""
        if self.returning or self.faults.crashing:
            return False
        return all(server.ready and not server.closing and self._idle(server) for server in self.servers)

    def _idle(self, server: SimulatedServer) -> bool:
        runtime = server.runtime
        assert runtime is not None
        store = runtime.cache.store
        expiry = runtime.scheduler.expiry
        looks = expiry.busy or not expiry.pause  # it was to look for what is due while it waited for a disk that hung
        waits = store.offload.writing or store.offload._queued or store.offload._unsure or looks or shared_waits(store)
        return runtime.scheduler.idle and not waits and self._tidied(server)

    def _tidied(self, server: SimulatedServer) -> bool:
        disk = server.disk
        if disk is None:
            return True
        works = disk._disk is not None and TIME.monotonic() >= disk._failing_until
        if not (works and disk._upkeep.tidied > float("-inf")) or disk._reads.hang or disk.hides or not disk.listed:
            return False
        if abs(self.files.now() - disk._upkeep.looked) > disk._terms.look + 1.0:
            return False  # a call of the disk hangs
        if disk._upkeep.looked <= self.files.unlooked and disk._terms.look < OVER:
            return False  # the next look deletes what has outlived its term
        assert disk._disk is not None
        assert server.runtime is not None
        return replaced(disk._disk) or checking.agrees(server.runtime, disk, disk._disk.catalog._db)

    def _end(self) -> None:
        rested_at = self.here.now  # what others had deleted meanwhile, a server asks its disk for
        self._until(lambda: not self._unsure() or self.here.now > rested_at + ASKED, "rest")
        for server in self.servers:
            runtime = server.runtime
            assert runtime is not None
            rested = self.here.spawn(runtime.scheduler.call(partial(self._rest, runtime)).result, "rest", server.process)
            self._until(partial(getattr, rested, "ended"), "rest")
            disk = None if server.disk is None else server.disk._disk
            if disk is not None and not replaced(disk):
                self.checks.rows(self.files, disk.catalog._db)
                self.checks.erasures.rows(disk.catalog._db)
                self.checks.pinned.rows(self.files)
                self.checks.pinned.known(runtime, self.files)
                self.checks.erasures.heard(runtime)
        self.checks.erasures.files(self.files)
        self.checks.pinned.files(self.files)
        self.checks.lifetimes.files(self.files)
        rested_at = self.here.now  # the row of what is evicted goes before its file
        self._until(lambda: not self._forgotten() or self.here.now > rested_at + EVICTED, "rest")
        require(not self._forgotten(), "forgotten after a crash: an object that was stored")
        self._until(lambda: not self._unknown_to_servers() or self.here.now > rested_at + ASKED, "rest")
        require(not self._unknown_to_servers(), "an index lacks an object that is on disk")
        for server in self.servers:
            server.close()
        self._until(lambda: all(server.closed for server in self.servers), "stop")
        self._until(lambda: not any(server.process.tasks for server in self.servers), "threads")
        self.checks.objects(self.files)
        self.checks.store()
        for server in self.servers:
            self._count(server)
        for call in self.calls:
            require(
                call.outcome in ("answered", "aborted", "refused", "failed", "lost"), f"a request is {call.outcome or 'open'}"
            )
            require(call.outcome not in ("refused", "failed") or call.reason, "a refusal without a reason")
        failed = sum(call.outcome == "failed" and call.reason == "EngineError" for call in self.calls)
        spoiled = self._spoiled + sum(server.engine.spoiled for server in self.servers)
        require(failed <= spoiled, f"{failed} requests failed, but the engine has spoiled {spoiled}")

    def _unsure(self) -> bool:
        """Whether a server has asked its disk, or will, for what it may have."""
        runtimes = [server.runtime for server in self.servers if server.runtime is not None]
        return any(runtime.cache.store.offload.unsure(None) for runtime in runtimes)

    def _unknown_to_servers(self) -> bool:
        """Whether a server does not know an object on its disk."""
        found = False
        for server in self.servers if self.checks.erasures.set_back < 0 else ():  # else what was over may not be over any more
            disk = None if server.disk is None else server.disk._disk
            if server.runtime is not None and disk is not None and not replaced(disk):
                found |= checking.unknown(server.runtime, disk.catalog._db, self.several_terms)
        return found

    def _rest(self, runtime: Runtime) -> None:
        """What must hold on the engine thread when nothing is left to do."""
        self.checks.parts(runtime)
        self.checks.memory(runtime)
        self.checks.erasures.server(runtime, rests=True)
        self.checks.lifetimes.server(runtime)
        require(not any(slot.busy for slot in runtime.scheduler.slots), "a slot is stuck")
        lent = {cell for _, cell in runtime.cache.prefetch._lent}
        require(runtime.cache.memory._open == lent, "a cell is allocated for ever")
        require(not runtime.scheduler.queued and not runtime.scheduler.running, "a request is forgotten")


def shared_waits(store: KvStore) -> bool:
    """Whether something is on its way to the shared store, or from there."""
    if not isinstance(store.shared, StoreTier):
        return False
    writing, offer = store.shared._writing, store.shared_offer
    return bool(writing._queue or writing._waiting or writing._answers or offer.reading or offer.later)


def run(history: Scenario, trace: Callable[[str], None] | None = None) -> Result:
    """Carries out a history. The stand-ins must be installed. `trace` gets a line about each call.

    Garbage is collected after it: meanwhile nothing may depend on the moment at which Python does so.
    """
    with _collected():
        return _run(history, trace)


@contextlib.contextmanager
def _collected() -> Iterator[None]:
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.collect()
        if collects:
            gc.enable()


def _run(history: Scenario, trace: Callable[[str], None] | None) -> Result:
    begun = time.process_time()
    alarm, logger = _Alarm(), logging.getLogger("headstart")
    before, spreads = logger.level, logger.propagate
    logger.setLevel(logging.ERROR)
    logger.propagate = False
    logger.addHandler(alarm)
    real = Path(tempfile.mkdtemp(prefix="headstart-", dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None))
    found, violation = HistoryRun(history, real), ""
    found.here.trace = trace
    kernel.enter(found.here)
    filesystem._systems.append(found.files)
    try:
        with limits(IN_PIECES if history.setup.pieces else ()):
            found.carry_out()
    except Violation as error:
        violation = str(error)
    except sqlite3.DatabaseError as error:  # of a check
        violation = f"the catalogue cannot be read: {error}"
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
    if alarm.heard:  # whatever came of it
        violation = f"an internal error: {alarm.heard[:1]}"
    found.seen += Counter({f"shared {what}": number for what, number in found.shared.items()})
    found.seen += Counter({f"evicted from {tier}": number for tier, number in found.evicted.items()})
    found.seen["step"] = found.checks.steps
    return Result(
        history,
        violation,
        found.requests,
        found.faults.counts,
        found.disk.lost,
        found.seen,
        found.here.steps,
        found.here.now,
        time.process_time() - begun,
    )
