"""What readers know of requests: nothing of those of others, not even how many there are."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

from headstart.events.item import ALL, EACH, Item
from headstart.events.mirror import Mirror
from headstart.events.source import Source
from headstart.events.tap import JobNews, Stage
from headstart.prefix_cache.quota import owner_of
from headstart.serving.job import Job

ALICE, BOB = b"a" * 32, b"b" * 32


def job_of(root: bytes, id: str = "") -> Job:
    request = SimpleNamespace(id=id)
    ticket = SimpleNamespace(request=request)
    return cast(Job, SimpleNamespace(root=root, ticket=ticket, choice=0, chain=[1, 2, 3], plan=None, tiers={}))


def mirror_of() -> Mirror:
    return Mirror(cast(Source, SimpleNamespace(slots=list)))


def tell(mirror: Mirror, job: Job, at: float, *stages: Stage) -> list[Item]:
    return [item for stage in stages for item in mirror.apply([JobNews(job, stage, at)]).requests]


def seen(mirror: Mirror, owner: bytes) -> list[dict[str, Any]]:
    return [json.loads(item.data) for item in mirror.requests() if item.owner == owner_of(owner)]


def test_a_tenant_cannot_count_the_requests_of_others() -> None:
    read = []
    for others in (0, 3 * EACH):
        mirror = mirror_of()
        items = tell(mirror, job_of(ALICE, "first"), 1.0, "queued", "stop")
        for number in range(others):
            tell(mirror, job_of(BOB), 2.0 + number / 1e3, "queued", "stop")
        items += tell(mirror, job_of(ALICE, "second"), 9.0, "queued", "stop")
        read.append(([item.data for item in items if item.owner == owner_of(ALICE)], seen(mirror, ALICE)))
    assert read[0] == read[1]
    assert [one["id"] for one in read[0][1]] == ["first", "second"]


def test_the_number_of_a_request_is_its_own_and_grows() -> None:
    mirror = mirror_of()
    jobs = [job_of(root) for root in (ALICE, BOB, ALICE)]
    numbers = [json.loads(tell(mirror, job, 1.0, "queued")[0].data)["number"] for job in jobs]
    assert numbers == sorted(set(numbers))
    assert numbers[-1] < 1 << 53, "JavaScript reads it as it is"
    assert json.loads(tell(mirror, jobs[0], 2.0, "stop")[0].data)["number"] == numbers[0]
    assert [one["state"] for one in seen(mirror, ALICE)] == ["stop", "queued"]


def test_requests_are_bounded() -> None:
    mirror = mirror_of()
    tell(mirror, job_of(ALICE), 0.5, "queued", "stop")
    for number in range(EACH + 50):
        tell(mirror, job_of(BOB), float(number), "queued", "stop")
    for number in range(ALL + 50):
        tell(mirror, job_of(number.to_bytes(32, "little")), 1e3 + number, "queued", "stop")
    assert len(seen(mirror, BOB)) < EACH
    assert len(mirror.requests()) == ALL


def test_what_ran_when_all_began_anew_is_not_left_running() -> None:
    mirror = mirror_of()
    running = job_of(ALICE, "running")
    tell(mirror, job_of(ALICE, "over"), 1.0, "queued", "stop")
    tell(mirror, running, 2.0, "queued", "prefill")
    mirror.begin(())
    assert [one["id"] for one in seen(mirror, ALICE)] == ["over"]
    tell(mirror, running, 3.0, "stop")
    assert [(one["id"], one["state"]) for one in seen(mirror, ALICE)] == [("over", "stop"), ("running", "stop")]
