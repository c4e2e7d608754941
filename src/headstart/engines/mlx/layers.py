"""Layers: what mlx-lm's cache of a layer holds, as bytes that can be taken out and put back.

A layer's cache is *KV*, which has bytes for each token and can be cut anywhere, or *state*, which cannot: the last keys and
values of a sliding window (a ring), or arrays of a recurrent or convolution layer. One layer may have several (`CacheList`).

KV of n tokens is laid out by plane (the keys and the values of each layer), then by head, token and dimension.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache

from headstart.errors import EngineError
from headstart.interfaces.engine import KVSegment
from headstart.interfaces.tokens import Bytes


class UnknownCache(Exception):
    """A kind of cache that cannot be moved."""


@dataclass(frozen=True, slots=True)
class Plane:
    """Keys or values of one layer.

    Attributes:
        heads: with keys and values of their own.
        width: bytes of one head of one token.
        dtype: of the numbers.
    """

    heads: int
    width: int
    dtype: Any

    @classmethod
    def of(cls, array: Any) -> Plane:
        """`array`: (1, heads, tokens, dimension)."""
        return cls(array.shape[1], array.shape[3] * array.dtype.size, array.dtype)

    @property
    def bytes_per_token(self) -> int:
        return self.heads * self.width

    def copy(self, array: Any, start: int, stop: int, out: Bytes) -> None:
        """Copies the tokens [start, stop) to `out`."""
        count = stop - start
        found = as_bytes(array)[0, :, start:stop]
        out[: count * self.bytes_per_token].reshape(self.heads, count, self.width)[...] = found

    def made(self, parts: Sequence[tuple[Bytes, int, int]]) -> Any:
        """An array of the first `take` of `tokens` tokens of each part, one after the other: (data, tokens, take)."""
        out = np.empty((1, self.heads, sum(take for _, _, take in parts), self.width), np.uint8)
        at = 0
        for data, tokens, take in parts:
            rows = data[: tokens * self.bytes_per_token].reshape(self.heads, tokens, self.width)
            out[0, :, at : at + take] = rows[:, :take]
            at += take
        return mx.array(out).view(self.dtype)


def as_bytes(array: Any) -> Bytes:
    """The bytes of an array, whose last axis becomes longer. A view where mlx allows it."""
    found: Any = mx.contiguous(array).view(mx.uint8)
    mx.eval(found)
    return np.asarray(found)


def leaves(caches: Sequence[Any]) -> Iterator[Any]:
    """The caches of all layers, in order, without lists. Raises UnknownCache for a kind that cannot be moved."""
    for cache in caches:
        if isinstance(cache, CacheList):
            yield from leaves(cache.caches)
        elif type(cache) not in (KVCache, RotatingKVCache, ArraysCache) or getattr(cache, "keep", 0) != 0:
            raise UnknownCache(f"its cache is of an unknown kind ({type(cache).__name__})")
        else:
            yield cache


@dataclass(frozen=True, slots=True)
class Form:
    """How KV and state of a model are laid out, learnt from caches that hold some tokens.

    Attributes:
        planes: of the KV layers, keys and values in turn.
        rings: (plane of the keys, plane of the values, tokens of the window) of each sliding-window layer.
        arrays: (shape, dtype) of each array of other layers.
    """

    planes: tuple[Plane, ...]
    rings: tuple[tuple[Plane, Plane, int], ...]
    arrays: tuple[tuple[tuple[int, ...], Any], ...]

    @classmethod
    def of(cls, caches: Sequence[Any]) -> Form:
        """Raises UnknownCache."""
        planes: list[Plane] = []
        rings: list[tuple[Plane, Plane, int]] = []
        arrays: list[tuple[tuple[int, ...], Any]] = []
        for leaf in leaves(caches):
            if isinstance(leaf, KVCache):
                planes += [Plane.of(leaf.keys), Plane.of(leaf.values)]
            elif isinstance(leaf, RotatingKVCache):
                rings.append((Plane.of(leaf.keys), Plane.of(leaf.values), leaf.max_size))
            elif any(array is None for array in leaf.cache):
                raise UnknownCache("one of its layers keeps a state that is not always there")
            else:
                arrays += [(tuple(array.shape), array.dtype) for array in leaf.cache]
        return cls(tuple(planes), tuple(rings), tuple(arrays))

    @property
    def kv_bytes_per_token(self) -> int:
        return sum(plane.bytes_per_token for plane in self.planes)

    @property
    def window(self) -> int:
        """Tokens that the longest sliding window sees; 0 without one."""
        return max((most for _, _, most in self.rings), default=0)

    @property
    def stateful(self) -> bool:
        return bool(self.rings or self.arrays)

    def state_bytes(self, tokens: int) -> int:
        """Of a checkpoint after so many tokens."""
        rings = sum((k.bytes_per_token + v.bytes_per_token) * min(most, tokens) for k, v, most in self.rings)
        arrays = sum(int(np.prod(shape)) * dtype.size for shape, dtype in self.arrays)
        return _HEAD + rings + arrays if self.stateful else 0

    # ── KV ───────────────────────────────────────────────────────────────────────────────────────────────────────────

    def export_kv(self, caches: Sequence[Any], start: int, stop: int, out: Bytes) -> None:
        at, planes = 0, iter(self.planes)
        for leaf in leaves(caches):
            if isinstance(leaf, KVCache):
                for array in (leaf.keys, leaf.values):
                    plane = next(planes)
                    plane.copy(array, start, stop, out[at:])
                    at += (stop - start) * plane.bytes_per_token

    def import_kv(self, caches: Sequence[Any], segments: Sequence[KVSegment]) -> None:
        """Puts KV into empty caches."""
        at, planes = [0] * len(segments), iter(self.planes)
        length = sum(segment.take for segment in segments)
        for leaf in leaves(caches):
            if not isinstance(leaf, KVCache):
                continue
            made = []
            for plane in (next(planes), next(planes)):
                parts = [(segment.data[at[n] :], segment.tokens, segment.take) for n, segment in enumerate(segments)]
                made.append(plane.made(parts))
                at = [begin + segment.tokens * plane.bytes_per_token for begin, segment in zip(at, segments, strict=True)]
            leaf.keys, leaf.values, leaf.offset = *made, length

    # ── state ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def export_state(self, caches: Sequence[Any], length: int, out: Bytes) -> int:
        """Copies the state at `length` tokens to `out`; returns its bytes."""
        out[:_HEAD] = np.array([length], np.int64).view(np.uint8)
        at, rings = _HEAD, iter(self.rings)
        for leaf in leaves(caches):
            if isinstance(leaf, RotatingKVCache):
                keys, values, most = next(rings)
                for plane, array in ((keys, leaf.keys), (values, leaf.values)):
                    ordered, count = leaf._temporal_order(array), min(most, length)
                    plane.copy(ordered, ordered.shape[2] - count, ordered.shape[2], out[at:])
                    at += count * plane.bytes_per_token
            elif isinstance(leaf, ArraysCache):
                for array in leaf.cache:
                    data = as_bytes(array).reshape(-1)
                    out[at : at + len(data)] = data
                    at += len(data)
        return at

    def check_state(self, state: Bytes, length: int) -> None:
        """Raises EngineError if `state` is no state at this length."""
        if len(state) != self.state_bytes(length) or int(state[:_HEAD].view(np.int64)[0]) != length:
            raise EngineError(f"this is no checkpoint at {length} tokens")

    def import_state(self, caches: Sequence[Any], length: int, state: Bytes) -> None:
        """Replaces the state. The bytes were checked."""
        at, rings, arrays = _HEAD, iter(self.rings), iter(self.arrays)
        for leaf in leaves(caches):
            if isinstance(leaf, RotatingKVCache):
                keys, values, most = next(rings)
                count, made = min(most, length), []
                for plane in (keys, values):
                    made.append(plane.made([(state[at:], count, count)]))
                    at += count * plane.bytes_per_token
                leaf.keys, leaf.values, leaf.offset, leaf._idx = *made, length, count
            elif isinstance(leaf, ArraysCache):
                for number in range(len(leaf.cache)):
                    shape, dtype = next(arrays)
                    size = int(np.prod(shape)) * dtype.size
                    leaf.cache[number] = mx.array(state[at : at + size]).view(dtype).reshape(shape)
                    at += size


_HEAD = 8  # bytes: the length, as int64


def contents(caches: Sequence[Any]) -> list[Any]:
    """All arrays that the caches hold, to be evaluated."""
    found: list[Any] = []
    for cache in caches:
        if isinstance(cache, CacheList):
            found += contents(cache.caches)
        elif isinstance(cache, ArraysCache):
            found += [array for array in cache.cache if array is not None]
        elif getattr(cache, "keys", None) is not None:
            found += [cache.keys, cache.values]
    return found
