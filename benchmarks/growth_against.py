"""Beside another version: `python -m benchmarks.growth --against DIR [--entries 1000] [--portions 30]`.

`DIR` is a checkout of the other version (`git worktree add DIR v1.2`). Both versions run at the same time, each in a process of
its own, and make the same calls in turn (`growth_calls`): a portion here, a portion there. So the machine's load meets both.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.table import Table

from benchmarks.growth_calls import CALLED, Samples
from benchmarks.processor import caption

HERE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Beside:
    """CPU microseconds of an operation in both versions.

    Attributes:
        before, now: median, 99.9th percentile and mean of all calls.
        ratio: the median of the ratios of the portions' medians (now / before), and the 10th and 90th percentile.
    """

    operation: str
    before: tuple[float, float, float]
    now: tuple[float, float, float]
    ratio: tuple[float, float, float]


@contextmanager
def version(checkout: Path, name: str, entries: int) -> Iterator[subprocess.Popen[str]]:
    """A process that makes the calls in the version of a checkout. It ends with its input."""
    given = os.environ | {"PYTHONPATH": os.pathsep.join([str(checkout / "src"), str(HERE)])}
    command = [sys.executable, "-m", "benchmarks.growth_calls", name, str(entries)]
    process = subprocess.Popen(command, cwd=HERE, env=given, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        yield process


def portion(process: subprocess.Popen[str]) -> Samples:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    if not (line := process.stdout.readline()):
        raise RuntimeError("a version has failed; its error is above")
    found: Samples = json.loads(line)
    return found


def beside(checkout: Path, name: str, entries: int, portions: int) -> Iterator[Beside]:
    taken: tuple[list[Samples], list[Samples]] = [], []
    with version(checkout, name, entries) as before, version(HERE, name, entries) as now:
        for number in range(portions + 1):
            for which in (0, 1) if number % 2 else (1, 0):
                found = portion((before, now)[which])
                if number:  # the first calls of a process are slower
                    taken[which].append(found)
    for operation in taken[0][0]:
        ratios = [np.median(b[operation]) / np.median(a[operation]) for a, b in zip(*taken, strict=True)]
        low, middle, high = np.percentile(ratios, (10, 50, 90))
        yield Beside(operation, _figures(taken[0], operation), _figures(taken[1], operation), (middle, low, high))


def _figures(portions: list[Samples], operation: str) -> tuple[float, float, float]:
    calls = np.concatenate([one[operation] for one in portions])
    return float(np.median(calls)), float(np.percentile(calls, 99.9)), float(np.mean(calls))


def table(checkout: Path, entries: int, portions: int) -> Table:
    result = Table(
        *("operation", "before", "now", "now / before"),
        title=f"{entries:,} entries: median (99.9th percentile), mean in µs; {portions} portions; {caption()}",
    )
    for name in CALLED:
        for row in beside(checkout, name, entries, portions):
            result.add_row(row.operation, _shown(row.before), _shown(row.now), "{:.2f} ({:.2f} – {:.2f})".format(*row.ratio))
    return result


def _shown(figures: tuple[float, float, float]) -> str:
    median, high, mean = (f"{figure:,.{1 if figure < 100 else 0}f}" for figure in figures)
    return f"{median} ({high}), {mean}"
