"""`headstart cache`: what is stored can be listed, explained, verified, pinned and deleted by its owner."""

from __future__ import annotations

import json
import os
import re
import shutil
import sqlite3
import tarfile
import time
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import headstart
from headstart.cli.main import main
from headstart.prefix_cache.blocks import checkpoint_id
from headstart.tiers.disk import Disk, Label, StoredModel, archive
from headstart.tiers.disk import store as disk_store
from headstart.tiers.disk.catalog import Row
from headstart.tiers.disk.chains import StoredChains
from headstart.units import show_size

Run = Callable[..., str]
Data = np.ndarray[tuple[int], np.dtype[np.uint8]]
Block = tuple[Label, Data]
Places = pytest.TempPathFactory
SIZE = 5000
OBJECT = 3 * 4096
"""Bytes that an object of SIZE bytes occupies."""


def key(number: int) -> bytes:
    return bytes([number + 1]) * 32


def short(number: int) -> str:
    return key(number).hex()[:4]


def block(number: int, parent: int | None) -> Block:
    start = 0 if parent is None else 8 * (parent % 16 + 1)
    label = Label(key(number), bytes(32) if parent is None else key(parent), b"m" * 32, start, tuple(range(8)), True, 0.5)
    return label, np.random.default_rng(number).integers(0, 256, SIZE, np.uint8)


STATE = 2 * SIZE
STATE_OBJECT = 4 * 4096
"""Bytes that a checkpoint of STATE bytes occupies."""


def checkpoint(number: int, parent: int | None) -> Block:
    """The checkpoint at the end of a block, counted from 100."""
    label, _ = block(number, parent)
    data = np.random.default_rng(100 + number).integers(0, 256, STATE, np.uint8)
    return replace(label, key=key(100 + number), parent=label.key, kind="state", seconds=1.5), data


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


def change(folder: Path, *blocks: Block, pinned: tuple[int, ...] = ()) -> None:
    disk = Disk(folder, 1 << 40)
    disk.write(blocks)
    disk.catalog.pin([key(number) for number in pinned])
    disk.close()


def derived(label: Label, data: Data) -> Block:
    return replace(label, canonical=False), data


def with_state(folder: Path) -> None:
    """Checkpoints: one where the two chains part, and one at the end of the longer."""
    change(folder, checkpoint(1, 0), checkpoint(3, 2))


def damage(folder: Path, number: int) -> None:
    path = folder / "objects" / f"{key(number).hex()}.rows"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def pinned(folder: Path) -> set[int]:
    with sqlite3.connect(folder / "index.sqlite") as database:
        found = {one[0] - 1 for (one,) in database.execute("SELECT key FROM objects WHERE pinned")}
    database.close()
    return found


def keys(folder: Path) -> set[int]:
    return {bytes.fromhex(path.stem)[0] - 1 for path in (folder / "objects").iterdir()}


def test_chains_are_listed(cache: Run) -> None:
    rows = listed(cache("ls"))
    assert {row[0] for row in rows} == {key(3).hex()[:12], key(18).hex()[:12]}
    assert {row[1] for row in rows} == {"32", "24"}
    assert "5 in 2 chains" in cache("stats")


def test_a_chain_is_shown_by_the_beginning_of_its_id(cache: Run, folder: Path) -> None:
    shown = cache("show", short(3))
    assert [number for number in range(20) if key(number).hex()[:12] in shown] == [0, 1, 2, 3]
    assert "No block begins with 'ffff'; `headstart cache ls`" in cache("show", "ffff", code=2)
    change(folder, block(15, 1))
    assert "2 blocks begin with '1'; give more digits." in cache("show", "1", code=2)


