"""Proofs at load: what an engine can do with this model, build and device is measured, not assumed.

A *trial* brings a slot to the same position of the same tokens in one of several ways. There it prefills a short tail in one
call and decodes some tokens. All trials must agree in every bit: KV, state, the logits at the position, of the tail and of each
decoded token.

    live        the slot has computed everything, in calls of the largest size
    rewound     the slot went on and was truncated or rewound to the position, with computed content and with imported content
    restored    content that was exported there is imported, into another slot if there is one
    in blocks   the content before the largest call is imported, and the tokens of that call are computed in smaller ones

The largest call is the engine's (`Shape.batch`). The smaller ones have one to three blocks on an empty slot, and one block
each behind a long prefix, because numbers may depend on where a call ends. The engine says which block sizes it can have
(`BlockSizes`); the first one that passes is taken. If calls of different sizes never give the same bits, each call computes one
block: then `in blocks` is the same call again.

The trials are done on an empty slot and again after a long prefix. The prefix has `_DEEP` tokens, or more than a sliding
window sees if the window is not too long. Exactness depends on the kernels that a call uses. Kernels change with the size of
the call and with the number of tokens before it. Decoding has its own kernels, which may depend on the place of tokens in
memory and on the number of threads. So equal logits of a prompt prove nothing about decoding.

If a model has only KV, the long prefix is the same KV imported several times: its numbers mean nothing, but it is KV. A state
has to be computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from headstart.errors import EngineError
from headstart.interfaces.engine import Engine, KVSegment, Logits, Span, Step
from headstart.interfaces.tokenizer import Tokenizer
from headstart.interfaces.tokens import Bytes, Tokens
from headstart.interfaces.traits import BlockSizes, Traits

_TAIL = _DECODED = 8
_REPLY = _TAIL + _DECODED
_DEEP = 1024
_LONGEST_WINDOW = 1024
"""Windows of more tokens are not filled, because that would take too long."""
_ODD = 37
_BLOCKS = (1, 3, 1, 2)
"""Blocks of each smaller call on an empty slot; repeated."""


ProofProgress = Callable[[float], None]


class Unmovable(Exception):
    """Exported content could not be imported, or changed on the way."""


@dataclass(frozen=True)
class Saved:
    """The first `tokens` tokens of a slot: their KV, and the checkpoint at their end (no bytes without state)."""

    tokens: int
    kv: Bytes
    state: Bytes

    def same(self, other: Saved) -> bool:
        return self.tokens == other.tokens and _same(self.kv, other.kv) and _same(self.state, other.state)


@dataclass(frozen=True)
class ProofReply:
    """Bits of the logits after the tail, and after each token that was decoded then."""

    tail: bytes
    decoded: bytes


@dataclass(frozen=True)
class Finding:
    """What the trials of one stage showed.

    Attributes:
        moved: the logits of the tail after rewound and restored content are the live ones.
        block: the first block size whose calls gave the KV, the state, the logits and the tail of the largest call; 0 if none
            did.
        decoded: decoding gave the bits of the live trial in each trial.
    """

    moved: bool
    block: int
    decoded: bool


@dataclass
class Prover:
    """Runs trials on an engine.

    Args:
        expected: about how many tokens will be computed.
    """

    engine: Engine
    tokens: Tokens
    progress: ProofProgress = field(default=lambda _: None)
    expected: int = 1
    computed: int = 0

    def feed(self, calls: Sequence[int], slot: int = 0, *, logits: bool = False) -> bytes:
        """Prefills the next tokens in calls of these sizes. Returns the bits of the logits after the last one, if requested."""
        for number, size in enumerate(calls, 1):
            start = self.engine.length(slot)
            self.engine.prefill(slot, self.tokens[start : start + size], logits=logits and number == len(calls))
            self._report(size)
        return self.engine.logits(slot).tobytes() if logits else b""

    def reply(self, slot: int = 0) -> ProofReply:
        tail, decoded = self.tokens[-_REPLY:-_DECODED], self.tokens[-_DECODED:]
        self.engine.prefill(slot, tail, logits=True)
        first, rest = self.engine.logits(slot).tobytes(), []
        for token in decoded:
            self.engine.decode([Step(slot, int(token))])
            rest.append(self.engine.logits(slot).tobytes())
        self._report(_REPLY)
        return ProofReply(first, b"".join(rest))

    def finish(self) -> Logits:
        """Logits after the tail in the first slot, computed in one call."""
        self.engine.prefill(0, self.tokens[-_TAIL:], logits=True)
        return self.engine.logits(0)

    def decode(self, slots: Sequence[int]) -> Logits:
        """Decodes the tail into all of these slots, token by token; returns the logits of the first."""
        for token in self.tokens[-_TAIL:]:
            self.engine.decode([Step(slot, int(token)) for slot in slots])
        return self.engine.logits(slots[0])

    def saved(self, slot: int = 0) -> Saved:
        """The content of the slot. Raises Unmovable."""
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
        """The checkpoint of the slot; no bytes without state."""
        state = np.empty(self.engine.shape.state_bytes, np.uint8)
        return state[: self.engine.export_checkpoint(slot, state)] if len(state) else state

    def back(self, slot: int, saved: Saved) -> None:
        """Truncates or rewinds the slot to the saved content, and checks that it then holds it. Raises Unmovable."""
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
        """Imports the saved content, and checks that the slot then holds it. Raises Unmovable."""
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
        """Fills the first slot with copies of this KV, to `length`."""
        self.engine.truncate(0, 0)
        tokens = saved.tokens
        segments = [KVSegment(saved.kv, tokens, min(tokens, length - start)) for start in range(0, length, tokens)]
        self.engine.import_kv(0, segments)

    def stage(self, live: int, blocks: Sequence[int], *, mixed: bool = False) -> tuple[Finding, Saved]:
        """Runs all trials after the content of the first slot.

        Args:
            live: size of the call of the live trial.
            blocks: block sizes for the trial in blocks, which ends at the first that passes. Each divides `live`.
            mixed: whether its calls have different numbers of blocks, not one each.

        Returns:
            The finding, and the content of the first slot with the tokens of `live`.

        Raises:
            Unmovable: content cannot be moved.
        """
        other = min(1, self.engine.shape.slots - 1)
        prefix = self.saved() if self.engine.length(0) else None
        trials: list[tuple[ProofReply, ProofReply]] = []  # pairs that must be equal
        if prefix is not None:
            before = self.reply()
            self.back(0, prefix)
        ends = self.feed([live], logits=True)
        whole, cold = self.saved(), self.reply()
        self.back(0, whole)
        trials.append((self.reply(), cold))
        found = 0
        for block in blocks:
            if prefix is not None:
                self.put(prefix, other)
            else:
                self.engine.truncate(other, 0)
            end = self.feed(_in_blocks(live, block, mixed=mixed), other, logits=True)
            same, again = end == ends and self.saved(other).same(whole), self.reply(other)
            if same:  # then decoding must be the same too
                trials.append((ProofReply(cold.tail, again.decoded), cold))
            if same and again.tail == cold.tail:
                found = block
                break
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
            moved=all(one.tail == due.tail for one, due in trials),
            block=found,
            decoded=all(one.decoded == due.decoded for one, due in trials),
        ), whole

    def _report(self, computed: int) -> None:
        self.computed += computed
        self.progress(min(1.0, self.computed / self.expected))


def most_tokens(batch: int) -> int:
    """Most tokens of a context that a proof uses, if the largest call has `batch` tokens."""
    return _LONGEST_WINDOW + 2 * batch + _REPLY


def prove(
    engine: Engine,
    tokens: Tokens,
    *,
    window: int = 0,
    sizes: BlockSizes | None = None,
    progress: ProofProgress = lambda _: None,
) -> Traits:
    """The traits of an engine that has declared whether it is sliceable, and has random access. Its slots are empty before and
    after.

    Args:
        tokens: ordinary tokens to compute on, at least `most_tokens(engine.shape.batch)`.
        window: tokens that the model's sliding windows see; 0 if it has none.
        sizes: block sizes to choose from; None for the engine's own.
        progress: receives the progress, from 0 to 1.

    Raises:
        EngineError: the engine cannot compute.
    """
    sizes = sizes or engine.block_sizes
    sliceable = engine.traits.sliceable
    prover = Prover(engine, tokens, progress, expected=(4 if sliceable else 5) * engine.shape.batch + 10 * _REPLY)
    try:
        random_access = engine.traits.random_access
        return replace(_proved(prover, sizes, window), sliceable=sliceable, random_access=random_access)
    except Unmovable as error:
        block = sizes.spanned[0]
        return Traits(block, canonical=False, decode_exact=False, sliceable=False, movable=False, notes=(str(error),))
    finally:
        _empty(engine)


def answer(engine: Engine, tokens: Tokens) -> bytes | None:
    """A sample of the bits that a proof compares, as a digest. It takes a twentieth of the tokens of a proof.

    It covers one block and short replies after it. The slots are empty before and after. None if a slot that was exported and
    imported again does not continue with the same bits.
    """
    prover = Prover(engine, tokens)
    try:
        prover.feed([engine.block_sizes.spanned[0]])
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


def ordinary_tokens(tokenizer: Tokenizer, count: int) -> Tokens:
    """Fixed pseudo-random tokens to compute on, without control tokens: int32, (count,)."""
    special = {control.id for control in tokenizer.controls} | tokenizer.eog
    ordinary = np.setdiff1d(np.arange(tokenizer.n_vocab, dtype=np.int32), [*special], assume_unique=True)
    return np.random.default_rng(0).choice(ordinary, count).astype(np.int32)


def _empty(engine: Engine) -> None:
    for slot in range(engine.shape.slots):
        engine.truncate(slot, 0)


def _in_blocks(tokens: int, block: int, *, mixed: bool) -> list[int]:
    """Sizes of calls for so many tokens: one block each, or `mixed`."""
    sizes, left, number = [], tokens // block, 0
    while left:
        blocks = min(left, _BLOCKS[number % len(_BLOCKS)]) if mixed else 1
        sizes.append(blocks * block)
        left, number = left - blocks, number + 1
    return sizes


def _proved(prover: Prover, sizes: BlockSizes, window: int) -> Traits:
    shape, first = prover.engine.shape, sizes.spanned[0]
    most = max(first, min(shape.batch, shape.ctx - _REPLY))  # tokens of the largest call
    left = [first, *(size for size in sizes.spanned[1:] if 2 * size <= most and shape.batch % size == 0)]
    tried: list[int] = []
    while left:
        largest = most // left[0] * left[0]
        found = _spanned(prover, largest, [block for block in left if most // block * block == largest], window, tried)
        if isinstance(found, Traits):
            return found
        left = [block for block in left if block > found]
    return _single(prover, sizes, window, tried, most)


def _spanned(prover: Prover, largest: int, blocks: Sequence[int], window: int, tried: list[int]) -> Traits | int:
    """The traits with the first of these block sizes that lets calls span several blocks; the last that was tried, if none.

    Args:
        tried: receives the block sizes that were tried.
    """
    _empty(prover.engine)
    sliceable = prover.engine.traits.sliceable
    finding, saved = prover.stage(largest, blocks, mixed=_depth(prover, blocks[0], largest, window) > 0)
    tried += [block for block in blocks if not finding.block or block <= finding.block]
    if not finding.block:
        return blocks[-1]
    block = finding.block
    joined = sliceable and finding.moved and finding.decoded and _decode_is_prefill(prover, saved, largest)
    depth = _depth(prover, block, largest, window)
    findings = [finding]
    if depth:
        _go(prover, saved, depth, largest)
        deep, saved = prover.stage(largest, [block])
        if not deep.block:
            return block
        findings.append(deep)
    if not all(one.moved for one in findings):
        return Traits(block, canonical=False, decode_exact=False, notes=("restored KV does not give the same bits",))
    reach = f"also after {depth} tokens" if depth else f"to {saved.tokens} tokens"
    if window and saved.tokens <= window:
        reach += f", of a window of {window}"
    traits = Traits(block, notes=_failed(tried[:-1], largest))
    if joined and all(one.decoded for one in findings):
        note = f"decoding and prefill in calls of any size give the same bits, {reach}"
        return replace(traits, decode_is_prefill=True, notes=(*traits.notes, note))
    note = f"prefill in calls of {block} and of {largest} tokens gives the same bits, {reach}"
    return _with_decoding(replace(traits, notes=(*traits.notes, note)), findings)


def _failed(blocks: Sequence[int], largest: int) -> tuple[str, ...]:
    """A note that block sizes were tried in vain."""
    if not blocks:
        return ()
    return (f"prefill in calls of {' or '.join(map(str, blocks))} tokens gives other bits than in calls of {largest}",)


def _depth(prover: Prover, unit: int, largest: int, window: int) -> int:
    """Tokens before the deep trials: full calls of `unit` tokens; 0 if there is no room."""
    wanted = _DEEP if window > _LONGEST_WINDOW else max(_DEEP, window + largest)
    return max(0, min(wanted, prover.engine.shape.ctx - largest - _REPLY)) // unit * unit


def _go(prover: Prover, saved: Saved, depth: int, largest: int) -> None:
    """Brings the first slot from the saved content to `depth`."""
    if prover.engine.traits.sliceable:
        prover.deep(saved, depth)
        return
    if depth < saved.tokens:
        prover.engine.truncate(0, 0)
    for start in range(prover.engine.length(0), depth, largest):
        prover.feed([min(largest, depth - start)])


def _with_decoding(traits: Traits, findings: Sequence[Finding]) -> Traits:
    if all(one.decoded for one in findings):
        return replace(traits, notes=(*traits.notes, "decoding gives the same bits after live, rewound and restored tokens"))
    note = "decoding depends on how the earlier tokens came into the slot"
    return replace(traits, decode_exact=False, notes=(*traits.notes, note))


def _decode_is_prefill(prover: Prover, whole: Saved, largest: int) -> bool:
    engine = prover.engine
    length = min(_DEEP, engine.shape.ctx - _TAIL - 1) - 3  # odd: inside a tile
    prover.deep(whole, length)
    logits = prover.finish()
    computed = prover.kv(0, length, length + _TAIL)
    for neighbours in sorted({0, min(1, engine.shape.slots - 1), engine.shape.slots - 1}):
        slots = range(1 + neighbours)
        for slot in slots[1:]:
            engine.import_kv(slot, [KVSegment(whole.kv, whole.tokens, slot * _ODD % whole.tokens or _ODD)])
        prover.deep(whole, length)
        if not _same(prover.decode(slots), logits) or not _same(prover.kv(0, length, length + _TAIL), computed):
            return False
    engine.truncate(0, 0)
    prover.feed([_ODD, largest - _ODD])
    return prover.saved().same(whole)


def _single(prover: Prover, sizes: BlockSizes, window: int, tried: Sequence[int], most: int) -> Traits:
    """The traits if each block is one call: of the first size for which the same call gives the same bits twice."""
    engine = prover.engine
    longest = min(engine.shape.batch, engine.shape.ctx - _REPLY)
    failed = _failed(tried, most)
    findings: list[Finding] = []
    for block in sizes.single:
        if block > longest or engine.shape.batch % block:
            continue
        findings = _one_call_a_block(prover, block, window)
        if all(one.block and one.moved for one in findings):
            note = f"each call computes one block of {block}, and gives the same bits twice"
            return _with_decoding(Traits(block, chunking=False, notes=(*failed, note)), findings)
    last = "the same prefill twice does not give the same bits" if findings else "the context is too short for one call a block"
    return Traits(engine.shape.batch, canonical=False, decode_exact=False, chunking=False, notes=(*failed, last))


def _one_call_a_block(prover: Prover, block: int, window: int) -> list[Finding]:
    _empty(prover.engine)
    depth = _depth(prover, block, block, window)
    finding, saved = prover.stage(block, [block])
    if not depth or not finding.block:
        return [finding]
    _go(prover, saved, depth, block)
    return [finding, prover.stage(block, [block])[0]]


def _same(a: npt.NDArray[np.generic], b: npt.NDArray[np.generic]) -> bool:
    return bool(np.array_equal(a.view(np.uint8), b.view(np.uint8)))
