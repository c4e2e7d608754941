"""Batch: the arrays of one `llama_decode` call. They are reused, so that a step costs a few writes in Python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headstart.engines.llama.binding import lib
from headstart.interfaces.engine import Step


class Batch:
    """Up to `size` tokens of up to `slots` sequences. `struct` is what `llama_decode` takes."""

    def __init__(self, size: int, slots: int) -> None:
        self._tokens = np.zeros(size, np.int32)
        self._positions = np.zeros(size, np.int32)
        self._counts = np.ones(size, np.int32)
        self._wanted = np.zeros(size, np.int8)
        self._slots = np.arange(slots, dtype=np.int32)
        # Each token points at its sequence's number: one table of numbers serves all tokens.
        self._address = [self._slots.ctypes.data + 4 * slot for slot in range(slots)]
        self._sequences = np.zeros(size, np.uintp)
        fields = dict(lib.llama_batch._fields_)

        def pointer(name: str, array: npt.NDArray[Any]) -> Any:
            return array.ctypes.data_as(fields[name])

        self.struct = lib.llama_batch(
            n_tokens=0,
            token=pointer("token", self._tokens),
            pos=pointer("pos", self._positions),
            n_seq_id=pointer("n_seq_id", self._counts),
            seq_id=pointer("seq_id", self._sequences),
            logits=pointer("logits", self._wanted),
        )

    def prompt(self, slot: int, tokens: npt.NDArray[np.int32], start: int, *, logits: bool, padding: int = 0) -> Any:
        """Tokens of one sequence from position `start`, with the last one repeated `padding` times."""
        n, size = len(tokens), len(tokens) + padding
        self._tokens[:n] = tokens
        self._tokens[n:size] = tokens[-1]
        self._positions[:size] = np.arange(start, start + size)
        self._sequences[:size] = self._address[slot]
        self._wanted[:size] = 0
        self._wanted[n - 1] = logits
        self.struct.n_tokens = size
        return self.struct

    def steps(self, steps: Sequence[Step], lengths: Sequence[int]) -> Any:
        """One token for each of several sequences of the given lengths, all with logits."""
        for row, step in enumerate(steps):
            self._tokens[row] = step.token
            self._positions[row] = lengths[step.slot]
            self._sequences[row] = self._address[step.slot]
            self._wanted[row] = 1
        self.struct.n_tokens = len(steps)
        return self.struct
