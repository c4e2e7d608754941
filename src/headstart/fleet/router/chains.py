"""Chains of prompts as the router sees them.

The ids are those of `prefix_cache/blocks`, cut to 64 bits. The last bit says whether a key names a block (0) or the checkpoint
at its end (1). Of ten million blocks that a fleet holds, a block that is in none of them is mistaken for one with a chance of
1 in 10¹²; then one request goes to a replica that must compute more than expected, and no answer is wrong.

A request has one chain, so one fingerprint and one tenant. Replicas with another fingerprint hold none of its blocks.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from headstart.fleet.router.reports import BlockKey
from headstart.interfaces.tokens import BlockId, Tokens
from headstart.prefix_cache.blocks import Chain

_CHECKPOINT = 1
_BLOCKS = np.uint64(2**64 - 2)


@dataclass(frozen=True, slots=True)
class PromptChain:
    """A prompt for the router.

    Attributes:
        keys: its full blocks before the last token, which is always computed.
        tokens: tokens of the prompt.
        block_size: tokens of a block.
        stateful: whether the model can continue only where there is a checkpoint.
        source: what it was made of, for the hot list of a front (`front/hot`); None if it must not be remembered.
    """

    keys: list[BlockKey]
    tokens: int
    block_size: int
    stateful: bool = False
    source: Chain | None = field(default=None, compare=False, repr=False)


def chain_of(root: BlockId, block_size: int, tokens: Tokens, *, stateful: bool = False) -> PromptChain:
    """The chain of a prompt. `root`: see `blocks.root_id`."""
    chain = Chain(root, block_size, tokens)
    ids = chain.ids[: max(0, len(tokens) - 1) // block_size]
    words = np.frombuffer(b"".join(ids), "<u8")[::4] & _BLOCKS
    return PromptChain(words.tolist(), len(tokens), block_size, stateful, chain)


def block_key(block: BlockId) -> BlockKey:
    """The key of a block, from its id."""
    return int.from_bytes(block[:8], "little") & ~_CHECKPOINT


def checkpoint_key(block: BlockKey) -> BlockKey:
    """The key of the checkpoint at the end of a block."""
    return block | _CHECKPOINT


def common_blocks(one: Sequence[Hashable], other: Sequence[Hashable]) -> int:
    """The number of leading blocks that two chains of keys or ids share. It is found by halving, because a key stands for all
    blocks before it."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high) // 2
        if one[middle] == other[middle]:
            low = middle + 1
        else:
            high = middle
    return low
