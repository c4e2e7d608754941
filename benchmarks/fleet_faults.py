"""What fails in a fleet, and for how long: `python -m benchmarks.fleet_faults [--mode handle|direct] [--rounds N]`.

Needs the extra `fleet`. Fleets of two replicas with a fake engine and a real store answer a steady load, and something is
killed or stopped. Each answer is compared with that of one server. `tests/fleet_faults.py` has the faults and the load.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import structlog

from benchmarks import processor
from benchmarks.fixtures import of_tests

COLUMNS = ("what fails", "requests", "failed", "hung", "wrong", "next good, s", "slowest, s", "last failure, s", "whole, s")


def measured(mode: str, rounds: int, only: Sequence[str]) -> Iterator[tuple[str, list[Any]]]:
    """The faults and what the clients saw of each. `only`: those whose names begin like this; all if it is empty."""
    faults = of_tests("fleet_faults")
    for every, kind in ((faults.ONE_MACHINE, {}), (faults.MACHINES, {"fronts": 2, "nodes": 3})):
        chosen = [fault for fault in every if fault.name.startswith(tuple(only) or "")]
        if not chosen:
            continue
        outcomes: dict[str, list[Any]] = {}
        for _ in range(rounds):
            with tempfile.TemporaryDirectory() as folder, faults.scene(Path(folder), direct=mode == "direct", **kind) as scene:
                for fault in chosen:
                    outcomes.setdefault(fault.name, []).append(faults.trouble(scene, fault))
        yield from outcomes.items()


def row(name: str, outcomes: Sequence[Any]) -> str:
    """A line of the table. Counts are sums, and seconds the longest of the rounds."""

    def longest(field: str) -> str:
        found = [seconds for one in outcomes if (seconds := getattr(one, field)) is not None]
        return f"{max(found):.1f}" if found else "none"

    counts = [str(sum(getattr(one, field) for one in outcomes)) for field in ("asked", "failed", "hung", "wrong")]
    times = [longest(field) for field in ("next_good", "slowest", "last_failed", "whole")]
    return f"| {' | '.join([name, *counts, *times])} |"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fleet_faults", description=__doc__)
    parser.add_argument("--mode", choices=["handle", "direct"], help="one of the two (both)")
    parser.add_argument("--rounds", type=int, default=1, help="times that each fault is tried")
    parser.add_argument("--only", nargs="*", default=[], help="faults whose names begin like this")
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    print(f"Ray {version('ray')}, {datetime.now(UTC):%Y-%m-%d}, {processor.caption()}", flush=True)
    data = {}
    for mode in [options.mode] if options.mode else ["handle", "direct"]:
        print(f"\n{mode} mode\n\n| {' | '.join(COLUMNS)} |\n|---|{'---:|' * (len(COLUMNS) - 1)}", flush=True)
        for name, outcomes in measured(mode, options.rounds, options.only):
            data[f"{mode}: {name}"] = [asdict(one) for one in outcomes]
            print(row(name, outcomes), flush=True)
    print(f"\n{json.dumps(data)}")


if __name__ == "__main__":
    main()
