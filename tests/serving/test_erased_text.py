"""What a user has deleted is found in a text, and nothing else is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headstart.interfaces.tokens import as_tokens
from headstart.prefix_cache.blocks import Chain, block_id
from headstart.prefix_cache.entry import Entry
from headstart.prefix_cache.index import Index
from headstart.serving.erased_text import ErasedText

ROOT, BLOCK = b"root", 4
TEXTS = st.lists(st.integers(0, 2), min_size=1, max_size=14)


def chain_of(tokens: list[int]) -> Chain:
    return Chain(ROOT, BLOCK, as_tokens(tokens))


def last_of(tokens: list[int]) -> Entry:
    """The last block of a text, or its open tail."""
    chain, whole = chain_of(tokens), (len(tokens) - 1) // BLOCK
    part = chain.block(whole)
    return Entry(block_id(chain.parent_of(whole), part), chain.parent_of(whole), part, whole * BLOCK)


@given(TEXTS, TEXTS)
def test_a_text_has_what_it_begins_with(deleted: list[int], text: list[int]) -> None:
    last = last_of(deleted)
    tails = [(last.parent, last.packed)] if last.length < BLOCK else []
    erased = ErasedText(BLOCK, {last.id}, tails)
    assert erased.within(chain_of(text)) == (text[: len(deleted)] == deleted)


def test_nothing_is_in_no_text() -> None:
    assert not ErasedText(BLOCK)
    assert not ErasedText(BLOCK).within(chain_of([1, 2, 3, 4, 5]))


@given(TEXTS, st.lists(TEXTS, max_size=6))
def test_a_longer_sibling_extends_a_tail(text: list[int], others: list[list[int]]) -> None:
    """Then the tail's text stays."""
    tail, index = last_of(text), Index(BLOCK)
    for tokens in (text, *others):
        index.add(last_of(tokens), "memory", canonical=True)
    siblings = [entry for entry in index if entry.parent == tail.parent]
    longer = any(entry.packed.startswith(tail.packed) and entry.length > tail.length for entry in siblings)
    assert index.children(tail.parent).extends(tail.packed) == longer
