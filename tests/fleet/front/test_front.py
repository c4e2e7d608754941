"""The front: which replica gets a request, from reports and prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
from starlette.datastructures import Headers

from headstart.fleet.front.affinity import replica_tag
from headstart.fleet.front.front import SILENT, Front
from headstart.fleet.model_card import ModelCard
from headstart.fleet.router.chains import PromptChain, chain_of
from headstart.fleet.router.reports import Load, ReplicaReport, Tier
from headstart.prefix_cache.blocks import root_id

BLOCK_SIZE = 8
CARD = ModelCard(b"f" * 32, BLOCK_SIZE, False, 4096)
OTHER = ModelCard(b"g" * 32, BLOCK_SIZE, False, 4096)


class Bytes:
    """A reader for which each byte of a body is a token."""

    def __init__(self) -> None:
        self.cards: list[ModelCard] = []

    def chain(self, card: ModelCard, path: str, headers: Headers, body: bytes) -> PromptChain | None:
        self.cards.append(card)
        if path == "/unreadable":
            return None
        return chain_of(root_id(card.fingerprint, ""), card.block_size, np.frombuffer(body, np.uint8).astype(np.int32))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Fleet:
    """A front with replicas that report what they hold."""

    def __init__(self) -> None:
        self.clock, self.reader = Clock(), Bytes()
        self.front = Front(self.reader, self.clock)
        self.sequences: dict[str, int] = {}

    def report(self, name: str, holds: Sequence[bytes] = (), *, queued: float = 0.0, card: ModelCard = CARD) -> bool:
        sequence = self.sequences[name] = self.sequences.get(name, -1) + 1
        keys = [key for text in holds for key in self._chain(text, card).keys]
        return self.front.report(ReplicaReport(name, 1, sequence, Load(queued=queued), {Tier.MEMORY: keys}), card)

    def _chain(self, text: bytes, card: ModelCard) -> PromptChain:
        chain = Bytes().chain(card, "", Headers(), text)
        assert chain is not None
        return chain

    def route(
        self,
        body: bytes,
        path: str = "/v1/chat/completions",
        *,
        id: str = "r",
        running: Sequence[str] | None = None,
        without: Sequence[str] = (),
    ) -> str | None:
        chosen = asyncio.run(self.front.route(path, Headers({"x-request-id": id}), body, running=running, without=without))
        return None if chosen is None else chosen.replica


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


PROMPT = bytes(range(1, 65))


def test_a_request_goes_where_its_prompt_is(fleet: Fleet) -> None:
    for name in "abc":
        fleet.report(name, [PROMPT] if name == "b" else [])
    assert fleet.route(PROMPT + b"more") == "b"


def test_a_prompt_that_cannot_be_read_goes_where_the_wait_is_least(fleet: Fleet) -> None:
    for name, queued in (("a", 3.0), ("b", 0.0), ("c", 2.0)):
        fleet.report(name, [PROMPT] if name == "a" else [], queued=queued)
    assert fleet.route(PROMPT, "/unreadable") == "b"
    assert fleet.route(b"") == "b"


def test_nobody_reports(fleet: Fleet) -> None:
    assert fleet.route(PROMPT) is None


def test_a_replica_that_stops_gets_no_requests(fleet: Fleet) -> None:
    fleet.report("a", [PROMPT])
    fleet.report("b")
    assert fleet.route(PROMPT, running=["b"]) == "b"
    assert fleet.route(PROMPT, running=[]) is None


def test_without_reports_each_replica_that_runs_gets_requests(fleet: Fleet) -> None:
    assert {fleet.route(PROMPT, running=["a", "b"]) for _ in range(64)} == {"a", "b"}
    for name in "ab":
        fleet.report(name, [PROMPT] if name == "a" else [])
    assert {fleet.route(PROMPT, running=["a", "b"]) for _ in range(8)} == {"a"}
    fleet.clock.now = SILENT + 0.1
    assert {fleet.route(PROMPT, running=["a", "b"]) for _ in range(64)} == {"a", "b"}
    assert fleet.route(PROMPT, running=["a", "b"], without=["a"]) == "b"
    assert fleet.route(PROMPT, running=["a", "b"], without=["a", "b"]) is None


def test_without_reports_a_stored_response_is_still_found(fleet: Fleet) -> None:
    path = f"/v1/responses/resp_{replica_tag('b')}{'0' * 24}"
    assert {fleet.route(b"", path, running=["a", "b"]) for _ in range(8)} == {"b"}


def test_a_stored_response_is_at_its_replica_though_only_others_report(fleet: Fleet) -> None:
    fleet.report("a")
    path = f"/v1/responses/resp_{replica_tag('b')}{'0' * 24}"
    assert fleet.route(b"", path, running=["a", "b"]) == "b"
    assert fleet.route(b"", path, running=["a"]) == "a"
    assert fleet.route(b"", path, running=["a", "b"], without=["b"]) == "a"


def test_one_replica_that_reports_is_preferred_to_a_silent_one(fleet: Fleet) -> None:
    fleet.report("a")
    assert {fleet.route(PROMPT, running=["a", "b"]) for _ in range(16)} == {"a"}


def test_a_silent_replica_gets_no_requests(fleet: Fleet) -> None:
    fleet.report("a", [PROMPT])
    fleet.clock.now = SILENT / 2
    fleet.report("b")
    fleet.clock.now = SILENT + 0.1
    assert fleet.route(PROMPT) == "b"
    assert set(fleet.front.replicas) == {"b"}


def test_a_replica_that_left_gets_no_requests_until_it_reports_again(fleet: Fleet) -> None:
    fleet.report("a", [PROMPT])
    fleet.report("b")
    fleet.front.leave("a")
    assert fleet.route(PROMPT) == "b"


def test_a_replica_that_failed_the_request_is_passed_over(fleet: Fleet) -> None:
    fleet.report("a", [PROMPT])
    fleet.report("b")
    assert fleet.route(PROMPT, id="1") == "a"
    assert fleet.route(PROMPT, id="1", without=["a"]) == "b"
    assert fleet.route(PROMPT, id="1", without=["a", "b"]) is None


@pytest.mark.parametrize("ids", ["1234", "1111"], ids=["own ids", "one id"])
def test_a_burst_spreads_and_one_prefix_meets(fleet: Fleet, ids: str) -> None:
    for name in "ab":
        fleet.report(name)
    first, second = bytes([1] * 640), bytes([2] * 640)
    assert fleet.route(first, id=ids[0]) != fleet.route(second, id=ids[1])
    assert fleet.route(first, id=ids[2]) == fleet.route(first, id=ids[3])


def test_a_request_that_is_over_ends_its_own_booking(fleet: Fleet) -> None:
    async def run() -> list[float]:
        waits = []
        chosen = [await fleet.front.route("", Headers({"x-request-id": "1"}), PROMPT) for _ in range(2)]
        for one in chosen:
            waits.append(fleet.front.status()[0].wait)
            assert one is not None
            fleet.front.close(one.booking)
        return [*waits, fleet.front.status()[0].wait]

    fleet.report("a")
    both, last, none = asyncio.run(run())
    assert both > last > none == 0.0


def test_while_a_fleet_is_updated_the_model_of_most_replicas_counts(fleet: Fleet) -> None:
    fleet.report("a", card=OTHER)
    fleet.report("b")
    fleet.report("c")
    fleet.route(PROMPT)
    assert fleet.reader.cards == [CARD]


def test_status_has_the_age_of_reports(fleet: Fleet) -> None:
    fleet.report("a", [PROMPT])
    fleet.clock.now = 1.5
    (found,) = fleet.front.status()
    assert (found.replica, found.age, found.blocks) == ("a", 1.5, len(PROMPT) // BLOCK_SIZE - 1)
