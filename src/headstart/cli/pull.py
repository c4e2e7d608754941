"""`headstart pull`, and the models of all commands that take one: a name is fetched if it is not on this machine."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from headstart.config import Settings
from headstart.model_names import same
from headstart.units import show_size, show_span

if TYPE_CHECKING:
    from headstart.hub.local_model import LocalModel
    from headstart.hub.progress import OnProgress, PullProgress

EPILOG = """
**Examples**

`headstart pull Qwen/Qwen3-0.6B-GGUF` — the best quantisation that fits into this machine's free memory

`headstart pull Qwen/Qwen3-0.6B-GGUF:Q8_0` — this one

`headstart pull mlx-community/Qwen3-0.6B-4bit` — a model in Hugging Face's form, for MLX (docs/mlx.md)

It asks huggingface.co, or the hub that HF_ENDPOINT names, with the token in HF_TOKEN. docs/models.md has more.
"""
EVERY = 5.0
"""Seconds between two lines about one file, where there is no terminal for a bar."""

Say = Callable[["PullProgress"], None]


def pull(
    name: Annotated[str, typer.Argument(metavar="NAME", help="OWNER/NAME or OWNER/NAME:QUANTISATION of a repository.")],
) -> None:
    """Fetches a model from Hugging Face's hub, or its latest version. It goes on where an earlier attempt ended.

    The files go into Hugging Face's cache, where other programs find them too. Each is compared with the hash that the hub
    names.

    Exit code 2 if it cannot be fetched; the message says why.
    """
    from headstart.engines.model_file import DEMO, locate
    from headstart.hub.pull import pull as fetch

    if same(name, DEMO):
        typer.echo(f"{DEMO} is bundled, so there is nothing to fetch: {locate(DEMO)}")
        return
    with pulling() as report:
        model = fetch(name, report)
    typer.echo(f"{model.name}, {show_size(model.size)}: {model.path}")


def located(settings: Settings, log: Say | None = None) -> tuple[Settings, tuple[str, ...]]:
    """The settings with the path of a model in place of its name, and the names that callers may use for it.

    A model that is not on this machine is fetched. A path that is there stays as it is.

    Args:
        log: is told about a download, where there is no terminal for a bar; None prints lines.

    Raises:
        ModelError: there is no such model, or it cannot be fetched.
    """
    model = named(settings.model, log)
    return (settings, ()) if model is None else (replace(settings, model=str(model.path)), model.names)


def named(text: str, log: Say | None = None) -> LocalModel | None:
    """As `located`, for a text alone. None if it needs no name: it is a path that is there, or the bundled model."""
    from headstart.engines.model_file import DEMO
    from headstart.hub.pull import resolve

    if text == DEMO or os.path.exists(os.path.expanduser(text)):
        return None
    with pulling(log) as report:
        return resolve(text, report)


@contextmanager
def pulling(log: Say | None = None) -> Iterator[OnProgress]:
    """Shows a download: a bar on a terminal, else a line every few seconds, or what `log` makes of it."""
    if sys.stderr.isatty():
        with _bar() as report:
            yield report
        return
    last: dict[str, float] = {}

    def tell(progress: PullProgress) -> None:
        now = time.monotonic()
        done = progress.done == progress.total
        if done or now - last.get(progress.file, float("-inf")) >= EVERY:
            last[progress.file] = float("inf") if done else now
            (log or _line)(progress)

    yield tell


def _line(progress: PullProgress) -> None:
    print(f"headstart: {sentence(progress)}", file=sys.stderr, flush=True)


def sentence(progress: PullProgress) -> str:
    """`model.gguf: 40% of 380 MiB, 12 MiB/s, 19 s left`."""
    text = f"{progress.file}: {100 * progress.done // progress.total}% of {show_size(progress.total)}"
    if progress.rate and progress.done < progress.total:
        left = (progress.total - progress.done) / progress.rate
        text += f", {show_size(progress.rate)}/s, {show_span(left)} left"
    return text


@contextmanager
def _bar() -> Iterator[OnProgress]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    from headstart.cli.console import shortened

    console = Console(stderr=True)
    columns = (
        *(TextColumn("{task.description}", markup=False), BarColumn(20), DownloadColumn(binary_units=True)),
        *(TransferSpeedColumn(), TimeRemainingColumn()),
    )
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=console, refresh_per_second=4) as bar:

        def tell(progress: PullProgress) -> None:
            if progress.file not in tasks:
                title = shortened(progress.file, console.width // 3)
                tasks[progress.file] = bar.add_task(title, total=progress.total, completed=progress.done)
            bar.update(tasks[progress.file], completed=progress.done)

        try:
            yield tell
        except KeyboardInterrupt:
            bar.console.print("Interrupted. What is here is kept: the same command goes on with it.", highlight=False)
            raise
