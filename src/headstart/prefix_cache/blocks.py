"""Blocks: a prompt as a chain of ids.

A *block* is `block_size` consecutive tokens of a prompt. The engine declares the block size (64 for llama.cpp on a CPU).
What is computed last is the *open tail*: the tokens after the last full block, or that block if nothing follows it. A block's
id is a hash of the id before it and of its own tokens, so an id names a block together with everything before it:

    tokens ─▶ │ block 0 │ block 1 │ … │ block k │ open tail
                id_0  ──▶  id_1  ──▶   id_k = H(id_{k-1} ‖ tokens_k),   id_{-1} = root = H(fingerprint ‖ salt)

All ids of a prompt are its *chain*. Two prompts with a common beginning have chains with a common beginning. The *root* covers
everything that changes the numbers of a block (the engine's fingerprint) and the tenant's salt, so nothing can be found under a
wrong id.

Example: with a block size of 64, a prompt of 200 tokens has three ids, and an open tail of 8 tokens.

The hashed bytes are a contract: another form would change every id. All hashes are BLAKE3.

* block: ``b"headstart.block.1" ‖ parent id (32 bytes) ‖ tokens as little-endian int32``
* root: ``b"headstart.root.1" ‖ len(fingerprint) as u64 ‖ fingerprint ‖ salt as UTF-8``. Its first 8 bytes are replaced by those
  of the same hash over the owner instead of the salt; the owner is the part of the salt before its first NUL (`quota`).
* checkpoint: ``b"headstart.checkpoint.1" ‖ id of the block or open tail at whose end it is``
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from blake3 import blake3

from headstart.interfaces.tokens import BlockId, Tokens, utf8
from headstart.prefix_cache.quota import OWNER

OWNER_END = "\0"
"""Ends the owner's part of a salt. A salt without it consists of the owner only."""


def root_id(fingerprint: bytes, salt: str) -> BlockId:
    """The parent of every first block. Another model, setting or tenant has another root, and so other ids.

    Its first bytes name the owner of the chain: see `quota`.
    """
    head = b"headstart.root.1" + len(fingerprint).to_bytes(8, "little") + fingerprint
    owner = blake3(head + utf8(salt.partition(OWNER_END)[0])).digest(OWNER)
    return owner + blake3(head + utf8(salt)).digest()[OWNER:]


def block_id(parent: BlockId, tokens: Tokens) -> BlockId:
    """The id of the block or open tail that consists of `tokens` and follows `parent`."""
    return blake3(b"headstart.block.1" + parent + tokens.tobytes()).digest()


def checkpoint_id(block: BlockId) -> BlockId:
    """The id of the checkpoint at the end of a block or open tail."""
    return blake3(b"headstart.checkpoint.1" + block).digest()


def last_block_boundary(length: int, block_size: int) -> int:
    """The last block boundary before the last of `length` tokens. The open tail begins there: it has 1 to `block_size` tokens.

    It is strictly before the last token, because that token is always computed: the reply needs its logits. So of a prompt of
    full blocks only, the last block is the open tail.
    """
    return max(0, (length - 1) // block_size * block_size)


@dataclass(frozen=True)
class Chain:
    """The tokens of a prompt with the ids of its full blocks."""

    root: BlockId
    block_size: int
    tokens: Tokens

    @cached_property
    def ids(self) -> tuple[BlockId, ...]:
        """One id for each of the `len(tokens) // block_size` full blocks."""
        ids: list[BlockId] = []
        parent = self.root
        data = self.tokens.tobytes()
        step = 4 * self.block_size
        for start in range(0, len(self.tokens) // self.block_size * step, step):
            parent = blake3(b"headstart.block.1" + parent + data[start : start + step]).digest()
            ids.append(parent)
        return tuple(ids)

    def parent_of(self, block: int) -> BlockId:
        """The id before block number `block`, or before the open tail that begins there."""
        return self.ids[block - 1] if block else self.root

    def block(self, number: int) -> Tokens:
        """The tokens of one block."""
        return self.tokens[number * self.block_size : (number + 1) * self.block_size]

    def __len__(self) -> int:
        return len(self.tokens)
