"""The proofs at load, on engines of which it is known what they can do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from headstart.engines.proof import most_tokens, prove
from headstart.interfaces.engine import KVSegment, Logits, Step
from headstart.interfaces.tokens import Bytes
from headstart.interfaces.traits import BlockSizes, Traits
from headstart.testing.fake_engine import FakeEngine

TOKENS = np.random.default_rng(0).integers(0, 256, most_tokens(512)).astype(np.int32)


def options(**more: Any) -> dict[str, Any]:
    return {"slots": 2, "ctx": 2304, "block_size": 64, "batch": 512, **more}


def proved(engine: FakeEngine, window: int = 0) -> Traits:
    told: list[float] = []
    traits = prove(engine, TOKENS, window=window, progress=told.append)
    assert told == sorted(told)
    assert all(0 < part <= 1 for part in told)
    assert [engine.length(slot) for slot in range(engine.shape.slots)] == [0] * engine.shape.slots
    assert traits.sliceable == engine.traits.sliceable
    assert traits.notes
    return traits


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("ctx", [256, 512, 1024, 2304])
@pytest.mark.parametrize("kv_bytes_per_token", [16, 0, None])
def test_what_is_exact_is_found_exact(slots: int, ctx: int, kv_bytes_per_token: int | None) -> None:
    sliceable = kv_bytes_per_token is None
    traits = proved(
        FakeEngine(
            **options(
                slots=slots, ctx=ctx, batch=256, kv_bytes_per_token=kv_bytes_per_token or 16 * sliceable, sliceable=sliceable
            )
        )
    )
    assert (traits.block_size, traits.chunking, traits.exact, traits.movable) == (64, True, True, True)
    assert not traits.decode_is_prefill


@pytest.mark.parametrize(("window", "computed"), [(0, 5), (500, 5), (512, 5), (1024, 6), (1025, 5)])
def test_no_more_is_computed_than_is_needed(window: int, computed: int) -> None:
    """Five of the largest calls and ten tails; beyond windows that are not too long."""
    engine = FakeEngine(**options(sliceable=False))
    proved(engine, window)
    assert (engine.prefilled, engine.decoded) == (computed * 512 + 10 * 8, 10 * 8)


def test_calls_of_the_largest_size_are_compared() -> None:
    engine = FakeEngine(**options())
    assert proved(engine).exact
    assert engine.largest == 512
    assert engine.prefilled > 4 * 512


@pytest.mark.parametrize("sliceable", [True, False])
def test_calls_of_other_sizes_that_give_other_bits(sliceable: bool) -> None:
    """The engine says which size is tried first."""
    for single in ((256, 128), (512, 256)):
        engine = FakeEngine(**options(block_size=512, chunking=False, sliceable=sliceable))
        engine.block_sizes = BlockSizes(single=single)
        traits = proved(engine)
        assert (traits.block_size, traits.chunking, traits.canonical) == (single[0], False, True)
    assert "calls of 64 or 128 or 256 tokens gives other bits than in calls of 512" in traits.notes[0]


class Splitting(FakeEngine):
    """Calls of more than `exact` tokens give other rows each time, as if they were split among varying workers."""

    exact = 128

    def prefill(self, slot: int, tokens: Any, *, logits: bool) -> None:
        super().prefill(slot, tokens, logits=logits)
        if len(tokens) > self.exact:
            self._slots[slot].low[self.length(slot) - 1] ^= np.uint8(self.calls % 251 + 1)


@pytest.mark.parametrize("sliceable", [True, False])
@pytest.mark.parametrize("block_size", [128, 256])
def test_larger_blocks_may_span_calls_where_smaller_ones_may_not(block_size: int, sliceable: bool) -> None:
    """As layers that compute 256 tokens at a time: any number of such steps is the same."""
    traits = proved(FakeEngine(**options(block_size=block_size, sliceable=sliceable)))
    assert (traits.block_size, traits.chunking, traits.exact) == (block_size, True, True)
    assert traits.notes[0].startswith("prefill in calls of 64")


@pytest.mark.parametrize("sliceable", [True, False])
@pytest.mark.parametrize("exact", [128, 256])
def test_smaller_calls_are_tried_before_exactness_is_given_up(exact: int, sliceable: bool) -> None:
    engine = Splitting(**options(block_size=exact, chunking=False, sliceable=sliceable))
    engine.exact = exact
    traits = proved(engine)
    assert (traits.block_size, traits.chunking, traits.exact) == (exact, False, True)


def test_a_short_context_has_smaller_blocks() -> None:
    traits = proved(FakeEngine(**options(ctx=512, block_size=256, chunking=False)))
    assert (traits.block_size, traits.chunking, traits.exact) == (256, False, True)


def test_no_size_is_exact() -> None:
    engine = Splitting(**options(block_size=128, chunking=False))
    engine.exact = 64
    traits = proved(engine)
    assert not traits.canonical
    assert "the same prefill twice does not give the same bits" in traits.notes


def test_decoding_that_is_prefill() -> None:
    assert proved(FakeEngine(**options(decode_is_prefill=True))).decode_is_prefill
    assert not proved(FakeEngine(**options(decode_is_prefill=True, sliceable=False))).decode_is_prefill, "not asked"


class SplitsBatches(FakeEngine):
    """Decoding more than two slots together gives other bits."""

    def decode(self, steps: Sequence[Step]) -> None:
        super().decode(steps)
        if len(steps) > 2:
            self._slots[0].low[self.length(0) - 1] ^= np.uint8(1)


@pytest.mark.parametrize(("slots", "joined"), [(1, True), (2, True), (3, False), (4, False)])
def test_all_slots_that_decode_together_are_compared(slots: int, joined: bool) -> None:
    assert proved(SplitsBatches(**options(slots=slots, decode_is_prefill=True))).decode_is_prefill is joined


class Drifting(FakeEngine):
    """No call gives the same logits as the one before."""

    def logits(self, slot: int) -> Logits:
        self.drift = getattr(self, "drift", 0) + 1
        return super().logits(slot) + np.float32(self.drift)


class WrongState(FakeEngine):
    """Imports the state of other tokens."""

    def import_checkpoint(self, slot: int, segments: Sequence[KVSegment], state: Bytes) -> None:
        super().import_checkpoint(slot, segments, _flipped(state))


class WrongRewind(FakeEngine):
    """Goes back to the state of other tokens."""

    def rewind(self, slot: int, length: int, state: Bytes) -> None:
        super().rewind(slot, length, _flipped(state))


class WrongBehind(FakeEngine):
    """Rows of the largest call differ from those of smaller ones, deep in a context only."""

    def prefill(self, slot: int, tokens: Any, *, logits: bool) -> None:
        deep = self.length(slot) >= 1024 and len(tokens) == 512
        super().prefill(slot, tokens, logits=logits)
        if deep:
            self._slots[slot].low[self.length(slot) - 300] ^= np.uint8(1)


class Stale(FakeEngine):
    """Looks right after an import, and computes something else from there on, unless the next call is short."""

    stale: frozenset[int] = frozenset()

    def import_checkpoint(self, slot: int, segments: Sequence[KVSegment], state: Bytes) -> None:
        super().import_checkpoint(slot, segments, state)
        self.stale |= {slot}

    def prefill(self, slot: int, tokens: Any, *, logits: bool) -> None:
        if slot in self.stale and len(tokens) >= 64:
            self._slots[slot].state_low = b"\1\2\3\4"
        self.stale -= {slot}
        super().prefill(slot, tokens, logits=logits)


class Refusing(FakeEngine):
    """Takes no checkpoint back into a live slot."""

    def rewind(self, slot: int, length: int, state: Bytes) -> None:
        super().rewind(slot, length, state[:-1])


class Silent(FakeEngine):
    """Gives no checkpoint of a long sequence."""

    def export_checkpoint(self, slot: int, out: Bytes) -> int:
        return super().export_checkpoint(slot, out[: -1 if self.length(slot) > 192 else None])


def _flipped(state: Bytes) -> Bytes:
    changed = state.copy()
    changed[-1] ^= 1
    return changed


@pytest.mark.parametrize(
    ("kind", "sliceable", "movable"),
    [
        (Drifting, True, True),
        (Drifting, False, True),
        (WrongState, False, False),
        (WrongRewind, False, False),
        (Refusing, False, False),
        (Silent, False, False),
        (Stale, False, True),
    ],
)
def test_what_is_not_exact_is_found_out(kind: type[FakeEngine], sliceable: bool, movable: bool) -> None:
    traits = proved(kind(**options(sliceable=sliceable)))
    assert not traits.canonical
    assert traits.movable == movable


def test_a_fault_that_only_the_largest_call_has_deep_in_a_context() -> None:
    traits = proved(WrongBehind(**options()))
    assert not traits.chunking, "each call is one block then"


class Panels(FakeEngine):
    """As a fast matrix library: the sums of a call over more than `exact` tokens are cut at places that depend on its end."""

    exact = 512

    def _kernels(self, start: int, count: int) -> list[bytes]:
        end = start + count
        if end <= self.exact:
            return super()._kernels(start, count)
        return [b"panels of %d" % (end // -(-end // 384))] * count


@pytest.mark.parametrize("sliceable", [True, False])
@pytest.mark.parametrize("decode_is_prefill", [True, False])
def test_what_is_exact_in_the_small_only_is_found_out(sliceable: bool, decode_is_prefill: bool) -> None:
    """The same call gives the same bits twice, so each call computes one block then."""
    traits = proved(Panels(**options(sliceable=sliceable, decode_is_prefill=decode_is_prefill)))
    assert (traits.block_size, traits.chunking, traits.exact) == (256, False, True)
    assert not traits.decode_is_prefill


def test_calls_of_more_than_usual_are_compared_too() -> None:
    """The largest call is the engine's own, not one of 512 tokens."""

    class WrongInLarge(FakeEngine):
        def prefill(self, slot: int, tokens: Any, *, logits: bool) -> None:
            super().prefill(slot, tokens, logits=logits)
            if len(tokens) > 512:
                self._slots[slot].low[self.length(slot) - 1] ^= np.uint8(1)

    tokens = np.tile(TOKENS, 2)[: most_tokens(1024)]
    traits = prove(WrongInLarge(**options(batch=1024, ctx=4096)), tokens)
    assert (traits.block_size, traits.chunking, traits.exact) == (256, False, True)


