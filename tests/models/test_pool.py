"""The pool with processes that do what a test says. `tests/system/test_several_models.py` has real ones."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable

import pytest

from headstart.api.openai_responses.handover import Handover, PackedConversation
from headstart.api.served_models import ServedModel
from headstart.config import Settings
from headstart.errors import ConfigError, NotFound, Overloaded, Unavailable
from headstart.interfaces.traits import EngineProof, Traits
from headstart.models import plan
from headstart.models import pool as pool_module
from headstart.models.channel import ProcessSetup, ReadyReport
from headstart.models.naming import ModelNames, NamedModel
from headstart.models.plan import MemoryShares
from headstart.models.pool import Backend, Lease, LoadRefused, ModelPool
from headstart.models.process import LoadFailed
from headstart.models.state import Phase
from headstart.models.upstream import UpstreamConnection

PROOF = EngineProof("00", Traits(64), 4)
MODELS = [NamedModel(name, f"{name}.gguf", 10) for name in "abc"]


class Scripted:
    """A process without a process. `fails`: why it cannot load its model."""

    def __init__(self, world: World) -> None:
        self.progress, self.cause, self.pid = 0.0, "", 0
        self.ended = False
        self.loaded = False
        self.setup: ProcessSetup | None = None
        self.handed = Handover()
        self._world = world
        self._noticed: Callable[[], None] = lambda: None

    def when_ended(self, call: Callable[[], None]) -> None:
        self._noticed = call

    async def load(self, setup: ProcessSetup) -> ReadyReport:
        self.setup = setup
        self._world.check_memory()
        await self._world.pause()
        if setup.names[0] in self._world.broken or self.ended:
            raise LoadFailed("broken")
        self.loaded = True
        return ReadyReport(setup.settings.memory or 0, ServedModel(setup.names[0], "loaded"), (PROOF,))

    async def connection(self) -> UpstreamConnection:
        raise NotImplementedError

    def put_back(self, connection: UpstreamConnection) -> None:
        raise NotImplementedError

    async def stop(self, seconds: float, *, hand_over: bool = False) -> None:
        await self._world.pause()
        if hand_over:
            self.handed = self._world.handed
        self.end()

    def kill(self) -> None:
        self.cause = self.cause or "killed"
        asyncio.get_running_loop().call_soon(self.end)

    def end(self) -> None:
        if not self.ended:
            self.ended = True
            self._noticed()


class World:
    """A pool and its processes."""

    def __init__(self, *, keep: int = 2, queue: int = 99, idle_unload: float | None = None, seed: int = 0) -> None:
        self.broken: set[str] = set()
        self.removed: set[str] = set()
        self.processes: list[Scripted] = []
        self.handed = Handover()
        self.later = 0.0  # seconds by which the pool's clock is ahead
        self._dice = random.Random(seed)
        shares = MemoryShares(keep * 20, keep, 10)
        self.pool = ModelPool(
            ModelNames(MODELS),
            shares,
            start=self._start,
            setup=lambda model, memory: ProcessSetup(Settings(model=model.file, memory=memory), model.names, model.tag, "none"),
            queue=queue,
            idle_unload=idle_unload,
            clock=lambda: time.monotonic() + self.later,
            exists=lambda file: file not in self.removed,
        )

    async def _start(self) -> Backend:
        await self.pause()
        self.processes.append(Scripted(self))
        return self.processes[-1]

    async def pause(self) -> None:
        for _ in range(self._dice.randrange(4)):
            await asyncio.sleep(0)

    def check_memory(self) -> None:
        held = [process.setup for process in self.processes if process.setup is not None and not process.ended]
        assert len(held) <= self.pool.shares.keep
        assert sum(setup.settings.memory or 0 for setup in held) <= self.pool.shares.total

    def lease(self, name: str) -> Lease:
        return self.pool.lease(self.pool.names.find(name))

    def phase(self, name: str) -> Phase:
        return self.pool.of(self.pool.names.find(name)).state.phase

    async def use(self, name: str) -> None:
        lease = self.lease(name)
        try:
            process = await lease.granted
            assert isinstance(process, Scripted)
            assert process.loaded
            assert process.setup is not None
            assert process.setup.names[0] == name
            await self.pause()
            assert not process.ended
        finally:
            lease.release()


def run(test: Callable[[], object]) -> None:
    asyncio.run(test())  # type: ignore[arg-type]


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "PATIENCE", 0.01)


@pytest.mark.parametrize("seed", range(20))
def test_no_request_fails_or_waits_for_ever_and_the_budget_holds(seed: int, hurried: None) -> None:
    """Users of three models at once, in memory for two. `load` checks the budget each time."""

    async def test() -> None:
        world, dice = World(seed=seed), random.Random(seed)
        async with asyncio.timeout(30):
            await asyncio.gather(*(world.use(dice.choice("abc")) for _ in range(60)))
        await world.pool.close(1.0)
        assert all(process.ended for process in world.processes)

    run(test)


def test_the_model_that_is_used_least_gives_way() -> None:
    async def test() -> None:
        world = World()
        for name in "aaba":
            await world.use(name)
            world.pool.of(world.pool.names.find(name)).load_seconds = 1.0  # as measured, it decides too
        await world.use("c")
        assert [world.phase(name) for name in "abc"] == [Phase.READY, Phase.ABSENT, Phase.READY]

    run(test)


def test_a_busy_model_gives_way_when_its_requests_are_over(hurried: None) -> None:
    async def test() -> None:
        world = World(keep=1)
        long = world.lease("a")
        await long.granted
        waiting = asyncio.create_task(world.use("b"))
        await asyncio.sleep(0.05)
        assert world.phase("a") is Phase.DRAINING
        later = asyncio.create_task(world.use("a"))
        await asyncio.sleep(0)
        assert not waiting.done()
        long.release()
        await asyncio.gather(waiting, later)

    run(test)


def test_a_model_is_not_unloaded_for_a_client_that_has_gone(hurried: None) -> None:
    async def test() -> None:
        world = World(keep=1)
        long = world.lease("a")
        await long.granted
        other = world.lease("b")
        await asyncio.sleep(0.05)
        assert world.phase("a") is Phase.DRAINING
        other.release()
        assert world.phase("a") is Phase.READY
        await world.use("a")
        long.release()

    run(test)


def test_a_load_that_fails_ends_its_requests_with_the_cause_and_is_tried_later() -> None:
    async def test() -> None:
        world = World()
        world.broken.add("b")
        with pytest.raises(LoadRefused, match="log says why") as refusal:
            await world.use("b")
        assert "broken" in str(refusal.value.for_operator)
        with pytest.raises(LoadRefused):  # at once: nothing is started
            world.lease("b")
        await world.use("a")
        world.broken.clear()
        pooled = world.pool.of(MODELS[1])
        world.later = pooled.state.due - time.monotonic() - 0.1
        with pytest.raises(LoadRefused):
            world.lease("b")
        world.later += 0.1
        await world.use("b")

    run(test)


def test_a_process_that_dies_is_started_again_by_the_next_request() -> None:
    async def test() -> None:
        world = World()
        lease = world.lease("a")
        process = await lease.granted
        process.kill()
        await asyncio.sleep(0.01)
        assert world.phase("a") is Phase.ABSENT
        await world.use("a")
        lease.release()
        assert world.pool.of(MODELS[0]).state.running == 0
        assert world.pool.deaths == 1

    run(test)


def test_too_many_waiting_requests_are_refused() -> None:
    async def test() -> None:
        world = World(queue=2)
        leases = [world.lease("a"), world.lease("a")]
        with pytest.raises(Overloaded, match="2 requests wait for the model 'a'"):
            world.lease("a")
        for lease in leases:
            lease.release()

    run(test)


def test_looking_neither_loads_a_model_nor_keeps_it() -> None:
    async def test() -> None:
        world = World(idle_unload=0.05)
        with pytest.raises(Unavailable, match="is not loaded"):
            world.pool.peek(MODELS[0])
        await world.use("a")
        peek = world.pool.peek(MODELS[0])
        await asyncio.sleep(0.2)
        assert world.phase("a") is Phase.ABSENT
        peek.release()

    run(test)


def test_the_operator_can_unload_a_model() -> None:
    async def test() -> None:
        world = World()
        assert not world.pool.unload(MODELS[0])
        lease = world.lease("a")
        await lease.granted
        assert world.pool.unload(MODELS[0])
        assert world.phase("a") is Phase.DRAINING
        await world.use("b")  # a change elsewhere does not bring it back
        assert world.phase("a") is Phase.DRAINING
        lease.release()
        await asyncio.sleep(0.01)
        assert world.phase("a") is Phase.ABSENT

    run(test)


@pytest.mark.parametrize(
    ("keep", "limit", "goes"),
    [(0.0, None, True), (0.02, None, True), (math.inf, 0.02, True), (math.inf, None, False), (9.0, 99.0, False)],
)
def test_a_request_says_for_how_long_its_model_is_kept_within_the_limit(keep: float, limit: float | None, goes: bool) -> None:
    async def test() -> None:
        world = World(idle_unload=limit)
        lease = world.pool.lease(MODELS[0], keep)
        await lease.granted
        lease.release()
        expires = world.pool.expires(MODELS[0])
        if goes:
            while world.phase("a") is not Phase.ABSENT:
                await asyncio.sleep(0.01)
            await world.use("a")
            assert world.pool.of(MODELS[0]).keep is None
        else:
            await asyncio.sleep(0.1)
            assert world.phase("a") is Phase.READY
            assert (expires is None) == (keep == math.inf)

    run(test)


def test_what_a_process_hands_over_goes_to_the_next_one_and_no_further() -> None:
    async def test() -> None:
        world = World(keep=1)
        stays, due = (PackedConversation(ends, b"{}") for ends in (math.inf, time.time() + 0.05))
        world.handed = Handover((0.0, 0), (stays, due))
        await world.use("a")
        await world.use("b")
        a = world.pool.of(MODELS[0])
        assert a.handed == world.handed
        while len(a.handed.conversations) > 1:
            await asyncio.sleep(0.02)
        assert a.handed.conversations == (stays,)
        await world.use("a")
        setups = [process.setup for process in world.processes if process.setup]
        assert [setup.handed.conversations for setup in setups] == [(), (), (stays,)]
        assert [setup.proofs for setup in setups] == [(), (), (PROOF,)]
        assert a.handed == Handover()

    run(test)


def test_a_stopping_server_ends_those_that_wait() -> None:
    async def test() -> None:
        world = World(keep=1)
        lease = world.lease("a")
        await lease.granted
        waiting = world.lease("b")
        closing = asyncio.create_task(world.pool.close(1.0))
        with pytest.raises(Unavailable):
            await waiting.granted
        lease.release()
        await closing
        with pytest.raises(Unavailable):
            world.lease("a")

    run(test)


def test_a_model_that_is_added_is_loaded_like_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "LEAST_REST", 1)  # the models have a few bytes

    async def test() -> None:
        world = World(keep=2)
        world.pool.shares = MemoryShares.of(40, [10] * 3, 2)
        await world.use("a")
        await world.use("b")
        world.pool.add(NamedModel("new", "new.gguf", 10))
        await world.use("new")
        held = [name for name in ("a", "b", "c", "new") if world.phase(name) is Phase.READY]
        assert held[-1] == "new"
        assert len(held) == 2
        world.check_memory()
        with pytest.raises(ConfigError, match="is taken"):
            world.pool.add(NamedModel("NEW", "other.gguf", 1))

    run(test)


def test_a_fetched_model_whose_file_was_removed_is_forgotten_when_it_is_not_loaded() -> None:
    async def test() -> None:
        world = World(keep=2)
        world.pool.shares = MemoryShares.of(40, [10] * 3, 2)
        world.pool.add(NamedModel("own/tiny:Q8_0", "q8.gguf", 10, ("own/tiny",), fetched=True))
        await world.use("own/tiny:Q8_0")
        world.removed |= {"q8.gguf", "b.gguf"}
        assert world.pool.names.named("own/tiny") is not None, "it is loaded"
        await world.use("own/tiny:Q8_0")
        world.pool.unload(world.pool.names.find("own/tiny"))
        while world.phase("own/tiny") is not Phase.ABSENT:
            await asyncio.sleep(0)
            if world.pool.names.named("own/tiny") is None:
                break
        with pytest.raises(NotFound, match="served are 'a', 'b', 'c'"):  # b is of the command: it stays
            world.lease("own/tiny")
        assert [pooled.model.name for pooled in world.pool.models] == ["a", "b", "c"]
        assert world.pool.is_removed(MODELS[1])
        world.pool.add(NamedModel("own/tiny:Q4_0", "q4.gguf", 12, ("own/tiny",), fetched=True))
        assert world.pool.names.find("own/tiny").file == "q4.gguf"
        await world.use("own/tiny:Q4_0")
        world.check_memory()

    run(test)


def test_the_last_model_stays_though_its_file_was_removed() -> None:
    names = ModelNames([NamedModel("x", "x.gguf", 1, fetched=True), NamedModel("y", "y.gguf", 1, fetched=True)], "y")
    assert [model.name for model in names.without(names.models[:1]).models] == ["y"]
    assert names.without(names.models[1:]).default.name == "x"
    assert names.without(names.models).models == (names.default,)


def test_beside_a_larger_model_none_stays_that_was_loaded_for_other_shares_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "LEAST_REST", 1)

    async def test() -> None:
        world = World(keep=2)
        world.pool.shares = MemoryShares.of(40, [10] * 3, 2)
        for name in ("a", "b"):
            await world.use(name)
        world.pool.add(NamedModel("large", "large.gguf", 12))
        await world.use("large")
        assert [world.phase(name) for name in ("a", "b")] == [Phase.ABSENT] * 2
        await world.use("a")
        assert [world.phase(name) for name in ("a", "large")] == [Phase.READY] * 2
        world.check_memory()

    run(test)
