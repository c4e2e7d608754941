"""What Python costs beside the engine: `python -m benchmarks.overhead`.

* A fully cached prompt of about 30,000 tokens: render + tokenise, chain, match + plan.
* Restoring its KV from memory, against the cost of only joining the same bytes, and of llama.cpp's own call.

The KV is arbitrary bytes, which the real engine exports and imports. Its values do not change the time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.servers import demo_model
from benchmarks.workloads import text
from headstart.config import Settings
from headstart.engines.llama import LlamaEngine
from headstart.engines.llama import kv_transfer as kv_transfer
from headstart.interfaces.conversation import Conversation
from headstart.interfaces.engine import KVSegment
from headstart.prefix_cache.blocks import Chain, root_id
from headstart.prefix_cache.planner import Costs, Mode, plan
from headstart.serving.runtime import Runtime


def conversation(rt: Runtime, tokens: int) -> list[dict[str, Any]]:
    """A chat of about `tokens` tokens."""
    chat: list[dict[str, Any]] = [{"role": "system", "content": text("system", 1200)}]
    while len(rt.prompter.chat(Conversation(tuple(chat)))) < tokens:
        chat += [
            {"role": "user", "content": text(f"{len(chat)}", 60)},
            {"role": "assistant", "content": text(f"a{len(chat)}", 200)},
        ]
    return [*chat[:-1], {"role": "user", "content": "And then?"}]


def timed(work: Callable[[], object], rounds: int) -> list[float]:
    out = []
    for _ in range(rounds):
        begun = time.perf_counter()
        work()
        out.append(time.perf_counter() - begun)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__)
    parser.add_argument("--tokens", type=int, default=30_000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--model", type=Path, default=None)
    given = parser.parse_args()
    settings = Settings(str(given.model or demo_model()), ctx=given.tokens + 2048, slots=1, memory_budget=3 << 30)
    result = Table("what", "median", "min – max")
    with Runtime(lambda: LlamaEngine.load(settings.engine_options()), settings) as rt:
        engine = rt.engine
        assert isinstance(engine, LlamaEngine)
        chat = conversation(rt, given.tokens)
        prompt = rt.chat_prompt(Conversation(tuple(chat)))
        chain = Chain(root_id(engine.fingerprint, ""), engine.traits.block_size, prompt.tokens)
        slot, length = rt.scheduler.slots[0], len(chain) // engine.traits.block_size * engine.traits.block_size
        rng = np.random.default_rng(0)
        data = rng.integers(0, 1 << 8, length * engine.shape.kv_bytes_per_token, dtype=np.uint8)
        engine.import_kv(0, [KVSegment(data, length, length)])
        slot.assign(chain, length, length)
        slot.dirty = True
        saved = timed(lambda: rt.cache.kv_save.save(slot), 1)
        mode, costs = Mode(False, engine.traits), Costs(1e-3, 1e-6)

        def know() -> None:
            fresh = rt.chat_prompt(Conversation(tuple(chat)))
            known = Chain(root_id(engine.fingerprint, ""), engine.traits.block_size, fresh.tokens)
            assert plan(known, rt.cache.index, [slot.view()], costs, mode) is not None

        def show(name: str, values: list[float]) -> float:
            middle = statistics.median(values)
            result.add_row(name, f"{middle * 1e3:.2f} ms", f"{min(values) * 1e3:.2f} – {max(values) * 1e3:.2f}")
            return middle

        know()
        show(f"render, tokenise, chain, match, plan: {len(chain)} known tokens", timed(know, given.rounds))
        show("  render and tokenise", timed(lambda: rt.chat_prompt(Conversation(tuple(chat))), given.rounds))
        show("save all of it, cold arena (once)", saved)
        engine.truncate(0, 0)
        slot.truncate(0)
        chosen = plan(chain, rt.cache.index, [slot.view()], costs, mode)
        assert chosen is not None
        assert chosen.restored >= length
        restored: list[float] = []
        bare: list[float] = []
        target = np.empty(length * engine.shape.kv_bytes_per_token, np.uint8)
        target[:] = data
        blob = np.empty(engine.shape.transfer_bytes, np.uint8)
        context = engine._context
        for _ in range(given.rounds):
            restored += timed(lambda: rt.cache.kv_restore.restore(slot, chain, chosen), 1)
            size = kv_transfer.read(context, 0, blob)
            begun = time.perf_counter()
            np.copyto(target, data)
            kv_transfer.write(context, 0, blob[:size])
            bare.append(time.perf_counter() - begun)
        ours = show(
            f"restore {chosen.restored} tokens from memory ({chosen.restored * engine.shape.kv_bytes_per_token >> 20} MiB)",
            restored,
        )
        floor = show("  the floor: one copy of the bytes + llama.cpp's bare set", bare)
        console = Console()
        console.print(result)
        console.print(f"restore: {floor / ours:.2f} x the speed of the floor")


if __name__ == "__main__":
    main()