def test_all_is_there_as_data(cache: Run, folder: Path) -> None:
    cache("pin", short(18))
    chains = {chain["id"]: chain for chain in json.loads(cache("ls", "--json"))}
    assert set(chains) == {key(3).hex(), key(18).hex()}
    chain = chains[key(3).hex()]
    assert (chain["tokens"], chain["bytes"], chain["own_bytes"], chain["seconds"]) == (32, 4 * OBJECT, 2 * OBJECT, 2.0)
    assert (chain["fingerprint"], chain["pinned"], chain["complete"]) == ("6d" * 32, False, True)
    assert chains[key(18).hex()]["pinned"]
    shown = json.loads(cache("show", short(18), "--json"))
    assert [part["id"] for part in shown["blocks"]] == [key(number).hex() for number in (0, 1, 18)]
    assert [(part["start"], part["pinned"], part["canonical"]) for part in shown["blocks"]] == [
        *((0, True, True), (8, True, True), (16, True, True)),
    ]
    stats = json.loads(cache("stats", "--json"))
    assert (stats["folder"], stats["chains"], stats["blocks"], stats["pinned"]) == (str(folder), 2, 5, 3)
    assert (stats["bytes"], stats["put_aside_bytes"]) == (5 * OBJECT, 0)
    assert [(model["fingerprint"], model["blocks"]) for model in stats["models"]] == [("6d" * 32, 5)]


def test_one_is_not_many(cache: Run, folder: Path) -> None:
    assert "deleted: 1 block, 12 KiB" in cache("rm", short(18))
    assert "4 in 1 chain\n" in cache("stats")


# ── deleting by age ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_deletion_that_was_killed_can_be_given_again(cache: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows were gone, and the objects not: nothing began with the id, and the next server brought the chain back."""

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, closing(Disk(folder, 1 << 40)) as disk:
        patch.setattr(Path, "unlink", killed)
        with pytest.raises(KeyboardInterrupt):
            disk.erase([key(3), key(2)])
    assert keys(folder) == {0, 1, 2, 3, 18}
    assert "deleted: 2 blocks" in cache("rm", short(3))
    assert keys(folder) == {0, 1, 18}


def test_what_is_old_is_deleted(cache: Run, folder: Path) -> None:
    """By when it was written, and all of it; what is pinned stays, and is said."""
    now = time.time()
    old = [(replace(one, written=now - number * 3600), data) for number in (40, 41, 42) for one, data in [block(number, None)]]
    change(folder, *old, pinned=(41,))
    assert keys(folder) == {0, 1, 2, 3, 18, 40, 41, 42}
    assert "deleted: 0 blocks, 0 B\n" in cache("rm", "--older-than", "2d")
    said = cache("rm", "--older-than", "40h")
    assert "deleted: 2 blocks, 24 KiB\n" in said
    assert "still there, because pinned: 1 block; unpin them with `headstart cache unpin`\n" in said
    assert keys(folder) == {0, 1, 2, 3, 18, 41}
    assert not any(key(number) in path.read_bytes() for number in (40, 42) for path in folder.iterdir() if path.is_file())
    assert "deleted: 5 blocks, 60 KiB\n" in cache("rm", "--all")
    assert keys(folder) == {41}


def test_what_to_delete_is_said_in_one_way(cache: Run) -> None:
    assert "Give one of: an id, --all, --older-than." in cache("rm", code=2)
    for wrong in (("--all", "--older-than", "7d"), (short(3), "--all"), (short(3), "--older-than", "7d")):
        assert "Give only one of: an id, --all, --older-than." in cache("rm", *wrong, code=2)
    assert "'7' is not a time; write it like 7d, 12h or 90min" in cache("rm", "--older-than", "7", code=2)


@pytest.mark.parametrize("nameless", [True, False])
def test_an_export_leaves_out_what_is_deleted_meanwhile(
    folder: Path, tmp_path_factory: Places, monkeypatch: pytest.MonkeyPatch, nameless: bool
) -> None:
    """And nobody sees it before it is whole; one that is broken off leaves nothing."""
    if not nameless:
        monkeypatch.setattr(archive, "_open_nameless", lambda _: None)
    place = tmp_path_factory.mktemp("out")
    with closing(Disk(folder, 1 << 40)) as disk, closing(Disk(folder, 1 << 40)) as other:
        chains = StoredChains(disk.catalog.rows())
        rows = [*chains.of(key(3)).rows, *chains.of(key(18)).own]

        def beside(go: Callable[[], object]) -> Iterator[Row]:
            yield from rows
            go()
            assert nameless == (not list(place.glob(".*")))

        packed, left = archive.pack(disk, beside(lambda: other.erase([key(3)])), place / "one.tar")
        assert [label.key[0] - 1 for label in packed] == [0, 1, 2, 18]
        assert not left
        with tarfile.open(place / "one.tar") as tar:
            assert [bytes.fromhex(name.removesuffix(".rows"))[0] - 1 for name in tar.getnames()] == [0, 1, 2, 18]
        assert key(3) not in (place / "one.tar").read_bytes()
        assert os.stat(place / "one.tar").st_mode & 0o777 == 0o600
        rows = rows[:3]
        packed, _ = archive.pack(disk, beside(lambda: other.remove([key(2)])), place / "one.tar")
        assert [label.key[0] - 1 for label in packed] == [0, 1, 2], "that had to make room, no more"

        def breaks_off() -> Iterator[Row]:
            yield rows[0]
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            archive.pack(disk, breaks_off(), place / "two.tar")
        assert [path.name for path in place.iterdir()] == ["one.tar"]


