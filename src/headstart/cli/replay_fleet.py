"""`headstart replay --fleet`: the same trace with several replicas and other routers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import typer

from headstart.errors import ConfigError
from headstart.units import count

if TYPE_CHECKING:
    from rich.table import Table

    from headstart.fleet.simulator.machine import FleetPlan
    from headstart.fleet.simulator.simulation import FleetResult
    from headstart.traces import Trace

ALL = "all"


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """What the options say of the fleet.

    Attributes:
        routers: names, or `ALL`.
        budgets: tokens of each replica's memory. At least the longest prompt fits anyway.
    """

    replicas: int
    routers: list[str]
    shared: bool
    slots: int
    report_delay: float
    seconds_per_token: float
    budgets: list[int]


def replay_fleet(trace: Trace, options: FleetOptions, *, as_json: bool) -> None:
    """Prints what each router would have done.

    Raises:
        ConfigError: there is no such router.
    """
    from rich.console import Console

    from headstart.fleet.simulator.simulation import bound, simulate

    names = _routers(options.routers)
    plans = [_plan(trace, budget, options) for budget in options.budgets]
    results = [(int(plan.machine.memory), simulate(trace, name, plan)) for plan in plans for name in names]
    best = bound(trace, plans[0])
    if as_json:
        shown = [{"memory": memory, **_json(one)} for memory, one in results]
        about = {"trace": trace.name, "block_size": trace.block_size, "replicas": options.replicas, "bound": _json(best)}
        typer.echo(json.dumps({**about, "results": shown}, indent=1))
        return
    Console().print(_table(results, best))
    requests, replicas = count(len(trace.requests), "request"), count(options.replicas, "replica")
    typer.echo(f"{trace.name}: {requests}, {replicas}; bound: an infinite cache that is everywhere at once, and nothing waits")


def _routers(names: Iterable[str]) -> list[str]:
    from headstart.fleet.simulator.routings import ROUTINGS

    chosen = list(dict.fromkeys(one for name in names for one in (ROUTINGS if name == ALL else [name])))
    if unknown := [name for name in chosen if name not in ROUTINGS]:
        raise ConfigError(f"--router must be one of {', '.join(ROUTINGS)} or {ALL}, not {unknown[0]}.")
    return chosen


def _plan(trace: Trace, budget: int, options: FleetOptions) -> FleetPlan:
    from headstart.fleet.simulator.machine import FleetPlan, Machine

    memory = max([budget, *(request.prompt for request in trace.requests)])
    machine = Machine.of(options.seconds_per_token, memory, slots=options.slots)
    shared = math.inf if options.shared else 0.0
    return FleetPlan(options.replicas, machine, shared, delay=options.report_delay)


def _json(result: FleetResult) -> dict[str, object]:
    return {name: value for name, value in asdict(result).items() if name != "requests"}


def _table(results: list[tuple[int, FleetResult]], best: FleetResult) -> Table:
    from rich.table import Column, Table

    figures = ("mean", "p50", "p90", "p99", "computed", "fetched tokens", "busiest / mean")
    table = Table("tokens in memory", "router", *(Column(name, justify="right") for name in figures))
    table.caption = "seconds to the first token; computed: share of the prompts' tokens"
    for memory, one in [*results, (0, best)]:
        table.add_row(
            f"{memory:,}" if memory else "∞",
            one.router + (" + shared" if one.shared and memory else ""),
            *(f"{value:,.3f}" for value in (one.mean, one.p50, one.p90, one.p99)),
            f"{one.computed / max(1, one.prompt):.1%}",
            f"{one.fetched:,}",
            f"{one.busiest:.2f}",
        )
    return table