def test_the_logits_of_large_calls_are_compared() -> None:
    """They may come from another kernel than those of a block, with the same KV: a tail may not join a call of blocks then."""

    class OtherLogits(FakeEngine):
        def prefill(self, slot: int, tokens: Any, *, logits: bool) -> None:
            super().prefill(slot, tokens, logits=logits)
            if logits and len(tokens) > 256:
                self._logits[slot] = self._logits[slot] + np.float32(1)

    traits = proved(OtherLogits(**options(ctx=4096)))
    assert (traits.block_size, traits.chunking, traits.exact) == (256, False, True)


class Wandering(FakeEngine):
    """Decoding depends on how the tokens before came into the slot, as on cells; the logits of prompts do not.

    `behind`: from which length on. `ways`: after which operations.
    """

    behind = 600
    ways: frozenset[str] = frozenset()
    _moved: dict[int, str]

    def _note(self, slot: int, how: str) -> None:
        self._moved = {**getattr(self, "_moved", {}), slot: how}

    def truncate(self, slot: int, length: int) -> None:
        super().truncate(slot, length)
        self._note(slot, "rewound" if length else "live")

    def rewind(self, slot: int, length: int, state: Bytes) -> None:
        super().rewind(slot, length, state)
        self._note(slot, "rewound")

    def import_kv(self, slot: int, segments: Sequence[KVSegment]) -> None:
        super().import_kv(slot, segments)
        self._note(slot, "restored")

    def import_checkpoint(self, slot: int, segments: Sequence[KVSegment], state: Bytes) -> None:
        super().import_checkpoint(slot, segments, state)
        self._note(slot, "restored")

    def decode(self, steps: Sequence[Step]) -> None:
        super().decode(steps)
        for step in steps:
            if self.length(step.slot) > self.behind and getattr(self, "_moved", {}).get(step.slot) in self.ways:
                self._logits[step.slot] = self._logits[step.slot] + np.float32(1e-6)


@pytest.mark.parametrize("sliceable", [True, False])
@pytest.mark.parametrize("way", ["rewound", "restored"])
@pytest.mark.parametrize(("behind", "chunking"), [(0, True), (600, True), (1100, True), (600, False)])
def test_decoding_that_depends_on_the_way_is_found_out(way: str, sliceable: bool, behind: int, chunking: bool) -> None:
    block_size = 64 if chunking else 512
    engine = Wandering(**options(sliceable=sliceable, block_size=block_size, chunking=chunking))
    engine.ways, engine.behind = frozenset({way}), behind
    traits = proved(engine)
    assert traits.canonical, "the logits of prompts are right"
    assert not traits.decode_exact
    assert not traits.exact
