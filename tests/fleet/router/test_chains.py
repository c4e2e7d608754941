"""Chains of the router: the ids of `prefix_cache/blocks`, cut."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from effort import examples
from headstart.fleet.router.chains import block_key, chain_of, checkpoint_key, common_blocks
from headstart.interfaces.tokens import as_tokens
from headstart.prefix_cache.blocks import Chain, root_id

ROOT = root_id(b"model", "tenant")


@given(st.lists(st.integers(0, 100), max_size=40), st.integers(1, 9))
@examples(100)
def test_keys_are_those_of_the_full_blocks_before_the_last_token(tokens: list[int], block_size: int) -> None:
    chain = chain_of(ROOT, block_size, as_tokens(tokens))
    ids = Chain(ROOT, block_size, as_tokens(tokens)).ids
    assert chain.keys == [block_key(one) for one in ids[: max(0, len(tokens) - 1) // block_size]]
    assert len(chain.keys) * block_size < max(1, len(tokens)) == max(1, chain.tokens)


def test_a_checkpoint_is_a_flag_on_its_block() -> None:
    key = block_key(b"\xff" * 32)
    assert key == 2**64 - 2
    assert checkpoint_key(key) == 2**64 - 1


def test_another_tenant_has_other_keys() -> None:
    tokens = as_tokens(range(100))
    assert not set(chain_of(ROOT, 8, tokens).keys) & set(chain_of(root_id(b"model", "other"), 8, tokens).keys)


@given(st.lists(st.integers(0, 1), max_size=6), st.lists(st.integers(0, 1), max_size=6))
@examples(100)
def test_common_blocks(one: list[int], other: list[int]) -> None:
    """Keys stand for all that is before them."""
    keys = [[hash(tuple(letters[: end + 1])) for end in range(len(letters))] for letters in (one, other)]
    both = zip(*keys, strict=False)
    assert common_blocks(*keys) == sum(a == b for a, b in both)
