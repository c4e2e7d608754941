"""Settle: a finished turn is made canonical while the engine has nothing else to do.

The conversation is rendered as the client will send it back, with a next message that nobody has sent yet, so that whatever
the template strips or rewrites is stripped already, and prefilled up to the last block boundary that all next messages have in
common. The next request then pays for its new message only, also where the reply had reasoning in it, also in exact mode.

One step at a time, a request waits for one at most: a call, or rows that are copied into a slot. What was live is saved
first, so if the client sends something else, nothing is lost but idle work. Used from the engine thread only.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from headstart.errors import HeadstartError, for_log
from headstart.interfaces.conversation import Conversation, Message
from headstart.interfaces.engine import Engine
from headstart.interfaces.tokens import BlockId, as_tokens
from headstart.prefix_cache.blocks import Chain, last_block_boundary, root_id
from headstart.prefix_cache.checkpoints import Placement, protected_points
from headstart.prefix_cache.planner import Mode, next_call
from headstart.prompt.builder import Prompt, Prompter
from headstart.serving.admission import MISSES, Admission
from headstart.serving.cache import Cache
from headstart.serving.slots import Slot
from headstart.units import count

log = logging.getLogger("headstart.settle")

AFTER = 0.25
"""Seconds without work after which settling begins: a tool's answer is often there before."""
CALL = 0.1
"""Seconds that a call should take, and so the most that a request waits for one; it is never less than a block."""
TURNS = 64
"""Turns that wait to be settled; the oldest give up."""


@dataclass(slots=True, eq=False)
class Turn:
    """A finished turn.

    Attributes:
        reply: the message that the client will send back.
        ids: blocks of the prompt and the reply as they were computed.
        written: when its text was first kept, in seconds since 1970.
        shared_prefix: what the client's next prompt will begin with, up to the token behind its last block boundary.
        slot: where that was last computed.
    """

    prompt: Prompt
    reply: Message
    ids: tuple[BlockId, ...]
    written: float = 0.0
    shared_prefix: Chain | None = None
    points: tuple[int, ...] = ()
    misses: int = 0
    slot: Slot | None = None


class Settling(Protocol):
    """What makes finished turns canonical.

    Attributes:
        counters: `turns` settled and given up, `tokens` computed for that.
    """

    counters: Counter[str]

    @property
    def pending(self) -> bool:
        """Whether there is something to do."""

    def add(self, prompt: Prompt, reply: Message, ids: tuple[BlockId, ...], written: float) -> None:
        """A turn is finished. `reply`: as it will be sent back; `ids`: the blocks of its prompt and reply; `written`: when its
        text was first kept.
        """

    def step(self) -> bool:
        """Computes one call; False if there was nothing (more) to compute."""

    def forget(self, gone: Callable[[Turn], bool]) -> None:
        """Gives up the turns for which `gone` is true."""


class NoSettle:
    """Settling switched off."""

    pending = False

    def __init__(self) -> None:
        self.counters: Counter[str] = Counter()

    def add(self, prompt: Prompt, reply: Message, ids: tuple[BlockId, ...], written: float) -> None:
        pass

    def step(self) -> bool:
        return False

    def forget(self, gone: Callable[[Turn], bool]) -> None:
        pass


