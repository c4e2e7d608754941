"""A fleet in trouble: a steady load with known answers, a fault, and what the clients saw.

The tests of fleets and `benchmarks.fleet_faults` share it. The fake engine's greedy replies depend on the tokens only. So each
answer is compared with that of one server without a fleet, after the fault.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from fleets import RunningFleet, running
from harness import assistant, system, user
from headstart.config import Settings
from headstart.fleet.front.affinity import tag_of
from headstart.serving.runtime import Runtime
from headstart.testing.fake_engine import FakeEngine
from headstart.tiers.shared.keys import FleetKeys
from live import serving, wait_until
from stores import ValkeyServer

ENGINE: dict[str, Any] = {"slots": 4, "ctx": 2048, "block_size": 16, "delay": 0.01, "kv_bytes_per_token": 64}
MEMORY = 192 << 10
"""Bytes of a replica's memory: less than the conversations need. So the store is in use all the time."""
CLIENTS, CONVERSATIONS, TURNS = 4, 4, 6
HUNG = 30.0
"""Seconds after which a request counts as hung."""
RULES = "You answer in the words of the house, and never in others. " * 8
PATH = "/v1/responses"  # the ids of its answers name the replica
STEADY = 3.0
"""Seconds of load before a fault, and after the fleet is whole again."""
WHOLE = 120.0
"""Most seconds until the fleet must be whole again."""


@dataclass(frozen=True)
class Asked:
    """A request and its end. Times are seconds of the monotonic clock.

    Attributes:
        text: the answer; None if it failed.
        replica: tag of the replica that answered.
        problem: how it failed.
    """

    conversation: str
    body: dict[str, Any]
    begun: float
    ended: float
    text: str | None = None
    replica: str = ""
    problem: str = ""

    @property
    def hung(self) -> bool:
        return self.ended - self.begun >= HUNG


class Load:
    """Clients that continue conversations in turn, one request at a time each, and do not try again what failed."""

    def __init__(self, fleet: RunningFleet) -> None:
        self._fleet = fleet
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._talk, args=[number]) for number in range(CLIENTS)]
        self.asked: list[Asked] = []

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(2 * HUNG)

    def good(self, since: float) -> int:
        """Good answers to requests that began after a time."""
        return sum(one.text is not None and one.begun >= since for one in self.asked)

    def _talk(self, client: int) -> None:
        begun: Counter[int] = Counter()
        chats: dict[int, list[dict[str, Any]]] = {}
        url = f"http://127.0.0.1:{self._fleet.port}"
        with httpx.Client(base_url=url, timeout=HUNG, trust_env=False, headers=dict(self._fleet.http.headers)) as http:
            while True:
                for place in range(CONVERSATIONS):
                    name = f"{client}.{place}.{begun[place]}"
                    chat = chats.setdefault(place, [system(f"{name}: {RULES}"), user("Begin.")])
                    asked = ask(http, name, chat)
                    self.asked.append(asked)
                    if asked.text is not None:
                        chat += [assistant(asked.text), user(f"Question {len(chat)}.")]
                    if len(chat) > 2 * TURNS:
                        del chats[place]
                        begun[place] += 1
                    if self._over.wait(0.02 if asked.text is not None else 0.1):
                        return


def ask(http: httpx.Client, name: str, chat: list[dict[str, Any]], **options: Any) -> Asked:
    """The answer of a conversation to its last message. With `stream` it must come whole, up to its last event."""
    body = {"input": [*chat], "max_output_tokens": 16, "temperature": 0, "store": False, **options}
    begun = time.monotonic()
    try:
        answer = http.post(PATH, json=body)
    except httpx.HTTPError as error:
        return Asked(name, body, begun, time.monotonic(), problem=type(error).__name__)
    ended = time.monotonic()
    if answer.status_code != 200:
        return Asked(name, body, begun, ended, problem=str(answer.status_code))
    if "stream" in body:
        last = [line for line in answer.text.splitlines() if line.startswith("data: ")][-1]
        found = json.loads(last.removeprefix("data: ")).get("response")
        if found is None:
            return Asked(name, body, begun, ended, problem="cut")
    else:
        found = answer.json()
    return Asked(name, body, begun, ended, _text(found), tag_of(found["id"]) or "")


