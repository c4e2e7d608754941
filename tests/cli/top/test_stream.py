"""Bytes become batches, wherever they are cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from effort import examples
from headstart.cli.top.stream import Decoder, ReadBatch
from scripted_top import batch, encoded, entry, request

STREAM = b":\n\nretry: 2000\n" + encoded(
    batch(("snapshot", {"owner": "é"}), ("tree", [entry(1), entry(2, 1)]), ("requests", [request(1)])),
    batch(("tree", [{"left": entry(2, 1)["id"]}])),
    batch(),
)


@examples(100)
@given(st.lists(st.integers(0, len(STREAM)), max_size=30).map(sorted))
def test_any_cut_gives_the_same_batches(cuts: list[int]) -> None:
    decoder, found = Decoder(), list[ReadBatch]()
    for start, end in zip([0, *cuts], [*cuts, len(STREAM)], strict=True):
        found += decoder.feed(STREAM[start:end])
    assert found == Decoder().feed(STREAM)
    assert [one.id for one in found] == ["x-0", "x-1", "x-2"]
    assert [len(one.events) for one in found] == [3, 1, 0]


def test_what_has_no_mark_yet_is_not_shown() -> None:
    half = encoded(batch(("tree", [entry(1)]))).rpartition(b"id: ")[0]
    assert Decoder().feed(half) == []


@pytest.mark.parametrize("name", ["end", "dropped"])
def test_last_words_come_at_once(name: str) -> None:
    (found,) = Decoder().feed(f'event: {name}\ndata: {{"reason":"x"}}\n\n'.encode())
    assert found.events[0][0] == name
    assert found.id == ""


NESTED = b"event: tree\ndata: " + b"[" * 100_000 + b"\n\n"


@pytest.mark.parametrize("data", [b"event: tree\ndata: {\n\n", b"\xff\xfe: 1\n\n", NESTED])
def test_what_is_no_event_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  (any of its subclasses)
        Decoder().feed(data)


def test_a_batch_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.cli.top.stream.LONGEST", 1000)
    with pytest.raises(ValueError, match="without an end"):
        Decoder().feed(b"event: tree\ndata: []\n\n" * 100)
