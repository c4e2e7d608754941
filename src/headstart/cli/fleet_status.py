"""`headstart fleet status`: the replicas of a running fleet, and what the fronts know of them."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from headstart.cli.server import ServerAddress, asks_server
from headstart.units import count, show_size

STATUS = "/headstart/fleet"


@asks_server
def status(
    *,
    server: ServerAddress,
    data: Annotated[bool, typer.Option("--json", help="Print data instead of a table.")] = False,
) -> None:
    """Shows the replicas of a fleet: what each holds, fetched at its start, reused and computed, its queue, and the age of its
    reports."""
    found = server.ask(STATUS, start="headstart fleet MODEL")
    if data:
        print(json.dumps(found))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("replica", "on", "requests", "queue", "holds", "fetched at start", "reused", "computed", "report", box=None)
    for one in found["replicas"]:
        ages = [row["age"] for front in found["fronts"] for row in front if row["replica"] == one["replica"]]
        gaps = any(row["gap"] for front in found["fronts"] for row in front if row["replica"] == one["replica"])
        table.add_row(
            one["tag"],
            f"{one['host']}, process {one['pid']}",
            f"{one['running']} run, {one['waiting']} wait",
            f"{one['queue']:.1f} s",
            "\n".join(f"{tier}: {held['entries']:,} ({show_size(held['used'])})" for tier, held in one["held"].items()),
            f"{one['preloaded']:,}",
            "\n".join(f"{tier}: {tokens:,}" for tier, tokens in one["cached"].items() if tokens) or "–",
            f"{one['computed']:,}",
            f"{max(ages):.1f} s ago{', incomplete' if gaps else ''}" if ages else "none",
        )
    for tag in found["silent"]["replicas"]:
        table.add_row(tag, "does not answer")
    Console().print(table)
    if silent := found["silent"]["fronts"]:
        typer.echo(f"{count(silent, 'front')} did not answer", err=True)
