"""Leaks: memory, threads and open files that an engine keeps, although nobody can use them any more.

A process takes more memory for many reasons. So only what grows again and again is taken for a leak.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass

import numpy as np
import psutil

from headstart.errors import InvalidRequest
from headstart.interfaces.engine import Step
from headstart.interfaces.sampling import Grammar, Sampling
from headstart.testing.conformance.driver import TAIL, EngineUnderTest, expect

_ROUNDS = 3
_LEAST = 1 << 20
"""Bytes of one round that are too few to be a leak."""


@dataclass(frozen=True)
class Resources:
    """What this process holds: bytes of memory, threads, open files (0 where the system does not say)."""

    memory: int
    threads: int
    files: int

    @classmethod
    def now(cls) -> Resources:
        _give_back_what_is_free()
        process = psutil.Process()
        files = process.num_fds() if hasattr(process, "num_fds") else 0
        return cls(process.memory_info().rss, process.num_threads(), files)

    def since(self, before: Resources) -> Resources:
        return Resources(self.memory - before.memory, self.threads - before.threads, self.files - before.files)


def _give_back_what_is_free() -> None:
    """Otherwise a leak may take memory that was freed before, and the process does not grow. Only glibc can be asked for it."""
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def _growths(act: Callable[[], None]) -> list[Resources]:
    """What each of some rounds added. The first round, which fills caches, does not count."""
    act()
    gc.collect()
    gc.freeze()  # what is there now need not be looked at again and again
    try:
        found, before = [], Resources.now()
        for _ in range(_ROUNDS):
            act()
            gc.collect()
            after = Resources.now()
            found.append(after.since(before))
            before = after
    finally:
        gc.unfreeze()
    return found


def slots_keep_no_memory_of_what_was_emptied(subject: EngineUnderTest) -> None:
    moved = 0

    def act() -> None:
        nonlocal moved
        moved = sum(_use(subject, seed) for seed in range(subject.cycles))

    least = min(one.memory for one in _growths(act))
    expect(least < max(_LEAST, moved // 4), f"memory grows by {least:,} bytes or more each time that {moved:,} bytes are moved")


def _use(subject: EngineUnderTest, seed: int) -> int:
    """Uses all that the engine can do, and empties the slots. Returns the bytes that were moved."""
    engine, slot = subject.engine, subject.other_slot
    subject.empty()
    subject.feed(0, subject.tokens(subject.depth, seed=seed + 1))
    logits = subject.after(0, subject.tokens(TAIL))
    moved = logits.nbytes
    grammar = None
    with suppress(InvalidRequest):  # the engine follows none
        grammar = engine.check_grammar(Grammar("regex", "[a-z]{2,9}"))
    with closing(engine.sampler(Sampling(seed=seed), grammar)) as sampler:
        engine.decode([Step(0, engine.sample(0, sampler))])
    if engine.traits.movable:
        saved = subject.save(0)
        subject.restore(slot, saved)
        subject.go_back(slot, saved.tokens, saved.state)
        moved += sum(segment.data.nbytes for segment in saved.segments) + saved.state.nbytes
    engine.release()
    subject.empty()
    return moved


def closing_frees_what_loading_took(subject: EngineUnderTest) -> None:
    """Threads and open files, and the memory of an engine that has computed something."""
    taken = 0

    def act() -> None:
        nonlocal taken
        before = Resources.now()
        with closing(subject.another()) as engine:
            engine.prefill(0, np.asarray(subject.tokens(TAIL), np.int32), logits=True)
            taken = Resources.now().since(before).memory

    growths = _growths(act)
    memory, threads, files = (min(getattr(one, name) for one in growths) for name in ("memory", "threads", "files"))
    expect(threads <= 0, f"{threads} threads more run after each load and close")
    expect(files <= 0, f"{files} files more are open after each load and close")
    most = max(4 * _LEAST, taken // 2)
    expect(memory < most, f"memory grows by {memory:,} bytes or more with each load and close")
