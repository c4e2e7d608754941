"""Layers: what mlx-lm's cache of a layer holds, as bytes that can be taken out and put back.

A layer's cache is *KV*, which has bytes for each token and can be cut anywhere, or *state*, which cannot: the last keys and
values of a sliding window (a ring), or arrays of a recurrent or convolution layer. One layer may have several (`CacheList`).

KV of n tokens is laid out by plane (the keys and the values of each layer), then by head, token and dimension.

Bytes go in and out through numpy's views of mlx's own memory. A view must be gone before the model computes again: mlx would
copy the array otherwise, instead of writing into it.
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

STEP = 256
"""Room for KV grows to multiples of this many tokens."""
_HEAD = 8  # bytes of a state: the length, as int64


class UnknownCache(Exception):
    """A kind of cache that cannot be moved."""


def view(array: Any) -> Bytes:
    """The bytes of a computed, contiguous array, whose last axis becomes longer. Writing changes the array."""
    return np.array(array.view(mx.uint8), copy=False)


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

    def empty(self, tokens: int) -> Any:
        """An array for so many tokens. Nothing is computed yet."""
        return mx.zeros((1, self.heads, tokens, self.width // self.dtype.size), self.dtype)

    def take(self, array: Any, parts: Sequence[tuple[int, int]], out: Bytes) -> int:
        """Copies the tokens [start, stop) of each part to `out`, one part after the other; returns the number of bytes."""
        count = sum(stop - start for start, stop in parts)
        rows, found, at = out[: count * self.bytes_per_token].reshape(self.heads, count, self.width), view(array), 0
        for start, stop in parts:
            rows[:, at : at + stop - start] = found[0, :, start:stop]
            at += stop - start
        return count * self.bytes_per_token

    def put(self, array: Any, parts: Sequence[tuple[Bytes, int, int]]) -> None:
        """Writes the first `take` of `tokens` tokens of each part to the front of an array: (data, tokens, take)."""
        rows, at = view(array), 0
        for data, tokens, take in parts:
            rows[0, :, at : at + take] = data[: tokens * self.bytes_per_token].reshape(self.heads, tokens, self.width)[:, :take]
            at += take


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
class Ring:
    """The last keys and values of one sliding-window layer.

    Attributes:
        planes: of the keys, and of the values.
        window: most tokens that it keeps.
    """

    planes: tuple[Plane, Plane]
    window: int

    @classmethod
    def of(cls, cache: Any) -> Ring:
        """Raises UnknownCache if this version of mlx-lm describes its rings in another way."""
        keys, values = cls.arrays(cache)
        return cls((Plane.of(keys), Plane.of(values)), cache.max_size)

    @staticmethod
    def arrays(cache: Any) -> tuple[Any, Any]:
        keys, values, _ = Ring.described(cache)
        return keys, values

    @staticmethod
    def described(cache: Any) -> tuple[Any, Any, int]:
        """Keys, values, and the place behind the latest token. Raises UnknownCache."""
        match cache.state:
            case (keys, values, cache.offset, 0, cache.max_size, int(place)) if 0 < place <= keys.shape[2] == values.shape[2]:
                return keys, values, place
        raise UnknownCache("this version of mlx-lm keeps sliding windows in another way")

    @property
    def bytes_per_token(self) -> int:
        return sum(plane.bytes_per_token for plane in self.planes)

    def take(self, cache: Any, out: Bytes) -> int:
        """Copies what the window sees to `out`, in the order of the tokens; returns the number of bytes."""
        keys, values, place = self.described(cache)
        size, length = keys.shape[2], cache.offset
        # Behind `place` are the earliest tokens if the ring is full, and nothing if it is not.
        runs = [(place, size), (0, place)] if place < length else [(0, place)]
        surplus = sum(stop - start for start, stop in runs) - min(self.window, length)
        if surplus < 0:
            raise EngineError(f"a sliding window lacks {-surplus} of the tokens that it sees")
        parts = []
        for start, stop in runs:
            skipped = min(surplus, stop - start)
            surplus -= skipped
            parts.append((start + skipped, stop))
        at = 0
        for plane, array in zip(self.planes, (keys, values), strict=True):
            at += plane.take(array, parts, out[at:])
        return at

    def put(self, cache: Any, length: int, data: Bytes) -> int:
        """Fills the cache from `data`; returns the number of bytes. The ring must have all that the window sees."""
        count, at, arrays = min(self.window, length), 0, [plane.empty(min(self.window, length)) for plane in self.planes]
        mx.eval(arrays)
        for plane, array in zip(self.planes, arrays, strict=True):
            plane.put(array, [(data[at:], count, count)])
            at += count * plane.bytes_per_token
        cache.state = (*arrays, length, 0, self.window, count)
        return at


@dataclass(frozen=True, slots=True)
class Form:
    """How KV and state of a model are laid out, learnt from caches that hold some tokens.

    Attributes:
        planes: of the KV layers, keys and values in turn.
        rings: of the sliding-window layers.
        arrays: (shape, dtype) of each array of other layers.
    """

    planes: tuple[Plane, ...]
    rings: tuple[Ring, ...]
    arrays: tuple[tuple[tuple[int, ...], Any], ...]

    @classmethod
    def of(cls, caches: Sequence[Any]) -> Form:
        """Raises UnknownCache."""
        planes: list[Plane] = []
        rings: list[Ring] = []
        arrays: list[tuple[tuple[int, ...], Any]] = []
        for leaf in leaves(caches):
            if isinstance(leaf, KVCache):
                planes += [Plane.of(leaf.keys), Plane.of(leaf.values)]
            elif isinstance(leaf, RotatingKVCache):
                rings.append(Ring.of(leaf))
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
        return max((ring.window for ring in self.rings), default=0)

    @property
    def stateful(self) -> bool:
        return bool(self.rings or self.arrays)

    def state_bytes(self, tokens: int) -> int:
        """Of a checkpoint after so many tokens."""
        rings = sum(ring.bytes_per_token * min(ring.window, tokens) for ring in self.rings)
        return _HEAD + rings + self._array_bytes if self.stateful else 0

    def live_bytes(self, call: int) -> int:
        """Most bytes of the states of one slot. A call of `call` tokens makes rings so much longer, until the next decoding.

        Arrays count twice, because those of the last batch are kept beside restored ones.
        """
        return sum(ring.bytes_per_token * (ring.window + call) for ring in self.rings) + 2 * self._array_bytes

    @property
    def _array_bytes(self) -> int:
        return sum(int(np.prod(shape)) * dtype.size for shape, dtype in self.arrays)

    # ── KV ───────────────────────────────────────────────────────────────────────────────────────────────────────────

    def export_kv(self, caches: Sequence[Any], start: int, stop: int, out: Bytes) -> None:
        at = 0
        for plane, array in zip(self.planes, _kv_arrays(caches), strict=True):
            at += plane.take(array, [(start, stop)], out[at:])

    def import_kv(self, caches: Sequence[Any], segments: Sequence[KVSegment], most: int) -> None:
        """Replaces the KV. `most`: tokens that a slot may ever hold."""
        length = sum(segment.take for segment in segments)
        set_length(caches, 0)
        reserve(caches, length, most, self)
        at = [0] * len(segments)
        for plane, array in zip(self.planes, _kv_arrays(caches), strict=True):
            plane.put(array, [(one.data[begin:], one.tokens, one.take) for begin, one in zip(at, segments, strict=True)])
            at = [begin + one.tokens * plane.bytes_per_token for begin, one in zip(at, segments, strict=True)]
        set_length(caches, length)

    # ── state ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def export_state(self, caches: Sequence[Any], length: int, out: Bytes) -> int:
        """Copies the state at `length` tokens to `out`; returns its bytes."""
        out[:_HEAD] = np.array([length], np.int64).view(np.uint8)
        at, rings = _HEAD, iter(self.rings)
        for leaf in leaves(caches):
            if isinstance(leaf, RotatingKVCache):
                at += next(rings).take(leaf, out[at:])
            elif isinstance(leaf, ArraysCache):
                for array in leaf.cache:
                    data = view(mx.contiguous(array)).reshape(-1)
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
                at += next(rings).put(leaf, length, state[at:])
            elif isinstance(leaf, ArraysCache):
                for number in range(len(leaf.cache)):
                    shape, dtype = next(arrays)
                    size = int(np.prod(shape)) * dtype.size
                    leaf.cache[number] = mx.array(state[at : at + size]).view(dtype).reshape(shape)
                    at += size


def kv_leaves(caches: Sequence[Any]) -> Iterator[Any]:
    """The caches that have bytes for each token."""
    return (leaf for leaf in leaves(caches) if isinstance(leaf, KVCache))


def _kv_arrays(caches: Sequence[Any]) -> Iterator[Any]:
    for leaf in kv_leaves(caches):
        yield from (leaf.keys, leaf.values)


def set_length(caches: Sequence[Any], length: int) -> None:
    """Lets the KV layers hold their first `length` tokens. Room for more stays."""
    for leaf in kv_leaves(caches):
        leaf.offset = length


def reserve(caches: Sequence[Any], tokens: int, most: int, form: Form) -> None:
    """Makes room for `tokens` tokens of KV, of at most `most`. Room doubles, so that a long prompt is not copied often."""
    planes = iter(form.planes)
    for leaf in kv_leaves(caches):
        pair = next(planes), next(planes)
        held = 0 if leaf.keys is None else leaf.keys.shape[2]
        if tokens <= held:
            continue
        size = -(-max(tokens, min(2 * held, most)) // STEP) * STEP
        if leaf.offset:
            old = (leaf.keys[..., : leaf.offset, :], leaf.values[..., : leaf.offset, :])
            leaf.keys, leaf.values = (
                mx.concatenate([array, plane.empty(size - leaf.offset)], axis=2) for plane, array in zip(pair, old, strict=True)
            )
        else:
            leaf.keys, leaf.values = (plane.empty(size) for plane in pair)
        mx.eval(leaf.keys, leaf.values)  # layer by layer, so that the old arrays of one layer only are beside the new ones


def emptied(caches: Sequence[Any], fresh: list[Any]) -> list[Any]:
    """`fresh`, with the room for KV that `caches` have."""
    for old, new in zip(kv_leaves(caches), kv_leaves(fresh), strict=True):
        new.keys, new.values = old.keys, old.values
    return fresh


def compact(caches: Sequence[Any]) -> None:
    """Lets states be arrays of their own, where they are the end of an array of a whole call."""
    for leaf in leaves(caches):
        if isinstance(leaf, ArraysCache):
            leaf.cache = [mx.contiguous(array) for array in leaf.cache]


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
