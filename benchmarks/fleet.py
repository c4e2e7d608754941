"""Routers beside each other on recorded traffic: `python -m benchmarks.fleet [--data DIR] [--load 0.3 0.6]`.

Each trace is simulated with four replicas (`headstart.fleet.simulator`), with every router, with and without a shared tier that
holds the whole working set. The *load* decides how fast the machines are: an infinite cache would keep them busy for that share
of the time in which nine tenths of the requests arrive. The two kinds of machines: `large` has 64 slots and prefill calls of
0.1 s beside running replies, `small` has 8 slots and calls of 0.25 s.

*In turns* is another replica, not another router: the prompts in its slots get one prefill call each, in turn. headstart
computes the one with the least left. Ratios of these rows are to Ray's router with headstart's replicas.

The `bound` is what no router can beat: an infinite cache that is everywhere at once, and no request ever waits.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from rich.console import Console

from headstart.fleet.simulator.machine import FleetPlan, Machine
from headstart.fleet.simulator.routings import ROUTINGS
from headstart.fleet.simulator.simulation import FleetResult, bound, simulate
from headstart.replay import working_set
from headstart.traces import Trace, read, sample

ROOT = Path(__file__).resolve().parents[1]
ARRIVED = 90
"""Percent of the requests that arrive in the time for which the load is meant."""
_PROBE = 1e-4


@dataclass(frozen=True)
class FleetWorkload:
    """A trace and the machines that serve it.

    Attributes:
        memory: a replica's memory as a share of all different blocks; at least the longest prompt fits.
    """

    trace: Trace
    memory: float
    slots: int
    stall: float

    def plan(self, replicas: int, load: float, *, shared: bool) -> FleetPlan:
        """A fleet that has this load."""
        memory = max(self.memory * working_set(self.trace), *(request.prompt for request in self.trace.requests))
        arrivals = np.array([request.at for request in self.trace.requests])
        span = float(np.percentile(arrivals, ARRIVED) - arrivals[0])
        probe = FleetPlan(replicas, Machine.of(_PROBE, memory))
        seconds = sum(one.first_token for one in bound(self.trace, probe).requests) * ARRIVED / 100
        machine = Machine.of(_PROBE * load * replicas * span / seconds, memory, slots=self.slots, stall=self.stall)
        return FleetPlan(replicas, machine, math.inf if shared else 0.0)


def workloads(data: Path) -> Iterator[FleetWorkload]:
    """Every trace that can be read in the folder, and the generated one."""
    for name in ("conversation", "synthetic"):
        file = data / "mooncake" / f"{name}_trace.jsonl"
        if file.exists():
            yield FleetWorkload(read([file], name=f"Mooncake {name}"), 0.05, 64, 0.1)
    if (data / "claude-code").is_dir():
        yield FleetWorkload(read([data / "claude-code"], every=10, name="coding agents"), 0.1, 64, 0.1)
    if (data / "miniswe").is_dir():
        yield FleetWorkload(read([data / "miniswe"], every=10, name="miniswe"), 0.2, 8, 0.25)
    yield FleetWorkload(replace(sample(), name="generated"), 0.1, 8, 0.25)


def row(result: FleetResult, base: FleetResult | None, best: FleetResult) -> str:
    """A line of the table. `base`: Ray's router with the same tiers."""
    name = result.router + (" + shared" if result.shared and result is not best else "")
    times = " | ".join(f"{value:,.2f}" for value in (result.mean, result.p50, result.p90, result.p99))
    ratios = f"{result.mean / base.mean:.2f} | {result.p99 / base.p99:.2f}" if base else " | "
    computed = f"{result.computed / best.computed:.2f}"
    return (
        f"| {name} | {times} | {ratios} | {result.computed / max(1, result.prompt):.3f} ({computed}) | {result.busiest:.2f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fleet", description=__doc__)
    given = os.environ.get("HEADSTART_DATA")
    parser.add_argument("--data", type=Path, default=Path(given) if given else ROOT.parent / "shared" / "data")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--load", type=float, nargs="*", default=[0.3, 0.6])
    parser.add_argument("--only", nargs="*", default=[], help="traces whose names begin like this")
    parser.add_argument("--out", type=Path, default=Path("bench-out"), help="folder for fleet.json")
    options = parser.parse_args()
    show = Console(soft_wrap=True, markup=False, highlight=False).print
    found = []
    for work in workloads(options.data):
        if options.only and not work.trace.name.startswith(tuple(options.only)):
            continue
        for load in options.load:
            plan = work.plan(options.replicas, load, shared=True)
            curve, memory = plan.machine.speed.prefill, plan.machine.memory
            speed = f"{1 / curve.per_token:,.0f} tokens/s, {memory:,.0f} tokens in memory"
            show(f"\n**{work.trace.name}**, load {load:.0%}: {speed}\n")
            show("| router | mean, s | p50 | p90 | p99 | mean / Ray's | p99 / Ray's | computed (/ bound) | busiest |")
            show("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
            best = bound(work.trace, plan)
            shortest = None
            for one in (plan, replace(plan, shared=0.0)):
                results = {router: simulate(work.trace, router, one) for router in ROUTINGS}
                shortest = results["ray-prefix"] if one is plan else shortest
                for result in results.values():
                    show(row(result, results["ray-prefix"], best))
                    found.append({"trace": work.trace.name, "load": load, **_figures(result)})
            turns = replace(plan, machine=replace(plan.machine, ageing=None))
            for router in ("exact", "ray-prefix"):
                result = replace(simulate(work.trace, router, turns), router=f"{router}, in turns")
                show(row(result, shortest, best))
                found.append({"trace": work.trace.name, "load": load, **_figures(result)})
            show(row(best, None, best))
            found.append({"trace": work.trace.name, "load": load, **_figures(best)})
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "fleet.json").write_text(json.dumps(found, indent=1))


def _figures(result: FleetResult) -> dict[str, object]:
    return {name: value for name, value in asdict(replace(result, requests=())).items() if name != "requests"}


if __name__ == "__main__":
    main()