def listed(text: str) -> list[list[str]]:
    """The cells of a table's lines, as far as there are any."""
    return [re.split(r"\s{2,}", line.rstrip()) for line in text.splitlines() if re.match("[0-9a-f]{12} ", line)]


def test_checkpoints_are_shown_where_they_are(cache: Run, folder: Path) -> None:
    with_state(folder)
    assert {row[0]: row[6] for row in listed(cache("ls"))} == {
        key(3).hex()[:12]: "2 checkpoints",
        key(18).hex()[:12]: "1 checkpoint",
    }
    assert "model 6d6d6d6d: 32 tokens, 2 blocks shared with others" in cache("ls")
    chains = {chain["id"]: chain for chain in json.loads(cache("ls", "--json"))}
    figures = [chains[key(number).hex()] for number in (3, 18)]
    assert [(one["checkpoints"], one["bytes"], one["own_bytes"], one["seconds"]) for one in figures] == [
        (2, 4 * OBJECT + 2 * STATE_OBJECT, 2 * OBJECT + STATE_OBJECT, 2.0),
        (1, 3 * OBJECT + STATE_OBJECT, OBJECT, 1.5),
    ]
    change(folder, derived(*checkpoint(2, 1)))
    shown = cache("show", short(3))
    assert [row[3] for row in listed(shown)][1:] == ["16 KiB", "16 KiB", "16 KiB"]
    assert [row[5] for row in listed(shown)[2:3]] == ["derived checkpoint"]
    assert "tokens 0 1 2 3 4 5 6 7\n" in shown
    shown = [one["checkpoint"] for one in json.loads(cache("show", short(18), "--json"))["blocks"]]
    assert [one and (one["id"], one["bytes"], one["pinned"]) for one in shown] == [
        *(None, (key(101).hex(), STATE_OBJECT, False), None),
    ]


def test_rows_and_checkpoints_are_counted_apart(cache: Run, folder: Path) -> None:
    assert " of checkpoints" not in cache("stats")
    with_state(folder)
    said = cache("stats")
    assert "5 in 2 chains\n" in said
    assert "92 KiB (60 KiB of KV, 32 KiB of checkpoints)\n" in said
    assert re.search(r"model +a model .*\(6d6d6d6d\)\n +5 blocks and 2 checkpoints, used .*\n +92 KiB \(60", said)
    stats = json.loads(cache("stats", "--json"))
    for figures in (stats, stats["models"][0]):
        assert (figures["blocks"], figures["checkpoints"], figures["checkpoint_bytes"]) == (5, 2, 2 * STATE_OBJECT)
        assert figures["bytes"] == 5 * OBJECT + 2 * STATE_OBJECT


def test_checkpoints_are_pinned_with_their_chain(cache: Run, folder: Path) -> None:
    with_state(folder)
    assert "pinned: 4 blocks and 2 checkpoints\n" in cache("pin", short(3))
    cache("gc", "--size", "0")
    assert keys(folder) == {0, 1, 2, 3, 101, 103}
    change(folder, block(18, 1))
    assert "pinned: 3 blocks and 1 checkpoint\n" in cache("pin", short(18))
    assert "pinned    5 blocks and 2 checkpoints\n" in cache("stats")
    said = cache("unpin", short(3))
    assert "unpinned: 2 blocks and 1 checkpoint\n" in said
    assert "need them: 2 blocks and 1 checkpoint\n" in said
    assert pinned(folder) == {0, 1, 18, 101}
    cache("rm", "--all")
    assert keys(folder) == {0, 1, 18, 101}


