"""Recorded traffic on a real fleet, beside Ray's own router and the simulator: `python -m benchmarks.fleet_replay`.

Needs the extra `fleet`. For each trace: a fleet on Ray Serve in handle mode, exact reuse, and a store that holds everything:
Valkey, or S3 with `--store s3`. Its replicas have an engine with a clock (`headstart.testing.clocked_engine`): calls take the
seconds of a machine whose speed gives the wanted load. All else is real: HTTP, prompts as token ids, tiers, reports, routing,
the store.

The beginning of a trace is replayed, its times scaled so that it lasts `--seconds`. Where its tokens are too
many for this machine, `--shrink` divides them. A session sends its next request when its
reply is complete and its recorded pause is over.

The *load* is the share of their time for which an infinite cache that nobody waits for would keep the replicas busy with
prefill. There are two ways to it. As recorded, it decides the machines' speed. But few sessions cannot load many machines: who
waits for an answer sends nothing. With `--users` the machines have a `--speed`, the recorded sessions are held by so many users
each, with the recorded pauses, and the load decides how often a session begins (`users`). *Busy* in the tables is what came
of it: the seconds of prefill that were really computed, as a share of the replicas' time.

Three results for each trace: headstart's router, Ray's `PrefixCacheAffinityRouter` before the same replicas (`ray_routed`), and
the simulator's prediction. What the simulator needs to know of this machine is measured first, on the idle fleet: what requests
cost beside the clock, and the replicas' own speeds of restoring and fetching.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from rich.console import Console

from benchmarks import processor
from benchmarks.fixtures import of_tests
from benchmarks.fleet import ROOT, FleetWorkload, workloads
from benchmarks.users import by_users
from headstart.fleet.router.reports import Speed
from headstart.fleet.simulator.machine import FleetPlan, Machine
from headstart.fleet.simulator.simulation import FleetResult, bound, simulate
from headstart.replay import working_set
from headstart.testing.clocked_engine import ClockedEngine, MachineClock
from headstart.tiers.shared.address import open_store
from headstart.tiers.shared.keys import FleetKeys
from headstart.traces import Trace, TracedRequest
from headstart.units import show_size

BATCH = 2048
"""Tokens of the engine's largest call."""
PATIENCE = 2.0
"""Seconds of a prefill call that nobody waits behind, as in `Scheduler`."""
REPLY = 33
"""Tokens of the replies by which a step is measured."""
LEAST = 64
"""Least tokens of a block in a trace that is shrunk."""
ALPHABET = 256
"""Tokens of prompts are below this."""
ROUTERS = ("exact", "ray-prefix")


# ── the fleet ────────────────────────────────────────────────────────────────────────────────────────────────────────


def serve(what: dict[str, Any]) -> None:
    """Runs a fleet until it is stopped."""
    from benchmarks import ray_routed
    from headstart.config import Settings
    from headstart.fleet.cluster import launch
    from headstart.fleet.cluster.setup import FleetSetup, Scale

    setup = FleetSetup(
        Settings(**what["settings"]),
        Scale(what["replicas"], what["replicas"]),
        cpus=0.1,
        engine=partial(ClockedEngine, MachineClock(**what["clock"]), **what["engine"]),
        tokenizer=ClockedEngine.load_tokenizer,
    )
    build = ray_routed.application if what["router"] == "ray-prefix" else None
    with launch.fleet(setup, "127.0.0.1", what["port"], build=build):
        launch.until_signal()


@contextmanager
def store_of(kind: str, folder: Path) -> Iterator[str]:
    """The URL of a new store."""
    stores = of_tests("stores")
    if kind == "s3":
        os.environ |= stores.S3_ENVIRONMENT
    store = stores.SeaweedServer(folder) if kind == "s3" else stores.ValkeyServer(folder)
    try:
        yield store.url("fleet") if kind == "s3" else store.url
    finally:
        store.kill()


