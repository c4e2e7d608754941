"""`headstart stats`: what reuse has saved since a server started, as text or as a plot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from headstart.cli.server import ServerAddress, asks_server
from headstart.errors import ConfigError
from headstart.units import count, show_span

EPILOG = """
**Examples**

`headstart stats` — the server on this machine

`headstart stats --plot out.svg` — also a plot: tokens by tier and over time, first tokens, causes, and how full the tiers are

With isolation on, the operator's key shows all requests, and any other key its own. docs/metrics.md explains the figures.
"""


@asks_server
def stats(
    *,
    server: ServerAddress,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Draw a plot as SVG into this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print data instead of text.")] = False,
) -> None:
    """Shows what reuse has saved since a server started: tokens, seconds, times to the first token, and causes."""
    if plot is not None and plot.suffix.lower() != ".svg":
        raise ConfigError("--plot draws SVG: give a name like out.svg.")
    found = server.ask("/headstart/stats")
    if "saved_seconds" not in found:
        raise ConfigError(f"The server at {server.url} is not headstart, or an older one; give --url.")
    if plot is not None:
        from headstart.cli.charts import stats_chart

        try:
            plot.write_text(stats_chart(found), "utf-8")
        except OSError as error:
            raise ConfigError(f"Cannot write --plot {plot}: {error.strerror}.") from error
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return
    from rich.console import Console

    from headstart.cli.look import plain
    from headstart.cli.top.savings import of_sums
    from headstart.cli.top.state import TierSize
    from headstart.cli.top.text import savings_lines

    since = f"{count(found['requests'], 'request')} in {show_span(found['seconds'])}"
    tiers = {name: TierSize(size["used"], size["budget"]) for name, size in found["stored"].items()}
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"{'server':8}{plain(str(found['model']))}, {since}", markup=False)
    console.print(savings_lines(of_sums(found), tiers))
    for cause, tokens in sorted(found["recomputed"].items(), key=lambda item: -item[1]):
        console.print(f"{'again':8}{count(tokens, 'token')} computed again: {plain(cause)}", markup=False)
