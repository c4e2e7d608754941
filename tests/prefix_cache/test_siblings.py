"""Siblings against a search of all of them, and how many of them a search looks at."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from effort import examples
from headstart.interfaces.tokens import as_tokens, common_prefix
from headstart.prefix_cache.blocks import Chain, block_id, checkpoint_id
from headstart.prefix_cache.entry import Entry
from headstart.prefix_cache.index import Index
from headstart.prefix_cache.siblings import Siblings, common_bytes
from small_blocks import ROOT


@dataclass(eq=False)
class Node:
    packed: bytes
    canonical: bool


# Tokens that are in another order as bytes than as numbers, and a few that share their first bytes.
TOKENS = st.lists(st.sampled_from([1, 256, 257]), min_size=1, max_size=4)


def packed(tokens: list[int]) -> bytes:
    return as_tokens(tokens).tobytes()


def test_of_two_that_share_as_much_the_canonical_one_is_found() -> None:
    """The next token of the derived one is another one too, but it begins with the same byte."""
    siblings = Siblings[Node]()
    canonical, derived = Node(packed([1, 256]), True), Node(packed([1, 257]), False)
    for node in (canonical, derived):
        siblings.put(node)
    assert siblings.nearest(packed([1, 1]), canonical_only=False) == (canonical, 1)


@given(st.dictionaries(TOKENS.map(tuple), st.booleans(), max_size=40), st.data())
@examples(300)
def test_searches_find_what_a_look_at_all_finds(stored: dict[tuple[int, ...], bool], data: st.DataObject) -> None:
    siblings = Siblings[Node]()
    nodes = [Node(packed(list(tokens)), canonical) for tokens, canonical in stored.items()]
    for node in nodes:
        siblings.put(node)
    for node in data.draw(st.lists(st.sampled_from(nodes), unique=True)) if nodes else ():
        siblings.take(node)
        if data.draw(st.booleans()):
            node.canonical = not node.canonical
            siblings.put(node)
        else:
            nodes.remove(node)
        siblings.check()
    assert set(siblings) == set(nodes)
    assert siblings.branches == (sum(node.canonical for node in nodes) >= 2)
    query, canonical_only = data.draw(TOKENS), data.draw(st.booleans())
    usable = [node for node in nodes if node.canonical or not canonical_only]
    shared = {node: common_prefix(np.frombuffer(node.packed, "<i4"), as_tokens(query)) for node in usable}
    best, most = siblings.nearest(packed(query), canonical_only=canonical_only)
    assert most == max(shared.values(), default=0)
    assert (best is None) == (most == 0)
    assert best is None or shared[best] == most
    prefixes = list(siblings.prefixes(packed(query), canonical_only=canonical_only))
    assert len(prefixes) == len(set(prefixes))
    assert set(prefixes) == {node for node in usable if packed(query).startswith(node.packed)}
    assert siblings.continues(packed(query)) == any(node.packed.startswith(packed(query)) for node in nodes)


@given(TOKENS, st.sets(st.integers(1, 6)), st.lists(TOKENS, max_size=9), st.booleans())
def test_each_prefix_is_found_the_longest_first(
    base: list[int], lengths: set[int], others: list[list[int]], canonical: bool
) -> None:
    query = (base * 6)[:6]
    stored = {packed(query[:length]) for length in lengths} | set(map(packed, others))
    siblings = Siblings[Node]()
    for one in sorted(stored):
        siblings.put(Node(one, canonical))
    found = [node.packed for node in siblings.prefixes(packed(query), canonical_only=canonical)]
    assert found == sorted((one for one in stored if packed(query).startswith(one)), key=len, reverse=True)


@given(st.binary(max_size=9), st.binary(max_size=9))
def test_common_bytes(a: bytes, b: bytes) -> None:
    count = common_bytes(a, b)
    assert a[:count] == b[:count]
    assert count == min(len(a), len(b)) or a[count] != b[count]


def test_all_can_move_to_another_parent() -> None:
    one, other, node = Siblings[Node](), Siblings[Node](), Node(b"abcd", True)
    one.put(node)
    one.move_to(other)
    assert list(one) == []
    assert list(other) == [node]


class Counting(Entry):
    """Counts how often its tokens are looked at."""

    __slots__ = ()
    looks = 0

    def __getattribute__(self, name: str) -> object:
        if name == "packed":
            Counting.looks += 1
        return super().__getattribute__(name)


def looked_at(index: Index, chain: Chain) -> dict[str, int]:
    found = {}
    for name, search in {
        "match": lambda: index.match(chain, len(chain), canonical_only=False, partial=True),
        "exact": lambda: index.match(chain, len(chain), canonical_only=True, partial=True),
        "resume": lambda: index.resume(chain, len(chain), canonical_only=False),
        "covered": lambda: index.covered(ROOT, chain.tokens),
        "covers": lambda: index.covers(ROOT, chain.tokens),
        "branch": lambda: index.is_branch_point(ROOT),
    }.items():
        Counting.looks = 0
        search()
        found[name] = Counting.looks
    return found


@pytest.mark.parametrize("canonical", [True, False], ids=["canonical", "derived"])
def test_a_search_looks_at_few_of_many(canonical: bool) -> None:
    """All begin with the same tokens. With `canonical` off, two canonical ones stand among thousands of derived ones."""
    dice, counts, block_size = np.random.default_rng(0), {}, 16
    texts = dice.integers(0, 50_000, (10_000, 12))
    texts[:, :3] = 7
    query = Chain(ROOT, block_size, as_tokens([7, 7, 7, *dice.integers(0, 50_000, 6)]))
    index = Index(block_size)
    for number, text in enumerate(texts):
        key = block_id(ROOT, as_tokens(text))
        entry = Counting(key, ROOT, as_tokens(text), 0)
        index.add(entry, "memory", canonical=canonical or number < 2)
        index.add(Entry(checkpoint_id(key), key, as_tokens(text), 0, state=True), "memory", canonical=canonical)
        if number + 1 in (100, 10_000):
            counts[number + 1] = looked_at(index, query)
    assert counts[100] == counts[10_000]
    assert max(counts[10_000].values()) <= 16
    assert counts[10_000]["match"] > 0
