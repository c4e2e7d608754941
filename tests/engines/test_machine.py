"""What a process may use: the machine's, or less in a container."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from headstart.engines import machine

GIB = 1 << 30


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 16 cores with 64 GiB free."""
    monkeypatch.setattr(machine, "_GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(machine, "_OWN", tmp_path / "own")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=64 * GIB))
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 16)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(32)), raising=False)
    return tmp_path / "cgroup"


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


def test_without_groups_it_is_the_machines(groups: Path) -> None:
    assert (machine.cores(), machine.memory()) == (16, 64 * GIB)
    write(groups, memory__max="max", memory__current=5, cpu__max="max 100000")
    (groups.parent / "own").write_text("0::/\n")
    assert (machine.cores(), machine.memory()) == (16, 64 * GIB)


@pytest.mark.parametrize("path", ["/", "/docker/abc", "/gone"])
def test_version_2(groups: Path, path: str) -> None:
    (groups.parent / "own").write_text(f"0::{path}\n")
    stat = f"anon 7\ninactive_file {GIB // 2}\nactive_file {GIB // 2}"
    write(groups, memory__max=16 * GIB, memory__current=3 * GIB, memory__stat=stat, cpu__max="400000 100000")
    assert (machine.cores(), machine.memory()) == (4, 14 * GIB)
    if path == "/docker/abc":
        write(groups / "docker" / "abc", memory__max=2 * GIB, memory__current=3 * GIB, cpu__max="50000 100000")
        assert (machine.cores(), machine.memory()) == (1, 0)


@pytest.mark.parametrize(("high", "free"), [("max", 14), (8 * GIB, 6), (20 * GIB, 14)])
def test_version_2_has_a_limit_that_slows_down(groups: Path, high: object, free: int) -> None:
    """Fault: with `memory.high` alone, as of systemd's MemoryHigh, the memory of the whole machine was planned with."""
    (groups.parent / "own").write_text("0::/\n")
    write(groups, memory__max=16 * GIB, memory__high=high, memory__current=2 * GIB)
    assert machine.memory() == free * GIB
    write(groups, memory__max="max")
    assert machine.memory() == (64 * GIB if high == "max" else int(str(high)) - 2 * GIB)


def test_version_1(groups: Path) -> None:
    (groups.parent / "own").write_text("4:memory:/there\n3:cpuset:/\n1:cpu,cpuacct:/\n0::/\n")
    limits = {
        "memory__usage_in_bytes": 3 * GIB,
        "memory__stat": f"inactive_file 5\ntotal_inactive_file {GIB - 9}\ntotal_active_file 9",
    }
    write(groups / "memory", memory__limit_in_bytes=(1 << 63) - 4096, **limits)
    write(groups / "memory" / "there", memory__limit_in_bytes=8 * GIB, **limits)
    write(groups / "cpu", cpu__cfs_quota_us=300_000, cpu__cfs_period_us=100_000)
    assert (machine.cores(), machine.memory()) == (3, 6 * GIB)
    write(groups / "cpu", cpu__cfs_quota_us=-1)
    assert machine.cores() == 16


def test_of_this_machine() -> None:
    assert machine.cores() >= 1
    assert 0 < machine.memory() <= psutil.virtual_memory().total
