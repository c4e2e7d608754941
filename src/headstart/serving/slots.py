"""Slot: a live sequence of the engine, and the state of its KV."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np

from headstart.interfaces.engine import Shape
from headstart.interfaces.tokens import BlockId, Tokens
from headstart.prefix_cache.blocks import Chain, block_id
from headstart.prefix_cache.planner import SlotView
from headstart.prefix_cache.reuse_model import UNKNOWN_REQUEST, RequestTraits


class Slot:
    """The content of one slot of the engine. Change it only together with the engine's slot.

    Attributes:
        root: the root id of its content. Its KV never serves another root.
        canonical: leading tokens whose KV is canonical.
        dirty: whether it may hold KV that is in no tier and was not tried to save.
        kept: whether everything worth keeping was saved, so that nothing is lost when the slot is overwritten.
        busy: whether a request is using it.
        secured: when its finished blocks were last saved, or when its request began.
        moves: whether its finished blocks must be saved soon, because other servers may need them.
        request_traits: the traits of its last request.
        now: when the text that is added to it was first stored, in seconds since 1970.
        restored: leading tokens that were loaded since a user has deleted everything: such a deletion had spared them.
        unsavable: whether its content was erased elsewhere, so that none of it may be saved.
    """

    def __init__(self, number: int, shape: Shape, block_size: int) -> None:
        self.number = number
        self.root: BlockId = b""
        self.canonical = 0
        self.dirty = False
        self.kept = True
        self.busy = False
        self.last_used = 0.0
        self.secured = 0.0
        self.moves = False
        self.request_traits = UNKNOWN_REQUEST
        self.now = 0.0
        self.restored = 0
        self.unsavable = False
        self._ends: list[int] = []  # of runs of tokens that were first stored at the same time
        self._times: list[float] = []
        self._block_size = block_size
        self._buffer = np.zeros(shape.ctx, dtype=np.int32)
        self._length = 0
        self._ids: list[BlockId] = []

    def __len__(self) -> int:
        return self._length

    @property
    def tokens(self) -> Tokens:
        """A view; copy it to keep it."""
        return self._buffer[: self._length]

    @property
    def ids(self) -> list[BlockId]:
        """Ids of its full blocks."""
        tokens = self.tokens
        while len(self._ids) < self._length // self._block_size:
            start = len(self._ids) * self._block_size
            parent = self._ids[-1] if self._ids else self.root
            self._ids.append(block_id(parent, tokens[start : start + self._block_size]))
        return self._ids

    def parent_of(self, block: int) -> BlockId:
        return self.ids[block - 1] if block else self.root

    def written(self, start: int = 0, stop: int | None = None) -> float:
        """When the oldest of these tokens was first stored; infinite if there are none."""
        stop = self._length if stop is None else stop
        first, last = bisect_right(self._ends, start), bisect_left(self._ends, stop)
        return min(self._times[first : last + 1], default=math.inf) if start < stop else math.inf

    def assign(self, chain: Chain, length: int, canonical: int, written: Sequence[tuple[int, float]] = ()) -> None:
        """Sets the content to the first `length` tokens of `chain`, which were just imported.

        Args:
            written: pairs of an end position and the time at which the tokens before it were first stored.
        """
        self.truncate(0)
        self.root = chain.root
        self._ends, self._times = [min(end, length) for end, _ in written], [time for _, time in written]
        self._buffer[:length] = chain.tokens[:length]
        self._length = self.restored = length
        self._ids = list(chain.ids[: length // self._block_size])
        self.canonical = canonical
        self.dirty = False
        self.kept = True
        self.request_traits = UNKNOWN_REQUEST

    def begin(self, now: float, request_traits: RequestTraits, written: float) -> None:
        """A request starts to use the slot. `written`: the time of its text."""
        self.last_used = self.secured = now
        self.request_traits = request_traits
        self.now = written

    def _grow(self, length: int) -> None:
        if length == self._length:
            return  # no tokens, no time
        if self._times and self._times[-1] == self.now:
            self._ends[-1] = length
        else:
            self._ends.append(length)
            self._times.append(self.now)
        self._length = length

    def truncate(self, length: int) -> None:
        self._buffer[length : self._length] = 0  # so that no removed token stays in memory
        self._length = min(self._length, length)
        keep = bisect_left(self._ends, length) + 1 if length else 0
        del self._ends[keep:], self._times[keep:]
        if self._ends:
            self._ends[-1] = min(self._ends[-1], length)
        self.unsavable = self.unsavable and bool(length)
        self.canonical = min(self.canonical, length)
        self.restored = min(self.restored, length)
        del self._ids[length // self._block_size :]

    def extend(self, tokens: Tokens, *, canonical: bool) -> None:
        """Appends prefilled tokens. `canonical`: the call was canonical, or proved to give the same bits."""
        end = self._length + len(tokens)
        self._buffer[self._length : end] = tokens
        if canonical and self.canonical == self._length:
            self.canonical = end
        self._grow(end)
        self.dirty, self.kept = True, False

    def append(self, token: int, *, canonical: bool) -> None:
        """Appends a decoded token."""
        if canonical and self.canonical == self._length:
            self.canonical += 1
        self._buffer[self._length] = token
        self._grow(self._length + 1)
        self.dirty, self.kept = True, False

    def view(self) -> SlotView:
        return SlotView(self.number, self.root, self.tokens, self.canonical, not self.busy, self.last_used)