def test_what_a_pinned_checkpoint_needs_stays(cache: Run, folder: Path) -> None:
    with_state(folder)
    change(folder, pinned=(101,))
    cache("rm", "--all")
    assert keys(folder) == {0, 1, 101}


def test_a_pinned_checkpoint_whose_block_is_damaged_stays(cache: Run, folder: Path) -> None:
    """The block is computed again, and then the checkpoint can be used."""
    with_state(folder)
    change(folder, pinned=(0, 1, 101))
    damage(folder, 1)
    cache("verify", "--repair")
    said = cache("rm", "--all")
    assert keys(folder) == {0, 101}
    (digits,) = re.findall("`headstart cache unpin ([0-9a-f]+)` frees it", said)
    assert "unpinned: 0 blocks and 1 checkpoint\n" in cache("unpin", digits)
    assert "frees it" not in cache("rm", "--all")
    assert keys(folder) == {0}


def test_checkpoints_are_deleted_with_their_blocks(cache: Run, folder: Path) -> None:
    with_state(folder)
    assert "deleted: 2 blocks and 1 checkpoint, 40 KiB" in cache("rm", short(3))
    assert keys(folder) == {0, 1, 18, 101}
    assert "deleted: 3 blocks and 1 checkpoint, 52 KiB" in cache("rm", short(18))
    assert keys(folder) == set()


def test_a_deletion_leaves_no_ghost_of_a_checkpoint_that_was_evicted(cache: Run, folder: Path) -> None:
    label, data = checkpoint(3, 2)
    gone = checkpoint_id(key(3))
    change(folder, (replace(label, key=gone), data))
    disk = Disk(folder, 1 << 40)
    disk.remove([gone])
    assert disk.catalog.ghosts([gone])
    disk.close()
    cache("rm", short(3))
    disk = Disk(folder, 1 << 40)
    assert not disk.catalog.ghosts([gone])
    disk.close()


def test_a_checkpoint_without_its_block_is_lost(cache: Run, folder: Path) -> None:
    with_state(folder)
    damage(folder, 103)
    damage(folder, 1)
    assert "5 of 7" in cache("verify", code=1)
    cache("verify", "--repair")
    assert keys(folder) == {0, 2, 3, 18, 101}
    assert "without a beginning: 4" in cache("gc")
    assert keys(folder) == {0}


def test_chains_take_their_checkpoints_along(cache: Run, folder: Path, tmp_path_factory: Places) -> None:
    file, other = tmp_path_factory.mktemp("out") / "chains.tar", tmp_path_factory.mktemp("other")
    with_state(folder)
    change(folder, *(derived(*one) for one in (checkpoint(2, 1), block(40, 3), checkpoint(40, 3))))
    said = cache("export", str(file), short(40))
    assert "exported: 4 blocks and 2 checkpoints; left out, because derived: 1 block and 2 checkpoints" in said
    assert "imported: 4 blocks and 2 checkpoints; there before: 0; bad: 0" in cache("import", str(file), place=other)
    assert "6 of 6" in cache("verify", place=other)
    for number, parent in ((1, 0), (3, 2)):
        label, data = checkpoint(number, parent)
        disk, out = Disk(other, 1 << 40), np.empty(STATE, np.uint8)
        assert disk.read_into(label, out) == STATE
        assert (out == data).all()
        disk.close()
    with tarfile.open(file) as tar:
        names = [bytes.fromhex(name.removesuffix(".rows"))[0] - 1 for name in tar.getnames()]
    assert names == [0, 1, 101, 2, 3, 103], "each behind what it hangs on"


def test_damage_is_found_and_put_aside(cache: Run, folder: Path) -> None:
    assert "5 of 5" in cache("verify")
    damage(folder, 2)
    assert "4 of 5" in cache("verify", code=1)
    assert "corrupt" in cache("verify", "--repair")
    assert keys(folder) == {0, 1, 3, 18}
    assert "12 KiB in quarantine" in cache("stats")
    said = cache("gc")
    assert "without a beginning: 1" in said
    assert "deleted from quarantine: 1" in said
    assert keys(folder) == {0, 1, 18}
    assert "0 B in quarantine" in cache("stats")


