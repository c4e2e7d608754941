"""Blocks: the canonical, content-addressed form of a token sequence.

    tokens ─▶ │ block 0 │ block 1 │ … │ block k │ open tail
                id_0  ──▶  id_1  ──▶   id_k = H(id_{k-1} ‖ tokens_k),   id_{-1} = root = H(fingerprint ‖ salt)

Everything here is a pure function of the tokens, so the chain of a prefix is a prefix of the chain.

The form that is hashed is a contract: changing it changes every id. It is the BLAKE3 of
``b"headstart.block.1" ‖ parent id (32 bytes) ‖ tokens as little-endian int32``; the root's is the BLAKE3 of
``b"headstart.root.1" ‖ len(fingerprint) as u64 ‖ fingerprint ‖ salt as UTF-8``, but that its first 8 bytes are those of the
salt's owner, which is what the salt has before its first NUL; a checkpoint's is the BLAKE3 of
``b"headstart.checkpoint.1" ‖ id of the piece whose end it is at``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from blake3 import blake3

from headstart.interfaces.tokens import BlockId, Tokens, utf8
from headstart.prefix_cache.quota import OWNER

OWNER_END = "\0"
"""What ends the owner's part of a salt; one without it is all owner."""


def root_id(fingerprint: bytes, salt: str) -> BlockId:
    """The parent of every first block: no block of another model, setting or tenant can have the same id.

    Whoever has it knows whose the chain is: see `prefix_cache/quota`.
    """
    head = b"headstart.root.1" + len(fingerprint).to_bytes(8, "little") + fingerprint
    owner = blake3(head + utf8(salt.partition(OWNER_END)[0])).digest(OWNER)
    return owner + blake3(head + utf8(salt)).digest()[OWNER:]


def block_id(parent: BlockId, tokens: Tokens) -> BlockId:
    """The id of the piece made of `tokens` whose history is `parent`."""
    return blake3(b"headstart.block.1" + parent + tokens.tobytes()).digest()


def checkpoint_id(piece: BlockId) -> BlockId:
    """The id of the checkpoint at the end of a piece."""
    return blake3(b"headstart.checkpoint.1" + piece).digest()


def last_block_boundary(length: int, block_size: int) -> int:
    """The last block boundary strictly before the last of `length` tokens: where the open tail begins."""
    return max(0, (length - 1) // block_size * block_size)


@dataclass(frozen=True)
class Chain:
    """Tokens with the ids of all their whole blocks."""

    root: BlockId
    block_size: int
    tokens: Tokens

    @cached_property
    def ids(self) -> tuple[BlockId, ...]:
        """One id for each of the `len(tokens) // block_size` whole blocks."""
        ids: list[BlockId] = []
        parent = self.root
        data = self.tokens.tobytes()
        step = 4 * self.block_size
        for start in range(0, len(self.tokens) // self.block_size * step, step):
            parent = blake3(b"headstart.block.1" + parent + data[start : start + step]).digest()
            ids.append(parent)
        return tuple(ids)

    def parent_of(self, block: int) -> BlockId:
        """The id that block number `block` (or the tail that begins there) hangs on."""
        return self.ids[block - 1] if block else self.root

    def block(self, number: int) -> Tokens:
        return self.tokens[number * self.block_size : (number + 1) * self.block_size]

    def __len__(self) -> int:
        return len(self.tokens)
