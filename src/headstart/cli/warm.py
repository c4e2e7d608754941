"""Warm: computes prompts ahead of time and stores them, so that the first request with one computes only its new text."""

from __future__ import annotations

import json
import logging
import sqlite3
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from headstart.chat import tenancy
from headstart.chat.messages import effort
from headstart.cli.console import loading
from headstart.config import Settings
from headstart.errors import ConfigError, ContextTooLong, HeadstartError, InvalidRequest
from headstart.interfaces.tokens import BlockId
from headstart.library.headstart import Headstart, load
from headstart.observe import logs
from headstart.observe.prefill import PrefillLog
from headstart.prefix_cache.blocks import Chain, root_id
from headstart.serving.cache import Cache
from headstart.serving.request import Event, Report, Request, Sink
from headstart.tiers.disk import Disk
from headstart.units import count, show_size

DRAIN = 24 * 3600.0
"""Seconds to wait for the disk at the end, because storing is the purpose of the command."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """One prompt. `place`: file and line, for messages to the user; `options`: for `Headstart.warm`."""

    place: str
    messages: Sequence[Mapping[str, Any]]
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Warmed:
    """A computed prompt. `ids`: of its full blocks."""

    place: str
    report: Report
    ids: tuple[BlockId, ...]


def run(file: str, settings: Settings, *, role: str = "system", salt: str = "", tenant: str | None = None) -> None:
    """Warms all prompts of `file` (`-` for standard input), and prints what was computed and stored.

    Args:
        salt: for prompts without a `cache_salt`.
        tenant: name of the keys of later requests; None for a server without isolation.

    Raises:
        ConfigError: the file cannot be read or is invalid, a prompt in it cannot be served, or nothing can be stored.
        HeadstartError: a prompt cannot be computed, or was not stored completely.

    Prompts that were computed before an error are stored.
    """
    prompts = read(file, role)
    console = Console(stderr=True)
    logs.configure(level=logging.WARNING if console.is_terminal else logging.INFO)
    with loading(settings.model) as progress:
        hs = load(replace(settings, drain=DRAIN), progress)
    with hs:
        cache, folder = hs.runtime.cache, settings.cache_dir
        if folder is None or not cache.disk.budget:
            why = "see above" if settings.disk_budget else "--disk-budget is 0"
            raise ConfigError(f"{folder} cannot be used ({why}): prompts must be stored, so give another --cache-dir.")
        before = cache.disk.used
        warmed: list[Warmed] = []
        try:
            for prompt in _warm(hs, [_salted(prompt, salt, tenant) for prompt in prompts], console):
                warmed.append(prompt)
        finally:
            with console.status("writing"):
                hs.close()
            wanted = {block for prompt in warmed for block in prompt.ids}
            stored = _stored(folder, wanted)
            saved = cache.disk.counters["saved"]
            if warmed or saved:
                _account(warmed, stored)
                print(f"stored: {count(saved, 'block')}, {show_size(max(0, cache.disk.used - before))} more in {folder}")
    if missing := len(wanted - stored):
        raise HeadstartError(f"{missing:,} of {count(len(wanted), 'block')} {_why(cache, folder)}")


def _salted(prompt: Wanted, salt: str, tenant: str | None) -> Wanted:
    """The prompt with the salt that a server will use for it."""
    who = tenancy.OPEN if tenant is None else tenancy.tenant_of("name", tenant)
    given = tenancy.salt(tenancy.POLICIES["key"], who, None, prompt.options.get("salt", salt))
    return replace(prompt, options={**prompt.options, "salt": given})


def _warm(hs: Headstart, prompts: Sequence[Wanted], console: Console) -> Iterator[Warmed]:
    engine, chains = hs.runtime.engine, list[Chain]()

    def watch(request: Request) -> Sink:
        chains.append(Chain(root_id(engine.fingerprint, request.prompt.salt), engine.traits.block_size, request.prompt.tokens))
        return _ignore

    hs.runtime.watch(watch)
    hs.runtime.watch(PrefillLog())
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        for number, prompt in enumerate(prompts):
            task = bar.add_task(f"{number + 1}/{len(prompts)} {escape(prompt.place)}", total=None)
            try:
                report = hs.warm(
                    prompt.messages,
                    progress=lambda done, total, task=task: bar.update(task, completed=done, total=total),  # type: ignore[misc]
                    **prompt.options,
                )
            except ContextTooLong as error:
                size = f"{count(error.prompt_tokens, 'token')}, but a conversation may have {error.limit:,}"
                raise ConfigError(
                    f"{prompt.place}: {size}. Shorten it, or give a larger --ctx, the same as the server's."
                ) from error
            except InvalidRequest as error:
                raise ConfigError(f"{prompt.place}: {error.with_flags}") from error
            bar.remove_task(task)
            if not console.is_terminal:
                line = f"{prompt.place}: {count(report.prompt, 'token')}, {report.computed:,} computed"
                console.print(line, highlight=False, markup=False, soft_wrap=True)
            yield Warmed(prompt.place, report, chains[-1].ids)


def _ignore(event: Event) -> None:
    pass


def _stored(folder: Path, wanted: Collection[BlockId]) -> set[BlockId]:
    """The blocks that are on disk; none if the disk cannot be read."""
    try:
        disk = Disk(folder, 0, check=False)
        try:
            return set(wanted) - disk.catalog.without_row(wanted)
        finally:
            disk.close()
    except (OSError, sqlite3.Error):
        return set()


def _why(cache: Cache, folder: Path) -> str:
    """Why blocks are not on disk, and what helps."""
    # After `skipped_full` an entry is offered to the disk again, so it does not count.
    refused = any(name.startswith("skipped") for name in cache.disk.counters.keys() - {"skipped_full"})
    if not refused and any(name.startswith("skipped") for name in cache.store.counters):
        return "did not fit into memory before they were written: give more --memory-budget."
    return f"did not fit on disk: give more --disk-budget, or make room in {folder}."


def _account(warmed: Sequence[Warmed], stored: Collection[BlockId]) -> None:
    """Prints what is ready, and the id of each prompt's last usable block."""
    tokens, computed = (sum(prompt.report.prompt for prompt in warmed), sum(prompt.report.computed for prompt in warmed))
    print(
        f"ready: {count(len(warmed), 'prompt')} of {count(tokens, 'token')}; "
        f"{computed:,} computed, {tokens - computed:,} already cached"
    )
    for prompt in warmed:
        usable = list(takewhile(stored.__contains__, prompt.ids))
        print(f"  {usable[-1].hex()[:12] if usable else 'not stored':12}  {prompt.place}")


