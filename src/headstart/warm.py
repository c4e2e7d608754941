"""Warm: computes prompts ahead of time and stores them, so that the first to send one waits for its own words only."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from headstart.config import Settings
from headstart.console import loading
from headstart.errors import ConfigError, ContextTooLong, HeadstartError, InvalidRequest
from headstart.library import Headstart, load
from headstart.observe import logs
from headstart.runtime.request import Report
from headstart.units import show_size

DRAIN = 24 * 3600.0
"""Seconds for which the disk is waited for: to write is what this is about."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """One prompt. `place`: where in the file it stands, for messages to the user."""

    place: str
    messages: Sequence[Mapping[str, Any]]
    options: Mapping[str, Any]


def run(file: str, settings: Settings, *, role: str = "system", salt: str = "") -> None:
    """Warms all prompts of `file` (`-` for standard input), and says what that took.

    Raises:
        ConfigError: the file cannot be read or makes no sense, or there is nowhere to store.
        HeadstartError: a prompt cannot be computed; what comes before it is stored.
    """
    if settings.cache_dir is None:
        raise ConfigError("There is nowhere to store prompts: leave --no-disk out.")
    prompts = read(file, role)
    logs.configure(level=logging.WARNING)
    console = Console(stderr=True)
    with loading(settings.model) as progress:
        hs = load(replace(settings, drain=DRAIN), progress)
    with hs:
        disk = hs.runtime.cache.disk
        before = disk.used
        reports = list(_warm(hs, prompts, salt, console))
        with console.status("writing"):
            hs.close()
    tokens, computed = sum(report.prompt for report in reports), sum(report.computed for report in reports)
    saved, refused = disk.counters["saved"], sum(count for name, count in disk.counters.items() if name.startswith("skipped"))
    print(f"ready: {len(reports):,} prompts of {tokens:,} tokens; {computed:,} computed, {tokens - computed:,} were there")
    print(f"stored: {saved:,} blocks, {show_size(max(0, disk.used - before))} more in {settings.cache_dir}")
    if refused or not disk.budget:
        raise HeadstartError(f"{refused:,} blocks could not be stored; is there room in {settings.cache_dir} (--disk-budget)?")


def _warm(hs: Headstart, prompts: Sequence[Wanted], salt: str, console: Console) -> Iterator[Report]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        for number, prompt in enumerate(prompts):
            task = bar.add_task(f"{number + 1}/{len(prompts)} {prompt.place}", total=None)
            try:
                report = hs.warm(
                    prompt.messages,
                    salt=salt,
                    progress=lambda done, total, task=task: bar.update(task, completed=done, total=total),  # type: ignore[misc]
                    **prompt.options,
                )
            except (InvalidRequest, ContextTooLong) as error:
                raise ConfigError(f"{prompt.place}: {error}") from error
            bar.remove_task(task)
            if not console.is_terminal:
                console.print(f"{prompt.place}: {report.prompt} tokens, {report.computed} computed", highlight=False)
            yield report


# ── what to warm ─────────────────────────────────────────────────────────────────────────────────────────────────────


def read(file: str, role: str) -> list[Wanted]:
    """The prompts in a file: a text (one message of `role`), the JSON body of a chat request (or its messages), or JSON lines.

    Raises:
        ConfigError: there is none, or it is said to be JSON and is not.
    """
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Cannot read {file}: {error}.") from error
    if not text.strip():
        raise ConfigError(f"{file} is empty; it should hold a text, or the JSON of a chat request.")
    promised = Path(file).suffix in (".json", ".jsonl")
    try:
        found = list(_bodies(text))
    except ValueError as error:
        if promised:
            raise ConfigError(f"{file} is not JSON: {error}.") from error
        found = []
    if found and all(_is_body(body) for _, body in found):
        return [_wanted(f"{file}:{line}" if len(found) > 1 else file, body) for line, body in found]
    if promised:
        raise ConfigError(f'{file} holds no chat request: it should be {{"messages": […]}} or a list of messages.')
    return [Wanted(file, [{"role": role, "content": text}], {})]


def _bodies(text: str) -> Iterator[tuple[int, Any]]:
    """What the text holds, with line numbers: one JSON value, or one a line. Raises ValueError if neither."""
    try:
        yield 1, json.loads(text)
        return
    except ValueError:
        lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
        if len(lines) < 2 or not lines[0][1].lstrip().startswith(("{", "[")):
            raise
    for number, line in lines:
        try:
            yield number, json.loads(line)
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None


def _is_body(body: Any) -> bool:
    messages = body.get("messages") if isinstance(body, dict) else body
    return isinstance(messages, list) and bool(messages) and all(isinstance(one, dict) and "role" in one for one in messages)


def _wanted(place: str, body: Any) -> Wanted:
    if isinstance(body, list):
        return Wanted(place, body, {})
    names = {"tools": "tools", "chat_template_kwargs": "template"}
    return Wanted(place, body["messages"], {ours: body[theirs] for theirs, ours in names.items() if body.get(theirs)})