def _text(answer: dict[str, Any]) -> str:
    text: str = answer["output"][0]["content"][0]["text"]
    return text


def wrong(asked: Collection[Asked]) -> int:
    """Answers that an undisturbed server does not give."""
    with serving(Runtime(lambda: FakeEngine(**{**ENGINE, "delay": 0.0}), Settings(memory_budget=8 << 20))) as server:
        bodies = [(one.text, {**one.body, "stream": False}) for one in asked if one.text is not None]
        return sum(text != _text(server.http.post(PATH, json=body).json()) for text, body in bodies)


@dataclass(frozen=True)
class Outcome:
    """What clients saw of a fault. Seconds are counted from it; None for never.

    Attributes:
        asked: requests that ended after it.
        failed, hung, wrong: of these.
        problems: how many failed how.
        next_good: until a conversation that was at the victim, or any if that was no replica, had an answer to a new request.
        slowest: of the good answers.
        last_failed: until the last failure.
        whole: until all processes were there again, and every front knew every replica.
    """

    asked: int
    failed: int
    hung: int
    wrong: int
    problems: dict[str, int]
    next_good: float | None
    slowest: float
    last_failed: float | None
    whole: float


@dataclass
class Scene:
    """A fleet under load, with its store."""

    fleet: RunningFleet
    store: ValkeyServer
    load: Load
    replicas: int

    def whole(self) -> bool:
        """Whether all processes are there, and every front knows every replica."""
        return bool(self.fleet.processes(CONTROLLER) and self.fleet.processes(self.proxy)) and self.fleet.ready(self.replicas)

    @property
    def proxy(self) -> str:
        return "haproxy" if self.fleet.direct else "ProxyActor"

    def busiest(self) -> str:
        """The tag of the replica that has answered most of the latest requests."""
        ((tag, _),) = Counter(one.replica for one in self.load.asked[-CLIENTS * CONVERSATIONS :] if one.replica).most_common(1)
        return tag


@dataclass(frozen=True)
class Fault:
    """What is done to a fleet.

    Attributes:
        inject: returns the tag of the replica that it concerns; "" if all conversations are concerned.
        mend: ends it, after `lasts` seconds.
    """

    name: str
    inject: Callable[[Scene], str]
    mend: Callable[[Scene], None] | None = None
    lasts: float = 0.0


def trouble(scene: Scene, fault: Fault) -> Outcome:
    """Does it, waits until the fleet is whole again, and returns what the clients saw."""
    load, settled = scene.load, time.monotonic()
    wait_until(lambda: time.monotonic() > settled + STEADY and load.good(settled) >= 2 * CLIENTS * CONVERSATIONS, WHOLE)
    at = {one.conversation: one.replica for one in load.asked[-CLIENTS * CONVERSATIONS :]}
    injected = time.monotonic()
    tag = fault.inject(scene)
    if fault.mend is not None:
        time.sleep(fault.lasts)
        fault.mend(scene)
    wait_until(scene.whole, WHOLE)
    whole = time.monotonic()
    wait_until(lambda: time.monotonic() > whole + STEADY and load.good(whole) >= CLIENTS, WHOLE)
    asked = [one for one in load.asked if one.ended > injected]
    good = [one for one in asked if one.text is not None]
    bad = [one for one in asked if one.text is None]
    concerned = [one.ended for one in good if one.begun > injected and (not tag or at.get(one.conversation) == tag)]
    return Outcome(
        *(len(asked), len(bad), sum(one.hung for one in asked), wrong(good)),
        dict(Counter(one.problem for one in bad)),
        min(concerned) - injected if concerned else None,
        max(one.ended - one.begun for one in good),
        max(one.ended for one in bad) - injected if bad else None,
        whole - injected,
    )


@contextmanager
def scene(folder: Path, *, direct: bool, fronts: int = 1, nodes: int = 0) -> Iterator[Scene]:
    """Two replicas and a store, under load."""
    FleetKeys.generate().save(folder / "fleet.key", replace=True)
    store = ValkeyServer(folder)
    options = ["--shared", store.url, "--shared-key-file", str(folder / "fleet.key"), "--memory-budget", str(MEMORY)]
    try:
        with (
            running(folder, replicas=2, engine=ENGINE, options=options, direct=direct, fronts=fronts, nodes=nodes) as fleet,
            Load(fleet) as load,
        ):
            yield Scene(fleet, store, load, 2)
    finally:
        store.kill()


