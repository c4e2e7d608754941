"""Doctor: shows what this machine can do with a model, and checks that a warm answer equals a cold one."""

from __future__ import annotations

import logging
import platform
import re
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from headstart.cli.console import facts, loading
from headstart.cli.doctor_proof import blocks_and_calls
from headstart.cli.install_gpu import pip_command
from headstart.config import Settings
from headstart.engines import registry
from headstart.interfaces.engine import Engine
from headstart.interfaces.traits import Traits
from headstart.observe import logs
from headstart.serving.engine_thread import EngineThread
from headstart.serving.runtime import Runtime
from headstart.serving.warm_check import WarmWalk, compute
from headstart.units import count, show_size

BLOCKS = 3
"""Full blocks that the check must restore."""
FEWEST = 8
"""Prompts that the long check computes, whatever its time, unless one of them could use the cache before."""
PROMPT_SECONDS = 2.0
"""Most seconds to compute a prompt of the long check."""
REPLY = 4
"""Most tokens of its replies."""


@dataclass(frozen=True, slots=True)
class Check:
    """The result of a check. `cold` and `warm`: seconds until the logits at the end of one prompt."""

    good: bool
    finding: str
    cold: float = 0.0
    warm: float = 0.0


def examine(settings: Settings, seconds: float = 60.0, console: Console | None = None) -> bool:
    """Prints the results, and returns whether all checks passed.

    Args:
        seconds: how long to compare warm answers with cold ones.

    Raises:
        ConfigError: the model cannot be used.
    """
    console = console or Console()
    logs.configure(level=logging.WARNING)

    with loading(settings.model) as progress:
        options = replace(settings, reuse="exact").engine_options()
        thread = EngineThread(lambda: registry.load(options, progress, anew=True))
    engine = thread.engine
    blocks = thread.submit(lambda: blocks_and_calls(engine)).result()
    alone = replace(settings, reuse="exact" if engine.traits.exact else "fast", shared=None)  # the checks' prompts stay here
    usable = True
    with Runtime(thread, alone) as runtime:
        table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
        for topic, line in (*machine(), *engine_build(engine), *facts(runtime).items()):
            if topic != "reuse":
                table.add_row(topic, line)
        table.add_row("traits", _traits(engine))
        table.add_row("blocks, calls", blocks)
        table.add_row("--reuse exact", _exactness(engine.traits))
        if settings.shared is not None:
            from headstart.cli.doctor_shared import examine_shared  # with libraries that only this needs

            usable, lines = examine_shared(settings, engine)
            for topic, line in lines:
                table.add_row(topic, line)
        if rows := engine.facts.details.get("gpu_plan"):
            console.print(plan_table(rows))
        check = check_warm(runtime)
        table.add_row("warm = cold", check.finding)
        console.print(table)
        good = check.good
        if good and seconds and engine.traits.movable and engine.traits.exact:
            with _bar(console, seconds) as progress:
                task = progress.add_task("comparing warm answers with cold ones", total=seconds)
                walk = check_walk(runtime, seconds, lambda done: progress.update(task, completed=done))
            console.print(walk.finding)
            good = walk.good
    bad = "[bold red]The check failed:[/] do not trust warm answers here, and please report it."
    console.print(bad if not good else "All is well." if usable else "[bold red]The shared store cannot be used.[/]")
    return good and usable


def plan_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """What goes to a GPU, and what other settings would change. The rows are those of `PlannedLayers.table`."""
    first = rows[0]
    kind = "the host's memory" if first["unified"] else "memory of its own"
    table = Table(title=f"{first['device']}: {show_size(first['device_free'])} free, {kind}", title_justify="left", box=None)
    for name in ("with", "layers on it", "slots", "tokens each", "memory"):
        table.add_column(name, justify="left" if name == "with" else "right")
    for row in rows:
        ctx = f"{row['ctx']:,}" if row["ctx"] else "the host's plan"
        slots = str(row["slots"] or "the host's plan")
        table.add_row(row["with"], str(row["layers"]), slots, ctx, show_size(row["device_bytes"]))
    return table


def _bar(console: Console, seconds: float) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, refresh_per_second=4)


def check_walk(runtime: Runtime, seconds: float, progress: Callable[[float], None] = lambda _: None) -> Check:
    """Compares warm with cold runs for some seconds. The prompts continue, branch off, shorten and repeat earlier ones. The
    logits of each must have the same bits as a cold run."""
    least, most = 4 * runtime.engine.traits.block_size, runtime.ctx - REPLY - 1
    walk = WarmWalk(runtime, min(least, most), REPLY)
    begun = time.monotonic()
    while (passed := time.monotonic() - begun) < seconds or (not walk.cached and walk.compared < FEWEST):
        progress(passed)
        walk.longest = min(most, max(least, runtime.scheduler.prefill_tokens(PROMPT_SECONDS)))
        walk.step()
    finding = f"{count(walk.compared, 'prompt')} compared with cold runs, {walk.cached:,} of their tokens from the cache: "
    bad = [f"{walk.wrong} differ"] * (walk.wrong > 0) + [f"{walk.failed} failed"] * (walk.failed > 0)
    return Check(not bad, finding + (f"[bold red]{', '.join(bad)}[/]" if bad else "equal to the last bit"))


