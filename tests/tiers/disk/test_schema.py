"""Folders that older releases have written (`older/README.md`): opened, nothing of them is lost and nothing is hidden."""

from __future__ import annotations

import base64
import errno
import json
import os
import random
import sqlite3
import struct
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from harness import ask, assistant, system, user
from headstart.chat.tenancy import POLICIES, salt
from headstart.cli.main import main
from headstart.config import Settings
from headstart.interfaces.tier import KV, STATE
from headstart.prefix_cache.blocks import root_id
from headstart.prefix_cache.expiry import Terms
from headstart.prefix_cache.quota import owner_of
from headstart.serving.runtime import Runtime
from headstart.testing.fake_engine import FakeEngine
from headstart.tiers.disk import Disk
from headstart.tiers.disk import files as disk_files
from headstart.tiers.disk.catalog import Catalog
from headstart.tiers.disk.format import ALIGN, Label
from headstart.tiers.disk.lock import Lock
from headstart.tiers.disk.schema import VERSION
from headstart.tiers.disk.store import RESERVE
from older_catalogues import WITHOUT_RANKS
from remains import DAY

OLDER = Path(__file__).with_name("older")
VERSIONS = (1, 4)
BIG = 1 << 40
WRITTEN = 1_795_500_000.0
"""Seconds since 1970, a few hours after the folders were written."""

Rows = list[dict[str, Any]]