def test_what_is_without_a_beginning_is_counted_once(cache: Run, folder: Path) -> None:
    (folder / "objects" / f"{key(0).hex()}.rows").unlink()
    assert "without a beginning: 4" in cache("gc")
    assert keys(folder) == set()


@pytest.mark.parametrize("repair", [(), ("--repair",)])
def test_what_a_server_evicts_meanwhile_is_not_bad(
    cache: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, repair: tuple[str, ...]
) -> None:
    def inspect(self: Disk, wanted: bytes) -> object:
        if wanted == key(3) and wanted in self:
            server = Disk(folder, 1 << 40)
            server.remove([wanted])
            server.close()
        return real(self, wanted)

    real = Disk.inspect
    monkeypatch.setattr(Disk, "inspect", inspect)
    assert "good: 4 of 4 objects" in cache("verify", *repair)


def test_what_a_server_writes_anew_meanwhile_is_good(cache: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def quarantine(self: Disk, wanted: bytes) -> object:
        path = self.path(wanted)
        path.write_bytes(path.read_bytes()[:-1] + last)
        return real(self, wanted)

    real, last = Disk.quarantine, bytes(block(2, 1)[1][-1:])
    damage(folder, 2)
    monkeypatch.setattr(Disk, "quarantine", quarantine)
    assert "good: 5 of 5 objects" in cache("verify", "--repair")
    assert keys(folder) == {0, 1, 2, 3, 18}


@pytest.mark.parametrize("command", [("verify", "--repair"), ("gc",)])
def test_tending_evicts_nothing_on_a_full_disk(
    cache: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1, 1, 0))
    cache(*command)
    assert keys(folder) >= {0, 1, 2, 3}


def test_a_lost_catalogue_is_made_anew(cache: Run, folder: Path) -> None:
    (folder / "index.sqlite").write_bytes(b"garbage" * 1000)
    assert "5 in 2 chains" in cache("stats")
    (folder / "index.sqlite").unlink()
    assert key(18).hex()[:12] in cache("ls")
    assert keys(folder) == {0, 1, 2, 3, 18}


def test_what_is_pinned_stays(cache: Run, folder: Path) -> None:
    assert "3 blocks" in cache("pin", short(18))
    cache("gc", "--size", "0")
    assert keys(folder) == {0, 1, 18}
    assert "deleted: 0" in cache("rm", "--all")
    assert f"pinned; unpin it with `headstart cache unpin {short(18)}`" in cache("rm", short(18), code=2)
    assert "pinned" in cache("ls")
    cache("unpin", short(18))
    cache("rm", "--all")
    assert keys(folder) == set()


def test_all_that_a_pinned_block_needs_stays(cache: Run, folder: Path) -> None:
    change(folder, pinned=(18,))  # as if what it hangs on had been put aside and written anew
    cache("rm", "--all")
    assert keys(folder) == {0, 1, 18}


def test_unpinning_leaves_what_other_pinned_chains_need(cache: Run, folder: Path) -> None:
    cache("pin", short(3))
    cache("pin", short(18))
    said = cache("unpin", short(3))
    assert "unpinned: 2 blocks" in said
    assert "need them: 2 blocks" in said
    assert pinned(folder) == {0, 1, 18}
    assert "unpinned: 3 blocks" in cache("unpin", short(18))
    assert pinned(folder) == set()


def test_inner_blocks_are_pinned_and_unpinned_alike(cache: Run, folder: Path) -> None:
    assert "pinned: 2 blocks" in cache("pin", short(1))
    assert pinned(folder) == {0, 1}
    assert "unpinned: 2 blocks" in cache("unpin", short(1))
    assert pinned(folder) == set()
    cache("pin", short(1))
    cache("unpin", short(3))  # a chain that has grown since its beginning was pinned
    assert pinned(folder) == set()


def test_what_others_hang_on_is_not_deleted(cache: Run, folder: Path) -> None:
    said = cache("rm", short(1), code=2)
    assert "Other chains continue this block; `headstart cache ls`" in said
    assert "deleted: 2 blocks" in cache("rm", short(3))
    assert keys(folder) == {0, 1, 18}


