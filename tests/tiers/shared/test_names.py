from __future__ import annotations

from typing import get_args

from hypothesis import given
from hypothesis import strategies as st

from headstart.tiers.shared.names import ObjectKind, ObjectNames, parse

KINDS = st.sampled_from(get_args(ObjectKind))
WHAT = st.tuples(st.binary(max_size=9), KINDS, st.binary(max_size=40))


@given(st.sets(WHAT, max_size=8), st.binary(min_size=32, max_size=32))
def test_names_are_different_and_say_owner_and_kind(all: set[tuple[bytes, ObjectKind, bytes]], key: bytes) -> None:
    names = ObjectNames(key)
    made = {what: names.of(*what) for what in all}
    assert len(set(made.values())) == len(all)
    for (owner, kind, _), name in made.items():
        assert name.startswith(names.prefix(owner))
        parsed = parse(name)
        assert parsed is not None
        assert parsed.kind == kind
        assert names.prefix(owner) == f"hs1/{parsed.owner}/"


@given(WHAT, st.binary(min_size=32, max_size=32))
def test_names_need_the_key_and_depend_on_encryption(what: tuple[bytes, ObjectKind, bytes], key: bytes) -> None:
    other = bytes([key[0] ^ 1]) + key[1:]
    owners = {names.of(*what).split("/")[1] for names in (ObjectNames(key), ObjectNames(key, True), ObjectNames(other))}
    digests = {names.of(*what).split("/")[3] for names in (ObjectNames(key), ObjectNames(key, True), ObjectNames(other))}
    assert len(owners) == len(digests) == 3


@given(WHAT)
def test_names_show_neither_owner_nor_id(what: tuple[bytes, ObjectKind, bytes]) -> None:
    owner, _, id = what
    name = ObjectNames(b"k" * 32).of(*what)
    assert len(owner) < 4 or owner.hex() not in name
    assert len(id) < 4 or id.hex() not in name


@given(st.text())
def test_other_texts_are_no_names(text: str) -> None:
    assert parse(text) is None
    name = ObjectNames(b"k" * 32).of(b"", "kv", b"")
    assert parse(name + "0") is parse(name.upper()) is parse("hs0" + name[3:]) is parse("/" + name) is None
    assert parse(name.replace("/kv/", "/row/")) is None
