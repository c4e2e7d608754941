"""Faults that are planted into the code are found. What the checks take for granted is true."""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path

import pytest

from headstart.interfaces.tokens import as_tokens
from headstart.prefix_cache.entry import Entry
from headstart.prefix_cache.index import Index
from headstart.testing.simulation.checks import Tenants, believed
from headstart.testing.simulation.history import Scenario
from headstart.testing.simulation.install import installed
from headstart.testing.simulation.run import HistoryRun, run
from planted import HISTORIES, PLANTED, SOURCE, Planted, search

FAST = "a quota is not counted"


def test_there_are_many_and_each_can_be_planted() -> None:
    assert len({one.name for one in PLANTED}) == len(PLANTED) >= 30
    assert all(bool(one.rare) == bool(one.test) for one in PLANTED)
    for one in PLANTED:
        text = (SOURCE / one.module).read_text("utf-8")
        assert text.count(one.old) == 1, one.name
        compile(text.replace(one.old, one.new), one.name, "exec")


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "fault",
    [pytest.param(one, id=one.name, marks=[] if one.name == FAST else pytest.mark.slow) for one in PLANTED],
)
def test_a_planted_fault_is_found(fault: Planted, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = search(fault, tmp_path)
    assert found.line, f"{fault.name}: not found by {fault.test or f'{HISTORIES} histories'}"
    with capsys.disabled():
        print(f"\n{found.seconds:6.1f} s  {fault.name}: {found.line}")


def test_the_disk_has_promised_what_all_processes_believe() -> None:
    """One may not know yet that another has evicted an object, and has stored a derived one in its place."""

    def index(**copies: bool) -> Index:
        found = Index(2)
        for name, canonical in copies.items():
            found.add(Entry(name.encode() * 32, bytes(32), as_tokens([1, 2]), 0), "disk", canonical=canonical)
        return found

    assert believed([]) == {}
    assert believed([index(a=True, b=False)]) == {b"a" * 32: True, b"b" * 32: False}
    assert believed([index(a=True, b=True), index(a=False, c=True)]) == {b"a" * 32: False}


def test_a_tenant_may_reuse_what_it_has_sent_and_no_more() -> None:
    tenants, call = Tenants(), object()
    tenants.adds(0, as_tokens([1, 2, 3]))
    tenants.adds(0, as_tokens([1, 2, 4, 5]), call)
    tenants.adds(1, as_tokens([1, 2, 4, 5, 6]))
    assert tenants.known(0, as_tokens([1, 2, 4, 5]), call) == 2
    assert tenants.known(0, as_tokens([1, 2, 4, 5]), object()) == 4
    assert tenants.known(1, as_tokens([7]), call) == tenants.known(2, as_tokens([1]), call) == 0


def test_an_error_that_no_fault_explains_ends_a_history(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors of the disk's thread and of requests, which are only logged."""

    def fails(*_: object, **__: object) -> None:
        raise KeyError("of a program")

    for where, what in (("headstart.tiers.write_behind.Disk.write", "disk"), ("headstart.serving.job.Job.finish", "scheduler")):
        with monkeypatch.context() as patch, installed():
            patch.setattr(where, fails)
            found = run(Scenario.of(0))
        assert re.match(f"an internal error: .{{2}}headstart.{what}: ", found.violation), where


def test_an_object_that_is_not_listed_again_after_a_crash_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its row is taken out of the catalogue just before the end."""
    done, forgotten = list[HistoryRun](), HistoryRun._forgotten

    def forgetting(history: HistoryRun) -> bool:
        disk = history.servers[-1].disk
        stored = [(key,) for key in history._promised if history._file(key)]
        if stored and history not in done and disk is not None and disk._disk is not None:
            sqlite3.Connection.executemany(disk._disk.catalog._db, "DELETE FROM objects WHERE key = ?", stored)
            done.append(history)
        return forgotten(history)

    monkeypatch.setattr(HistoryRun, "_forgotten", forgetting)
    with installed():
        first = (11, 42, 77)  # with which it is found; should histories change, others are tried
        found = next(violation for seed in (*first, *range(100)) if (violation := run(Scenario.of(seed)).violation))
    assert found.startswith("forgotten after a crash")
