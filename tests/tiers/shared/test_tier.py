"""The shared tier as a whole: what it takes from other servers. With a real store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from headstart.tiers.disk import Note
from headstart.tiers.shared.breaker import FIRST
from headstart.tiers.shared.folder import FolderStore
from headstart.tiers.shared.keys import FleetKeys, TagKeys
from live import wait_until
from stores import ValkeyServer
from tiers_shared import OWNER, prompt, request, tier_of

KEYS = TagKeys(FleetKeys.generate())
SIZE = 20_000


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FolderStore]:
    store = FolderStore(tmp_path, 30.0)
    yield store
    store.close()


def test_notes_of_a_distrusted_server_are_not_used(store: FolderStore) -> None:
    """Fault: its blocks were passed over, and the reply tokens that it had noted were used."""
    broken, sound, tier = (tier_of(store, KEYS) for _ in range(3))
    notes = [Note(bytes([number]) * 64, b"b" * 32, b"tokens") for number in range(2)]
    for server, note in zip((broken, sound), notes, strict=True):
        server.note(OWNER, note)
        wait_until(lambda server=server: server.counters["notes_saved"] == 1)
    tier.distrust([request(prompt(1), SIZE).label(0)], broken._writing._card.writer)
    assert [tier.find_note(OWNER, note.key) for note in notes] == [None, notes[1]]
    assert tier.counters["fault_distrusted"] == tier.counters["notes_fetched"] == 1
    for server in (broken, sound, tier):
        server.close(5)


def test_a_request_waits_once_for_a_store_that_hangs(valkey: ValkeyServer) -> None:
    """Fault: a prompt with several unknown replies waited for each of their notes, and then for its blocks."""
    store = valkey.store(timeout=0.05)
    tier = tier_of(store, KEYS)
    try:
        valkey.hang()
        assert tier.find_note(OWNER, b"1" * 64) is None
        assert 0 < tier._link.breaker.seconds(tier._link.clock()) <= FIRST
        assert tier.fetch(request(prompt(3), SIZE), lambda: None) is None
    finally:
        valkey.go_on()
        tier.close(5)