def _traits(engine: Engine) -> str:
    traits, parts = engine.traits, "KV only: it can be cut at any token"
    if not traits.movable:
        parts = "nothing can be saved: a slot is reused only by a prompt that continues it"
    elif traits.stateful:
        parts = "KV and state" if engine.shape.kv_bytes_per_token else "state only"
        parts += ": reused from checkpoints"
    return parts


def _exactness(traits: Traits) -> str:
    if not traits.exact:
        return "refused: there is no proof that a warm answer has the same bits as a cold one"
    return "possible; " + ("replies are reused too" if traits.decode_is_prefill else "replies are computed again as prompt")


def check_warm(runtime: Runtime) -> Check:
    """Computes a prompt, computes others until it has left its slot, and repeats it. The logits must have the same bits."""
    engine = runtime.engine
    if not engine.traits.movable:
        return Check(True, "nothing to check: this model's state cannot be saved; only continuing a slot reuses it")
    wanted = BLOCKS * engine.traits.block_size
    if wanted + engine.traits.block_size >= runtime.ctx:
        ctx = count(runtime.ctx, "token")
        return Check(True, f"nothing to check: a context of {ctx} holds too few blocks of {engine.traits.block_size}")
    words = "".join(f"{number} apples and {number + 7} pears. " for number in range(wanted))
    prompt = runtime.text_prompt(engine.tokenizer.tokenize(words)[: wanted + 9])
    cold = compute(runtime, prompt)
    for number in range(engine.shape.slots):
        compute(runtime, runtime.text_prompt(f"{number}: something else"))
    warm = compute(runtime, prompt)
    first, second = cold.report, warm.report
    if second.restored < wanted:
        return Check(
            False, f"only {second.restored} of {wanted} tokens were restored ({second.cause})", first.ttft, second.ttft
        )
    times = f"cold {1e3 * first.prefill:.0f} ms, restored {1e3 * second.prefill:.0f} ms"
    if not warm.same(cold):
        kind = "differ" if engine.traits.exact else "differ a little, as these settings allow"
        return Check(not engine.traits.exact, f"logits {kind} ({times})", first.ttft, second.ttft)
    restored = count(second.restored, "token")
    return Check(True, f"logits are equal to the last bit after restoring {restored} ({times})", first.ttft, second.ttft)


def machine() -> Iterator[tuple[str, str]]:
    """Facts about this machine, by topic."""
    import psutil

    memory = psutil.virtual_memory()
    cores, threads = count(psutil.cpu_count(logical=False) or 1, "core"), count(psutil.cpu_count() or 1, "thread")
    yield "machine", f"{platform.system()} {platform.machine()}, {cores} ({threads})"
    yield "memory", f"{show_size(memory.total)}, {show_size(memory.available)} of it available"


def engine_build(engine: Engine | None = None) -> Iterator[tuple[str, str]]:
    """Facts about the library of llama.cpp, by topic; none if this process has loaded none."""
    from headstart.engines.llama import amx, half_precision
    from headstart.engines.llama.binding import loaded
    from headstart.engines.llama.library import BINDING, TESTED

    if (found := loaded()) is None:
        return
    own, library = found.library, f"the {found.library}"
    if own.users:
        library += f", as {BINDING} {own.binding} declares it"
    proved = "tested" if own.tested else f"proved at its first load, because it is no tested one ({', '.join(TESTED)})"
    yield "llama.cpp", f"{found.version() or 'of unknown version'}: {library}; {proved}"
    yield "features", "; ".join(f"no {one.name}: {one.without}" for one in found.lacking) or "all that headstart uses"
    system = found.module.llama_print_system_info().decode("utf-8", "replace")
    yield "instructions", " ".join(re.findall(r"(\w+) = 1\b", system)) or "none known"
    if amx.built():
        yield "AMX", _amx(engine, tested=own.tested, works=amx.works(), version=own.binding)
    if own.tested and half_precision.computes_in_f16(found):
        yield "half precision", _half_precision(own.binding)
    offload = found.module.llama_supports_gpu_offload()
    yield "GPU", "usable by this engine" if offload else "not supported by this build of the engine"


def _amx(engine: Engine | None, *, tested: bool, works: bool, version: str) -> str:
    """Whether AMX is used, and how to build a llama.cpp that can use it."""
    if engine is not None and engine.facts.details.get("amx"):
        return "used"
    if works and engine is None:
        return "works with this build"
    if works:
        what = (
            "with layers on a GPU"
            if engine is not None and engine.facts.details.get("gpu_layers")
            else "with this architecture, or with weights of this type"
        )
        return f"not used {what}" if tested else "not used, because this library is not a tested one"
    return (
        "not used, because this build of llama.cpp crashes with it, or the system refuses it. Prompts would take about half "
        f"the time. Build llama.cpp again, with GCC: {_build_command(version)}"
    )


def _half_precision(version: str) -> str:
    return (
        "attention computes in F16, in large steps. Deep in a conversation, a reply of a model with heads of 64 elements, or "
        "another number that is no multiple of 128, takes up to twice as long. Build llama.cpp again: "
        f"{_build_command(version)}"
    )


def _build_command(version: str) -> str:
    """For processors with AMX or AVX512-FP16. Compilers that do not know the flag for the second do not use it either."""
    from headstart.engines.llama import amx, half_precision
    from headstart.engines.llama.binding import loaded

    found = loaded()
    known = found is not None and half_precision.computes_in_f16(found)
    flags = f"{amx.FLAGS} {half_precision.FLAG}" if known else amx.FLAGS
    return f"CXXFLAGS='{flags}' {shlex.join(pip_command(version))}"
