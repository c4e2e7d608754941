"""A disk that fails in every way at every call: no request notices, nothing is leaked, and it is used again when it works."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness import Answer, ask, system, user
from headstart.config import Settings
from headstart.interfaces.tokens import Bytes
from headstart.serving import scheduler
from headstart.serving.runtime import Runtime
from headstart.testing.fake_engine import FakeEngine
from headstart.tiers import parallel_read, write_behind
from headstart.tiers.disk import Disk, Label, schema
from headstart.tiers.disk import store as disk_store

BLOCK_SIZE = 8
CODES = {
    errno.ENOSPC: (sqlite3.OperationalError, sqlite3.SQLITE_FULL, "database or disk is full"),
    errno.EIO: (sqlite3.OperationalError, sqlite3.SQLITE_IOERR, "disk I/O error"),
    errno.EACCES: (sqlite3.OperationalError, sqlite3.SQLITE_READONLY, "attempt to write a readonly database"),
    errno.EBADMSG: (sqlite3.DatabaseError, sqlite3.SQLITE_CORRUPT, "database disk image is malformed"),
}
"""What SQLite makes of it."""
BY_PATH = ("open", "replace", "unlink", "mkdir", "stat", "listdir", "scandir", "statvfs")
BY_FILE = ("write", "fsync", "fstat", "pread", "preadv")
BUDGET = disk_store.RESERVE + 24 * 8192


class Injector:
    """Stands between the disk tier and the system, and lets calls fail.

    Attributes:
        calls: names of the calls so far.
        fired: how many failed.
    """

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.fired = 0
        self._folder = str(folder)
        self._files: set[int] = set()
        self._fails: Callable[[int, str], bool] = lambda *_: False
        self._code = 0
        self._lock = threading.Lock()
        for name in (*BY_PATH, *BY_FILE):
            patch.setattr(os, name, self._wrapped(name, getattr(os, name)))
        patch.setattr(sqlite3, "connect", self._connect(sqlite3.connect))

    def inject(self, code: int, fails: Callable[[int, str], bool]) -> None:
        """From now on a call fails if `fails(number, name)`, counted from 0."""
        with self._lock:
            self.calls.clear()
            self._code, self._fails = code, fails

    def stop(self) -> None:
        with self._lock:
            self._fails = lambda *_: False

    def _meets(self, name: str) -> bool:
        with self._lock:
            self.calls.append(name)
            failing = self._fails(len(self.calls) - 1, name)
            self.fired += failing
            return failing

    def _wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(place: Any = ".", *args: Any, **options: Any) -> Any:
            ours = place in self._files if isinstance(place, int) else os.fspath(place).startswith(self._folder)
            if ours and self._meets(name):
                raise OSError(self._code, os.strerror(self._code), place if name in BY_PATH else None)
            found = real(place, *args, **options)
            if ours and name == "open":
                self._files.add(found)
            elif name == "open":
                self._files.discard(found)
            return found

        return call

    def _connect(self, real: Callable[..., sqlite3.Connection]) -> Callable[..., sqlite3.Connection]:
        injector = self

        class Failing(sqlite3.Connection):
            def _meet(self, name: str) -> None:
                if injector._meets(f"sqlite {name}"):
                    kind, code, message = CODES[injector._code]
                    error = kind(message)
                    error.sqlite_errorcode = code
                    raise error

            def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
                self._meet(statement.split()[0])
                return super().execute(statement.replace("synchronous=FULL", "synchronous=OFF"), *values)

            def executemany(self, *given: Any) -> sqlite3.Cursor:
                self._meet("many")
                return super().executemany(*given)

            def executescript(self, *given: Any) -> sqlite3.Cursor:
                self._meet("script")
                return super().executescript(*given)

            def __exit__(self, *error: Any) -> Any:
                try:
                    if error[0] is None:
                        self._meet("commit")
                except sqlite3.Error:
                    self.rollback()
                    raise
                return super().__exit__(*error)

        def connect(path: Any, **options: Any) -> sqlite3.Connection:
            if str(path).startswith(self._folder) and self._meets("sqlite connect"):
                raise sqlite3.OperationalError("unable to open database file")
            return real(path, factory=Failing, **options)

        return connect


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_behind, "PATIENCE", 0.02)
    monkeypatch.setattr(write_behind, "POLL", 0.01)
    monkeypatch.setattr(scheduler, "IDLE_SAVE", 0.002)
    monkeypatch.setattr(os, "fsync", lambda _: None)


def start(folder: Path | None, *, disk: int = BUDGET, **options: Any) -> Runtime:
    settings = Settings(reuse="exact", memory_budget=64 << 10, cache_dir=folder, disk_budget=disk, **options)
    return Runtime(lambda: FakeEngine(slots=2, ctx=512, block_size=BLOCK_SIZE), settings)


def chat(number: int) -> list[dict[str, Any]]:
    return [system(f"{number}: you answer in the words of the house, and never in others."), user("a" * number)]


def answer(rt: Runtime, number: int) -> Answer:
    return ask(rt, chat(number), max_tokens=4, keep_logits=True)


def same(one: Answer, other: Answer) -> None:
    assert one.logits is not None
    assert other.logits is not None
    assert one.text == other.text
    assert one.logits.tobytes() == other.logits.tobytes()


def settled(rt: Runtime) -> None:
    """Waits until the disk has answered for all that it was offered, or has refused it."""
    until = time.monotonic() + 60
    while any(slot.dirty for slot in rt.scheduler.slots) or rt.cache.disk._queue.waiting:  # type: ignore[attr-defined]
        assert time.monotonic() < until, (
            rt.cache.disk._queue.waiting,  # type: ignore[attr-defined]
            rt.cache.disk.counters,
            [slot.dirty for slot in rt.scheduler.slots],
        )
        time.sleep(0.001)


def recovered(rt: Runtime, wanted: dict[int, Answer]) -> None:
    """Waits until the disk takes what it is given, and answers for all of it."""
    until = time.monotonic() + 60
    before = rt.cache.disk.counters["saved"]
    number = 50
    while rt.cache.disk.counters["saved"] == before:
        assert time.monotonic() < until, "the disk is not used again"
        number = 50 + (number + 1) % 20
        same(answer(rt, number), wanted[number])
        settled(rt)
    while rt.cache.store.offload.writing:
        assert time.monotonic() < until, "rows are pinned for ever"
        same(answer(rt, 0), wanted[0])


@pytest.fixture(scope="module")
def wanted() -> Iterator[dict[int, Answer]]:
    """What is answered without a disk."""
    with start(None) as rt:
        yield {number: answer(rt, number) for number in range(70)}


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with some conversations in it."""
    folder = tmp_path_factory.mktemp("used")
    with start(folder) as rt:
        for number in range(2):
            answer(rt, number)
    return folder