@contextmanager
def fleet(work: FleetWorkload, plan: FleetPlan, router: str, store: str, folder: Path) -> Iterator[str]:
    """The URL of a fleet like that of the plan. `store`: the URL of its store."""
    key_file, port = folder / "fleet.key", of_tests("stores").free_port()
    FleetKeys.generate().save(key_file)
    machine, block = plan.machine, work.trace.block_size
    longest = max(one.prompt + one.reply for one in work.trace.requests)
    engine = {"slots": machine.slots, "ctx": -(-(longest + 2 * block) // block) * block, "block_size": block, "batch": BATCH}
    kv_bytes = ClockedEngine(MachineClock(0.0), block_size=8).shape.kv_bytes_per_token
    settings = {"reuse": "exact", "memory_budget": int(machine.memory * kv_bytes), "stall": machine.stall, "queue": 10_000}
    settings |= {"shared": store, "shared_key_file": str(key_file), "settle": "off"}
    curve = machine.speed.prefill
    clock = MachineClock(curve.per_token, curve.per_depth, machine.step, machine.step_reply)
    what = {"router": router, "replicas": plan.replicas, "port": port, "engine": engine, "settings": settings}
    what["clock"] = asdict(clock)
    path = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    with (folder / "fleet.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.fleet_replay", "--serve", json.dumps(what)],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": path},
        )
    url = f"http://127.0.0.1:{port}"
    try:
        of_tests("live").wait_until(lambda: process.poll() is not None or whole(url, plan.replicas), 180)
        if process.poll() is not None:
            raise RuntimeError((folder / "fleet.log").read_text("utf-8", "replace")[-3000:])
        yield url
    finally:
        process.terminate()
        process.wait(200)


def whole(url: str, replicas: int) -> bool:
    try:
        return len(figures(url)) == replicas
    except (httpx.HTTPError, ValueError):
        return False


def figures(url: str) -> list[dict[str, Any]]:
    """What the replicas say of themselves."""
    answer = httpx.get(f"{url}/headstart/fleet", timeout=30, trust_env=False).raise_for_status()
    found: list[dict[str, Any]] = answer.json()["replicas"]
    return found


# ── the traffic ──────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Served:
    """A request on the real fleet: when it was sent, seconds to its first token, and the tokens computed."""

    at: float
    first_token: float
    computed: int
    fetched: int


def beginning(trace: Trace, requests: int, seconds: float, shrink: int = 1, *, at_once: bool = False) -> Trace:
    """The first requests of a trace, in so many seconds, with a part of its tokens: a small machine makes and copies them all.

    An id of a block depends on the blocks before it, so the last id stands for blocks that are joined.

    Args:
        at_once: requests of one recorded time come at once. Otherwise see `unrounded`.
    """
    first, join = trace.requests[:requests], max(1, LEAST * shrink // trace.block_size)
    first = first if at_once else unrounded(first)
    scale = seconds / max(1e-9, first[-1].at - first[0].at)

    def less(one: TracedRequest) -> TracedRequest:
        prompt, reply, blocks = one.prompt // shrink, max(1, one.reply // shrink), one.blocks[join - 1 :: join]
        return TracedRequest((one.at - first[0].at) * scale, blocks, prompt, reply, session=one.session)

    return replace(trace, block_size=trace.block_size * join // shrink, requests=tuple(map(less, first)))


def unrounded(requests: Sequence[TracedRequest]) -> tuple[TracedRequest, ...]:
    """The same requests. Those without a session that have one time come evenly until the next time.

    The times of Mooncake's conversations are whole three seconds. If all of one time came at once, their order would decide
    their first tokens, and the trace does not tell it.
    """
    found: list[TracedRequest] = []
    times = [[*together] for _, together in groupby(requests, key=lambda one: one.at)]
    for together, later in zip(times, [*times[1:], times[-1]], strict=True):
        step = (later[0].at - together[0].at) / len(together)
        found += [replace(one, at=one.at + step * place) if one.session < 0 else one for place, one in enumerate(together)]
    return tuple(found)


def tokens_of(trace: Trace, number: int, salt: int = 0) -> list[int]:
    """A prompt with these blocks. What is behind the last block is its own."""
    size, request = trace.block_size, trace.requests[number]

    def stretch(name: int, count: int) -> Any:
        return np.random.default_rng([salt, name]).integers(0, ALPHABET, count)

    blocks = [stretch(int(block), size) for block in request.blocks]
    tail = stretch((1 << 40) + number, request.prompt - size * len(blocks))
    return [int(token) for token in np.concatenate([*blocks, tail])]


def prepared(whole: FleetWorkload, replicas: int, options: argparse.Namespace) -> tuple[FleetWorkload, FleetPlan]:
    """What is replayed, and the fleet."""
    if not options.users:
        trace = beginning(whole.trace, options.requests, options.seconds, options.shrink, at_once=options.at_once)
        work = replace(whole, trace=trace)
        plan = work.plan(replicas, options.load, shared=True)
    else:
        requests = whole.trace.requests
        recorded = beginning(whole.trace, len(requests), (requests[-1].at - requests[0].at) / options.hurry, options.shrink)
        sessions = options.users * len({one.session for one in recorded.requests})
        memory = max(whole.memory * working_set(recorded) * options.users, *(one.prompt for one in recorded.requests))
        machine = Machine.of(1 / options.speed, memory, slots=whole.slots, stall=whole.stall)
        plan = FleetPlan(replicas, machine, math.inf)
        alone = sum(one.first_token for one in bound(by_users(recorded, options.users, 1.0), plan).requests)
        every = alone / sessions / replicas / options.load
        held = by_users(recorded, options.users, every, seed=options.seed)
        work = replace(whole, trace=replace(held, requests=held.requests[: options.requests]))
    return work, replace(plan, machine=real_calls(plan.machine))


async def ask(http: httpx.AsyncClient, body: bytes) -> Served:
    begun, first, last = time.perf_counter(), math.nan, b""
    async with http.stream("POST", "/v1/completions", content=body, headers={"content-type": "application/json"}) as answer:
        if answer.status_code != 200:
            raise RuntimeError(f"{answer.status_code}: {(await answer.aread())[:300]!r}")
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                first = time.perf_counter() - begun if math.isnan(first) else first
                last = line[6:].encode() if '"headstart"' in line else last
    costs = json.loads(last)["headstart"]
    return Served(begun, first, costs["computed"], costs["tiers"].get("shared", 0))


def body_of(tokens: Sequence[int], reply: int) -> bytes:
    body = {"prompt": tokens, "max_tokens": max(1, reply), "ignore_eos": True, "temperature": 0, "stream": True}
    return json.dumps({**body, "stream_options": {"include_usage": True}}).encode()


async def replay(url: str, trace: Trace) -> list[Served]:
    """Sends all requests of a trace when they are due."""
    bodies = [body_of(tokens_of(trace, number), one.reply) for number, one in enumerate(trace.requests)]
    limits, found = httpx.Limits(max_connections=None), dict[int, Served]()
    async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False, limits=limits) as http:
        begun = time.perf_counter() + 1.0

        async def until(at: float) -> None:
            await asyncio.sleep(max(0.0, at - time.perf_counter()))

        async def one(number: int) -> None:
            found[number] = await ask(http, bodies[number])

        async def alone(number: int) -> None:
            await until(begun + trace.requests[number].at)
            await one(number)

        async def session(numbers: list[int]) -> None:
            await alone(numbers[0])
            for before, number in pairwise(numbers):
                await until(found[before].at + trace.requests[number].at - trace.requests[before].at)
                await one(number)

        sessions: dict[int, list[int]] = {}
        for number, request in enumerate(trace.requests):
            if request.session >= 0:
                sessions.setdefault(request.session, []).append(number)
        apart = [alone(number) for number, request in enumerate(trace.requests) if request.session < 0]
        await asyncio.gather(*apart, *map(session, sessions.values()))
    return [found[number] for number in range(len(trace.requests))]


@dataclass(frozen=True, slots=True)
class Overhead:
    """What requests cost on this machine beside the clock, on the idle fleet.

    Attributes:
        least, token: seconds outside the engine without a prompt, and for each token of it.
        computed: seconds more for each token that is computed: chains, and KV that is saved.
        step: seconds of a decoding step.
    """

    least: float
    token: float
    computed: float
    step: float


async def overhead(url: str, trace: Trace, machine: Machine) -> Overhead:
    sizes = (2 * trace.block_size, max(one.prompt for one in trace.requests) * 3 // 4)
    cold, warm, step, curve = list[float](), list[float](), 0.0, machine.speed.prefill
    async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False) as http:
        for size in sizes:
            tokens = np.random.default_rng(size).integers(0, ALPHABET, size).tolist()
            served = [await ask(http, body_of(tokens, 1)) for _ in range(8)]
            beside = [one.first_token - curve.seconds(size - one.computed, size) for one in served]
            cold.append(beside[0])
            warm.append(float(np.median(beside[1:])))
            begun = time.perf_counter()
            served = [await ask(http, body_of(tokens, REPLY)) for _ in range(3)]
            step = (time.perf_counter() - begun - sum(one.first_token for one in served)) / (REPLY - 1) / len(served)
    span = sizes[1] - sizes[0]
    token = max(0.0, (warm[1] - warm[0]) / span)
    return Overhead(max(0.0, warm[0] - token * sizes[0]), token, max(0.0, (cold[1] - cold[0]) / span - token), step)


# ── the table ────────────────────────────────────────────────────────────────────────────────────────────────────────


def real(work: FleetWorkload, plan: FleetPlan, router: str, kind: str = "valkey") -> tuple[list[Served], FleetPlan, str]:
    """The trace on a real fleet with this kind of store, the plan with what was measured of it, and a note about that."""
    with (
        tempfile.TemporaryDirectory() as folder,
        store_of(kind, Path(folder)) as store,
        fleet(work, plan, router, store, Path(folder)) as url,
    ):
        beside = asyncio.run(overhead(url, work.trace, plan.machine))
        served = asyncio.run(replay(url, work.trace))
        speeds = [one["speed"] for one in figures(url)]
        with closing(open_store(store, 60.0)) as there:
            held = sum(one.size for one in there.objects())
    curve = replace(plan.machine.speed.prefill, per_token=plan.machine.speed.prefill.per_token + beside.computed)
    fetch = [one["fetch"] for one in speeds if one["fetch"] is not None]
    middle: Any = {name: float(np.median([one[name] for one in speeds])) for name in ("memory", "round_trip")}
    speed = Speed(curve, middle["memory"], 0.0, float(np.median(fetch)) if fetch else None, middle["round_trip"])
    machine = replace(plan.machine, speed=speed, step=beside.step)
    micro = f"{1e6 * beside.token:.2f} µs a token, {1e6 * beside.computed:.2f} µs more if it is computed"
    steps = f"steps of {1e3 * beside.step:.1f} ms for {1e3 * plan.machine.step:.1f}"
    fetched = f"fetch {1e6 * (speed.fetch or 0):.2f} µs a token; the store holds {show_size(held)}"
    note = f"beside the clock {1e3 * beside.least:.0f} ms and {micro}; {steps}; {fetched}"
    return served, replace(plan, machine=machine, passage=beside.token, passage_least=beside.least), note


def busy(trace: Trace, plan: FleetPlan, served: Sequence[Served]) -> float:
    """The share of their time in which the replicas prefilled."""
    curve, begun = plan.machine.speed.prefill, min(one.at for one in served)
    both = zip(trace.requests, served, strict=True)
    seconds = sum(curve.seconds(asked.prompt - one.computed, asked.prompt) for asked, one in both)
    return seconds / plan.replicas / (max(one.at + one.first_token for one in served) - begun)


def row(name: str, trace: Trace, times: Sequence[float], computed: int, best: FleetResult, share: float) -> str:
    p50, p90, p99 = np.percentile(times, (50, 90, 99))
    shares = f"{computed / trace.tokens:.3f} | {computed / best.computed:.3f} | {share:.2f}"
    return f"| {name} | {np.mean(times):.2f} | {p50:.2f} | {p90:.2f} | {p99:.2f} | {shares} |"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fleet_replay", description=__doc__)
    given = os.environ.get("HEADSTART_DATA")
    parser.add_argument("--data", type=Path, default=Path(given) if given else ROOT.parent / "shared" / "data")
    parser.add_argument("--only", nargs="*", default=[], help="traces whose names begin like this")
    parser.add_argument("--replicas", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--requests", type=int, default=250)
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--shrink", type=int, default=1, help="divides the tokens of prompts and replies")
    parser.add_argument("--at-once", action="store_true", help="requests of one recorded time come at once, not evenly")
    parser.add_argument("--load", type=float, default=0.5, help="of an infinite cache, see above")
    parser.add_argument("--users", type=int, default=0, help="who hold each recorded session; 0: it is replayed once")
    parser.add_argument("--speed", type=float, default=1000.0, help="tokens of prefill a second, with --users")
    parser.add_argument("--hurry", type=float, default=1.0, help="divides the recorded pauses, with --users")
    parser.add_argument("--seed", type=int, default=0, help="of the times at which users begin")
    parser.add_argument("--routers", nargs="*", default=ROUTERS, choices=ROUTERS)
    parser.add_argument("--store", choices=["valkey", "s3"], default="valkey", help="that all replicas share")
    parser.add_argument("--out", type=Path, default=Path("bench-out"), help="folder for fleet_replay.json")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(json.loads(options.serve))
        return
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a run takes long, and each row counts
    show = Console(soft_wrap=True, markup=False, highlight=False).print
    options.out.mkdir(parents=True, exist_ok=True)
    show(processor.caption())
    found = []
    for whole_work in workloads(options.data):
        if options.only and not whole_work.trace.name.startswith(tuple(options.only)):
            continue
        for replicas in options.replicas:
            work, plan = prepared(whole_work, replicas, options)
            best = bound(work.trace, plan)
            speed = f"{1 / plan.machine.speed.prefill.per_token:,.0f} tokens/s"
            users = f", {options.users} users a session" if options.users else ""
            load = f"a load of {options.load:.0%}{users}; floor of p99 {best.p99:.2f} s"
            show(f"\n**{work.trace.name}**, {len(work.trace.requests)} requests, {replicas} replicas of {speed}, {load}\n")
            show("| | mean, s | p50 | p90 | p99 | computed | / infinite cache | busy |")
            show("|---|---:|---:|---:|---:|---:|---:|---:|")
            for router in options.routers:
                served, measured, note = real(work, plan, router, options.store)
                times = [one.first_token for one in served]
                computed = sum(one.computed for one in served)
                show(row(f"real, {router}", work.trace, times, computed, best, busy(work.trace, plan, served)))
                predicted = simulate(work.trace, router, measured)
                times = [one.first_token for one in predicted.requests]
                show(row(f"simulated, {router}", work.trace, times, predicted.computed, best, predicted.busy) + f" ({note})")
                about = {"trace": work.trace.name, "replicas": replicas, "router": router, "note": note}
                both = {"real": list(map(asdict, served)), "simulated": list(map(asdict, predicted.requests))}
                found.append({**about, **both})
                (options.out / "fleet_replay.json").write_text(json.dumps(found))


def real_calls(machine: Machine) -> Machine:
    """The machine with the calls that a real scheduler makes: none is larger than the engine's batch."""
    batch = BATCH * machine.speed.prefill.per_token
    return replace(machine, stall=min(machine.stall, batch), call=min(PATIENCE, batch))


if __name__ == "__main__":
    main()
