"""Proofs at load: what an engine can do with this model, build and device is measured, not assumed.

A *trial* brings a slot to the same point of the same tokens in one way, computes a short tail there in one call, and decodes
some tokens behind it. Trials must agree in every bit: rows, state, the tail's logits, those behind each decoded token.

    live        the slot has computed all of it, in calls of the largest size
    rewound     it went on from there, and was cut or rewound to it; a slot with imported content as well
    restored    what was exported there is imported, into another slot if there is one
    in blocks   what lies before the largest call is imported, and computed on in calls of one block

This is done behind nothing, and behind `_DEEP` tokens or, where a window is not too long, more than it sees. Exactness depends
on which kernels a call hits, and those switch at sizes: of calls, and of what they look at. Decoding has kernels of its own,
which may look at where tokens lie in memory and how many threads there are: equal logits of a prompt do not prove it.

Where rows are all there is, what lies before the deep trials is imported several times over: numbers without meaning, but rows.
A state has to be computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from headstart.errors import EngineError
from headstart.interfaces.engine import Engine, KVSegment, Logits, Span, Step, Traits
from headstart.interfaces.tokens import Bytes, Tokens

_TAIL = _DECODED = 8
_SAID = _TAIL + _DECODED
_LARGEST = 512
_DEEP = 1024
_LONGEST_WINDOW = 1024
"""Of windows, in tokens: beyond longer ones nothing is computed, for it would take too long."""
_ODD = 37
MOST_TOKENS = _LONGEST_WINDOW + 2 * _LARGEST + _SAID
"""Most tokens of a context that a proof looks at."""


Tell = Callable[[float], None]


class Unmovable(Exception):
    """What is moved does not arrive, or not as it was."""


@dataclass(frozen=True)
class Saved:
    """The first `tokens` tokens of a slot: their rows, and the checkpoint at their end (no bytes without state)."""

    tokens: int
    kv: Bytes
    state: Bytes

    def same(self, other: Saved) -> bool:
        return self.tokens == other.tokens and _same(self.kv, other.kv) and _same(self.state, other.state)


@dataclass(frozen=True)
class ProofReply:
    """Bits of the logits behind the tail, and behind each of the tokens that were decoded after it."""

    tail: bytes
    decoded: bytes


@dataclass(frozen=True)
class Finding:
    """What the trials of one stage have shown.

    Attributes:
        moved: the tails behind what was rewound and restored are the live one.
        blocks: calls of one block gave the rows, the state and the tail of the largest call.
        decoded: decoding gave the live bits in each trial.
    """

    moved: bool
    blocks: bool
    decoded: bool


@dataclass
class Prover:
    """Runs trials on an engine.

    Args:
        expected: about how many tokens will be computed.
    """

    engine: Engine
    tokens: Tokens
    tell: Tell = field(default=lambda _: None)
    expected: int = 1
    computed: int = 0

    def feed(self, calls: Sequence[int], slot: int = 0) -> None:
        """Goes on in calls of these sizes."""
        for size in calls:
            start = self.engine.length(slot)
            self.engine.prefill(slot, self.tokens[start : start + size], logits=False)
            self._told(size)

    def reply(self, slot: int = 0) -> ProofReply:
        tail, decoded = self.tokens[-_SAID:-_DECODED], self.tokens[-_DECODED:]
        self.engine.prefill(slot, tail, logits=True)
        first, rest = self.engine.logits(slot).tobytes(), []
        for token in decoded:
            self.engine.decode([Step(slot, int(token))])
            rest.append(self.engine.logits(slot).tobytes())
        self._told(_SAID)
        return ProofReply(first, b"".join(rest))

    def finish(self) -> Logits:
        """Logits behind the tail in the first slot, computed in one call."""
        self.engine.prefill(0, self.tokens[-_TAIL:], logits=True)
        return self.engine.logits(0)

    def decode(self, slots: Sequence[int]) -> Logits:
        """Logits of the first of these slots after the tail was decoded into all of them, token by token."""
        for token in self.tokens[-_TAIL:]:
            self.engine.decode([Step(slot, int(token)) for slot in slots])
        return self.engine.logits(slots[0])

    def saved(self, slot: int = 0) -> Saved:
        """What the slot holds. Raises Unmovable."""
        length = self.engine.length(slot)
        try:
            return Saved(length, self.kv(slot, 0, length), self.state(slot))
        except EngineError as error:
            raise Unmovable(f"a slot cannot be exported: {error}") from error

    def kv(self, slot: int, start: int, stop: int) -> Bytes:
        out = np.empty((stop - start) * self.engine.shape.kv_bytes_per_token, np.uint8)
        self.engine.export_kv(slot, [Span(start, stop, out)])
        return out

    def state(self, slot: int) -> Bytes:
        """The checkpoint of what the slot holds; no bytes without state."""
        state = np.empty(self.engine.shape.state_bytes, np.uint8)
        return state[: self.engine.export_checkpoint(slot, state)] if len(state) else state

    def back(self, slot: int, saved: Saved) -> None:
        """Cuts the slot or rewinds it to what was saved, and looks whether it then holds that. Raises Unmovable."""
        try:
            if len(saved.state):
                self.engine.rewind(slot, saved.tokens, saved.state)
            else:
                self.engine.truncate(slot, saved.tokens)
        except EngineError as error:
            raise Unmovable(f"a slot cannot be rewound: {error}") from error
        if not self.saved(slot).same(saved):
            raise Unmovable("a slot that was rewound holds something else")

    def put(self, saved: Saved, slot: int) -> None:
        """Imports it, and looks whether the slot then holds what was saved. Raises Unmovable."""
        segments = [KVSegment(saved.kv, saved.tokens, saved.tokens)]
        try:
            if len(saved.state):
                self.engine.import_checkpoint(slot, segments, saved.state)
            else:
                self.engine.import_kv(slot, segments)
        except EngineError as error:
            raise Unmovable(f"a slot cannot be imported: {error}") from error
        if not self.saved(slot).same(saved):
            raise Unmovable("a slot that was imported holds something else")

    def deep(self, saved: Saved, length: int) -> None:
        """Fills the first slot with copies of these rows, to `length`."""
        self.engine.truncate(0, 0)
        tokens = saved.tokens
        segments = [KVSegment(saved.kv, tokens, min(tokens, length - start)) for start in range(0, length, tokens)]
        self.engine.import_kv(0, segments)

    def stage(self, live: Sequence[int], again: Sequence[int]) -> tuple[Finding, Saved]:
        """All trials behind what the first slot holds, and what it holds then: also what it computed in the calls `live`.

        Raises Unmovable.
        """
        other = min(1, self.engine.shape.slots - 1)
        prefix = self.saved() if self.engine.length(0) else None
        trials: list[tuple[ProofReply, ProofReply]] = []  # what must be the same
        if prefix is not None:
            before = self.reply()
            self.back(0, prefix)
        self.feed(live)
        whole, cold = self.saved(), self.reply()
        self.back(0, whole)
        trials.append((self.reply(), cold))
        if prefix is not None:
            self.put(prefix, other)
        else:
            self.engine.truncate(other, 0)
        self.feed(again, other)
        same, blocks = self.saved(other).same(whole), self.reply(other)
        self.put(whole, other)
        trials.append((self.reply(other), cold))
        if prefix is not None:
            self.back(other, prefix)
            trials.append((self.reply(other), before))
        if other:
            self.back(0, whole)
        else:
            self.put(whole, 0)
        return Finding(
            moved=all(found.tail == due.tail for found, due in trials),
            blocks=same and blocks.tail == cold.tail,
            decoded=all(found.decoded == due.decoded for found, due in [*trials, *([(blocks, cold)] if same else [])]),
        ), whole

    def _told(self, computed: int) -> None:
        self.computed += computed
        self.tell(min(1.0, self.computed / self.expected))


def prove(engine: Engine, tokens: Tokens, *, block: int, window: int = 0, tell: Tell = lambda _: None) -> Traits:
    """The traits of an engine that says of itself whether it is sliceable. Its slots are empty, before and after.

    Args:
        tokens: ordinary tokens to compute on, at least `MOST_TOKENS`.
        block: the smallest possible block size, in tokens.
        window: tokens that the model's sliding windows see; 0 if it has none.
        tell: gets fractions from 0 to 1.

    Raises:
        EngineError: it cannot even compute.
    """
    sliceable = engine.traits.sliceable
    prover = Prover(engine, tokens, tell, expected=(4 if sliceable else 5) * _LARGEST + 10 * _SAID)
    try:
        return replace(_proved(prover, block, window), sliceable=sliceable)
    except Unmovable as error:
        return Traits(block, canonical=False, decode_exact=False, sliceable=False, movable=False, notes=(str(error),))
    finally:
        _empty(engine)


def answer(engine: Engine, tokens: Tokens, *, block: int) -> bytes | None:
    """Digest of what is computed for one block and short replies behind it. Slots as for `prove`.

    A sample of the bits that a proof compares, for a twentieth of its tokens. None if what is moved out and in again does not
    go on with the same bits.
    """
    prover = Prover(engine, tokens)
    try:
        prover.feed([block])
        saved, reply = prover.saved(), prover.reply()
        prover.put(saved, 0)
        if prover.reply() != reply:
            return None
        found = [saved.kv.tobytes(), saved.state.tobytes(), reply.tail, reply.decoded]
        if engine.traits.sliceable:
            prover.deep(saved, min(_DEEP, engine.shape.ctx - _TAIL))
            found.append(prover.finish().tobytes())
        return blake3(b"".join(found)).digest()
    except Unmovable:
        return None
    finally:
        _empty(engine)


def _empty(engine: Engine) -> None:
    for slot in range(engine.shape.slots):
        engine.truncate(slot, 0)


def _proved(prover: Prover, block: int, window: int) -> Traits:
    shape, sliceable = prover.engine.shape, prover.engine.traits.sliceable
    largest = max(block, min(_LARGEST, shape.batch, shape.ctx - _SAID) // block * block)
    calls = [block] * (largest // block)
    finding, saved = prover.stage([largest], calls)
    if sliceable and finding.moved and finding.blocks and _decode_is_prefill(prover, saved, largest):
        return Traits(block, decode_is_prefill=True, notes=("decoding and prefill in calls of any size give the same bits",))
    depth = _depth(prover, block, largest, window)
    findings = [finding]
    if finding.blocks and depth:
        _go(prover, saved, depth, largest)
        deep, saved = prover.stage([largest], calls)
        findings.append(deep)
    if not all(one.blocks for one in findings):
        return _without_chunking(prover, window)
    if not all(one.moved for one in findings):
        return Traits(block, canonical=False, decode_exact=False, notes=("what is restored does not give the same bits",))
    reach = f"behind {depth} tokens too" if depth else f"to {saved.tokens} tokens"
    if window and saved.tokens <= window:
        reach += f", of a window of {window}"
    note = f"prefill in calls of {block} and of {largest} tokens gives the same bits, {reach}"
    return _with_decoding(Traits(block, notes=(note,)), findings)


def _depth(prover: Prover, unit: int, largest: int, window: int) -> int:
    """How far into a context the deep trials begin: whole calls of `unit` tokens; 0 where there is no room."""
    wanted = _DEEP if window > _LONGEST_WINDOW else max(_DEEP, window + largest)
    return max(0, min(wanted, prover.engine.shape.ctx - largest - _SAID)) // unit * unit


def _go(prover: Prover, saved: Saved, depth: int, largest: int) -> None:
    """Brings the first slot from what was saved to `depth`."""
    if prover.engine.traits.sliceable:
        prover.deep(saved, depth)
        return
    if depth < saved.tokens:
        prover.engine.truncate(0, 0)
    for start in range(prover.engine.length(0), depth, largest):
        prover.feed([min(largest, depth - start)])


def _with_decoding(traits: Traits, findings: Sequence[Finding]) -> Traits:
    if all(one.decoded for one in findings):
        return replace(traits, notes=(*traits.notes, "decoding has the same bits behind live, rewound and restored tokens"))
    note = "decoding depends on how the tokens before it came into the slot"
    return replace(traits, decode_exact=False, notes=(*traits.notes, note))


def _decode_is_prefill(prover: Prover, whole: Saved, largest: int) -> bool:
    engine = prover.engine
    length = min(_DEEP, engine.shape.ctx - _TAIL - 1) - 3  # odd: inside a tile
    prover.deep(whole, length)
    logits = prover.finish()
    computed = prover.kv(0, length, length + _TAIL)
    slots = [0]
    for neighbour in (False, True):
        if neighbour:
            if engine.shape.slots == 1:
                break
            slots = [0, 1]
            engine.import_kv(1, [KVSegment(whole.kv, whole.tokens, _ODD)])
        prover.deep(whole, length)
        if not _same(prover.decode(slots), logits) or not _same(prover.kv(0, length, length + _TAIL), computed):
            return False
    engine.truncate(0, 0)
    prover.feed([_ODD, largest - _ODD])
    return prover.saved().same(whole)


def _without_chunking(prover: Prover, window: int) -> Traits:
    # Whatever a call's size does to the bits, the same call twice must give the same.
    engine = prover.engine
    block_size = engine.shape.batch
    traits = Traits(
        block_size,
        chunking=False,
        notes=(f"prefill calls of different sizes give different bits: blocks of {block_size} tokens",),
    )
    if block_size + _SAID > engine.shape.ctx:
        return replace(traits, canonical=False, decode_exact=False, notes=(*traits.notes, "a context is too short for one"))
    _empty(engine)
    findings = []
    depth = _depth(prover, block_size, block_size, window)
    finding, saved = prover.stage([block_size], [block_size])
    findings.append(finding)
    if depth:
        _go(prover, saved, depth, block_size)
        findings.append(prover.stage([block_size], [block_size])[0])
    if not all(one.blocks and one.moved for one in findings):
        note = "the same prefill twice does not give the same bits"
        return replace(traits, canonical=False, decode_exact=False, notes=(*traits.notes, note))
    return _with_decoding(traits, findings)


def _same(a: npt.NDArray[np.generic], b: npt.NDArray[np.generic]) -> bool:
    return bool(np.array_equal(a.view(np.uint8), b.view(np.uint8)))