class Settle:
    """Settles turns in the order in which they were finished."""

    def __init__(
        self,
        engine: Engine,
        cache: Cache,
        slots: list[Slot],
        mode: Mode,
        prompter: Prompter,
        admission: Admission,
        placement: Placement,
    ) -> None:
        self.counters: Counter[str] = Counter()
        self._engine = engine
        self._cache = cache
        self._slots = slots
        self._mode = Mode(True, mode.traits)
        self._lossless = not mode.exact  # whether derived rows are of use, so that they have to be saved first
        self._prompter = prompter
        self._admission = admission
        self._placement = placement
        self._turns: deque[Turn] = deque()

    @property
    def pending(self) -> bool:
        return bool(self._turns)

    def add(self, prompt: Prompt, reply: Message, ids: tuple[BlockId, ...], written: float) -> None:
        if prompt.source is None or not self._mode.traits.movable or not self._mode.traits.canonical:
            return
        # The conversation has gone on: what was to be settled of it is part of this turn.
        for turn in list(self._turns):
            if turn.ids and len(turn.ids) <= len(ids) and turn.ids == ids[: len(turn.ids)] and turn.prompt.salt == prompt.salt:
                self._turns.remove(turn)
        self._turns.append(Turn(prompt, reply, ids, written))
        if len(self._turns) > TURNS:
            self._give_up(self._turns.popleft(), "too many wait")

    def forget(self, gone: Callable[[Turn], bool]) -> None:
        self._turns = deque(turn for turn in self._turns if not gone(turn))

    def step(self) -> bool:
        while self._turns:
            turn = self._turns[0]
            try:
                if self._advance(turn):
                    return True
                self._turns.popleft()
            except Exception as error:  # idle work must not take anything else down
                self._turns.popleft()
                if not isinstance(error, HeadstartError):
                    log.exception("settling failed")
                self._give_up(turn, for_log(error))
                if turn.slot is not None:
                    self._admission.empty(turn.slot)
        return False

    def _give_up(self, turn: Turn, reason: str) -> None:
        self.counters["given_up"] += 1
        log.info("a turn of %s is not settled: %s", count(len(turn.prompt), "token"), reason)

    def _advance(self, turn: Turn) -> bool:
        """Computes one call for a turn; False if it is settled, or cannot be."""
        shared_prefix = turn.shared_prefix or self._prepare(turn)
        end = len(shared_prefix) - 1
        choice = self._admission.choose(shared_prefix, self._mode)
        slot = turn.slot = self._slots[choice.slot]
        if choice.entries and not self._cache.restorer.ahead(choice, CALL):
            return True
        if choice.start < end and choice.keep < len(slot):
            self._cache.saves.save(slot, spare=choice.entries)
            if self._lossless and not slot.kept:
                self._give_up(turn, "no room for what would give way")
                return False
            choice = self._admission.choose(shared_prefix, self._mode, only=slot)
        if choice.start >= end:
            self._finish(turn)
            return False
        if choice.entries or not choice.keep or choice.keep != len(slot):
            restored = self._admission.seat(shared_prefix, choice)
            if restored is None or restored.plan.start < choice.start:
                turn.misses += 1
                if turn.misses == MISSES:
                    self._give_up(turn, "what it stands on cannot be restored")
                return turn.misses < MISSES
        if not turn.points:
            turn.points = self._placement.points(
                choice.start, len(shared_prefix), shared_prefix.block_size, 0, turn.prompt.landmarks
            )
        limit = min(self._engine.shape.batch, self._admission.pace.tokens(CALL))
        size = next_call(len(slot), len(shared_prefix), slot.canonical, limit, self._mode.traits, turn.points)
        tokens = shared_prefix.tokens[len(slot) : len(slot) + size]
        self._engine.prefill(slot.number, tokens, logits=False)
        slot.now = turn.written
        slot.extend(tokens, canonical=True)
        self.counters["tokens"] += size
        landmarks = turn.prompt.landmarks  # its turn is not over until the next one begins: that may still be a tool's
        if self._mode.traits.stateful and len(slot) in turn.points:
            self._cache.checkpoints.take(
                slot,
                landmarks,
                protected=len(slot) in protected_points(len(shared_prefix), shared_prefix.block_size, 0, landmarks),
            )
        if len(slot) < end:
            return True
        self._cache.saves.save(slot)
        self._cache.checkpoints.thin(slot, self._placement, (landmarks.anchor, landmarks.turn, *self._admission.shared(slot)))
        self._finish(turn)
        return False

    def _prepare(self, turn: Turn) -> Chain:
        shared_prefix = self._prompter.shared_prefix(_continued(turn))
        end = last_block_boundary(min(len(shared_prefix), self._engine.shape.ctx), self._mode.traits.block_size)
        root = root_id(self._engine.fingerprint, turn.prompt.salt)
        turn.shared_prefix = Chain(root, self._mode.traits.block_size, as_tokens(shared_prefix.tokens[: end + 1]))
        return turn.shared_prefix

    def _finish(self, turn: Turn) -> None:
        """Derived gives way to canonical: the next prompt is spelled as the tokenizer does it, and dead rows leave the disk."""
        self.counters["turns"] += 1
        shared_prefix = turn.shared_prefix
        assert shared_prefix is not None
        forgotten = self._prompter.forget(_continued(turn))
        self._cache.give_way(turn.ids, shared_prefix, forgotten)


def _continued(turn: Turn) -> Conversation:
    """The conversation with its reply, as the next request will send it."""
    source = turn.prompt.source
    assert source is not None
    return replace(source, messages=(*source.messages, turn.reply), breakpoints=(), prefill="")
