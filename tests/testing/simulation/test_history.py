"""The simulation: histories of fixed seeds and of a new one, and the same run from the same seed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from effort import NEW_SEED, SLOW
from headstart.testing.simulation.coverage import SOURCE, reasons
from headstart.testing.simulation.erasures import Deletion, Erasures
from headstart.testing.simulation.history import Scenario
from headstart.testing.simulation.install import installed
from headstart.testing.simulation.run import run
from headstart.testing.simulation.shrink import shrink, written
from headstart.testing.simulation.violation import Violation


def simulate(*options: str) -> str:
    """What the command prints. It must find nothing wrong."""
    command = [sys.executable, "-m", "headstart.testing.simulation", *options]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE.parent), "PYTHONHASHSEED": "0"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
    return ended.stdout


@pytest.mark.parametrize("first", [0, 1000])
def test_nothing_goes_wrong_in_histories_of_fixed_seeds(first: int) -> None:
    count = 300 if SLOW else 6
    printed = simulate("--seeds", f"{first}..{first + count - 1}")
    assert re.search(rf"^histories +{count}$", printed, re.MULTILINE)
    assert re.search(r"^violations +0$", printed, re.MULTILINE)


def test_nothing_goes_wrong_in_new_histories() -> None:
    """The summary of all tests says from which seed on (`tests/conftest.py`)."""
    seed, count = int(os.environ[NEW_SEED]), 100 if SLOW else 6
    simulate("--seeds", f"{seed}..{seed + count - 1}")


def test_a_seed_decides_everything() -> None:
    first, again = (simulate("--seed", "7", "--trace") for _ in range(2))
    times = re.compile(r"requests a second.*")
    assert times.sub("", first) == times.sub("", again)
    assert "fsync" in first


def test_a_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    file = str(tmp_path / "part.json")
    simulate("--seeds", "4..4", "--resume", file)
    printed = simulate("--seeds", "4..5", "--resume", file)
    assert "4..5" in printed
    assert simulate("--show", file).count("\n") == printed.count("\n")


def test_histories_are_long_have_tenants_and_evict() -> None:
    """The median is at least 30 requests, each history has at least 3 tenants, and three of four evict."""
    histories = [Scenario.of(seed) for seed in range(100)]
    sizes = sorted(sum(event.what == "ask" for event in one.events) for one in histories)
    assert sizes[len(sizes) // 2] >= 30
    assert all(len({event.who for event in one.events if event.what == "ask"}) >= 3 for one in histories)
    with installed():
        seen = [run(one).seen for one in histories[:12]]
    assert sum(one["evicted from memory"] > 0 for one in seen) >= 9
    assert sum(one["evicted from disk"] > 0 for one in seen) >= 6


def test_a_failing_history_becomes_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails is a check that takes each deletion for a fault."""

    def answered(self: Erasures, deletion: Deletion) -> None:
        raise Violation("a deletion")

    monkeypatch.setattr(Erasures, "answered", answered)
    with installed():
        first = (30, 10, 6)  # short ones; should histories change, others are tried
        failed = run(next(one for seed in (*first, *range(100)) if run(one := Scenario.of(seed)).violation))
        short = shrink(failed, 100)
    assert (failed.violation, short.violation) == ("a deletion", "a deletion")
    assert len(short.history.events) <= 4 < len(failed.history.events)
    assert {"ask", "delete"} <= {event.what for event in short.history.events}


def test_a_history_is_printed_as_python() -> None:
    from headstart.testing.simulation import history

    made = Scenario.of(3)
    assert eval(written(made), vars(history)) == made


@pytest.mark.slow
def test_each_branch_is_reached_or_listed_with_a_reason() -> None:
    printed = simulate("--seeds", "0..199", "--coverage")
    assert re.search(r"reason, 0 without$", printed, re.MULTILINE), printed
    assert re.search(r"^reached, though listed: 0$", printed, re.MULTILINE), printed


def test_reasons_name_lines_that_exist() -> None:
    for (module, line), reason in reasons().items():
        assert reason
        text = (SOURCE / module).read_text("utf-8") if line != "*" else ""
        assert line == "*" or any(line == one.strip() for one in text.splitlines()), (module, line)
