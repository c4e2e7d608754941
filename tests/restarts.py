"""Restarts on the real model: several runtimes one after the other on one engine, and answers without any cache."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from harness import Answer, Messages, Pending, request_of
from headstart.config import Settings
from headstart.engines.llama import LlamaEngine
from headstart.interfaces.engine import Engine
from headstart.interfaces.generation import GenerationParams
from headstart.interfaces.sampling import GREEDY
from headstart.prefix_cache.blocks import Chain
from headstart.prompt.builder import Prompt
from headstart.serving.request import Event, Progress, Request
from headstart.serving.runtime import Handle, Runtime
from live import wait_until
from talks import talk

BLOCK_SIZE = 64
MEMORY = 128 << 20
"""Bytes for KV, beside the engine's buffer (which may take half of a budget)."""


def load(model: Path, *, slots: int, ctx: int = 2048, threads: int | None = None) -> LlamaEngine:
    """Loads an engine without proof, which would run again for each number of slots and each context. These tests compare the
    results anyway."""
    return LlamaEngine.load(Settings(str(model), ctx=ctx, slots=slots, threads=threads).engine_options(), block_size=BLOCK_SIZE)


@contextmanager
def running(engine: Engine, mode: str = "fast", folder: Path | None = None, memory: int = MEMORY) -> Iterator[Runtime]:
    """A runtime on an engine that stays loaded, because loading takes longer than most tests. Nothing else is kept."""
    budget = memory and memory + 2 * engine.shape.transfer_bytes
    settings = Settings(reuse=mode, memory_budget=budget, cache_dir=folder)  # type: ignore[arg-type]
    with patch.object(engine, "close"), Runtime(lambda: engine, settings) as runtime:
        yield runtime
    assert all(engine.length(slot) == 0 for slot in range(engine.shape.slots))


def ask(rt: Runtime, messages: Messages | Prompt, *, salt: str = "", max_tokens: int = 4, **options: Any) -> Answer:
    """A greedy reply, with the logits at the end of the prompt."""
    prompt = messages if isinstance(messages, Prompt) else rt.chat_prompt(talk(messages, salt=salt))
    return Pending(rt, request_of(prompt, max_tokens=max_tokens, keep_logits=True, **options)).answer()


def cold(engine: Engine, answers: Sequence[Answer]) -> list[Answer]:
    """The same prompts, as tokens, without any cache. Each reply gets as many tokens as before."""
    with running(engine, memory=0) as rt:
        return [ask(rt, rt.text_prompt(one.prompt.tolist()), max_tokens=len(one.finish.tokens), reuse=False) for one in answers]


def assert_same(answers: Sequence[Answer], engine: Engine) -> None:
    """Asserts that the logits are bit-identical and the greedy replies have the same tokens."""
    for warm, fresh in zip(answers, cold(engine, answers), strict=True):
        assert fresh.report.cached == 0
        assert bits(warm) == bits(fresh)
        assert warm.finish.tokens == fresh.finish.tokens


def assert_near(answers: Sequence[Answer], engine: Engine) -> None:
    """Asserts that the logits differ no more than those of different kernels for the same tokens."""
    for warm, fresh in zip(answers, cold(engine, answers), strict=True):
        assert difference(warm, fresh) < 0.1


def bits(answer: Answer) -> bytes:
    assert answer.logits is not None
    return answer.logits.tobytes()


def difference(one: Answer, other: Answer) -> float:
    """The difference of two answers' logits, as a share of their spread."""
    assert one.logits is not None
    assert other.logits is not None
    return float(np.abs(one.logits - other.logits).max() / np.ptp(other.logits))


def abort(rt: Runtime, prompt: Prompt, *, after: int = 1) -> int:
    """Cancels a request after so many prefill calls. Returns how many tokens were in place then."""
    handles: queue.SimpleQueue[Handle] = queue.SimpleQueue()
    done: list[int] = []
    over = threading.Event()

    def sink(event: Event) -> None:
        assert isinstance(event, Progress), "it was to be cancelled during its prefill"
        done.append(event.done)
        if len(done) == after:
            handles.get().cancel()
            over.set()

    handles.put(rt.submit(Request(prompt, GenerationParams(GREEDY, max_tokens=8)), sink))
    assert over.wait(60)
    wait_until(lambda: not rt.scheduler.running)
    return done[-1]


# ── what is on disk ──────────────────────────────────────────────────────────────────────────────────────────────────


def written(rt: Runtime) -> None:
    """Waits until all canonical blocks in slots are on disk."""
    deadline = time.monotonic() + 30
    while not _is_written(rt):
        assert time.monotonic() < deadline
        time.sleep(0.1)  # an idle engine saves after 50 ms unless something wakes it


def _is_written(rt: Runtime) -> bool:
    rt.scheduler.wake()  # so that it reads the disk's notices
    for slot in rt.scheduler.slots:
        for piece in Chain(slot.root, BLOCK_SIZE, slot.tokens[: slot.canonical]).ids:
            entry = rt.cache.index.get(piece)
            if entry is None or "disk" not in entry.copies:
                return False
    return True


def occupied(folder: Path) -> int:
    """Bytes on disk of all files in a folder, including headers, catalogue and temporary files."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