def test_a_missing_id_is_said_with_where_ids_are(cache: Run) -> None:
    for command in ("show", "pin", "unpin"):
        assert "Missing argument 'ID'. `headstart cache ls` shows ids." in cache(command, code=2)


def test_everything_is_what_was_put_aside_too(cache: Run, folder: Path) -> None:
    damage(folder, 2)
    cache("verify", "--repair")
    (folder / "tmp" / "1-1.rows").write_bytes(b"left by a crash")
    cache("rm", "--all")
    assert not [path for inner in ("objects", "quarantine", "tmp") for path in (folder / inner).iterdir()]


@pytest.fixture
def exported(cache: Run, tmp_path_factory: Places) -> Path:
    file = tmp_path_factory.mktemp("out") / "chains.tar"
    cache("export", str(file))
    return file


def test_chains_move_to_another_machine(cache: Run, folder: Path, tmp_path_factory: Places) -> None:
    file, other = tmp_path_factory.mktemp("out") / "chains.tar", tmp_path_factory.mktemp("other")
    assert "exported: 3" in cache("export", str(file), short(18))
    data = bytearray(file.read_bytes())
    assert "imported: 3 blocks; there before: 0; bad: 0" in cache("import", str(file), place=other)
    assert keys(other) == {0, 1, 18}
    assert "3 of 3" in cache("verify", place=other)
    assert "imported: 0 blocks; there before: 3" in cache("import", str(file), place=other)
    data[512 + 4096] ^= 1  # the first byte of rows
    data[20_000] ^= 1  # in the third header
    file.write_bytes(data)
    assert "imported: 1 block; there before: 0; bad: 2" in cache(
        "import", str(file), place=tmp_path_factory.mktemp("third"), code=1
    )