# ── the file of prompts ──────────────────────────────────────────────────────────────────────────────────────────────


def read(file: str, role: str) -> list[Wanted]:
    """The prompts in a file: a text (one message of `role`), the JSON body of a chat request (or its messages), or JSON lines.

    Raises:
        ConfigError: there is no prompt, a `.json` or `.jsonl` file is not JSON, or a `cache_salt` is not a text.
    """
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Cannot read {file}: {getattr(error, 'strerror', error)}.") from error
    if not text.strip():
        raise ConfigError(f"{file} is empty; it should contain a text, or the JSON of a chat request.")
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
        raise ConfigError(f'{file} contains no chat request: it should be {{"messages": […]}} or a list of messages.')
    return [Wanted(file, [{"role": role, "content": text}], {})]


def _bodies(text: str) -> Iterator[tuple[int, Any]]:
    """The JSON values of a text with line numbers: one value, or one a line. Raises ValueError if it is neither."""
    try:
        yield 1, _value(text)
        return
    except ValueError:
        lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
        if len(lines) < 2 or not lines[0][1].lstrip().startswith(("{", "[")):
            raise
    for number, line in lines:
        try:
            yield number, _value(line)
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None


def _value(text: str) -> Any:
    """The JSON value of a text. Raises ValueError."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _is_body(body: Any) -> bool:
    messages = body.get("messages") if isinstance(body, dict) else body
    return isinstance(messages, list) and bool(messages) and all(isinstance(one, dict) and "role" in one for one in messages)


def _wanted(place: str, body: Any) -> Wanted:
    if isinstance(body, list):
        return Wanted(place, body, {})
    for name, kind, what in (
        ("cache_salt", str, "a text"),
        ("reasoning_effort", str, "a text"),
        ("chat_template_kwargs", dict, "an object"),
    ):
        if body.get(name) is not None and not isinstance(body[name], kind):
            raise ConfigError(f"{place}: {name} must be {what}, not {body[name]!r:.100}.")
    if "system" in body:
        raise ConfigError(
            f"{place}: `system` beside the messages is Anthropic's format; make it the first message, with role `system`."
        )
    template = {**effort(body.get("reasoning_effort")), **(body.get("chat_template_kwargs") or {})}
    options = {"tools": body.get("tools"), "template": template, "salt": body.get("cache_salt")}
    return Wanted(place, body["messages"], {name: value for name, value in options.items() if value})
