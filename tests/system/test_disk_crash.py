"""Crashes: all that the disk tier does to files, cut at every point, with whatever was not synced dropped or reordered.

The calls that the tier makes are recorded as they are made. What may be found after a crash is modelled as harshly as POSIX
allows: a file has what was written before its last fsync, and of what came later any part, or zeros instead; each name in a
folder leads to what it led to at the folder's last fsync, or to anything it has led to since, whatever became of the other
names, so renames may come apart and overtake each other. Of SQLite its contract with synchronous=FULL is taken for granted:
a transaction survives if its commit has returned, else wholly or not at all. Each state is also opened without a catalogue.
"""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headstart.interfaces.tier import EntryKind
from headstart.interfaces.tokens import Bytes
from headstart.tiers.disk import Disk, Label
from headstart.tiers.disk import ages as disk_ages
from headstart.tiers.disk import catalog as disk_catalog
from headstart.tiers.disk import store as disk_store

SIZES: dict[EntryKind, int] = {"rows": 5_000, "state": 700}
BIG = 1 << 40
ROOM = 31 * 4096
"""Blocks occupy three of these, checkpoints two."""


@dataclass(eq=False)
class File:
    """A file: all that was written, and what of it is durable."""

    data: bytes = b""
    synced: bytes = b""

    def survivors(self, dice: random.Random) -> bytes:
        """What a crash may leave of it."""
        new = self.data[len(self.synced) :]
        match dice.choice(("dropped", "cut", "zeroed", "torn", "whole")) if new else "whole":
            case "dropped":
                return self.synced
            case "cut":
                return self.synced + new[: dice.randrange(len(new))]
            case "zeroed":
                return self.synced + bytes(len(new))
            case "torn":
                at = dice.randrange(len(new))
                return self.synced + new[:at] + bytes(len(new) - at)
        return self.data


@dataclass(eq=False)
class Folder:
    """A folder: for each name all that it led to since the last fsync, what is durable first."""

    names: dict[str, list[File | Folder | None]] = field(default_factory=dict)

    def now(self, name: str) -> File | Folder | None:
        return self.names[name][-1] if name in self.names else None

    def lead(self, name: str, to: File | Folder | None) -> None:
        self.names.setdefault(name, [None]).append(to)

    def sync(self) -> None:
        self.names = {name: [found[-1]] for name, found in self.names.items() if found[-1] is not None}


@dataclass(frozen=True)
class Promise:
    """What must be found after a crash, and what must not.

    Attributes:
        kept: keys with whether canonical rows are promised.
        deleted: keys that the owner deleted.
        rotten: keys of objects that the medium has damaged.
    """

    kept: dict[bytes, bool] = field(default_factory=dict)
    deleted: frozenset[bytes] = frozenset()
    rotten: frozenset[bytes] = frozenset()


