"""`headstart ps`: which models of a running server are loaded, and what they do."""

from __future__ import annotations

import json as jsons
from typing import Annotated, Any

import typer

from headstart.cli.look import plain
from headstart.cli.server import ServerAddress, ServerRefusal, asks_server
from headstart.units import show_size, show_span


@asks_server
def ps(
    server: ServerAddress,
    json: Annotated[bool, typer.Option("--json", help="Print data instead of a table.")] = False,
) -> None:
    """Lists the models of a server: which are loaded, what they may use, and what they do.

    Exit code 0; 2 if there is no such server.
    """
    try:
        found = server.ask("/headstart/models")
    except ServerRefusal as error:
        if error.status != 404:
            raise
        found = _only(server)
    if json:
        typer.echo(jsons.dumps(found, indent=2))
        return
    rows = [("MODEL", "STATE", "MEMORY", "RUNNING", "WAITING", "IDLE"), *(_row(model) for model in found["models"])]
    columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
    widths = [max(map(len, column)) for column in columns]
    for row in zip(*columns, strict=True):
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    if "memory_bytes" in found:
        used, total = show_size(found["memory_used_bytes"]), show_size(found["memory_bytes"])
        typer.echo(f"{used} of {total} for all models; default: {plain(found['default'])}")
    for model in found["models"]:
        if model.get("cause"):
            typer.echo(f"{plain(model['name'])}: {plain(model['cause'])}")


def _only(server: ServerAddress) -> dict[str, Any]:
    """What a server of one model would answer."""
    stats = server.ask("/headstart/stats")
    only = {"name": stats["model"], "state": "ready", "running": stats["running"], "waiting": stats["waiting"]}
    return {"default": stats["model"], "keep_loaded": 1, "models": [only]}


def _row(model: dict[str, Any]) -> tuple[str, ...]:
    state = model["state"] + (f" {100 * model['progress']:.0f} %" if "progress" in model else "")
    file = f"({show_size(model['size_bytes'])} file)" if "size_bytes" in model else ""
    memory = show_size(model["memory_bytes"]) if "memory_bytes" in model else file
    idle = model.get("idle_seconds")
    return (
        plain(model["name"]),
        state,
        memory,
        str(model.get("running", "")),
        str(model.get("waiting", "")),
        show_span(idle) if idle else "",
    )
