"""The router: right whatever happens to reports, and no herding."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from effort import examples
from headstart.fleet.router.book import ARRIVES
from headstart.fleet.router.chains import PromptChain
from headstart.fleet.router.costs import Weights
from headstart.fleet.router.curve import Curve
from headstart.fleet.router.reports import BlockKey, Load, ReplicaReport, Speed, Tier
from headstart.fleet.router.router import ASK_AGAIN, TIE, FleetRouter

NAMES = ("a", "b", "c")
TIERS = tuple(tier for tier in Tier if tier is not Tier.COMING)
KEYS = range(0, 20, 2)
Held = frozenset[tuple[BlockKey, Tier]]
SPEED = Speed(Curve(0.001), fetch=1e-4)


@dataclass
class Sender:
    """A replica as the routers hear of it. `snapshots`: what it held when it sent each report of its epoch."""

    name: str
    epoch: int = 0
    held: Held = frozenset()
    reported: Held = frozenset()
    snapshots: list[Held] = field(default_factory=list)

    def report(self, *, dump: bool = False) -> ReplicaReport:
        known = frozenset[tuple[BlockKey, Tier]]() if dump else self.reported
        added, removed = by_tier(self.held - known), by_tier(known - self.held)
        report = ReplicaReport(self.name, self.epoch, len(self.snapshots), Load(), added, removed, dump, speed=SPEED)
        self.reported = self.held
        self.snapshots.append(self.held)
        return report

    def restart(self) -> None:
        self.epoch += 1
        self.held = self.reported = frozenset()
        self.snapshots = []


def by_tier(held: Held) -> dict[Tier, list[BlockKey]]:
    return {tier: [key for key, where in held if where is tier] for tier in TIERS}


class Reports(RuleBasedStateMachine):
    """Reports are lost, doubled and reordered. The router's view of a replica is always what the replica held at one moment: at
    the last report up to which nothing is missing."""

    def __init__(self) -> None:
        super().__init__()
        self.router = FleetRouter()
        self.senders = {name: Sender(name) for name in NAMES}
        self.network: list[ReplicaReport] = []
        self.delivered: dict[str, list[ReplicaReport]] = {}
        self.now = 0.0
        self.number = 0

    @rule(name=st.sampled_from(NAMES), tier=st.sampled_from(TIERS), keys=st.sets(st.sampled_from(KEYS)), comes=st.booleans())
    def change(self, name: str, tier: Tier, keys: set[BlockKey], comes: bool) -> None:
        changed = frozenset((key, tier) for key in keys)
        sender = self.senders[name]
        sender.held = sender.held | changed if comes else sender.held - changed
        self.network.append(sender.report())

    @rule(name=st.sampled_from(NAMES))
    def restart(self, name: str) -> None:
        self.senders[name].restart()

    @precondition(lambda self: self.network)
    @rule(data=st.data(), twice=st.booleans())
    def deliver(self, data: st.DataObject, twice: bool) -> None:
        place = data.draw(st.integers(0, len(self.network) - 1))
        self._deliver(self.network[place] if twice else self.network.pop(place))

    @precondition(lambda self: self.network)
    @rule()
    def deliver_the_oldest(self) -> None:
        self._deliver(self.network.pop(0))

    @precondition(lambda self: self.network)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        self.network.pop(data.draw(st.integers(0, len(self.network) - 1)))

    @rule(seconds=st.floats(0, 2 * ASK_AGAIN))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(blocks=st.integers(0, len(KEYS)))
    def choose(self, blocks: int) -> None:
        self.number += 1
        chain = PromptChain(list(KEYS[:blocks]), 64 * blocks + 10, 64)
        choice = self.router.choose(str(self.number), chain, self.now)
        assert (choice is not None) == bool(self.delivered)
        if choice is not None:
            assert choice.replica in self.delivered
            assert choice.reused + choice.computed == chain.tokens
            assert choice.computed > 0

    @rule()
    def all_is_lost_and_asked_again(self) -> None:
        """After one dump of each, all is known."""
        self.network.clear()
        self.now += ASK_AGAIN
        for sender in self.senders.values():
            if self._deliver(sender.report()):
                self.network.pop()
            self._deliver(sender.report(dump=True))
            assert self._view(sender.name) == sender.held

    @invariant()
    def a_view_is_a_moment(self) -> None:
        for name, reports in self.delivered.items():
            epoch = max(one.epoch for one in reports)
            numbers = {one.sequence: one for one in reports if one.epoch == epoch}
            known = -1
            for start in [0, *(number for number, one in numbers.items() if one.dump)]:
                end = start
                while end in numbers:
                    end += 1
                known = max(known, end - 1)
            sender = self.senders[name]
            if epoch == sender.epoch:
                assert self._view(name) == (sender.snapshots[known] if known >= 0 else frozenset())

    def _deliver(self, report: ReplicaReport) -> bool:
        self.delivered.setdefault(report.replica, []).append(report)
        asked = self.router.report(report, self.now)
        if asked:
            self.network.append(self.senders[report.replica].report(dump=True))
        return asked

    def _view(self, name: str) -> Held:
        return frozenset((key, tier) for key in KEYS for tier in self.router.holds(name, key) if tier is not Tier.COMING)


TestReports = Reports.TestCase
TestReports.settings = settings(examples(160), stateful_step_count=30)


def fleet(*names: str, **load: Load) -> FleetRouter:
    router = FleetRouter()
    for name in names:
        router.report(ReplicaReport(name, 0, 0, load.get(name, Load()), speed=SPEED), 0.0)
    return router


def prompt(first: int, blocks: int = 10) -> PromptChain:
    return PromptChain(list(range(2000 * first, 2000 * first + 2 * blocks, 2)), 64 * blocks + 1, 64)


def chosen(router: FleetRouter, request: str, chain: PromptChain, now: float = 0.0) -> str:
    choice = router.choose(request, chain, now)
    assert choice is not None
    return choice.replica


def test_without_replicas_there_is_no_choice() -> None:
    assert FleetRouter().choose("1", prompt(1), 0.0) is None
    router = fleet("a")
    assert router.choose("1", prompt(1), 0.0, without=("a", "x")) is None
    router.leave("a")
    assert router.choose("1", prompt(1), 0.0) is None


def test_a_router_that_knows_nothing_takes_the_least_wait() -> None:
    router = fleet("a", "b", "c", a=Load(prefills=(3.0,)), b=Load(prefills=(1.0,)), c=Load(queued=2.0))
    assert chosen(router, "1", prompt(1)) == "b"


def test_a_burst_of_prompts_does_not_herd() -> None:
    router = fleet("a", "b", "c", "d")
    places = Counter(chosen(router, str(number), prompt(number)) for number in range(40))
    assert set(places.values()) == {10}


def test_a_burst_with_one_new_prefix_goes_where_it_is_computed() -> None:
    router = fleet("a", "b", "c", "d")
    assert len({chosen(router, str(number), prompt(1, 1000)) for number in range(4)}) == 1


def test_a_conversation_stays_until_the_wait_is_dearer_than_the_prompt() -> None:
    router = fleet("a", "b")
    chain = prompt(1)
    router.report(ReplicaReport("b", 0, 1, added={Tier.MEMORY: chain.keys}, speed=SPEED), 0.0)
    assert chosen(router, "1", chain) == "b"
    router.report(ReplicaReport("b", 0, 2, Load(queued=100.0), done=("1",), speed=SPEED), 0.0)
    assert chosen(router, "2", chain) == "a"


def test_equal_costs_go_to_the_replica_that_worked_least() -> None:
    router = fleet("a", "b")
    first = chosen(router, "1", prompt(1, 100))
    assert chosen(router, "2", prompt(2), now=20.0) != first


def test_a_slow_replica_is_slow_from_its_first_report_on() -> None:
    """Fault: a router that began to listen in the middle took it for one of usual speed, until its dump came."""
    router, slow = fleet("b"), Speed(Curve(0.1))
    assert router.report(ReplicaReport("a", 0, 5, speed=slow), 0.0), "a gap"
    assert chosen(router, "1", prompt(1)) == "b"
    router.leave("a")
    router.report(ReplicaReport("a", 0, 7, speed=slow), 30.0)
    choice = router.choose("2", prompt(2), 30.0, without=("b",))
    assert choice is not None
    assert choice.first_token == pytest.approx(slow.prefill.seconds(0, 641))


def test_a_replica_that_comes_back_does_not_get_all_that_costs_the_same() -> None:
    router = fleet("a", "b")
    for number in range(20):
        router.close(str(number))
        router.choose(str(number), prompt(number), 100.0 * number)
    router.leave("b")
    router.report(ReplicaReport("b", 0, 5, speed=SPEED), 2000.0)
    places = Counter(chosen(router, str(number), prompt(number), 100.0 * number) for number in range(20, 30))
    assert set(places.values()) == {5}


def test_a_booking_ends_with_the_report_of_its_arrival() -> None:
    router = fleet("a")
    router.choose("1", prompt(1), 0.0)
    seconds = SPEED.prefill.seconds(0, 641)
    assert router.status(0.0)[0].wait == pytest.approx(seconds)
    router.report(ReplicaReport("a", 0, 1, Load(prefills=(seconds / 2,)), arrived=("1",), speed=SPEED), 0.0)
    assert router.status(0.0)[0].wait == pytest.approx(seconds / 2)
    assert router.holds("a", prompt(1).keys[0]) == {Tier.COMING}
    router.report(ReplicaReport("a", 0, 2, added={Tier.MEMORY: prompt(1).keys}, done=("1",), speed=SPEED), 0.0)
    assert router.holds("a", prompt(1).keys[0]) == {Tier.MEMORY}
    assert router.status(0.0)[0].wait == 0.0


def test_a_request_that_fails_on_its_way_is_not_waited_for() -> None:
    router = fleet("a")
    for end in ("closed", "forgotten"):
        router.choose("1", prompt(1, 1000), 0.0)
        if end == "closed":
            router.close("1")
        else:
            router.choose("2", prompt(2, 0), ARRIVES)
            router.close("2")
        assert router.holds("a", prompt(1).keys[0]) == frozenset()
        assert router.status(0.0)[0].wait == 0.0


def test_a_replica_that_left_is_forgotten_and_its_place_is_used_again() -> None:
    router = fleet("a", "b")
    router.report(ReplicaReport("a", 0, 1, added={Tier.MEMORY: prompt(1).keys}, speed=SPEED), 0.0)
    router.choose("1", prompt(1), 0.0)
    router.leave("a")
    router.leave("a")
    assert [one.replica for one in router.status(0.0)] == ["b"]
    assert router.holds("a", prompt(1).keys[0]) == frozenset()
    router.report(ReplicaReport("c", 7, 0, speed=SPEED), 0.0)
    assert [(one.replica, one.blocks, one.wait) for one in router.status(0.0)] == [("b", 0, 0.0), ("c", 0, 0.0)]
    assert {chosen(router, str(number), prompt(number)) for number in range(4)} == {"b", "c"}


def test_a_restarted_replica_holds_nothing() -> None:
    router = fleet("a")
    router.report(ReplicaReport("a", 0, 1, added={Tier.MEMORY: prompt(1).keys}, speed=SPEED), 0.0)
    assert router.report(ReplicaReport("a", 1, 3, added={Tier.DISK: prompt(2).keys}, speed=SPEED), 1.0)
    (status,) = router.status(2.0)
    assert (status.blocks, status.gap, status.age) == (0, True, 1.0)
    assert not router.report(ReplicaReport("a", 1, 4, dump=True, added={Tier.DISK: prompt(2).keys}, speed=SPEED), 1.0)
    (status,) = router.status(2.0)
    assert (status.blocks, status.gap) == (10, False)


def test_a_dump_says_nothing_of_what_is_coming() -> None:
    router = fleet("a")
    router.choose("1", prompt(1), 0.0)
    router.report(ReplicaReport("a", 0, 1, dump=True, added={Tier.DISK: prompt(2).keys}, speed=SPEED), 0.0)
    assert router.holds("a", prompt(1).keys[0]) == {Tier.COMING}
    assert router.holds("a", prompt(2).keys[0]) == {Tier.DISK}
    assert router.holds("x", prompt(2).keys[0]) == frozenset()


def test_a_dump_is_asked_for_once_a_second() -> None:
    router = fleet("a")
    asked = [router.report(ReplicaReport("a", 0, 5 + number, speed=SPEED), 0.4 * number) for number in range(5)]
    assert asked == [True, False, False, True, False]


def test_a_model_with_state_continues_at_checkpoints_only() -> None:
    router = fleet("a", "b")
    keys = prompt(1).keys
    chain = PromptChain(keys, 641, 64, stateful=True)
    router.report(ReplicaReport("a", 0, 1, added={Tier.MEMORY: keys}, speed=SPEED), 0.0)
    router.report(ReplicaReport("b", 0, 1, added={Tier.MEMORY: [*keys[:6], keys[3] | 1]}, speed=SPEED), 0.0)
    choice = router.choose("1", chain, 0.0)
    assert choice is not None
    assert (choice.replica, choice.reused) == ("b", 4 * 64)


# ── the choice, beside one that looks at each replica and each block in turn ─────────────────────────────────────────

SECONDS = st.floats(0.0, 5.0)
LOADS = st.builds(
    Load, st.lists(st.floats(0.01, 5.0), max_size=4).map(tuple), SECONDS, st.floats(0, 2), SECONDS, SECONDS, SECONDS, SECONDS
)
SPEEDS = st.builds(
    Speed,
    st.builds(Curve, st.floats(1e-4, 1e-2), st.floats(0.0, 1e-6)),
    memory=st.floats(0.0, 1e-3),
    disk=st.floats(0.0, 1e-2),
    fetch=st.none() | st.floats(0.0, 1e-2),
    round_trip=st.floats(0.0, 0.1),
)
HOLDS = st.dictionaries(st.sampled_from(TIERS), st.sets(st.sampled_from(KEYS)), max_size=len(TIERS))
BLOCK = 64


@dataclass(frozen=True)
class KnownReplica:
    """What a router has heard of a replica."""

    load: Load
    speed: Speed
    holds: dict[Tier, set[BlockKey]]

    def cheapest(self, key: BlockKey) -> Tier | None:
        return next((tier for tier in TIERS if tier is not Tier.SHARED and key in self.holds.get(tier, ())), None)


def expected(one: KnownReplica, fleet: list[KnownReplica], chain: PromptChain) -> tuple[float, float, int]:
    """Cost, seconds to the first token, and tokens that are reused."""
    shared = set[BlockKey]().union(*(each.holds.get(Tier.SHARED, ()) for each in fleet))
    own, places = 0, list[Tier]()
    for key in chain.keys:
        if (place := one.cheapest(key)) is not None:
            own += own == len(places)
        elif key not in shared:
            break
        places.append(place if place is not None else Tier.SHARED)
    speed, load = one.speed, one.load
    alone, start, fetch = speed.prefill.seconds(own * BLOCK, chain.tokens), own, 0.0
    compute, fetched = speed.prefill.seconds(len(places) * BLOCK, chain.tokens), places.count(Tier.SHARED) * BLOCK
    if not fetched or (speed.fetch is not None):
        seconds = fetched * (speed.fetch or 0.0) + (speed.round_trip + load.fetching) * bool(fetched)
        if not fetched or compute + seconds < alone:
            start, fetch, alone = len(places), seconds, compute
    restore = places.count(Tier.MEMORY) * speed.memory + places.count(Tier.DISK) * speed.disk
    work = alone + BLOCK * restore
    total = sum(load.prefills) + load.queued
    wait = min(sum(min(prompt, max(work, load.call / 2)) for prompt in load.prefills) + load.queued, total)
    first = max(wait * (1 + load.drag), load.hold, fetch) + work * (1 + load.drag)
    delay = min(sum(min(prompt, work) for prompt in load.prefills), total)
    weights = Weights()
    return first + (weights.work - 1) * (work + fetch) + weights.others * delay + load.crowd, first, start * BLOCK


@given(st.lists(st.builds(KnownReplica, LOADS, SPEEDS, HOLDS), min_size=1, max_size=4), st.integers(0, len(KEYS)), st.data())
@examples(200)
def test_the_choice_is_the_cheapest_replica(fleet: list[KnownReplica], blocks: int, data: st.DataObject) -> None:
    router = FleetRouter()
    for number, one in enumerate(fleet):
        added = {tier: sorted(keys) for tier, keys in one.holds.items()}
        router.report(ReplicaReport(str(number), 0, 0, one.load, added, {}, dump=True, speed=one.speed), 0.0)
    without = data.draw(st.sets(st.sampled_from(range(len(fleet)))))
    chain = PromptChain(list(KEYS[:blocks]), BLOCK * blocks + 10, BLOCK)
    estimate = router._board.estimate(router._holdings.reach(chain), chain.tokens, BLOCK, 0.0)
    assert estimate.cost.tolist() == pytest.approx([expected(one, fleet, chain)[0] for one in fleet])
    choice = router.choose("1", chain, 0.0, without={str(number) for number in without})
    costs = {number: expected(one, fleet, chain) for number, one in enumerate(fleet) if number not in without}
    if not costs:
        assert choice is None
        return
    assert choice is not None
    cost, first, reused = costs[int(choice.replica)]
    best = min(found for found, _, _ in costs.values())
    assert cost <= best + TIE * max(1.0, best) + 1e-6
    assert (choice.first_token, choice.reused) == (pytest.approx(first), reused)
