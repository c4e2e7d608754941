"""Clients: what the callers of a history do, and its owners and operators, event by event."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path

from headstart.errors import Conflict, HeadstartError, NotFound, Unavailable
from headstart.interfaces.tokens import BlockId
from headstart.prefix_cache.blocks import Chain, root_id
from headstart.prefix_cache.quota import owner_of
from headstart.serving.runtime import Runtime
from headstart.serving.stored import Deleted
from headstart.testing.simulation.calls import SimulatedPath
from headstart.testing.simulation.erasures import Deletion
from headstart.testing.simulation.filesystem import ROOT
from headstart.testing.simulation.history import TAILS, Happening, Scenario
from headstart.testing.simulation.lifetimes import HEARD
from headstart.testing.simulation.machine import SimulatedMachine
from headstart.testing.simulation.server import OBJECT, Call, SimulatedServer, disk_budget
from headstart.testing.simulation.talks import Talk
from headstart.testing.simulation.threads import TIME
from headstart.testing.simulation.violation import require
from headstart.tiers.disk import Disk
from headstart.tiers.disk.chains import StoredChains

LATE = 0.3
"""How often a server that is being stopped may get a request."""


class Clients(SimulatedMachine):
    """A machine with clients.

    Attributes:
        calls: all requests.
        requests: outcomes of calls.
        seen: other things that happened, by kind.
        several_terms: owners who have had different terms. Which one a server knows depends on when it hears of it.
    """

    def __init__(self, history: Scenario, real: Path) -> None:
        super().__init__(history, real)
        self.talks: dict[tuple[int, int], Talk] = {}
        self.calls: list[Call] = []
        self.requests: Counter[str] = Counter()
        self.seen: Counter[str] = Counter()
        self.several_terms: set[bytes] = set()
        self._terms: dict[int, int] = {}
        self._open = 0  # what clients and operators still do
        self._removed = -HEARD  # when another program ended
        self._played = False

    def _hot(self, runtime: Runtime) -> Iterable[Chain]:
        root, size = partial(root_id, runtime.engine.fingerprint), runtime.engine.traits.block_size
        for (who, _), talk in sorted(self.talks.items()):
            if talk.messages and self.here.dice.random() < 0.5:
                prompt = runtime.chat_prompt(talk.conversation(self.salts[who]))
                self.tenants.adds(who, prompt.tokens)
                yield Chain(root(self.salts[who]), size, prompt.tokens)

    def _play(self) -> None:
        for event in self.history.events:
            if event.at > self.here.now:
                self.here.sleep(event.at - self.here.now)
            self._happens(event)
        self._played = True

    def _happens(self, event: Happening) -> None:
        self.here.say(repr(event))
        seen = self.seen
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
                self.here.read = partial(self.faults.counts.update, ["clock_jump"])
                self.here.skew += event.size
                self.files.unlooked = min(self.files.unlooked, self.files.now())
                self.checks.lifetimes.jumped(event.size)
                if event.size < 0:
                    self.checks.erasures.clock_set_back(self.here.now)
            case "space":
                self.disk.free, self.disk.short = event.size, True
            case "second":
                self._second(event)
            case "rm":
                self._open += 1
                self.here.spawn(lambda: self._remove(float(event.size)), "rm", self.clients)
            case "verify":
                self._open += 1
                self.here.spawn(self._verify, "verify", self.clients)
            case "gc":
                self._open += 1
                self.here.spawn(lambda: self._collect(event.size), "gc", self.clients)
            case "restart":
                for server in [one for one in self.servers if one.ready and not one.closing][:1]:
                    seen["restart"] += 1
                    server.closing = True
                    self.here.spawn(partial(self._restart, server), "restart", self.clients)
            case _:
                self._open += 1
                self.here.spawn(lambda: self._operate(event), "operator", self.clients)

    def _second(self, event: Happening) -> None:
        others = [one for one in self.servers if one.process.name.startswith("second")]
        if event.how != "stop" and not others:
            self.seen["second server"] += 1
            if self.checks.shared is not None:
                self.checks.shared.told = self.setup.apart
            self._serve("second")
        elif event.how == "stop":
            for server in others:
                if server.ready and not server.closing:
                    server.closing = True
                    self.here.spawn(partial(self._stop, server), "stop second", self.clients)

    def _stop(self, server: SimulatedServer) -> None:
        self._open += 1
        server.close()
        while not server.closed and server.process.alive:
            self.here.sleep(0.5)
        if server.process.alive:
            self._leave(server)
        self._open -= 1

    def _restart(self, server: SimulatedServer) -> None:
        self._stop(server)
        self._serve(server.process.name.rpartition(" ")[0])

    def _ready(self) -> SimulatedServer:
        """A server that takes requests, or now and then one that is being stopped. There may be none for a while."""
        dice = self.here.dice
        while not (ready := [one for one in self.servers if one.ready or (one.stops and dice.random() < LATE)]):
            self.here.sleep(0.3)
        return dice.choice(ready)

    def _ask(self, event: Happening) -> None:
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
                self.requests[call.outcome] += 1
                if call.outcome == "answered" and not flood:
                    talk.answered(call.reply)
                    assert call.finished is not None
                    turn = call.finished.turn
                    talk.ids = talk.ids if turn is None else turn.ids
                if call.outcome not in ("lost", "refused") or call.reason == "ContextTooLong":
                    if call.reason == "ContextTooLong":
                        talk.messages = []
                    break
                self.seen["retry"] += 1
                self.here.sleep(1.0 + self.here.dice.random())
        finally:
            talk.busy = False
            self._open -= 1

    def _call(self, event: Happening, talk: Talk, seed: int) -> Call:
        server = self._ready()
        call = Call(event.who, event.talk, seed, event.reply)
        self.calls.append(call)
        self.seen["other template"] += server.setup.template
        server.serve(call, talk.conversation(self.salts[event.who]))
        while not call.outcome:
            self.here.sleep(0.05)
            if not server.process.alive and not call.outcome:
                call.outcome = "lost"
        return call

    def _operate(self, event: Happening) -> None:
        """An owner, or the operator, does something to what is stored."""
        server = self._ready()
        runtime = server.runtime
        assert runtime is not None
        talk = self.talks.get((event.who, event.talk))
        owner, pinned = owner_of(root_id(self.cold.fingerprint, self.salts[event.who])), self.checks.pinned

        def act() -> None:
            asked = pinned.asked() if event.what == "pin" else 0
            try:
                if event.what == "term":
                    pinned.expires(owner)
                    if self._terms.setdefault(event.who, event.size) != event.size:
                        salt = self.salts[event.who]
                        self.several_terms |= {owner_of(root_id(model, salt)) for model in self.checks.oracles}
                    runtime.keep(self.salts[event.who], float(event.size))
                    for one in self.servers:  # the others hear of it sooner or later
                        seconds, since = one.watch.terms.get(owner, (inf, 0.0))
                        one.watch.terms[owner] = max(seconds, float(event.size)), since
                    server.watch.terms[owner] = float(event.size), self.here.now
                elif event.what == "list":
                    chains = runtime.stored.all(owner)
                    require(all(chain.owner == owner for chain in chains), "a list has chains of others")
                elif event.what == "erase slot":
                    runtime.erase(event.who % len(runtime.scheduler.slots))
                elif talk is not None and talk.ids and (event.what == "delete" or server.disk is not None):
                    key, path = self._last(runtime, talk, tail=event.size == TAILS), talk.ids
                    match event.what:
                        case "pin":
                            pinned.answered(asked, runtime.stored.pin(key, owner), runtime, self.files)
                            if self.programs or self.here.now < self._removed + HEARD:
                                pinned.forgotten()  # the server will hear of it
                        case "unpin":
                            asked = pinned.unpins((*path, key), runtime)
                            chain = runtime.stored.unpin(key, owner)
                            if chain.entries[0].start:  # `rm --older-than` took what is before: it is not known what that was
                                path = tuple(entry.id for entry in chain.entries)
                            pinned.unpinned(asked, path, self.files)
                        case "delete":
                            self._delete(server, key, owner)
                self.seen[event.what] += 1
            except HeadstartError as error:
                if event.what == "pin":
                    pinned.failed(refused=isinstance(error, Conflict | NotFound))
                elif event.what == "unpin" and isinstance(error, NotFound):
                    pinned.not_unpinned(asked)
                self.seen[f"{event.what}: {type(error).__name__}"] += 1

        done = self.here.spawn(act, "operation", server.process)
        while not done.ended:
            self.here.sleep(0.1)
        self._open -= 1

    def _last(self, runtime: Runtime, talk: Talk, *, tail: bool) -> BlockId:
        """The last block of a turn, or an open tail that follows it."""
        size = runtime.engine.traits.block_size
        tails = [one.id for one in runtime.cache.index.children(talk.ids[-1]) if one.length < size] if tail else []
        return min(tails, default=talk.ids[-1])

    def _remove(self, age: float) -> None:
        """`headstart cache rm --all`, or `--older-than`."""
        self.checks.pinned.forgotten()
        spared, before = set[bytes](), self.files.now() - age

        def needed(disk: Disk) -> set[bytes]:
            spared.update(StoredChains(disk.catalog.rows()).needed())
            return spared

        def remove(disk: Disk) -> None:
            disk.reconcile(evict=False)
            disk.erase(() if age else disk.catalog.keys(), before, lambda: needed(disk))

        def removed() -> None:
            if before <= self.files.now() and not self.setup.shared:  # not set back meanwhile; what is shared comes back
                self.checks.erasures.swept(before, spared)
            self.checks.erasures.files(self.files)

        self._program("rm", remove, removed)

    def _verify(self) -> None:
        """`headstart cache verify --repair`."""

        def verify(disk: Disk) -> None:
            disk.reconcile(evict=False)
            for row in list(disk.catalog.rows()):
                disk.quarantine(row.label.key)

        self._program("verify", verify)

    def _collect(self, size: int) -> None:
        """`headstart cache gc --size`. `size`: how many objects may stay."""

        def collect(disk: Disk) -> None:
            disk.reconcile(evict=False)
            disk.empty_quarantine()
            disk.discard([row.label.key for row in StoredChains(disk.catalog.rows()).lost()])
            disk.shrink(size * OBJECT)

        self._program("gc", collect)

    def _program(self, name: str, work: Callable[[Disk], None], done: Callable[[], None] = lambda: None) -> None:
        """A process of its own opens the folder, works in it, and closes it. `done` is called at once, if that succeeded."""
        process = self.here.process(name)
        process.exits.append(lambda: self.files.leave(process))
        self.programs.append(process)

        def run() -> None:
            try:
                disk = Disk(SimulatedPath(ROOT), disk_budget(self.setup), clock=TIME.time)  # the default is the real one
                try:
                    work(disk)
                finally:
                    disk.close()
            except (OSError, sqlite3.Error, ValueError, TypeError) as error:
                self.seen[f"{name}: {type(error).__name__}"] += 1
                return
            done()
            self.seen[name] += 1

        running = self.here.spawn(run, name, process)
        while process.alive and not running.ended:
            self.here.sleep(0.1)
        self.programs.remove(process)
        self._removed = self.here.now
        self.files.unlooked = self.files.now()  # in a catalogue that it has rebuilt
        self._open -= 1

    def _delete(self, server: SimulatedServer, key: BlockId, owner: bytes) -> None:
        """An owner deletes a chain, where servers are apart as a fleet does it: at all of them."""
        assert server.runtime is not None
        deleted = server.runtime.stored.delete(key, owner)
        others = [one for one in self.servers if one is not server] if self.setup.apart else []  # also one that has just begun
        deletions, needed, longest = [_latest(server, deleted)], _spared(server, deleted), deleted.stretches
        if self.setup.apart and self.returning:
            raise Unavailable("a server does not answer")
        for other in others:
            if other.runtime is None or not other.ready:
                raise Unavailable("a server does not answer")
            free = len(other.runtime.stored._free(deleted.stretches))
            # What continues these may be evicted meanwhile, and they with it.
            needed |= {one.id for one in deleted.stretches[free:]}
            with suppress(NotFound):
                gone = self._there(other, partial(other.runtime.stored.delete, key, owner, deleted.stretches))
                deletions.append(_latest(other, gone))
                needed |= _spared(other, gone)
                longest = max(longest, gone.stretches, key=len)
                self.seen["delete there"] += 1
            for number, one in enumerate(deleted.stretches):  # the last first
                if any(other.runtime.cache.index.children(one.id)):
                    needed |= {before.id for before in deleted.stretches[number:]}
                    break
        if len(longest) > len(deleted.stretches):  # the first one has lost a block, and could not see what was before it
            with suppress(NotFound):
                rest = server.runtime.stored.delete(key, owner, longest)
                deletions.append(_latest(server, rest))
                needed |= _spared(server, rest)
                self.seen["delete again"] += 1
        first = min(one.at for one in deletions)  # a server may compute it again while others are asked
        self._deleted(server, [replace(one.without(needed), at=first) for one in deletions])

    def _there(self, other: SimulatedServer, delete: Callable[[], Deleted]) -> Deleted:
        """Deletes something at another server. It goes on there if the one that asks ends."""
        found, errors = list[Deleted](), list[HeadstartError]()

        def act() -> None:
            try:
                found.append(delete())
            except HeadstartError as error:
                errors.append(error)

        done = self.here.spawn(act, "operation there", other.process)
        while not done.ended:
            self.here.sleep(0.1)
        for error in errors:
            raise error
        if not found:
            raise Unavailable("a server does not answer")
        return found[0]

    def _deleted(self, server: SimulatedServer, deletions: list[Deletion]) -> None:
        """An owner has the answer that a chain is deleted, at this server and at others."""
        runtime, erasures = server.runtime, self.checks.erasures
        assert runtime is not None
        deletion = deletions[0]
        self.checks.pinned.deleted(deletion.blocks, self.files)
        if min(one.began for one in deletions) <= erasures.set_back:  # the times of texts do not say which are later
            return
        for one in deletions:
            erasures.answered(one)
        if self.programs or self.here.now < self._removed + HEARD:  # of what they did, a server hears later
            return
        if self.checks.shared is not None and (self.setup.apart or len(self.servers) == 1):
            self.checks.shared.lacks(deletion, erasures.again)
        erasures.files(self.files)  # no other server writes it again, though it may not have heard yet
        if len(self.servers) == 1:
            if not erasures.beside(server.process.name, server.began):
                runtime.scheduler.call(lambda: erasures.server(runtime, rests=False)).result()
            erasures.durable(self.files, deletion)
            erasures.bytes(self.files.real, deletion)


def _latest(server: SimulatedServer, deleted: Deleted) -> Deletion:
    """The deletion with these entries."""
    return next(one for one in reversed(server.deletions) if deleted.stretches[0].id in one.blocks)


def _spared(server: SimulatedServer, deleted: Deleted) -> set[BlockId]:
    """What a deletion has left of its chain, because other chains continue it."""
    assert server.runtime is not None
    index, own, found = server.runtime.cache.index, {one.id for one in deleted.stretches}, set[BlockId]()
    for one in deleted.stretches:
        at = None if one.parent in own else index.get(one.parent)
        while at is not None and at.id not in found:
            found.add(at.id)
            at = index.get(at.parent)
    return found
