"""Cards of servers, and what differs between them."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from headstart.names import option
from headstart.tiers.shared.folder import FolderStore
from headstart.tiers.shared.keys import FleetKeys, TagKeys
from headstart.tiers.shared.servers import WORDS, ServerCard, cards, differences, publish


def card(host: str, **identity: str) -> ServerCard:
    return ServerCard(host.encode().hex().ljust(16, "0")[:16], host, "model", "00" * 32, identity)


def test_cards_are_seen_by_servers_with_the_same_keys_only(tmp_path: Path) -> None:
    store, keys = FolderStore(tmp_path, 30.0), TagKeys(FleetKeys.generate())
    for host in ("two", "one", "two"):
        publish(store, keys, card(host, kv_type="f16"))
    assert cards(store, keys) == [card("one", kv_type="f16"), card("two", kv_type="f16")]
    assert cards(store, TagKeys(FleetKeys.generate())) == []


def test_a_bad_card_is_left_out(tmp_path: Path) -> None:
    store, keys = FolderStore(tmp_path, 30.0), TagKeys(FleetKeys.generate())
    publish(store, keys, card("one"))
    (path,) = [path for path in tmp_path.rglob("*") if path.is_file()]
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    assert cards(store, keys) == []


def test_what_differs_is_said_in_words() -> None:
    long = "AVX = 1 | AVX2 = 1 | " + " | ".join(f"F{number} = 1" for number in range(20))
    here, there = {"kv_type": "f16", "system": long + " | AMX_INT8 = 1", "batch": "512"}, {"kv_type": "q8_0", "system": long}
    assert differences(here, {**there, "batch": "512"}) == [
        "another processor, or a build for another one (only here: AMX_INT8 = 1; only there: nothing)",
        f"another {option('kv_type')} (f16 here, q8_0 there)",
    ]
    assert differences(here, here) == []


@given(*[st.dictionaries(st.sampled_from([*WORDS, "new"]), st.text(max_size=3), max_size=5)] * 2)
def test_equal_identities_and_only_these_have_no_difference(here: dict[str, str], there: dict[str, str]) -> None:
    equal = {**dict.fromkeys(there, "none"), **here} == {**dict.fromkeys(here, "none"), **there}
    assert (differences(here, there) == []) == equal
