"""A folder in trouble: missing, not writable, hung, damaged. The hung one is a named pipe that nobody writes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headstart.tiers.disk import files as disk_files
from headstart.tiers.shared.folder import THREADS, FolderStore
from headstart.tiers.shared.names import ObjectNames
from headstart.tiers.shared.store import StoreError

NAMES = ObjectNames(b"n" * 32)
BLOB = np.arange(200, dtype=np.uint8).data


def name(number: int) -> str:
    return NAMES.of(b"owner", "kv", bytes([number]))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FolderStore]:
    store = FolderStore(tmp_path, 10.0)
    yield store
    store.close()


def test_files_stand_where_the_docs_say_and_only_their_owner_reads_them(store: FolderStore, tmp_path: Path) -> None:
    store.put(name(1), BLOB)
    version, owner, kind, digest = name(1).split("/")
    (file,) = (path for path in tmp_path.rglob("*") if path.is_file())
    assert file == tmp_path / version / owner / kind / digest[:2] / digest
    assert file.stat().st_mode & 0o077 == 0
    assert all(folder.stat().st_mode & 0o077 == 0 for folder in list(file.parents)[:4])


def test_a_missing_folder_is_not_created(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "mount", 10.0)
    for call in (lambda: store.get([name(1)]), lambda: store.have([name(1)]), lambda: store.put(name(1), BLOB)):
        with pytest.raises(StoreError, match="mount it") as caught:
            call()
        assert caught.value.reason == "refused", "or the server would not learn that there is no store"
    (tmp_path / "mount").mkdir()
    assert store.get([name(1)]) == [None]
    assert store.have([name(1)]) == [False]
    assert store.put(name(1), BLOB)


def test_what_is_not_mounted_is_not_deleted(store: FolderStore, tmp_path: Path) -> None:
    """A deletion was answered, and the text was there again with the mount."""
    store.put(name(1), BLOB)
    (away := tmp_path.with_name("away")).mkdir()
    tmp_path.rename(away / "store")
    for call in (lambda: store.delete([name(1)]), lambda: store.objects()):
        with pytest.raises(StoreError, match="mount it"):
            call()
    (away / "store").rename(tmp_path)
    assert [one.name for one in store.objects()] == [name(1)]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_listing_leaves_out_nothing_that_it_may_not_read(store: FolderStore, tmp_path: Path) -> None:
    store.put(name(1), BLOB)
    (path,) = (path for path in tmp_path.rglob("*") if path.is_file())
    path.parent.chmod(0)
    with pytest.raises(StoreError, match="auth"):
        store.objects()
    path.parent.chmod(0o700)


def test_a_file_in_place_of_a_folder_is_an_error(store: FolderStore, tmp_path: Path) -> None:
    (tmp_path / "hs1").write_text("in the way")
    with pytest.raises(StoreError) as caught:
        store.put(name(1), BLOB)
    assert caught.value.reason == "other"
    assert str(tmp_path) in str(caught.value)


def test_a_hung_file_system_costs_the_time_limit_and_all_threads_at_most(tmp_path: Path) -> None:
    store = FolderStore(tmp_path, 0.1)
    store.put(name(1), BLOB)
    (path,) = (path for path in tmp_path.rglob("*") if path.is_file())
    path.unlink()
    os.mkfifo(path)
    for _ in range(THREADS + 2):  # the last two find no free thread
        began = time.monotonic()
        with pytest.raises(StoreError) as caught:
            store.get([name(1)])
        assert caught.value.reason == "timeout"
        assert time.monotonic() - began < 3
    for _ in range(THREADS):  # lets the threads go: each opens the pipe, and finds nothing in it
        os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))
        time.sleep(0.02)
    store.close()


@pytest.mark.parametrize("late", ["write", "replace"], ids=["before-its-name", "with-its-name"])
def test_a_write_that_was_given_up_does_not_undo_a_deletion(
    store: FolderStore, monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    """The mount hangs. The write fails, the mount answers others, the text is deleted, and then the write goes on."""
    store._timeout = 0.1
    goes, went = threading.Event(), threading.Event()
    where, real = (disk_files, disk_files.write) if late == "write" else (os, os.replace)

    def hangs(*arguments: Any) -> None:
        goes.wait(60)
        real(*arguments)
        went.set()

    monkeypatch.setattr(where, late, hangs)
    with pytest.raises(StoreError, match="timeout"):
        store.put(name(1), BLOB)
    store.delete([name(1)])
    goes.set()
    assert went.wait(60)
    for _ in range(THREADS):  # all threads are free: it has come to its end
        assert store._free.acquire(timeout=60)
    store._free.release(THREADS)
    assert store.have([name(1)]) == [False]
    assert not list(store.objects())


HANGS = """
import os, sys
from pathlib import Path
from headstart.tiers.disk import files as disk_files
from headstart.tiers.shared.folder import FolderStore
from headstart.tiers.shared.store import StoreError
store = FolderStore(Path(sys.argv[1]), 0.1)
try:
    store.get([sys.argv[2]])
except StoreError as error:
    print(error.reason)
"""


def test_a_hung_file_system_does_not_keep_a_process_from_ending(tmp_path: Path, store: FolderStore) -> None:
    store.put(name(1), BLOB)
    (path,) = (path for path in tmp_path.rglob("*") if path.is_file())
    path.unlink()
    os.mkfifo(path)
    command = [sys.executable, "-c", HANGS, str(tmp_path), name(1)]
    assert subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout == "timeout\n"


def test_what_a_crash_left_is_neither_read_nor_listed_and_goes_in_time(tmp_path: Path) -> None:
    now = time.time()
    store = FolderStore(tmp_path, 10.0, lambda: now)
    store.put(name(1), BLOB)
    (path,) = (path for path in tmp_path.rglob("*") if path.is_file())
    (left := path.with_name(".tmp-dead-0")).write_bytes(b"half")
    assert [stored.name for stored in store.objects()] == [name(1)]
    assert left.exists()  # somebody may be writing it
    now += 7200
    assert [stored.name for stored in store.objects()] == [name(1)]
    assert not left.exists()
    assert store.get([name(1)]) == [BLOB]
    store.close()


def test_other_names_never_reach_the_file_system(store: FolderStore) -> None:
    for bad in ("../etc/passwd", "hs1/../../x", "/etc/passwd", name(1) + "/..", ""):
        with pytest.raises(ValueError, match="not a name"):
            store.get([bad])
