"""`headstart cache`: what is stored can be listed, explained, verified, pinned and deleted by its owner."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from headstart.cli import main
from headstart.stores.disk import Disk, Label

Run = Callable[..., str]
SIZE = 5000


def key(number: int) -> bytes:
    return bytes([number + 1]) * 32


def block(number: int, parent: int | None) -> tuple[Label, np.ndarray[tuple[int], np.dtype[np.uint8]]]:
    start = 0 if parent is None else 8 * (parent % 16 + 1)
    label = Label(key(number), bytes(32) if parent is None else key(parent), b"m" * 32, start, tuple(range(8)), True, 0.5)
    return label, np.random.default_rng(number).integers(0, 256, SIZE, np.uint8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two chains that part after two blocks: 0 1 2 3 and 0 1 18."""
    disk = Disk(tmp_path, 1 << 40)
    disk.write([block(0, None), block(1, 0), block(2, 1), block(3, 2), block(18, 1)])
    disk.close()
    return tmp_path


@pytest.fixture
def cache(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str, code: int = 0, place: Path = folder) -> str:
        with pytest.raises(SystemExit) as end:
            main(["cache", *arguments, "--cache-dir", str(place)])
        captured = capsys.readouterr()
        assert end.value.code == code, captured
        return captured.out + captured.err

    return run


def keys(folder: Path) -> set[int]:
    return {bytes.fromhex(path.stem)[0] - 1 for path in (folder / "objects").iterdir()}


def test_chains_are_listed(cache: Run) -> None:
    listed = cache("ls")
    rows = [re.split(r"\s*│\s*", line)[1:] for line in listed.splitlines() if line.startswith("│")]
    assert {row[0] for row in rows} == {key(3).hex()[:12], key(18).hex()[:12]}
    assert {row[1] for row in rows} == {"32", "24"}
    assert "5 in 2 chains" in cache("stats")


def test_a_chain_is_shown_by_the_beginning_of_its_id(cache: Run) -> None:
    shown = cache("show", key(3).hex()[:4])
    assert [number for number in range(20) if key(number).hex()[:12] in shown] == [0, 1, 2, 3]
    assert "no blocks begin with" in cache("show", "ffff", code=1).lower()


def test_damage_is_found_and_put_aside(cache: Run, folder: Path) -> None:
    assert "5 of 5" in cache("verify")
    path = folder / "objects" / f"{key(2).hex()}.rows"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert "4 of 5" in cache("verify", code=1)
    assert "corrupt" in cache("verify", "--repair")
    assert keys(folder) == {0, 1, 3, 18}
    assert "without a beginning: 1" in cache("gc")
    assert keys(folder) == {0, 1, 18}


def test_what_is_pinned_stays(cache: Run, folder: Path) -> None:
    assert "3 blocks" in cache("pin", key(18).hex()[:4])
    cache("gc", "--size", "0")
    assert keys(folder) == {0, 1, 18}
    assert "deleted: 0" in cache("rm", "--all")
    assert "pinned" in cache("ls")
    cache("unpin", key(18).hex()[:4])
    cache("rm", "--all")
    assert keys(folder) == set()


def test_what_others_hang_on_is_not_deleted(cache: Run, folder: Path) -> None:
    assert "deleted: 2 blocks" in cache("rm", key(3).hex()[:4])
    assert keys(folder) == {0, 1, 18}
    assert "Give an id" in cache("rm", code=2)


def test_chains_move_to_another_machine(cache: Run, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    file, other = tmp_path_factory.mktemp("out") / "chains.tar", tmp_path_factory.mktemp("other")
    assert "exported: 3" in cache("export", str(file), key(18).hex()[:4])
    data = bytearray(file.read_bytes())
    assert "imported: 3 blocks; bad: 0" in cache("import", str(file), place=other)
    assert keys(other) == {0, 1, 18}
    assert "3 of 3" in cache("verify", place=other)
    assert "imported: 0" in cache("import", str(file), place=other)
    data[20_000] ^= 1
    file.write_bytes(data)
    assert "bad: 1" in cache("import", str(file), place=tmp_path_factory.mktemp("third"))


def test_an_empty_folder_is_said(cache: Run, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert "Nothing is stored" in cache("ls", code=2, place=tmp_path_factory.mktemp("empty"))