def test_an_import_in_many_parts(cache: Run, exported: Path, tmp_path_factory: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    from headstart.tiers.disk import archive

    monkeypatch.setattr(archive, "BATCH", 2 * SIZE)
    other = tmp_path_factory.mktemp("other")
    assert "imported: 5 blocks; there before: 0; bad: 0" in cache("import", str(exported), place=other)
    assert "5 of 5" in cache("verify", place=other)


@pytest.mark.parametrize("how", ["option", "environment"])
def test_an_import_evicts_nothing(
    cache: Run, exported: Path, tmp_path_factory: Places, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    other, budget = tmp_path_factory.mktemp("other"), str(disk_store.RESERVE + 4 * OBJECT)
    change(other, block(100, None), block(120, None))
    if how == "environment":
        monkeypatch.setenv("HEADSTART_DISK_BUDGET", budget)
    said = cache("import", str(exported), *(["--disk-budget", budget] if how == "option" else []), place=other, code=1)
    assert "imported: 2 blocks" in said
    assert "no room for 3 blocks" in said
    assert keys(other) >= {100, 120}
    assert len(keys(other)) == 4


def test_an_import_mends(cache: Run, folder: Path, exported: Path, tmp_path_factory: Places) -> None:
    damage(folder, 2)
    change(folder, pinned=(2,))
    assert "imported: 1 block; there before: 4; bad: 0" in cache("import", str(exported))
    assert pinned(folder) == {2}
    assert "5 of 5" in cache("verify")
    other = tmp_path_factory.mktemp("other")
    change(other, derived(*block(0, None)))
    assert "imported: 5 blocks; there before: 0" in cache("import", str(exported), place=other)
    assert "derived" not in cache("show", short(3), place=other)


@pytest.mark.parametrize("how", ["id", "all"])
def test_an_import_brings_nothing_back_that_is_deleted_meanwhile(
    cache: Run, folder: Path, exported: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """It stored the chain again, and pinned it again, because it had been pinned at the beginning."""
    monkeypatch.setattr(archive, "BATCH", 1)
    change(folder, pinned=(18,))

    def objects() -> Iterator[Block]:
        with exported.open("rb") as stream:
            for one in archive.unpack(stream, lambda *_: None):
                yield one
                if one[0].key == key(0):
                    cache("unpin", short(18))
                    cache("rm", *([short(18)] if how == "id" else ["--all"]))

    with closing(Disk(folder, 1 << 40)) as disk:
        taken = archive.take(disk, objects())
    assert (taken.stored, taken.refused) == ((), ())
    assert keys(folder) == ({0, 1, 2, 3} if how == "id" else set())
    assert not pinned(folder)


def test_derived_rows_never_leave_the_machine(cache: Run, folder: Path, tmp_path: Path) -> None:
    change(folder, derived(*block(40, 2)), block(60, 40))
    assert "exported: 5 blocks; left out, because derived: 2 blocks" in cache("export", str(tmp_path / "chains.tar"))
    with tarfile.open(tmp_path / "chains.tar") as tar:
        assert {bytes.fromhex(name.removesuffix(".rows"))[0] - 1 for name in tar.getnames()} == {0, 1, 2, 3, 18}


def test_an_archive_is_its_owners_and_names_nobody(exported: Path) -> None:
    assert exported.stat().st_mode & 0o777 == 0o600
    with tarfile.open(exported) as tar:
        assert {(one.uid, one.gid, one.uname, one.gname) for one in tar} == {(0, 0, "", "")}
    assert os.listdir(exported.parent) == [exported.name]


def test_a_failed_export_leaves_what_was_there(
    cache: Run, folder: Path, exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    before = exported.read_bytes()
    monkeypatch.setattr(tarfile.TarFile, "addfile", full)
    assert f"Cannot write {exported}: No space left on device." in cache("export", str(exported), code=2)
    assert exported.read_bytes() == before
    assert os.listdir(exported.parent) == [exported.name]


def test_what_is_evicted_during_an_export_is_left_out(cache: Run, folder: Path, tmp_path: Path) -> None:
    (folder / "objects" / f"{key(2).hex()}.rows").unlink()
    assert "exported: 3 blocks; left out" in cache("export", str(tmp_path / "chains.tar"))


def test_places_that_cannot_be_used_are_said(cache: Run, folder: Path, exported: Path, tmp_path_factory: Places) -> None:
    place = tmp_path_factory.mktemp("place")
    (place / "file").write_text("no folder")
    for command in (("ls",), ("show", short(3)), ("import", str(exported))):
        assert f"{place / 'file'} is a file, not a folder" in cache(*command, place=place / "file", code=2)
    assert f"Cannot read {place / 'none.tar'}: No such" in cache("import", str(place / "none.tar"), place=place / "new", code=2)
    said = cache("import", str(place / "file"), place=place / "new", code=2)
    assert f"{place / 'file'} is no tar file of `headstart cache export`." in said
    assert f"Cannot write {place / 'no' / 'x.tar'}: No such" in cache("export", str(place / "no" / "x.tar"), code=2)
    assert f"Cannot write {place}: it is no plain file." in cache("export", str(place), code=2)
    assert not (place / "new").exists()


def test_an_archive_cut_short_is_said(cache: Run, exported: Path, tmp_path_factory: Places) -> None:
    exported.write_bytes(exported.read_bytes()[:30_000])
    assert f"Cannot read {exported}: unexpected end of data." in cache(
        "import", str(exported), place=tmp_path_factory.mktemp("other"), code=2
    )


def test_strange_things_in_an_archive_are_bad(cache: Run, tmp_path_factory: Places) -> None:
    place = tmp_path_factory.mktemp("place")
    (place / "text").write_text("no object")
    (place / "link").symlink_to("nowhere")
    with tarfile.open(place / "x.tar", "w") as tar:
        for name in ("text", "link"):
            tar.add(place / name, arcname=name)
    said = cache("import", str(place / "x.tar"), place=place / "new", code=1)
    assert "imported: 0 blocks; there before: 0; bad: 2" in said
    assert "link: foreign" in said


def test_a_catalogue_that_cannot_be_read_is_said(cache: Run, folder: Path, exported: Path) -> None:
    with sqlite3.connect(folder / "index.sqlite") as database:
        database.execute("PRAGMA user_version=99")
    database.close()
    for command in (("ls",), ("import", str(exported))):
        assert f"Cannot open {folder}: the catalogue is of version 99" in cache(*command, code=2)


def test_an_empty_folder_is_said(cache: Run, folder: Path, tmp_path_factory: Places) -> None:
    assert "Nothing is stored" in cache("ls", code=2, place=tmp_path_factory.mktemp("empty"))
    cache("rm", "--all")
    assert cache("ls") == f"Nothing is stored in {folder}.\n"
    assert json.loads(cache("ls", "--json")) == []
    assert "nothing is stored here" in cache("stats")


def test_what_is_kept_for_the_catalogue_is_not_used(cache: Run, folder: Path) -> None:
    disk = Disk(folder, 1 << 40)
    catalogue = sum(path.stat().st_blocks * 512 for path in folder.iterdir())
    assert (disk.used, disk.reserved) == (5 * OBJECT + catalogue, disk_store.RESERVE - catalogue)
    disk.close()
    stats = json.loads(cache("stats", "--json"))
    assert (stats["catalogue_bytes"], stats["reserved_bytes"]) == (catalogue, disk_store.RESERVE - catalogue)
    reserved = show_size(disk_store.RESERVE - catalogue)
    assert f"{reserved} more of the budget are reserved for it" in cache("stats")


# ── names and words ──────────────────────────────────────────────────────────────────────────────────────────────────

BEGINNING = "You are a gardener with forty years of experience, and you know every plant by its name. "


@pytest.fixture
def spoken(tmp_path: Path, tiny_model: Path) -> tuple[Path, Path]:
    """A folder with two conversations that begin alike, and the file of the model that had them."""
    model = Path(shutil.copy(tiny_model, tmp_path / "tiny-llama-F16.gguf"))
    with headstart.open(model, ctx=512, slots=1, threads=1, memory_budget="8MiB", cache_dir=tmp_path / "cache") as hs:
        for said in ("My roses have \x1b[31mblack spots.", "When are quinces ripe?"):
            hs.chat([{"role": "system", "content": 3 * BEGINNING}, {"role": "user", "content": 12 * said}], max_tokens=1)
    return tmp_path / "cache", model


def test_chains_go_by_their_models_name_and_first_words(
    cache: Run, spoken: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    place, _ = spoken
    monkeypatch.setenv("COLUMNS", "120")
    said = cache("ls", place=place)
    assert said.count("  tiny-llama-F16: system You are a garden… ▸ ") == 2
    for own in ("roses", "quinces"):
        assert own in said
    assert "\x1b" not in said
    shown = json.loads(cache("ls", "--json", place=place))
    assert {one["model"] for one in shown} == {"tiny-llama-F16"}
    assert all("You are a gardener with forty years" in one["words"] for one in shown)
    assert "forty years" in cache("show", shown[0]["id"], place=place)
    assert "tiny-llama-F16 (" in cache("stats", place=place)


def test_words_are_for_the_folders_owner_and_of_the_very_model(
    cache: Run, spoken: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it is told how many tokens there are."""
    place, model = spoken

    def wordless() -> None:
        assert "garden" not in (said := cache("ls", place=place))
        assert "tiny-llama-F16" in said
        assert re.search(r"tiny-llama-F16: \d+ tokens, \d+ blocks? shared", said)
        assert {one["words"] for one in json.loads(cache("ls", "--json", place=place))} == {None}

    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        wordless()
    assert "a garden…" in cache("ls", place=place)
    with model.open("ab") as file:
        file.write(b"\0")
    wordless()
    model.write_bytes(b"GGUF")
    with closing(Disk(place, 1 << 40)) as disk:
        (fingerprint,) = disk.catalog.models()
        disk.catalog.learn(fingerprint, StoredModel.of("tiny-llama-F16", str(model)))
    wordless()
    model.unlink()
    wordless()


@pytest.mark.parametrize("command", [("ls",), ("stats",)])
def test_all_fits_on_80_columns(
    cache: Run, spoken: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    place, _ = spoken
    with closing(Disk(place, 1 << 40)) as disk:
        (fingerprint,) = disk.catalog.models()
        disk.catalog.learn(fingerprint, StoredModel("a-model-with-a-name-" * 6, "", ""))
        disk.catalog.pin(disk.catalog.keys())
        size = 123 << 30
        with sqlite3.connect(place / "index.sqlite") as database:
            database.execute("UPDATE objects SET allocated = ?, seconds = 1e5, used = 0", (size,))
        database.close()
    lines = cache(*command, place=place).splitlines()
    assert max(len(line) for line in lines if not line.startswith("folder")) <= 80
    assert any("a-model-with-a-name" in line for line in lines)
