"""Hot list: which beginnings of prompts a fleet uses most. A new replica fetches them before it gets requests.

A front remembers the latest prompt of each conversation, with its *heat*: the number of its requests, where older ones count
less. A conversation that goes on counts up to twice as much as a new one. It does not count more, because its next request goes
where its cache is. Other conversations come to a new replica. The heat of a block is the sum over all prompts that it is part
of. So a block never has more than the one before it, and the hottest blocks are beginnings of prompts.

    system prompt ──┬── first chat            heat 3: the list begins with the system prompt
                    ├── second chat           heat 1
                    └── third chat            heat 1

Seconds that a block saves = seconds to compute it × its requests. As for eviction, the unit is the prefill of one token: tokens
at the end of a long prompt cost more, but they must not rank above the beginnings of others.

Pure: the caller passes the time, in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from headstart.interfaces.tokens import BlockId, as_tokens
from headstart.lru import Lru
from headstart.prefix_cache.blocks import Chain, last_block_boundary

HALF_LIFE = 600.0
"""Seconds after which a request counts half."""
CONVERSATIONS = 1024
"""Most prompts that are remembered."""
TOKENS = 1 << 22
"""Most tokens of all of them. A token takes about 5 bytes."""
_GOES_ON = 2.0
"""Most heat of one conversation."""


@dataclass(frozen=True, slots=True)
class HotStretch:
    """Consecutive blocks that are part of the same prompts. It can be sent to other machines.

    Attributes:
        before: the number, in the list, of the stretch that it continues; -1 for the beginning of a prompt.
        root: of its chain.
        tokens: int32, little-endian.
    """

    before: int
    root: BlockId
    tokens: bytes


@dataclass(frozen=True, slots=True)
class _Conversation:
    fingerprint: bytes
    chain: Chain
    heat: float
    at: float

    def heat_at(self, now: float) -> float:
        return self.heat * math.exp2((self.at - now) / HALF_LIFE)


@dataclass(slots=True)
class _Heat:
    prompts: int = 0
    heat: float = 0.0


class HotPrompts:
    """The latest prompt of each conversation, within bounds. `asked` is for one thread, all else for any."""

    def __init__(self) -> None:
        self._latest: Lru[BlockId, _Conversation] = Lru(CONVERSATIONS, TOKENS, lambda one: len(one.chain))

    def asked(self, fingerprint: bytes, chain: Chain, now: float) -> None:
        """A request has this prompt. Its last token is always computed, so the block with it does not count."""
        ids = _usable(chain)
        if not ids:
            return
        last = next((id for id in reversed(ids) if id in self._latest), None)  # it continues there
        heat, known = 1.0, None if last is None else self._latest.get(last)
        if last is not None and known is not None:
            before = known.heat_at(now)
            taken = before if last == ids[-1] else min(before, _GOES_ON) / 2
            heat += taken
            if last != ids[-1] and before > _GOES_ON:  # short prompts of several conversations can have the same blocks
                self._latest.put(last, _Conversation(fingerprint, known.chain, before - _GOES_ON, now))
            else:
                self._latest.drop(last)
        self._latest.put(ids[-1], _Conversation(fingerprint, chain, heat, now))

    def hottest(self, fingerprint: bytes, tokens: int, now: float) -> list[HotStretch]:
        """The hottest blocks of a model, at most `tokens` tokens, the hottest first. A stretch comes after what it continues.

        It takes up to a tenth of a second.
        """
        known = [one for _, one in reversed(self._latest.items()) if one.fingerprint == fingerprint]
        blocks: dict[BlockId, _Heat] = {}
        for one in known:  # always in this order, so that no sum is more than that of the block before it
            heat = one.heat_at(now)
            for id in _usable(one.chain):
                block = blocks.setdefault(id, _Heat())
                block.prompts += 1
                block.heat += heat
        stretches: dict[BlockId, tuple[float, int, Chain, range]] = {}  # by its last block
        for one in known:
            ids, start = _usable(one.chain), 0
            for stop in range(1, len(ids) + 1):
                if stop == len(ids) or blocks[ids[stop]].prompts != blocks[ids[start]].prompts:
                    stretches.setdefault(ids[stop - 1], (-blocks[ids[start]].heat, start, one.chain, range(start, stop)))
                    start = stop
        found: list[HotStretch] = []
        numbers: dict[BlockId, int] = {}
        for end, (_, _, chain, span) in sorted(stretches.items(), key=lambda one: one[1][:2]):
            size = chain.block_size
            stop = min(span.stop, span.start + tokens // size)
            if stop <= span.start:
                break
            before = numbers[chain.ids[span.start - 1]] if span.start else -1
            part = chain.tokens[span.start * size : stop * size]
            numbers[end] = len(found)
            found.append(HotStretch(before, chain.root, part.tobytes()))
            tokens = tokens - len(part) if stop == span.stop else 0
        return found

    def forget(self) -> None:
        """Forgets all prompts."""
        self._latest.clear()


def hot_prefixes(stretches: Sequence[HotStretch], block_size: int) -> Iterator[Chain]:
    """For each stretch, the prompt up to its end, as `Runtime.preload` takes it: with one token more, which is never reused.

    Raises ValueError if it is no such list.
    """
    for number, one in enumerate(stretches):
        parts, place, root = [one.tokens], one.before, one.root
        while place >= 0:
            if place >= number or stretches[place].root != root:
                raise ValueError("this is no hot list")
            number, parts, place = place, [stretches[place].tokens, *parts], stretches[place].before
        yield Chain(root, block_size, as_tokens(np.frombuffer(b"".join(parts) + bytes(4), "<i4")))


def _usable(chain: Chain) -> Sequence[BlockId]:
    return chain.ids[: last_block_boundary(len(chain), chain.block_size) // chain.block_size]
