from __future__ import annotations

import numpy as np
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from headstart.interfaces.tokens import as_tokens, common_prefix
from headstart.prefix_cache.blocks import Chain, block_id, last_block_boundary, root_id

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=40)
GRIDS = st.integers(1, 9)


def chain(tokens: list[int], block_size: int, salt: str = "", fingerprint: bytes = b"model") -> Chain:
    return Chain(root_id(fingerprint, salt), block_size, as_tokens(tokens))


def test_canonical_form_is_a_contract() -> None:
    """Changing any of these changes every id that was ever stored."""
    root = root_id(b"fingerprint", "salt")
    assert root.hex() == "d7c03f7932f1e783db1c8f610bbfb0b203552965a2f2190ca4487904018061cd"
    assert root == blake3(b"headstart.root.1" + b"\x0b" + bytes(7) + b"fingerprint" + b"salt").digest()
    first = block_id(root, as_tokens([1, 2, 3, 2**31 - 1]))
    assert first.hex() == "2f1cb22c7cb52ce1609bf2b84c80b71165240a098f5228486e9c94579bd42b8a"
    little = b"\1\0\0\0\2\0\0\0\3\0\0\0\xff\xff\xff\x7f"
    assert first == blake3(b"headstart.block.1" + root + little).digest()
    ids = Chain(root, 2, as_tokens(range(7))).ids
    assert [key.hex() for key in ids] == [
        "3f0caf6b546386fa49b52d301c83ab0ee7978195153030f0cb584212757e8c4f",
        "0694272ed56055ce1db568bcc7999ad2f3fb1bde1adcd261f6accd3471441e28",
        "f2abfeb03f7c0fa4b366ef48ed3b32cd7cb3d2905f24b186582951419da23c30",
    ]


@given(TOKENS, TOKENS, GRIDS)
def test_ids_are_content(a: list[int], b: list[int], block_size: int) -> None:
    """Two chains share exactly the ids of the whole blocks of their common prefix: same id, same history."""
    ours, theirs = chain(a, block_size).ids, chain(b, block_size).ids
    shared = common_prefix(as_tokens(a), as_tokens(b)) // block_size
    assert ours[:shared] == theirs[:shared]
    assert not set(ours[shared:]) & set(theirs)
    assert len(set(ours)) == len(ours) == len(a) // block_size


@given(TOKENS, GRIDS, st.data())
def test_chain_of_a_prefix_is_a_prefix_of_the_chain(tokens: list[int], block_size: int, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(tokens)))
    part, whole = chain(tokens[:cut], block_size).ids, chain(tokens, block_size).ids
    assert part == whole[: len(part)]


@given(TOKENS, GRIDS)
def test_chain_is_made_of_block_ids(tokens: list[int], block_size: int) -> None:
    whole = chain(tokens, block_size)
    for number, key in enumerate(whole.ids):
        assert key == block_id(whole.parent_of(number), whole.block(number))
    assert whole.parent_of(0) == whole.root


@given(st.lists(st.integers(0, 99), min_size=1, max_size=20), st.text(), st.text(), st.binary(), st.binary())
def test_salt_and_fingerprint_separate(tokens: list[int], salt: str, other: str, ours: bytes, theirs: bytes) -> None:
    a, b = chain(tokens, 1, salt, ours), chain(tokens, 1, other, theirs)
    assert (set(a.ids) & set(b.ids) == set()) == ((salt, ours) != (other, theirs))


def test_root_has_no_seam() -> None:
    """Moving a character between fingerprint and salt gives another root."""
    assert root_id(b"ab", "c") != root_id(b"a", "bc")


@given(TOKENS, TOKENS)
def test_common_prefix(a: list[int], b: list[int]) -> None:
    count = common_prefix(as_tokens(a), as_tokens(b))
    assert a[:count] == b[:count]
    assert count == min(len(a), len(b)) or a[count] != b[count]


@given(st.integers(1, 1000), GRIDS)
def test_last_block_boundary(length: int, block_size: int) -> None:
    point = last_block_boundary(length, block_size)
    assert point % block_size == 0
    assert 1 <= length - point <= block_size, "the open tail is never empty and never more than a block"


def test_tokens_cannot_change() -> None:
    source = np.array([1, 2, 3], dtype=np.int32)
    tokens = as_tokens(source)
    source[0] = 9
    assert tokens.tolist() == [1, 2, 3]
    assert not tokens.flags.writeable