def fetched(fleet: RunningFleet) -> int:
    """Tokens that the replicas had from the store."""
    return sum(one["cached"].get("shared", 0) for one in fleet.replicas().values())


def _end(*victims: psutil.Process) -> None:
    for victim in victims:
        victim.kill()
    psutil.wait_procs(victims, 10)


def _named(scene: Scene, name: str) -> list[psutil.Process]:
    found = scene.fleet.processes(name)
    assert found, f"no process is called {name}"
    return found


def _kill_replica(scene: Scene) -> str:
    _end(psutil.Process(scene.fleet.replicas()[tag := scene.busiest()]["pid"]))
    return tag


def _kill_raylet(scene: Scene) -> str:
    """A machine with a replica, if possible without a front: its raylet, and its processes, which may live on for a while."""
    at = {one.ppid() for one in _named(scene, FRONT)}
    raylets = {tag: psutil.Process(one["pid"]).ppid() for tag, one in scene.fleet.replicas().items()}
    tag = min(raylets, key=lambda tag: raylets[tag] in at)
    raylet = psutil.Process(raylets[tag])
    assert "raylet" in raylet.name()
    _end(raylet, *raylet.children(recursive=True))
    return tag


def _kill(name: str, most: int | None = None) -> Callable[[Scene], str]:
    def inject(scene: Scene) -> str:
        _end(*_named(scene, name)[:most])
        return ""

    return inject


def _kill_proxy(scene: Scene) -> str:
    return _kill(scene.proxy)(scene)


def _kill_replicas(scene: Scene) -> str:
    scene.fleet.loading.touch()
    _end(*(psutil.Process(one["pid"]) for one in scene.fleet.replicas().values()))
    return ""


def _lose_reports(scene: Scene) -> str:
    tag = scene.busiest()
    scene.fleet.lost.write_text(str(scene.fleet.replicas()[tag]["pid"]))
    return tag


def _lose_all_reports(scene: Scene) -> str:
    scene.fleet.lost.write_text(" ".join(str(one["pid"]) for one in scene.fleet.replicas().values()))
    return ""


def _kill_store(scene: Scene) -> str:
    scene.store.kill()
    return ""


def _stop_store(scene: Scene) -> str:
    scene.store.hang()
    return ""


FRONT, CONTROLLER = "ServeReplica:headstart:Front", "ServeController"

REPLICA_KILLED = Fault("replica, `kill -9`", _kill_replica)
FRONT_KILLED = Fault("front, the only one, `kill -9`", _kill(FRONT))
CONTROLLER_KILLED = Fault("controller of Ray, `kill -9`", _kill(CONTROLLER))
PROXY_KILLED = Fault("proxy, the only one, `kill -9`", _kill_proxy)
STORE_KILLED = Fault("store, `kill -9`, started after 5 s", _kill_store, lambda scene: scene.store.start(), 5.0)
STORE_STOPPED = Fault("store, SIGSTOP for 5 s", _stop_store, lambda scene: scene.store.go_on(), 5.0)
REPORTS_LOST = Fault("reports of a replica, lost for 8 s", _lose_reports, lambda scene: scene.fleet.lost.unlink(), 8.0)
ALL_REPORTS_LOST = Fault("all reports, lost for 12 s", _lose_all_reports, lambda scene: scene.fleet.lost.unlink(), 12.0)
REPLICAS_KILLED = Fault(
    "all replicas, `kill -9`; models load for 12 s", _kill_replicas, lambda scene: scene.fleet.loading.unlink(), 12.0
)
ONE_MACHINE = (
    *(REPLICA_KILLED, REPLICAS_KILLED, REPORTS_LOST, ALL_REPORTS_LOST, STORE_KILLED, STORE_STOPPED),
    *(FRONT_KILLED, CONTROLLER_KILLED, PROXY_KILLED),
)

RAYLET_KILLED = Fault("machine: its raylet, `kill -9`", _kill_raylet)
ONE_FRONT_KILLED = Fault("front, one of two, `kill -9`", _kill(FRONT, most=1))
MACHINES = (ONE_FRONT_KILLED, RAYLET_KILLED)