def restore(folder: Path, version: int) -> dict[str, bytes]:
    """Puts a folder together, byte by byte as the old release has written it; the payloads, by the objects' names."""
    for name in ("objects", "tmp", "quarantine"):
        (folder / name).mkdir(parents=True)
    (folder / "lock").touch()
    with closing(sqlite3.connect(folder / "index.sqlite")) as database:
        database.execute("PRAGMA journal_mode=WAL")
        database.executescript((OLDER / f"v{version}.sql").read_text())
    payloads: dict[str, bytes] = {}
    for line in (OLDER / f"v{version}.jsonl").read_text().splitlines():
        one = json.loads(line)
        text, payload = one["description"].encode(), base64.b64decode(one["payload"])
        head = struct.pack("<8sII16s", b"headstrt", one["version"], len(text), xxhash.xxh3_128_digest(text)) + text
        path = folder / "objects" / one["name"]
        path.write_bytes(head.ljust(-(-len(head) // ALIGN) * ALIGN, b"\0") + payload)
        os.utime(path, (one["time"], one["time"]))
        payloads[one["name"]] = payload
    return payloads


def table(folder: Path, name: str, order: str) -> Rows:
    """All rows of a table."""
    with closing(sqlite3.connect(folder / "index.sqlite")) as database:
        database.row_factory = sqlite3.Row
        return [dict(row) for row in database.execute(f"SELECT * FROM {name} ORDER BY {order}")]


def without(rows: Rows, *names: str) -> Rows:
    return [{name: value for name, value in row.items() if name not in names} for row in rows]


def renamed(rows: Rows) -> Rows:
    """Rows of version 4 as they have to be now."""
    names = {"sort": "bucket"}
    return [{names.get(name, name): value for name, value in row.items()} for row in without(rows, "heat", "created")]


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def payloads(tmp_path: Path, version: int) -> dict[str, bytes]:
    return restore(tmp_path, version)


@pytest.fixture
def cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def run(*arguments: str) -> str:
        with pytest.raises(SystemExit) as end:
            main(["cache", *arguments, "--cache-dir", str(tmp_path)])
        captured = capsys.readouterr()
        assert end.value.code == 0, captured
        return captured.out

    return run


def test_every_object_is_served(tmp_path: Path, payloads: dict[str, bytes]) -> None:
    """Bit by bit, in the order in which they were written; and none was put aside."""
    with closing(Disk(tmp_path, BIG)) as disk:
        assert disk.reconcile() == ([], [])
        rows = list(disk.catalog.rows())
        assert {disk.path(row.label.key).name for row in rows} == {*payloads}
        for row in rows:
            out = np.empty(len(payloads[disk.path(row.label.key).name]), np.uint8)
            assert disk.read_into(row.label, out) == len(out)
            assert out.tobytes() == payloads[disk.path(row.label.key).name]
    assert not list((tmp_path / "quarantine").iterdir())


def test_the_catalogue_of_version_1_gets_what_it_has_not(tmp_path: Path) -> None:
    """Its pins, uses and times stay. Whose an object is, its chain's root says; it is as old as its row."""
    restore(tmp_path, 1)
    before = table(tmp_path, "objects", "number")
    Disk(tmp_path, BIG).close()
    after = table(tmp_path, "objects", "number")
    added = ("uses", "kind", "bucket", "weight", "written", "owner", "rank", "children")
    assert without(after, *added) == without(before, "heat", "created")
    assert sum(row["pinned"] for row in after) == 5
    assert [(row["written"], row["uses"], row["kind"], row["bucket"]) for row in after] == [
        (row["created"], 1, "rows", 0) for row in before
    ]
    (owner,) = {row["owner"] for row in after}
    assert {row["parent"][:8] for row in after if not row["start"]} == {owner}


def test_the_catalogue_of_version_4_keeps_everything(tmp_path: Path) -> None:
    """But for `heat` and `created`, which decided nothing."""
    restore(tmp_path, 4)
    before = {name: table(tmp_path, name, "1") for name in ("objects", "gone", "notes", "spells", "models", "terms", "erased")}
    assert all(before.values()), "an empty table shows nothing"
    Disk(tmp_path, BIG).close()
    assert without(table(tmp_path, "objects", "number"), "rank", "children") == renamed(before["objects"])
    assert table(tmp_path, "ghosts", "number") == renamed(before["gone"])
    assert table(tmp_path, "intervals", "1, 2, 3") == sorted(before["spells"], key=lambda row: [*row.values()])
    for name in ("notes", "models", "terms", "erased"):
        assert table(tmp_path, name, "1") == before[name], name
    assert sum(row["pinned"] for row in before["objects"]) == 7


_VERSION_5 = f"""
{WITHOUT_RANKS}PRAGMA user_version = 5;
"""


def test_the_catalogue_of_version_5_keeps_everything(tmp_path: Path, payloads: dict[str, bytes]) -> None:
    """And a second conversion of one folder finds the same."""
    names = "objects", "ghosts", "notes", "intervals", "models", "terms", "erased", "owned", "made", "totals"
    Disk(tmp_path, BIG).close()
    before = {name: table(tmp_path, name, "1") for name in names}
    assert any(row["pinned"] for row in before["objects"])
    with closing(sqlite3.connect(tmp_path / "index.sqlite")) as database:
        database.executescript(_VERSION_5)
    Disk(tmp_path, BIG).close()
    for name in names:
        assert without(table(tmp_path, name, "1"), "rank", "pins") == without(before[name], "rank", "pins"), name


def test_no_table_of_an_older_version_is_left(tmp_path: Path, payloads: dict[str, bytes]) -> None:
    Disk(tmp_path / "new", BIG).close()
    Disk(tmp_path, BIG).close()
    places = tmp_path, tmp_path / "new"
    found, expected = ({(row["type"], row["name"]) for row in table(place, "sqlite_master", "1")} for place in places)
    assert found == expected
    for name in ("objects", "ghosts"):
        columns = [[row["name"] for row in table(place, f"pragma_table_info('{name}')", "cid")] for place in places]
        assert columns[0] == columns[1]
        assert not {"heat", "created"} & {*columns[0]}
    assert table(tmp_path, "pragma_user_version", "1") == [{"user_version": VERSION}]


def test_the_budget_is_held_and_pins_stay(tmp_path: Path, payloads: dict[str, bytes], version: int) -> None:
    with closing(Disk(tmp_path, RESERVE + 9 * 2 * ALIGN)) as disk:
        pinned = {row.label.key for row in disk.catalog.rows() if row.pinned}
        _, gone = disk.reconcile()
        assert len(gone) == len(payloads) - 9
        assert disk.used + disk.reserved <= disk.budget
        assert pinned
        assert pinned <= disk.catalog.keys()
        assert {path.name for path in disk.objects.iterdir()} == {disk.path(row.label.key).name for row in disk.catalog.rows()}


def test_an_owners_term_is_known(tmp_path: Path) -> None:
    """Ten years later what is bob's is erased, and nothing else."""
    restore(tmp_path, 4)
    now = [WRITTEN]
    with closing(Disk(tmp_path, BIG, clock=lambda: now[0])) as disk:
        terms = Terms()
        terms.learn(disk.catalog.ages.terms())
        ((bob, seconds),) = terms.owners.items()
        assert seconds == 3650 * DAY
        his = {row.label.key for row in disk.catalog.rows() if row.label.owner == bob}
        others = disk.catalog.keys() - his
        assert his
        assert not any(gone for gone, _ in disk.expire(terms))
        now[0] += seconds
        gone = [key for keys, _ in disk.expire(terms) for key in keys]
        assert {*gone} == his
        assert disk.catalog.keys() == others


def test_rm_all_leaves_nothing(tmp_path: Path, payloads: dict[str, bytes], cache: Callable[..., str]) -> None:
    """What is pinned stays, and is listed; once it is unpinned, no file has anything of an object's any more."""
    keys = [bytes.fromhex(name.split(".")[0]) for name in payloads]
    tokens = [row["tokens"] for row in table(tmp_path, "objects", "number") if any(row["tokens"])]
    listed = json.loads(cache("ls", "--json"))
    assert {one["id"] for one in listed} <= {key.hex() for key in keys}
    cache("rm", "--all")
    (left,) = json.loads(cache("ls", "--json"))
    assert left["pinned"]
    assert len(files(tmp_path / "objects")) == left["tokens"] // 8
    cache("unpin", left["id"])
    cache("rm", "--all")
    assert json.loads(cache("stats", "--json"))["blocks"] == 0
    assert files(tmp_path) <= {"index.sqlite", "index.sqlite-wal", "index.sqlite-shm", "lock", "deleted"}
    data = b"".join(path.read_bytes() for path in tmp_path.iterdir() if path.is_file())
    assert not [key for key in keys if key in data or key.hex().encode() in data]
    assert not [text for text in tokens if text in data]
    for name in ("objects", "ghosts", "notes"):
        assert not table(tmp_path, name, "1"), name


def test_a_conversation_goes_on(tmp_path: Path) -> None:
    """The chat of the release before, of a tenant: its next turn is read from the disk, also after a restart; no other's is."""
    restore(tmp_path, 4)
    (fingerprint,) = {row["fingerprint"] for row in table(tmp_path, "objects", "number")}
    alice, *others = (salt(POLICIES["key"], name, None, None) for name in ("alice", "eve", "mallory"))
    chat = [system("Be brief."), user("A hammer?"), assistant("\\PgcuttF")]
    for question, other in zip(("And so on?", "And further?"), others, strict=True):
        engine = FakeEngine(slots=2, ctx=2048, block_size=8, seed=0)
        engine.fingerprint = fingerprint  # whatever the present fake engine's is
        settings = Settings(reuse="exact", memory_budget=1 << 20, cache_dir=tmp_path)
        with Runtime(lambda engine=engine: engine, settings) as runtime:
            report = ask(runtime, [*chat, user(question)], salt=alice, max_tokens=4).report
            assert report.tiers["disk"] >= 7 * 8
            assert ask(runtime, [*chat, user(question)], salt=other, max_tokens=4).report.tiers == {}
    assert owner_of(root_id(fingerprint, alice)) in {row["owner"] for row in table(tmp_path, "objects", "number")}


def test_all_may_open_it_at_once(tmp_path: Path, payloads: dict[str, bytes]) -> None:
    """One of them rebuilds the catalogue, and none keeps the others from writing afterwards."""
    with ThreadPoolExecutor(8) as pool:
        opened = list(pool.map(lambda _: Disk(tmp_path, BIG), range(8)))
    for disk in opened:
        assert len(disk) == len(payloads)
        with disk.writing():
            pass
        disk.close()


def test_a_damaged_one_is_rebuilt(tmp_path: Path, payloads: dict[str, bytes]) -> None:
    """Its conversion fails. It was not taken for damaged then, and the folder could never be opened again."""
    index = tmp_path / "index.sqlite"
    with closing(sqlite3.connect(index)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        (page,) = connection.execute("PRAGMA page_size").fetchone()
        (root,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'objects'").fetchone()
    data = bytearray(index.read_bytes())
    data[(root - 1) * page : root * page] = b"\xff" * page
    index.write_bytes(data)
    with closing(Disk(tmp_path, BIG)) as disk:
        disk.reconcile()
        assert len(disk) == len(payloads)


def test_a_running_older_process_is_turned_away(tmp_path: Path, payloads: dict[str, bytes], version: int) -> None:
    """It would take the new tables for damage, and delete them. So its lock is not the folder's any more, and when it opens the
    folder again, the catalogue is of a later version.
    """
    with closing(Lock(tmp_path / "lock")) as older, closing(sqlite3.connect(tmp_path / "index.sqlite")) as connection:
        older.watch(tmp_path / "index.sqlite", disk_files.identity(tmp_path / "index.sqlite"))
        with older.held():
            assert connection.execute("PRAGMA user_version").fetchone() == (version,)
        with closing(Disk(tmp_path, BIG)) as disk:
            with pytest.raises(OSError, match="replaced") as error, older.held():
                pass
            assert error.value.errno == errno.ESTALE
            assert connection.execute("PRAGMA user_version").fetchone() == (VERSION,)
            with disk.writing():
                pass
    assert max(VERSIONS) < VERSION
    assert "lock.new" not in files(tmp_path)


# ── totals ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def counted(folder: Path) -> dict[str, Any]:
    """What the totals have to say, from the objects themselves."""
    objects = table(folder, "objects", "number")

    def by(column: str, **sums: Callable[[dict[str, Any]], int]) -> Rows:
        groups: dict[bytes, Rows] = {}
        for row in objects:
            groups.setdefault(row[column], []).append(row)
        return [
            {column: name, "objects": len(rows)} | {what: sum(map(of, rows)) for what, of in sums.items()}
            for name, rows in sorted(groups.items())
        ]

    parents = Counter(row["parent"] for row in objects)
    return {
        "totals": {"bytes": sum(row["allocated"] for row in objects), "objects": len(objects)},
        "owned": by("owner", bytes=lambda row: row["allocated"], pinned=lambda row: row["allocated"] * row["pinned"]),
        "made": by("fingerprint", states=lambda row: int(row["kind"] == "state")),
        "children": {row["key"]: parents[row["key"]] for row in objects},
    }


def kept(folder: Path) -> dict[str, Any]:
    """What the totals say."""
    (totals,) = table(folder, "totals", "1")
    return {
        "totals": {name: totals[name] for name in ("bytes", "objects")},
        "owned": table(folder, "owned", "owner"),
        "made": table(folder, "made", "fingerprint"),
        "children": {row["key"]: row["children"] for row in table(folder, "objects", "number")},
    }


def test_the_totals_of_an_older_catalogue_are_counted(tmp_path: Path, payloads: dict[str, bytes]) -> None:
    Disk(tmp_path, BIG).close()
    assert kept(tmp_path) == counted(tmp_path)
    assert len(kept(tmp_path)["children"]) == len(payloads)
    assert all(row["rank"] > 0 for row in table(tmp_path, "objects", "1"))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 10))])
def test_the_totals_are_always_right(tmp_path: Path, seed: int) -> None:
    """Blocks come in any order, become better or larger, are pinned, go, and are erased."""
    dice = random.Random(seed)
    with closing(Catalog(tmp_path / "index.sqlite")) as catalog:
        for _ in range(150):
            number = dice.randrange(1, 30)
            key = bytes([number] * 32)
            label = Label(
                *(
                    key,
                    bytes([number // 2] * 32),
                    bytes([dice.randrange(2)] * 32),
                    8 * (number > 1),
                    (number,),
                    dice.random() < 0.5,
                ),
                *(1.0, dice.choice((KV, STATE)), 1.0, dice.choice((b"alice123", b"bob45678", b""))),
            )
            match dice.choice(("add", "add", "pin", "remove", "erase")):
                case "add":
                    catalog.add([(label, 4096 * dice.randint(1, 5))])
                case "pin":
                    (catalog.pin if dice.random() < 0.7 else catalog.unpin)([key])
                case "remove":
                    catalog.remove([key])
                case "erase":
                    catalog.ages.erase([key])
            assert kept(tmp_path) == counted(tmp_path)
            assert (catalog.used(), len(catalog)) == tuple(kept(tmp_path)["totals"].values())


def test_wrong_totals_are_corrected(tmp_path: Path, payloads: dict[str, bytes]) -> None:
    with closing(Disk(tmp_path, BIG)) as disk:
        for change in (
            "totals SET bytes = bytes + 1",
            "owned SET objects = 0",
            "made SET states = 9",
            "objects SET children = 7",
        ):
            disk.catalog._db.execute(f"UPDATE {change}")
        assert kept(tmp_path) != counted(tmp_path)
        disk.reconcile()
        assert kept(tmp_path) == counted(tmp_path)
