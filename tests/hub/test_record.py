from __future__ import annotations

from pathlib import Path

from headstart.hub.record import Fetched, FetchRecord


def test_a_cache_has_a_record_of_its_own(tmp_path: Path) -> None:
    one, other = FetchRecord(tmp_path / "state", tmp_path / "a"), FetchRecord(tmp_path / "state", tmp_path / "b")
    assert not one.has("o/n", "12")
    one.add("12", Fetched("o/n", "n.gguf", 5))
    one.add("12", Fetched("o/n", "n.gguf", 5))
    assert one.has("o/n", "12")
    assert not other.has("o/n", "12")
    assert not one.has("o/n", "13")
    assert FetchRecord(tmp_path / "state", tmp_path / "a").has("o/n", "12")


def test_what_another_program_has_fetched_is_noted_and_not_owned(tmp_path: Path) -> None:
    record = FetchRecord(tmp_path / "state", tmp_path / "a")
    asked = Fetched("o/n", "n.gguf", 5, own=False)
    record.add("12", asked)
    assert record.get("o/n", "12") == asked
    assert record.get("o/n", "13") is None
    assert not record.has("o/n", "12")
    assert record.all() == []


def test_what_is_forgotten_leaves_nothing(tmp_path: Path) -> None:
    record = FetchRecord(tmp_path / "state", tmp_path / "a")
    for digest in ("12", "13"):
        record.add(digest, Fetched("o/n", "n.gguf", 5))
    record.forget("o/n", "12")
    assert not record.has("o/n", "12")
    assert record.has("o/n", "13")
    record.forget("o/n", "13")
    record.forget("o/n", "13")
    assert not [*(tmp_path / "state" / "fetched").iterdir()]