class Recorder:
    """Stands between the tier and the system. Each step changes the model; `steps` can be taken again, one by one."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.steps: list[Callable[[StoredModel], None]] = []
        self._files: dict[int, str] = {}
        for name in ("open", "close", "write", "fsync", "replace", "unlink", "mkdir"):
            patch.setattr(os, name, self._wrapped(getattr(os, name), getattr(self, f"_{name}")))
        for name in ("add", "remove", "use", "pin"):
            patch.setattr(disk_catalog.Catalog, name, self._committing(getattr(disk_catalog.Catalog, name)))
        patch.setattr(disk_ages.Ages, "wipe", self._committing(disk_ages.Ages.wipe))

    def _wrapped(self, real: Callable[..., Any], note: Callable[..., None]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            found = real(*args, **options)
            note(found, *args)
            return found

        return call

    def _committing(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(catalog: Any, *args: Any, **options: Any) -> Any:
            found = real(catalog, *args, **options)
            state = catalog._db.serialize()
            self.steps.append(lambda model: model.commit(state))
            return found

        return call

    def _name(self, path: Any) -> str | None:
        place = os.fspath(path)
        ours = place.startswith(f"{self.root}{os.sep}") and not Path(place).name.startswith("index.sqlite")
        return os.path.relpath(place, self.root) if ours or place == str(self.root) else None

    def _open(self, file: int, path: Any, flags: int, *_: Any) -> None:
        name = self._name(path)
        if name is not None:
            self._files[file] = name
            if flags & os.O_CREAT:
                self.steps.append(lambda model: model.create(name))

    def _close(self, _: None, file: int) -> None:
        self._files.pop(file, None)

    def _write(self, count: int, file: int, data: Any) -> None:
        if (name := self._files.get(file)) is not None:
            written = bytes(data[:count])
            self.steps.append(lambda model: model.write(name, written))

    def _fsync(self, _: None, file: int) -> None:
        if (name := self._files.get(file)) is not None:
            self.steps.append(lambda model: model.sync(name))

    def _replace(self, _: None, source: Any, target: Any) -> None:
        before, after = self._name(source), self._name(target)
        if before is not None and after is not None:
            self.steps.append(lambda model: model.lead(after, model.find(before)))
            self.steps.append(lambda model: model.lead(before, None))

    def _unlink(self, _: None, path: Any) -> None:
        if (name := self._name(path)) is not None:
            self.steps.append(lambda model: model.lead(name, None))

    def _mkdir(self, _: None, path: Any, *__: Any) -> None:
        if (name := self._name(path)) is not None:
            self.steps.append(lambda model: model.lead(name, Folder()))

    def rot(self, path: Path) -> None:
        """The medium loses a bit."""
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        name = os.path.relpath(path, self.root)
        self.steps.append(lambda model: model.rot(name, bytes(data)))


class StoredModel:
    """What is on disk, and what the catalogue says."""

    def __init__(self) -> None:
        self.root = Folder()
        self.catalogue: bytes | None = None

    def find(self, name: str) -> File | Folder | None:
        found: File | Folder | None = self.root
        for part in Path(name).parts:
            assert isinstance(found, Folder)
            found = found.now(part)
        return found

    def lead(self, name: str, to: File | Folder | None) -> None:
        above = self.find(os.path.dirname(name))
        assert isinstance(above, Folder)
        above.lead(os.path.basename(name), to)

    def create(self, name: str) -> None:
        if self.find(name) is None:
            self.lead(name, File())

    def write(self, name: str, data: bytes) -> None:
        found = self.find(name)
        assert isinstance(found, File)
        found.data += data

    def sync(self, name: str) -> None:
        found = self.find("" if name == "." else name)
        assert found is not None
        if isinstance(found, Folder):
            found.sync()
        else:
            found.synced = found.data

    def rot(self, name: str, data: bytes) -> None:
        found = self.find(name)
        assert isinstance(found, File)
        found.data = found.synced = data

    def commit(self, state: bytes) -> None:
        self.catalogue = state

    def crash(self, dice: random.Random, which: str) -> dict[str, bytes | None]:
        """Paths with their contents (None for a folder): nothing lost, all lost that may be, or a throw of the dice."""
        contents: dict[File, bytes] = {}
        found: dict[str, bytes | None] = {}

        def survive(folder: Folder, at: str) -> None:
            for name, values in folder.names.items():
                value = {"all": values[-1], "none": values[0]}.get(which, dice.choice(values))
                path = os.path.join(at, name)
                if isinstance(value, Folder):
                    found[path] = None
                    survive(value, path)
                elif value is not None:
                    whole = {"all": value.data, "none": value.synced}
                    found[path] = contents.setdefault(value, whole[which] if which in whole else value.survivors(dice))

        survive(self.root, "")
        return found


# ── a history ────────────────────────────────────────────────────────────────────────────────────────────────────────


def label(number: int, parent: int | None = None, *, canonical: bool = True) -> Label:
    above = bytes(32) if parent is None else bytes([parent] * 32)
    start = 0 if parent is None else (parent + 1) * 8
    return Label(bytes([number] * 32), above, b"f" * 32, start, tuple(range(number, number + 8)), canonical, 1.0)


def state(number: int, parent: int | None = None, *, canonical: bool = True) -> Label:
    """The checkpoint at the end of a block."""
    block = label(number, parent, canonical=canonical)
    return replace(block, key=bytes([number + 100] * 32), parent=block.key, kind="state")


def payload(wanted: Label, *, canonical: bool) -> Bytes:
    return np.random.default_rng([wanted.key[0], canonical]).integers(0, 256, SIZES[wanted.kind], np.uint8)


class History:
    """A life of a folder, with what is promised at each step."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder = root / "deep" / "cache"
        self.recorder = Recorder(root, patch)
        self.promises: list[tuple[int, Promise]] = [(0, Promise())]
        self._live()

    def _promise(self, at: int | None = None, **changes: Any) -> None:
        """From step `at` on, or now."""
        now = len(self.recorder.steps) if at is None else at
        self.promises.append((now, replace(self.promises[-1][1], **changes)))

    def _write(self, disk: Disk, *labels: Label) -> None:
        begun, last = len(self.recorder.steps), self.promises[-1][1]
        keys = {one.key for one in labels}
        stored, gone = disk.write([(one, payload(one, canonical=one.canonical)) for one in labels])
        assert stored
        kept = {key: canonical for key, canonical in last.kept.items() if key not in gone}
        self._promise(begun, kept=kept, deleted=last.deleted - keys)
        kept = kept | {one.key: one.canonical or kept.get(one.key, False) for one in stored}
        self._promise(kept=kept, rotten=last.rotten - keys)

    def _without(self, key: bytes) -> dict[bytes, bool]:
        return {other: canonical for other, canonical in self.promises[-1][1].kept.items() if other != key}

    def _delete(self, act: Callable[[list[bytes]], Any], key: bytes) -> None:
        self._promise(kept=self._without(key))
        act([key])
        self._promise(deleted=self.promises[-1][1].deleted | {key})

    def _rot(self, disk: Disk, key: bytes) -> None:
        self._promise(kept=self._without(key), rotten=frozenset({key}))
        self.recorder.rot(disk.path(key))

    def _live(self) -> None:
        with closing(Disk(self.folder, disk_store.RESERVE + ROOM)) as disk:
            self._write(disk, label(0), label(1, 0), label(2, 1), state(2, 1))
            self._write(disk, *(one(*at, canonical=False) for at in ((3, 2), (4, 3)) for one in (label, state)))
            disk.catalog.use([(one.key, 4e9) for number in range(5) for one in (label(number), state(number))])
            self._write(disk, label(3, 2), state(3, 2), label(10))
            self._write(disk, label(3, 2, canonical=False), state(3, 2, canonical=False))
            self._delete(disk.remove, state(4, 3).key)
            self._delete(disk.remove, label(4, 3).key)
            self._write(disk, label(11), label(12, 11), label(13, 12))
            assert len(disk) == 10
            self._delete(disk.discard, state(2, 1).key)
            self._write(disk, label(14), label(15, 14))
            assert label(10).key not in disk, "something had to go"
            self._write(disk, label(4, 3), state(4, 3))
        with closing(Disk(self.folder, disk_store.RESERVE + ROOM)) as disk:
            disk.reconcile()
            for rotten in (state(4, 3), label(4, 3)):
                self._rot(disk, rotten.key)
                assert disk.quarantine(rotten.key) is None
                self._write(disk, rotten)
            self._write(disk, label(16), label(17))
            self._delete(disk.remove, label(16).key)
            self._delete(disk.erase, label(17).key)

    def points(self) -> Iterator[tuple[StoredModel, Promise]]:
        """Each point where it may end, with what is promised there."""
        model, promises = StoredModel(), list(self.promises)
        promised = Promise()
        for number in range(len(self.recorder.steps) + 1):
            while promises and promises[0][0] <= number:
                promised = promises.pop(0)[1]
            yield model, promised
            if number < len(self.recorder.steps):
                self.recorder.steps[number](model)


