"""Prompts of a few blocks with three tokens each, for tests of the index and its readers."""

from __future__ import annotations

from hypothesis import strategies as st

from headstart.interfaces.tokens import as_tokens
from headstart.prefix_cache.blocks import Chain, block_id, root_id
from headstart.prefix_cache.entry import Entry

BLOCK_SIZE = 3
ROOT = root_id(b"model", "")
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=4 * BLOCK_SIZE)


def entries_of(tokens: list[int]) -> list[Entry]:
    """All blocks of a token sequence and its open tail."""
    chain = Chain(ROOT, BLOCK_SIZE, as_tokens(tokens))
    found = [
        Entry(key, chain.parent_of(number), chain.block(number), number * BLOCK_SIZE)
        for number, key in enumerate(chain.ids)
    ]
    rest = as_tokens(tokens[len(found) * BLOCK_SIZE :])
    if len(rest):
        parent = chain.parent_of(len(found))
        found.append(Entry(block_id(parent, rest), parent, rest, len(found) * BLOCK_SIZE))
    return found
