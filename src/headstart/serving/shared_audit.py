"""Shared audit: an idle server computes some of the blocks again that it has fetched, and compares them bit for bit.

The tag of an object says that a server of the fleet has stored it. It does not say that this server computed the right thing:
its memory may be broken, or its build may differ in a way that no fingerprint shows. So one of a thousand fetched blocks is
checked. If one differs, it is deleted here and in the store, with all that was computed after it, also if it is pinned, and its
writer is named.

Like settling, it works in steps, of one call of the engine each. Used from the engine thread only.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from blake3 import blake3

from headstart.errors import HeadstartError, for_log
from headstart.interfaces.engine import Engine, Span
from headstart.interfaces.tier import KV
from headstart.interfaces.tokens import BlockId, Bytes
from headstart.prefix_cache.blocks import Chain, checkpoint_id
from headstart.prefix_cache.planner import Mode, Plan, next_call
from headstart.serving.admission import Admission
from headstart.serving.cache import Cache
from headstart.serving.settle import CALL
from headstart.serving.slots import Slot
from headstart.tiers.disk import Label
from headstart.tiers.shared_tier import Arrival

log = logging.getLogger("headstart.shared")

PORTION = 0.001
"""Share of fetched blocks that are checked."""
MOST = 16
"""Most blocks that wait to be checked."""


@dataclass(frozen=True, slots=True)
class Audit:
    """A block that waits to be checked.

    Attributes:
        chain: its chain, up to the token after it.
        written: when the oldest text of the chain was first stored, in seconds since 1970.
        digest: of its payload as it was fetched.
        writer: the server that stored it.
    """

    chain: Chain
    label: Label
    written: float
    digest: bytes
    writer: str


class SharedAudit:
    """Checks fetched blocks while the engine is idle.

    Args:
        drop: removes entries from memory and disk whose content is wrong.
        chance: random numbers from 0 to 1; None for those of `random`.
    """

    def __init__(
        self,
        engine: Engine,
        cache: Cache,
        slots: list[Slot],
        mode: Mode,
        admission: Admission,
        drop: Callable[[Sequence[BlockId]], None],
        chance: Callable[[], float] | None = None,
    ) -> None:
        self._engine = engine
        self._cache = cache
        self._slots = slots
        self._mode = Mode(True, mode.traits)  # only canonical KV may be before a block that is compared
        self._lossless = not mode.exact
        self._admission = admission
        self._drop = drop
        self._chance = random.random if chance is None else chance
        self._used: Slot | None = None  # by the present block
        self._tasks: deque[Audit] = deque(maxlen=MOST)

    @property
    def pending(self) -> bool:
        """Whether a block waits to be checked."""
        return bool(self._tasks)

    def fetched(self, chain: Chain, arrival: Arrival) -> None:
        """An object has arrived for a prompt. Few are chosen."""
        label = arrival.label
        if label.kind == KV and self._chance() < PORTION:
            part = Chain(chain.root, chain.block_size, chain.tokens[: label.start + chain.block_size + 1])
            before = (self._cache.index.get(key) for key in part.ids)
            written = min([label.written, *(entry.written for entry in before if entry is not None)])
            self._tasks.append(Audit(part, label, written, _digest(arrival.payload), arrival.writer))

    def forget(self, gone: Callable[[Chain, float], bool]) -> None:
        """Gives up the blocks for whose chain, and the time of its oldest text, `gone` is true."""
        self._tasks = deque((task for task in self._tasks if not gone(task.chain, task.written)), MOST)

    def step(self) -> bool:
        """Does one step. False if there was nothing to compute."""
        while self._tasks:
            self._used = None
            try:
                if self._advance(self._tasks[0]):
                    return True
            except Exception as error:  # idle work must not stop anything else
                if not isinstance(error, HeadstartError):
                    log.exception("checking a fetched block failed")
                log.info("a fetched block is not checked: %s", for_log(error))
                if self._used is not None:  # what it holds is undefined
                    self._admission.empty(self._used)
            self._tasks.popleft()
        return False

    def _advance(self, task: Audit) -> bool:
        """Does one step for a block. False if it was checked, or cannot be."""
        block, start = task.chain.block_size, task.label.start
        before = Chain(task.chain.root, block, task.chain.tokens[: start + 1])  # a plan never loads the last token
        choice = self._admission.choose(before, self._mode)
        if choice.entries and not self._cache.kv_restore.prefetch(choice, CALL):
            return True
        slot = self._used = self._slots[choice.slot]
        if not self._prepared(slot, task, before, choice):
            return False
        while len(slot) < start + block:
            limit = min(self._engine.shape.batch, self._admission.pace.tokens(CALL))
            size = next_call(len(slot), len(task.chain), slot.canonical, limit, self._mode.traits)
            tokens = task.chain.tokens[len(slot) : len(slot) + size]
            self._engine.prefill(slot.number, tokens, logits=False)
            slot.now = task.written
            slot.extend(tokens, canonical=True)
            if len(slot) < start:
                return True
        out = np.empty(block * self._engine.shape.kv_bytes_per_token, np.uint8)
        self._engine.export_kv(slot.number, [Span(start, start + block, out)])
        self._compare(task, out, slot)
        return False

    def _prepared(self, slot: Slot, task: Audit, before: Chain, choice: Plan) -> bool:
        """Loads what is before the block. False if that would lose something, or fails."""
        if choice.keep and choice.keep == len(slot):
            return True
        self._cache.kv_save.save(slot, spare=choice.entries)
        if self._lossless and not slot.kept and len(slot):
            return False
        return self._admission.load(before, self._admission.choose(before, self._mode, only=slot)) is not None

    def _compare(self, task: Audit, computed: Bytes, right: Slot) -> None:
        counters = self._cache.shared.counters
        if _digest(computed) == task.digest:
            counters["audited"] += 1
            return
        going = [task.label.key]
        for slot in self._slots:  # the engine is idle, so none is in use
            if slot is not right and task.label.key in slot.ids:
                self._admission.empty(slot)
        for key in going:  # grows: all that was computed after it is wrong too
            going.extend(entry.id for entry in self._cache.index.children(key))
        behind = (entry for key in going if (entry := self._cache.index.get(key)) is not None)
        labels = [label for entry in behind for label in self._cache.shared_labels(entry) if label.key != task.label.key]
        self._cache.shared.distrust([task.label, *labels], task.writer)
        self._drop([one for key in reversed(going) for one in (checkpoint_id(key), key)])


def _digest(payload: Bytes) -> bytes:
    return blake3(payload.data).digest()
