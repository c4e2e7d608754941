"""Settle: computes a finished turn again as canonical KV, while the engine is idle.

The conversation is rendered as the client will send it back, with a placeholder for the next message. So everything that the
template strips or rewrites is already changed. It is prefilled up to the last block boundary that all next messages share. The
next request then computes only its new message, also after a reply with reasoning, and also in exact mode.

Settling works in steps: one call of the engine, or one load of KV into a slot. A request waits for at most one step. The live
KV is saved first. If the client sends something else, only idle work is lost. Used from the engine thread only.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from headstart.errors import HeadstartError, for_log
from headstart.interfaces.engine import Engine
from headstart.interfaces.tokens import as_tokens
from headstart.prefix_cache.blocks import Chain, last_block_boundary, root_id
from headstart.prefix_cache.checkpoints import LATTICE, protected_points
from headstart.prefix_cache.planner import Mode, next_call
from headstart.prompt.builder import Prompt, Prompter
from headstart.prompt.continuation import Continuation
from headstart.prompt.reply_tokens import ReplyTokensRecord
from headstart.serving.admission import MISSES, Admission
from headstart.serving.cache import Cache
from headstart.serving.slots import Slot
from headstart.serving.turn import ReturnedTurn, Turn
from headstart.units import count

log = logging.getLogger("headstart.settle")

AFTER = 0.25
"""Seconds without work after which settling begins. The result of a tool often arrives earlier."""
CALL = 0.1
"""Seconds that one call should take, so that a request waits no longer. A call computes at least one block."""
TURNS = 64
"""Most turns that wait to be settled. If there are more, the oldest is given up."""
AGAIN = 4
"""How often a turn is computed at most. Requests may take the slot of a turn, and deletions its KV, while it is settled."""


@dataclass(slots=True, eq=False)
class SettleTask:
    """A turn that is to be settled.

    Attributes:
        continuation: its conversation, with its reply and a next message.
        shared_prefix: the beginning of the client's next prompt, up to the token after its last block boundary.
        points: lengths at which a checkpoint is taken.
        misses: how many restores failed.
        computed: tokens that were computed.
        slot: the slot that computed `shared_prefix` last.
    """

    turn: Turn
    continuation: Continuation
    learned: Sequence[ReplyTokensRecord]
    shared_prefix: Chain | None = None
    points: tuple[int, ...] = ()
    misses: int = 0
    computed: int = 0
    slot: Slot | None = None


class Settling(Protocol):
    """Settles finished turns.

    Attributes:
        counters: `turns` that were settled, turns that were `given_up`, and `tokens` that were computed.
    """

    counters: Counter[str]

    @property
    def pending(self) -> bool:
        """Whether a turn waits to be settled."""

    def takes(self, prompt: Prompt) -> bool:
        """Whether a turn with this prompt can be settled."""

    def add(self, returned: ReturnedTurn) -> None:
        """Adds a finished turn."""

    def step(self) -> bool:
        """Does one step. False if there was nothing to compute."""

    def forget(self, gone: Callable[[Turn], bool]) -> None:
        """Gives up the turns for which `gone` is true."""


class NoSettle:
    """Settling is switched off."""

    pending = False

    def __init__(self) -> None:
        self.counters: Counter[str] = Counter()

    def takes(self, prompt: Prompt) -> bool:
        return False

    def add(self, returned: ReturnedTurn) -> None:
        pass

    def step(self) -> bool:
        return False

    def forget(self, gone: Callable[[Turn], bool]) -> None:
        pass


class Settle:
    """Settles turns in the order in which they finished."""

    def __init__(
        self,
        engine: Engine,
        cache: Cache,
        slots: list[Slot],
        mode: Mode,
        prompter: Prompter,
        admission: Admission,
    ) -> None:
        self.counters: Counter[str] = Counter()
        self._engine = engine
        self._cache = cache
        self._slots = slots
        self._mode = Mode(True, mode.traits)
        self._lossless = not mode.exact  # fast mode reuses derived KV, so it must be saved first
        self._prompter = prompter
        self._admission = admission
        self._tasks: deque[SettleTask] = deque()

    @property
    def pending(self) -> bool:
        return bool(self._tasks)

    def takes(self, prompt: Prompt) -> bool:
        return prompt.source is not None and self._mode.traits.movable and self._mode.traits.canonical

    def add(self, returned: ReturnedTurn) -> None:
        turn, continuation = returned.turn, returned.continuation
        if not turn.settles or continuation is None:
            return

        def continued(earlier: Turn) -> bool:
            length = len(earlier.ids)
            return 0 < length <= len(turn.ids) and earlier.ids == turn.ids[:length] and earlier.prompt.salt == turn.prompt.salt

        self.forget(continued)  # settling this turn also settles the turns before it
        self._tasks.append(SettleTask(turn, continuation, returned.learned))
        if len(self._tasks) > TURNS:
            self._give_up(self._tasks.popleft(), "too many wait")

    def forget(self, gone: Callable[[Turn], bool]) -> None:
        self._tasks = deque(task for task in self._tasks if not gone(task.turn))

    def step(self) -> bool:
        while self._tasks:
            task = self._tasks[0]
            try:
                if self._advance(task):
                    return True
                self._tasks.popleft()
            except Exception as error:  # idle work must not stop anything else
                self._tasks.popleft()
                if not isinstance(error, HeadstartError):
                    log.exception("settling failed")
                self._give_up(task, for_log(error))
                if task.slot is not None:
                    self._admission.empty(task.slot)
        return False

    def _give_up(self, task: SettleTask, reason: str) -> None:
        self.counters["given_up"] += 1
        log.info("a turn of %s is not settled: %s", count(len(task.turn.prompt), "token"), reason)

    def _advance(self, task: SettleTask) -> bool:
        """Does one step for a turn. False if the turn is settled, or given up."""
        shared_prefix = task.shared_prefix or self._prepare(task)
        end = len(shared_prefix) - 1
        if task.computed > AGAIN * len(shared_prefix):
            self._give_up(task, "what is computed of it does not stay")
            return False
        choice = self._admission.choose(shared_prefix, self._mode)
        slot = task.slot = self._slots[choice.slot]
        if choice.entries and not self._cache.kv_restore.prefetch(choice, CALL):
            return True
        if choice.start < end and choice.keep < len(slot):
            self._cache.kv_save.save(slot, spare=choice.entries)
            if self._lossless and not slot.kept:
                self._give_up(task, "no memory for the KV that it would overwrite")
                return False
            choice = self._admission.choose(shared_prefix, self._mode, only=slot)
        if choice.start >= end:
            self._finish(task)
            return False
        if choice.entries or not choice.keep or choice.keep != len(slot):
            restored = self._admission.load(shared_prefix, choice)
            if restored is None or restored.plan.start < choice.start:
                task.misses += 1
                if task.misses == MISSES:
                    self._give_up(task, "its prefix cannot be restored")
                return task.misses < MISSES
        if not task.points:
            landmarks = task.turn.prompt.landmarks
            task.points = LATTICE.points(choice.start, len(shared_prefix), shared_prefix.block_size, 0, landmarks)
        limit = min(self._engine.shape.batch, self._admission.pace.tokens(CALL))
        size = next_call(len(slot), len(shared_prefix), slot.canonical, limit, self._mode.traits, task.points)
        tokens = shared_prefix.tokens[len(slot) : len(slot) + size]
        self._engine.prefill(slot.number, tokens, logits=False)
        slot.now = task.turn.written
        slot.extend(tokens, canonical=True)
        self.counters["tokens"] += size
        task.computed += size
        landmarks = task.turn.prompt.landmarks  # the turn may go on: a tool's result may still come
        if self._mode.traits.stateful and len(slot) in task.points:
            self._cache.checkpoints.take(
                slot,
                landmarks,
                protected=len(slot) in protected_points(len(shared_prefix), shared_prefix.block_size, 0, landmarks),
            )
        if len(slot) < end:
            return True
        self._cache.kv_save.save(slot)
        stay = replace(landmarks, header=0)  # now that the reply is canonical, the header needs no checkpoint
        self._cache.checkpoints.thin(slot, (*stay, *self._admission.shared(slot)))
        self._finish(task)
        return False

    def _prepare(self, task: SettleTask) -> Chain:
        shared_prefix = self._prompter.common(task.continuation)
        end = last_block_boundary(min(len(shared_prefix), self._engine.shape.ctx), self._mode.traits.block_size)
        root = root_id(self._engine.fingerprint, task.turn.prompt.salt)
        task.shared_prefix = Chain(root, self._mode.traits.block_size, as_tokens(shared_prefix.tokens[: end + 1]))
        return task.shared_prefix

    def _finish(self, task: SettleTask) -> None:
        """Replaces derived KV: the next prompt has the tokenizer's own tokens, and the derived KV leaves the disk."""
        self.counters["turns"] += 1
        shared_prefix = task.shared_prefix
        assert shared_prefix is not None
        forgotten = self._prompter.forget(task.continuation, task.learned)
        self._cache.give_way(task.turn.ids, shared_prefix, forgotten)
