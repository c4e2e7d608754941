"""Oracle: what a cold run computes. A second engine, which never saw the history, computes every prompt anew."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headstart.interfaces.engine import Step
from headstart.interfaces.sampling import Sampling
from headstart.interfaces.tokens import Tokens
from headstart.prefix_cache.planner import next_call
from headstart.prefix_cache.siblings import WIDTH
from headstart.testing.fake_engine import FakeEngine, FakeSampler, _Slot

_KV, _REPLY = 0, 1
"""Slots."""
KEPT = 4000
"""Most beginnings whose KV is kept."""


class ColdKV(NamedTuple):
    """The content of a slot."""

    high: npt.NDArray[np.uint8]
    low: npt.NDArray[np.uint8]
    state_high: bytes
    state_low: bytes


class Oracle:
    """Computes with an engine of its own, of the same weights. It has two slots: for KV, and for the prompt of a reply."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self._prompt = b""  # what the second slot holds, with its logits
        self._block_size = engine.traits.block_size
        self._known: dict[bytes, ColdKV] = {}
        self._replies: dict[tuple[bytes, object, int], tuple[int, ...]] = {}
        self._logits: dict[bytes, bytes] = {}

    def kv(self, tokens: Tokens) -> ColdKV:
        """The KV of tokens as canonical calls compute it: `high` says which tokens they are."""
        data = np.ascontiguousarray(tokens, np.int32).tobytes()
        found = self._known.get(data)
        if found is not None:
            return found
        length = len(tokens)
        at, before = length - 1, self._known.get(data[:-WIDTH])
        if before is None:
            at = at // self._block_size * self._block_size
            before = self.kv(tokens[:at]) if at else None
        slot = self._slot(_KV, before)
        self.engine._append(slot, tokens[at:].tolist(), [b""] * (length - at))
        return self._keep(data, slot)

    def _slot(self, number: int, known: ColdKV | None) -> _Slot:
        slot = self.engine._slots[number]
        slot.clear()
        if known is not None:
            slot.length = len(known.high)
            slot.high[: slot.length], slot.low[: slot.length] = known.high, known.low
            slot.state_high, slot.state_low = known.state_high, known.state_low
        return slot

    def _keep(self, data: bytes, slot: _Slot) -> ColdKV:
        if len(self._known) >= KEPT:
            self._known.clear()
        known = ColdKV(slot.high[: slot.length].copy(), slot.low[: slot.length].copy(), slot.state_high, slot.state_low)
        self._known[data] = known
        return known

    def logits(self, tokens: Tokens) -> bytes:
        """The bytes of the logits at the end of a prompt."""
        data = np.ascontiguousarray(tokens, np.int32).tobytes()
        if data not in self._logits:
            self._prefill(tokens, data)
            self._logits[data] = self.engine.logits(_REPLY).tobytes()
        return self._logits[data]

    def _prefill(self, tokens: Tokens, data: bytes) -> None:
        if self._prompt == data:
            return
        size, self._prompt = self._block_size, b""
        at = (len(tokens) - 1) // size * size
        self._slot(_REPLY, self.kv(tokens[:at]) if at else None)
        while at < len(tokens):
            count = next_call(at, len(tokens), at, self.engine.shape.batch, self.engine.traits)
            self.engine.prefill(_REPLY, np.asarray(tokens[at : at + count], np.int32), logits=at + count == len(tokens))
            at += count
        self._prompt = data

    def reply(self, tokens: Tokens, sampling: Sampling, most: int) -> tuple[int, ...]:
        """The reply of a cold run, with at most so many tokens."""
        key = np.ascontiguousarray(tokens, np.int32).tobytes(), sampling, most
        if key not in self._replies:
            self._prefill(tokens, key[0])
            sampler, found = FakeSampler(sampling), list[int]()
            while len(found) < most and len(tokens) + len(found) <= self.engine.shape.ctx:
                found.append(self.engine.sample(_REPLY, sampler))
                if found[-1] in self.engine.tokenizer.eog or len(found) == most:
                    break
                if self.engine.length(_REPLY) >= self.engine.shape.ctx:
                    break
                self._prompt = b""
                self.engine.decode([Step(_REPLY, found[-1])])
            self._replies[key] = tuple(found)
        return self._replies[key]
