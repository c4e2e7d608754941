"""Terms: the shortest of many, what makes a search due, and what is forgotten."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from effort import examples
from headstart.prefix_cache import expiry
from headstart.prefix_cache.expiry import Terms, outlived

DAY = 86_400.0
CHANGES = st.lists(st.tuples(st.integers(0, 5), st.sampled_from((None, 1.0, 2.0, 3.0))), max_size=40)


@given(changes=CHANGES, most=st.sampled_from((math.inf, 2.5)))
@examples(60)
def test_the_shortest_term_is_known(changes: list[tuple[int, float | None]], most: float) -> None:
    terms, model = Terms(most), dict[bytes, float]()
    for number, term in changes:
        owner = b"%d" % number
        terms.give(owner, term, 0.0)
        model.pop(owner, None)
        if term is not None:
            model[owner] = term
        assert terms.owners == model
        assert terms.shortest == min((most, *model.values()))
        assert (owner in terms) == (owner in model)


@given(changes=CHANGES, most=st.sampled_from((math.inf, 2.5)))
@examples(60)
def test_no_search_finds_more_than_the_earliest_one(changes: list[tuple[int, float | None]], most: float) -> None:
    """Others' terms make searches more frequent, which lets an owner's entries stay longer."""
    terms = Terms(most)
    for number, term in changes:
        terms.give(b"%d" % number, term, 0.0)
    for owner in {b"%d" % number for number, _ in changes}:
        earliest = terms.earliest_cut(owner, 100.0)
        assert terms.cut(owner, 100.0) <= earliest + 1e-9
        if terms.of(owner) == terms.shortest < math.inf:
            assert abs(terms.cut(owner, 100.0) - earliest) < 1e-9


def test_only_a_shorter_term_makes_a_search_due() -> None:
    """Each user of a key with a term is an owner: if each made one, a request would cost what is stored."""
    terms = Terms()

    def searched(owner: bytes, term: float | None) -> bool:
        before = terms.version
        terms.give(owner, term, 0.0)
        return terms.version > before

    assert searched(b"first", 7 * DAY)
    assert not any(searched(b"%d" % number, 7 * DAY) for number in range(100))
    assert not searched(b"long", 9 * DAY)
    assert searched(b"long", 8 * DAY), "its own became shorter"
    assert searched(b"new", DAY), "the shortest one"
    assert not searched(b"new", None)
    assert terms.shortest == 7 * DAY


def test_terms_are_forgotten_a_few_at_a_time() -> None:
    terms, count = Terms(), 3 * expiry.AT_ONCE
    for number in range(count):
        terms.give(b"%d" % number, DAY if number % 3 else 900 * DAY, 0.0)
    later = outlived(DAY, 0.0) + 1
    terms.forget(later)
    assert count - expiry.AT_ONCE <= len(terms.owners) < count - expiry.AT_ONCE / 2
    for _ in range(4):
        terms.forget(later)
    assert {*terms.owners.values()} == {900 * DAY}
    assert terms.news().keys() == terms.owners.keys()


def test_a_folder_does_not_undo_what_it_has_not_heard() -> None:
    terms = Terms()
    terms.give(b"one", DAY, 0.0)
    heard = terms.news()
    terms.give(b"two", 2 * DAY, 0.0)
    terms.give(b"one", 3 * DAY, 0.0)
    terms.kept(heard)
    terms.learn({b"one": DAY, b"other": DAY})
    assert terms.owners == {b"one": 3 * DAY, b"two": 2 * DAY, b"other": DAY}
    terms.kept(terms.news())
    assert not terms.news()
    terms.learn({b"two": 2 * DAY})
    assert terms.owners == {b"two": 2 * DAY}
    assert terms.shortest == 2 * DAY
