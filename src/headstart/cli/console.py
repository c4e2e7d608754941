"""Console: shows people the progress of loading a model, and then what the model uses."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import structlog
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from headstart.model_names import model_name
from headstart.serving.runtime import Runtime
from headstart.units import count, show_size, show_time
from headstart.version import __version__

AGENTS = 20_000
"""Tokens that coding agents need: Claude Code's first prompt has some 17,000."""
LOG_EVERY = 2.0
"""Seconds between log lines about loading, if there is no terminal for a bar."""


def shortened(file: str, most: int) -> str:
    """The name of a file without its folders. If it has more than `most` characters, its end: it says which part it is."""
    name = file.rpartition("/")[2]
    return name if len(name) <= most else "…" + name[-(most - 1) :]


@contextmanager
def loading(model: str) -> Iterator[Callable[[float], None]]:
    """Shows progress as a bar on a terminal, else as log lines. Yields a function that takes the share from 0 to 1.

    A bar has the name of the model's file: a path would push it off the screen.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _logged(model)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, refresh_per_second=4) as bar:
        task = bar.add_task(f"loading {escape(shortened(model_name(model), console.width // 3))}", total=1.0)
        yield lambda share: bar.update(task, completed=share)


def _logged(model: str) -> Callable[[float], None]:
    log, due = structlog.get_logger("headstart"), time.monotonic() + LOG_EVERY

    def log_share(share: float) -> None:
        nonlocal due
        if time.monotonic() >= due:
            due = time.monotonic() + LOG_EVERY
            log.info("loading", model=model, percent=round(100 * share))

    return log_share


def facts(runtime: Runtime) -> dict[str, str]:
    """What a loaded model uses: one line a topic."""
    engine, settings = runtime.engine, runtime.settings
    shape, details, known = engine.shape, engine.facts.details, engine.facts
    topics = {"model": f"{known.name} ({known.description})", "engine": known.engine}
    if "path" in details:
        topics["file"] = str(details["path"])
    topics["template"] = runtime.template_facts.with_flags
    topics["slots"] = f"{count(shape.slots, 'conversation')} at a time, {count(shape.ctx, 'token')} each"
    trained = int(details.get("ctx_train") or 0)
    if 0 < trained < shape.ctx:
        topics["slots"] += f", more than the {trained:,} that the model was trained on"
    elif shape.ctx < min(trained, AGENTS):
        smaller = "--kv-type q8_0, or " if "kv_type" in details else ""
        topics["slots"] += f", fewer than coding agents need: give --ctx more, or {smaller}a smaller model"
    if shape.kv_bytes_per_token:
        kind = details.get("kv_type", "")
        topics["keys and values"] = f"{kind}, {show_size(shape.kv_bytes_per_token)} a token".removeprefix(", ")
        budget = runtime.cache.memory.budget
        topics["cache"] = (
            f"{show_size(budget)} of memory for {count(budget // shape.kv_bytes_per_token, 'token')} beside those in slots"
        )
        whole = budget // (shape.kv_bytes_per_token + shape.transfer_bytes // shape.ctx)
        if whole < shape.ctx:
            topics["cache"] += f"; at most {whole:,} of one conversation can be restored: give more --memory-budget"
    if details.get("amx") is False and not details.get("gpu_layers"):
        topics["AMX"] = "not used, although this processor has it: `headstart doctor` says why"
    if engine.traits.stateful:
        topics["checkpoints"] = f"{show_size(shape.state_bytes)} each"
        if shape.kv_bytes_per_token:
            topics["checkpoints"] += f", as much as {count(shape.state_bytes // shape.kv_bytes_per_token, 'token')}"
    if settings.expire is not None:
        topics["expire"] = f"nothing is kept longer than {show_time(settings.expire)}"
    disk = runtime.cache.disk
    if disk.budget:
        topics["disk"] = f"{show_size(disk.budget)} in {settings.cache_dir}, {count(len(disk), 'block')} stored"
    elif disk.on:
        topics["disk"] = f"{settings.cache_dir} cannot be used now: see the log"
    if settings.shared is not None:
        how = "read and written" if settings.shared_mode == "readwrite" else "read only"
        topics["shared store"] = f"{settings.shared}, {how}{', encrypted' * settings.shared_encrypt}"
    parts = [
        f"{show_size(details[name])} {word}"
        for name, word in (("weights_bytes", "of weights"), ("live_bytes", "for slots"))
        if name in details
    ]
    if parts:
        topics["memory"] = ", ".join(parts)
    if "threads" in details:
        topics["compute"] = count(int(details["threads"]), "thread")
        if details.get("decode_threads", details["threads"]) != details["threads"]:
            topics["compute"] += ", 1 for decoding, which is exact with no more"
        if layers := details.get("gpu_layers"):
            topics["compute"] += f", {'all layers' if layers < 0 else count(layers, 'layer')} on the GPU"
        elif unused := details.get("gpus"):
            topics["compute"] += f"; no layer is on {', '.join(unused)}: give --gpu-layers auto or -1"
    seconds = details.get("proof_seconds")
    topics["reuse"] = settings.reuse
    topics["proof"] = "; ".join(engine.traits.notes) or "none"
    if seconds is not None:
        topics["proof"] += f" ({seconds:.1f} s)"
    return topics


def figures(runtime: Runtime) -> dict[str, Any]:
    """The same for programs, without sentences. Sizes are in bytes. Unknown values are left out."""
    engine, settings = runtime.engine, runtime.settings
    shape, details, known = engine.shape, engine.facts.details, engine.facts
    memory, disk = runtime.cache.memory, runtime.cache.disk
    found = {
        "model": known.name,
        "description": known.description,
        "engine": known.engine,
        "file": str(details["path"]) if "path" in details else None,
        "slots": shape.slots,
        "ctx": shape.ctx,
        "ctx_train": details.get("ctx_train"),
        "block_size": engine.traits.block_size,
        "kv_type": details.get("kv_type"),
        "kv_bytes_per_token": shape.kv_bytes_per_token,
        "checkpoint_bytes": shape.state_bytes,
        "memory_budget_bytes": memory.budget,
        "memory_budget_tokens": memory.budget // shape.kv_bytes_per_token if shape.kv_bytes_per_token else None,
        "disk_budget_bytes": disk.budget,
        "disk_blocks": len(disk),
        "cache_dir": str(settings.cache_dir) if disk.on else None,
        "weights_bytes": details.get("weights_bytes"),
        "slots_bytes": details.get("live_bytes"),
        "threads": details.get("threads"),
        "gpu_layers": details.get("gpu_layers"),
        "expire_seconds": settings.expire,
        "reuse": settings.reuse,
        "exact": engine.traits.exact,
        "proof_seconds": details.get("proof_seconds"),
    }
    return {name: value for name, value in found.items() if value is not None}


def announce(runtime: Runtime, log_format: str) -> None:
    """Prints once what a server will use: for people, or for a log collector."""
    if log_format == "json":
        structlog.get_logger("headstart").info("ready", version=__version__, **figures(runtime))
        return
    topics = facts(runtime)
    width = max(map(len, topics))
    lines = [f"headstart {__version__}", *(f"  {topic:{width}}  {line}" for topic, line in topics.items())]
    print("\n".join(lines), file=sys.stderr, flush=True)
