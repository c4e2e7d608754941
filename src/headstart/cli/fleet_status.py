"""`headstart fleet status`: the replicas of a running fleet, and what the fronts know of them."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from headstart.cli.server import (
    ApiKey,
    ClientKeyFile,
    ServerAddress,
    ServerCert,
    ServerHost,
    ServerPort,
    ServerSocket,
    Url,
    typed,
)
from headstart.units import show_size

STATUS = "/headstart/fleet"


def status(
    context: typer.Context,
    url: Url = None,
    host: ServerHost = None,
    port: ServerPort = None,
    unix_socket: ServerSocket = None,
    tls_cert: ServerCert = None,
    api_key: ApiKey = None,
    api_key_file: ClientKeyFile = None,
    data: Annotated[bool, typer.Option("--json", help="Print data instead of a table.")] = False,
) -> None:
    """Shows the replicas of a fleet: what each holds, fetched at its start, reused and computed, its queue, and the age of its
    reports."""
    options: dict[str, Any] = {
        "url": url,
        "host": host,
        "port": port,
        "unix_socket": unix_socket,
        "tls_cert": tls_cert,
        "api_key": api_key,
        "api_key_file": api_key_file,
    }
    found = ServerAddress.found(options, typed(context, options.keys())).ask(STATUS)
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
    Console().print(table)