def live(rt: Runtime, wanted: dict[int, Answer]) -> None:
    """Reads from disk, writes to it, and makes it evict."""
    for number in (0, 2, 1, 3, 4, 0, 5):
        same(answer(rt, number), wanted[number])
        settled(rt)


def endure(used: Path, tmp_path: Path, wanted: dict[int, Answer], code: int, fails: Callable[[int, str], bool]) -> Injector:
    """A life with faults, then one without; afterwards all is as if there had been none."""
    folder = tmp_path / "cache"
    shutil.copytree(used, folder)
    with pytest.MonkeyPatch.context() as patch:
        injector = Injector(folder, patch)
        injector.inject(code, fails)
        with start(folder) as rt:
            live(rt, wanted)
            injector.stop()
            recovered(rt, wanted)
            rt.cache.store.check()
        left = [file.path for file in psutil.Process().open_files() if Path(file.path).is_relative_to(folder)]
        assert not left, "files are left open"
        with start(folder) as rt:
            same(answer(rt, 0), wanted[0])
            same(answer(rt, 60), wanted[60])
            recovered(rt, wanted)
            assert rt.cache.disk.counters["faults"] == 0
            assert not list((folder / "tmp").iterdir())
    shutil.rmtree(folder)
    return injector


@pytest.fixture(scope="module")
def calls(used: Path, tmp_path_factory: pytest.TempPathFactory, wanted: dict[int, Answer]) -> list[str]:
    """The calls of a life without faults."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write_behind, "POLL", 0.01)
        patch.setattr(scheduler, "IDLE_SAVE", 0.002)
        found: list[str] = []

        def never(number: int, name: str) -> bool:
            found[number:] = [name]
            return False

        endure(used, tmp_path_factory.mktemp("calls"), wanted, errno.EIO, never)
    assert {*BY_FILE, "open", "replace", "unlink", "sqlite many", "sqlite SELECT", "sqlite commit"} <= set(found)
    return found


@pytest.mark.parametrize(
    ("lasting", "code", "share"),
    [
        pytest.param(
            *(lasting, code, share),
            id=f"{'lasting' if lasting else 'once'}-{errno.errorcode[code]}-{share}",
            marks=[] if share < 1 and (lasting or code in (errno.EIO, errno.ENOSPC)) else [pytest.mark.slow],
        )
        for lasting in (False, True)
        for code in CODES
        for share in (0.004, 1.0)
    ],
)
def test_every_call_fails(
    used: Path, tmp_path: Path, wanted: dict[int, Answer], calls: list[str], code: int, lasting: bool, share: float
) -> None:
    """Fault: a failing write or read fails a request, leaves rows pinned or files open, or ends the use of the disk."""
    dice = random.Random(code)
    fired = 0
    for at in sorted(dice.sample(range(len(calls)), int(share * len(calls) / (1 + lasting)))):

        def fails(number: int, _: str, at: int = at) -> bool:
            return number >= at if lasting else number == at

        fired += endure(used, tmp_path, wanted, code, fails).fired > 0
    assert fired


KINDS = (*BY_FILE, "open", "replace", "unlink", "sqlite")


@pytest.mark.parametrize(
    ("name", "code"),
    [  # by default each kind of call with one error, and each error with some kinds
        pytest.param(
            name, code, id=f"{name}-{errno.errorcode[code]}", marks=[pytest.mark.slow] if (one - other) % len(CODES) else []
        )
        for one, name in enumerate(KINDS)
        for other, code in enumerate(CODES)
    ],
)
def test_one_kind_of_call_always_fails(used: Path, tmp_path: Path, wanted: dict[int, Answer], code: int, name: str) -> None:
    assert endure(used, tmp_path, wanted, code, lambda _, called: called.startswith(name)).fired


@pytest.mark.parametrize("count", [4, pytest.param(150, marks=pytest.mark.slow)])
def test_a_catalogue_of_garbage(
    used: Path, tmp_path: Path, wanted: dict[int, Answer], count: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever has become of it, it is made anew at the latest when it is found out."""
    dice, faults = random.Random(count), 0
    for number in range(count):
        folder = tmp_path / str(number)
        shutil.copytree(used, folder)
        index = folder / "index.sqlite"
        data = bytearray(index.read_bytes())
        for _ in range(dice.choice((1, 10, 100))):
            at, size = dice.randrange(len(data)), dice.choice((1, 1, 40, 4096))
            data[at : at + size] = dice.choice((bytes, dice.randbytes))(len(data[at : at + size]))
        if dice.random() < 0.1:
            del data[dice.randrange(len(data)) :]
        data[60:64] = schema.VERSION.to_bytes(4, "big")  # that of a later version would be left alone
        index.write_bytes(data)
        for _ in range(2):
            with start(folder) as rt:
                live(rt, wanted)
                recovered(rt, wanted)
                rt.cache.store.check()
                faults += rt.cache.disk.counters["faults"]
        with start(folder) as rt:
            live(rt, wanted)
            assert rt.cache.disk.counters["faults"] == 0
    assert faults or "the catalogue is damaged" in caplog.text, "no damage was met"