def build(folder: Path, files: dict[str, bytes | None], catalogue: bytes | None) -> None:
    folder.mkdir()
    for name, data in files.items():
        if data is None:
            (folder / name).mkdir()
        else:
            (folder / name).write_bytes(data)
    place = folder / "deep" / "cache"
    if catalogue is not None and place.is_dir():
        (place / "index.sqlite").write_bytes(catalogue)


def check(folder: Path, promised: Promise) -> None:
    """Opens what a crash left, and reads everything before and after it is put in order."""
    with closing(Disk(folder, BIG)) as disk:
        for row in list(disk.catalog.rows()):
            if row.label.key not in promised.rotten:
                read(disk, row.label)
        disk.reconcile()
        found = {row.label.key: row.label for row in disk.catalog.rows()}
        for key, one in found.items():
            if key not in promised.rotten:
                read(disk, one)
                assert disk.inspect(key).label == one, "the catalogue says something else than the object"
        for key, canonical in promised.kept.items():
            assert key in found, f"object {key[0]} is lost"
            assert found[key].canonical >= canonical, f"object {key[0]} is derived again"
        assert not promised.deleted & found.keys(), "what was deleted is there again"
        assert found.keys() == {bytes.fromhex(path.stem) for path in disk.objects.iterdir()}
        assert not list((folder / "tmp").iterdir())


