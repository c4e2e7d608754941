"""`headstart replay`: what a trace would have found in a cache of some size, with each policy and at best."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headstart.errors import ConfigError
from headstart.units import count, parse_size, show_size

if TYPE_CHECKING:
    from rich.table import Table

    from headstart.replay import ReplayResult

EPILOG = """
**Examples**

`headstart replay` — a generated trace, for a first look

`headstart replay conversation_trace.jsonl --budget 4GiB --bytes-per-token 131072`

`headstart replay sessions/ --block-size 512 --every 120 --policy value --policy lru --json`

`headstart replay sessions/ --fleet 4 --router all --shared` — a simulated fleet: first token and computed tokens by router

Formats: Mooncake's traces (JSONL with `hash_ids`), kv-cache-tester (a session a file, JSON or gzip), or JSONL with
`timestamp` in microseconds, the whole prompt as `input` and the reply as `output` (a session a file). The default costs of a
token are those of the bundled model on two cores.
"""


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number.")
    return value


def replay(
    traces: Annotated[
        list[Path] | None,
        typer.Argument(metavar="TRACE", help="Files, or folders of sessions.", show_default="a generated trace"),
    ] = None,
    budget: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SIZE|%",
            help="Size of the cache, like 4GiB, or as a share of all different blocks, like 10%; again for more.",
            show_default="5%, 10%, 25%",
        ),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Policy: value, gdsf, lfu, twice, lru or optimum; again for more.", show_default="all"
        ),
    ] = None,
    block_size: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="TOKENS", help="Size of a block: a multiple of the recorded one.", show_default="as recorded"
        ),
    ] = None,
    every: Annotated[
        float,
        typer.Option(min=0.0, callback=_finite, metavar="SECONDS", help="Time between the starts of two recorded sessions."),
    ] = 60.0,
    behind: Annotated[
        float,
        typer.Option(
            min=0.0, max=0.99, metavar="PART", help="Count only requests after this share of them; the cache sees all."
        ),
    ] = 0.0,
    seconds_per_token: Annotated[
        float, typer.Option(min=0.0, callback=_finite, metavar="SECONDS", help="Cost of computing a token.")
    ] = 0.0024,
    bytes_per_token: Annotated[
        float, typer.Option(min=1.0, callback=_finite, metavar="BYTES", help="Cost of storing a token.")
    ] = 23_040,
    fleet: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Simulate a fleet of N replicas; --budget is the memory of each.", show_default="one cache"
        ),
    ] = None,
    router: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Router: exact, round-robin, power-of-two, sticky, ray-prefix, ray-prefix-10, sglang or all; again for more.",
            show_default="exact",
        ),
    ] = None,
    shared: Annotated[bool, typer.Option("--shared", help="The fleet has a shared tier that holds all blocks.")] = False,
    slots: Annotated[int, typer.Option(min=1, metavar="N", help="Slots of each replica of the fleet.")] = 8,
    report_delay: Annotated[
        float,
        typer.Option(
            min=0.0, callback=_finite, metavar="SECONDS", help="Time that a report takes from a replica to the router."
        ),
    ] = 0.05,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Replays recorded requests against the cache's own code, and shows what each retention policy would have saved."""
    from rich.console import Console

    from headstart import replay as simulator
    from headstart import traces as recorded
    from headstart.cli.replay_fleet import FleetOptions, replay_fleet

    if fleet is None and (router or shared):
        raise ConfigError("--router and --shared need --fleet.")
    if fleet is not None and (policy or behind):
        raise ConfigError("--policy and --behind are not for a fleet, which evicts the least recently used blocks.")
    names = policy or simulator.policies()
    if unknown := [name for name in names if name not in simulator.policies()]:
        raise ConfigError(f"--policy must be one of {', '.join(simulator.policies())}, not {unknown[0]}.")
    trace = (
        recorded.read(traces, block_size=block_size, every=every) if traces else recorded.sample(block_size=block_size or 64)
    )
    total = simulator.working_set(trace)
    costs = simulator.ReplayCosts(seconds_per_token, bytes_per_token)
    usual = ["5%", "10%", "25%"] if fleet is None else ["10%"]
    budgets = [_tokens(text, total, bytes_per_token) for text in budget or usual]
    if fleet is not None:
        options = FleetOptions(fleet, router or ["exact"], shared, slots, report_delay, seconds_per_token, budgets)
        replay_fleet(trace, options, as_json=as_json)
        return
    first = int(len(trace.requests) * behind)
    results = [
        simulator.replay(trace, name, budget, costs, first=first)
        for budget in budgets
        for name in dict.fromkeys([*names, "lru", simulator.OPTIMUM])
    ]
    if as_json:
        found = [asdict(result) | {"computed": result.computed, "gap_closed": gap} for result, gap in _gaps(results)]
        typer.echo(
            json.dumps({"trace": trace.name, "block_size": trace.block_size, "working_set": total, "results": found}, indent=1)
        )
        return
    Console().print(_table(results, names, bytes_per_token))
    size = f"{count(total, 'token')} ({show_size(total * bytes_per_token)})"
    requests, block = count(len(trace.requests), "request"), count(trace.block_size, "token")
    typer.echo(f"{trace.name}: {requests}; all different blocks of {block}: {size}")


def _tokens(text: str, total: int, bytes_per_token: float) -> int:
    """How many tokens fit into a budget, from the text of the option."""
    try:
        if text.endswith("%"):
            share = float(text[:-1])
            if not 0 <= share < math.inf:
                raise ValueError
            return int(total * share / 100)
        return int(parse_size(text) / bytes_per_token)
    except ValueError:
        raise ConfigError(f"--budget {text}: write it like 4GiB or 10%.") from None


def _gaps(results: list[ReplayResult]) -> Iterator[tuple[ReplayResult, float | None]]:
    """Each result, with the share of the gap between LRU and the optimum that it closes."""
    from headstart.replay import OPTIMUM, closed

    known = {(result.policy, result.budget): result for result in results}
    for result in results:
        yield result, closed(result, known["lru", result.budget], known[OPTIMUM, result.budget])


def _table(results: list[ReplayResult], names: list[str], bytes_per_token: float) -> Table:
    from rich.table import Column, Table

    figures = ("hit tokens", "of the prompt", "computed tokens", "seconds saved", "of the gap to the optimum")
    table = Table("budget", "policy", *(Column(name, justify="right") for name in figures))
    for result, gap in _gaps(results):
        if result.policy in names:
            table.add_row(
                show_size(result.budget * bytes_per_token),
                result.policy,
                f"{result.hit:,}",
                f"{result.hit / max(1, result.prompt):.1%}",
                f"{result.computed:,}",
                f"{result.seconds:,.0f}",
                "–" if gap is None else f"{gap:.0%}",
                end_section=result.policy == names[-1],
            )
    return table