def test_a_catalogue_with_garbage_in_what_is_for_people_only(used: Path, tmp_path: Path, wanted: dict[int, Answer]) -> None:
    """Fault: the names of models are read when the folder is opened. Damage there kept the disk from being used, for ever."""
    folder = tmp_path / "cache"
    shutil.copytree(used, folder)
    with contextlib.closing(sqlite3.connect(folder / "index.sqlite")) as catalog, catalog:
        catalog.execute("INSERT INTO models VALUES ('text, not bytes', 'name', 'file', 'mark')")
    with start(folder) as rt:
        recovered(rt, wanted)
        assert rt.cache.disk.counters["faults"] == 1
    with start(folder) as rt:
        live(rt, wanted)
        assert rt.cache.disk.counters["faults"] == 0


class Gate:
    """Lets no write to a folder through until it is opened."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.reached = threading.Event()
        real_open, real_write, files = os.open, os.write, set[int]()

        def opened(path: Any, *args: Any, **options: Any) -> int:
            file = real_open(path, *args, **options)
            (files.add if os.fspath(path).startswith(str(folder)) else files.discard)(file)
            return file

        def write(file: int, data: Any) -> int:
            if file in files:
                self.reached.set()
                assert self.open.wait(60)
            return real_write(file, data)

        patch.setattr(os, "open", opened)
        patch.setattr(os, "write", write)


def test_a_disk_that_hangs_holds_nobody_up(
    used: Path, tmp_path: Path, wanted: dict[int, Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests are served, from the disk too, while a write never ends; nor does stopping wait for it."""
    folder = tmp_path / "cache"
    shutil.copytree(used, folder)
    monkeypatch.setattr(write_behind, "GRACE", 0.05)
    gate = Gate(folder, monkeypatch)
    with start(folder, disk=1 << 30, drain=0.05) as rt:
        for number in range(2, 30):
            same(answer(rt, number), wanted[number])
        assert gate.reached.wait(60)
        old = answer(rt, 0)
        same(old, wanted[0])
        assert old.report.tiers["disk"] > 0
        assert rt.cache.disk.counters["saved"] == 0
    thread = rt.cache.disk._thread  # type: ignore[attr-defined]
    assert thread.is_alive(), "it has waited for the disk"
    gate.open.set()
    thread.join(60)
    assert not thread.is_alive()
    with start(folder, disk=1 << 30) as rt:
        live(rt, wanted)
        assert rt.cache.disk.counters["faults"] == 0