def read(disk: Disk, wanted: Label) -> None:
    out = np.empty(SIZES[wanted.kind], np.uint8)
    disk.read_into(wanted, out)
    canonical = disk.inspect(wanted.key).label.canonical
    assert (out == payload(wanted, canonical=canonical)).all(), f"object {wanted.key[0]} is not what was written"


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is synced from here on: what is put in order need not survive another crash."""

    class Hasty(sqlite3.Connection):
        def __init__(self, *given: Any, **options: Any) -> None:
            super().__init__(*given, **options)
            super().execute("PRAGMA synchronous=OFF")

        def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
            return super().execute(statement.replace("synchronous=FULL", "synchronous=OFF"), *values)

    monkeypatch.setattr(sqlite3, "connect", Hasty)
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> History:
    with pytest.MonkeyPatch.context() as patch:
        return History(tmp_path_factory.mktemp("history"), patch)


@pytest.mark.parametrize("throws", [1, pytest.param(30, marks=pytest.mark.slow)])
@pytest.mark.usefixtures("hasty")
def test_whatever_a_crash_interrupts(tmp_path: Path, history: History, throws: int) -> None:
    """Nothing corrupt is read, and nothing that was stored is lost, with the catalogue or from the objects alone."""
    dice, seen = random.Random(throws), set()
    for number, (model, promised) in enumerate(history.points()):
        for which in ("all", "none", *["some"] * throws):
            files = model.crash(dice, which)
            catalogue = None if dice.random() < 0.2 else model.catalogue
            state = hash((tuple(sorted(files.items())), catalogue, id(promised)))
            if state in seen:
                continue
            seen.add(state)
            place = tmp_path / str(len(seen))
            build(place, files, catalogue)
            try:
                check(place / "deep" / "cache", promised)
            except Exception as error:
                raise AssertionError(f"a crash at step {number}, state {which!r}, with {catalogue is not None=}") from error
            shutil.rmtree(place)
    print(len(seen), number)
    assert len(seen) > 200


def test_the_catalogue_keeps_what_it_is_trusted_with(tmp_path: Path) -> None:
    """What the model takes for granted holds only with these settings."""
    with closing(Disk(tmp_path, BIG)) as disk:
        asked = [disk.catalog._db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("synchronous", "journal_mode")]
        assert asked == [2, "wal"]