def test_a_disk_that_hangs_while_it_is_read_holds_nobody_up(
    used: Path, tmp_path: Path, wanted: dict[int, Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it holds is computed; when it answers again, it is read again, and no memory is lost."""
    folder = tmp_path / "cache"
    shutil.copytree(used, folder)
    monkeypatch.setattr(parallel_read, "STUCK", 0.5)
    answers, real = threading.Event(), Disk.read_into

    def read_into(self: Disk, label: Label, out: Bytes, *count: Any) -> int:
        assert answers.wait(60)
        return real(self, label, out, *count)

    monkeypatch.setattr(Disk, "read_into", read_into)
    with start(folder, disk=1 << 30) as rt:
        for number in (0, 1):
            hung = answer(rt, number)
            same(hung, wanted[number])
            assert hung.report.tiers.get("disk", 0) == 0
        assert rt.cache.prefetch._lent
        monkeypatch.setattr(parallel_read, "STUCK", 30.0)
        answers.set()
        recovered(rt, wanted)
        for number in range(2, 70):  # more than memory holds
            same(answer(rt, number), wanted[number])
        again = answer(rt, 1)
        same(again, wanted[1])
        assert again.report.tiers["disk"] > 0
        assert rt.cache.disk.counters["fault_hung"] == 1
        assert not rt.cache.prefetch._lent
        rt.cache.memory.check()


def test_a_folder_that_vanishes(used: Path, tmp_path: Path, wanted: dict[int, Answer]) -> None:
    folder = tmp_path / "cache"
    shutil.copytree(used, folder)
    files = psutil.Process().num_fds()
    with start(folder) as rt:
        live(rt, wanted)
        shutil.rmtree(folder, ignore_errors=True)  # the disk's thread may delete or make a file there meanwhile
        live(rt, wanted)
        recovered(rt, wanted)
        there = {path.stem for path in (folder / "objects").iterdir()}
        assert there
        known = {entry.id.hex() for entry in rt.cache.index if rt.cache.disk.name in entry.copies}
        assert known <= there, "what has gone with the folder is still believed to be there"
        rt.cache.store.check()
    assert psutil.Process().num_fds() <= files
    with start(folder) as rt:
        recovered(rt, wanted)
        assert rt.cache.disk.counters["faults"] == 0


def test_a_folder_that_vanishes_and_comes_back(used: Path, tmp_path: Path, wanted: dict[int, Answer]) -> None:
    """As when a volume is taken away for a while: what is written meanwhile goes to another folder of the same name."""
    folder, away = tmp_path / "volume" / "cache", tmp_path / "away"
    shutil.copytree(used, folder)
    kept = {path.name for path in (folder / "objects").iterdir()}
    with start(folder, disk=1 << 30) as rt:
        (tmp_path / "volume").rename(away)
        live(rt, wanted)
        recovered(rt, wanted)
        while away.exists():  # the disk's thread may make the folder anew in between
            (tmp_path / "volume").rename(tempfile.mkdtemp(dir=tmp_path))
            with contextlib.suppress(OSError):
                away.rename(tmp_path / "volume")
        recovered(rt, wanted)
        assert len(rt.cache.disk) >= len(kept), "what was there before is known again"
        rt.cache.store.check()
    with start(folder, disk=1 << 30) as rt:
        assert answer(rt, 1).report.tiers["disk"] > 0
        assert kept <= {path.name for path in (folder / "objects").iterdir()}
        assert rt.cache.disk.counters["faults"] == 0
