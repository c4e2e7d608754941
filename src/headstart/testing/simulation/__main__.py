"""`python -m headstart.testing.simulation`: runs histories, and prints what they have shown (docs/simulation.md)."""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from headstart.testing.simulation.coverage import Measured
from headstart.testing.simulation.history import Scenario
from headstart.testing.simulation.install import installed
from headstart.testing.simulation.run import run
from headstart.testing.simulation.shrink import shrink, written
from headstart.testing.simulation.totals import Totals

SAVE_EVERY = 50
"""Histories after which `--resume` saves."""


def _seeds(text: str) -> range:
    first, _, last = text.partition("..")
    return range(int(first), int(last or first) + 1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m headstart.testing.simulation", description=__doc__)
    parser.add_argument("--seeds", type=_seeds, metavar="A..B", help="the histories of these seeds")
    parser.add_argument("--seed", type=int, metavar="N", help="the history of one seed")
    parser.add_argument("--trace", action="store_true", help="print each call of the history (with --seed)")
    parser.add_argument("--minutes", type=float, metavar="M", help="stop after so many minutes; without seeds, take new ones")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="leave out the seeds in this file, and add to it")
    parser.add_argument("--show", type=Path, nargs="+", metavar="FILE", help="print the sum of such files, and run nothing")
    parser.add_argument("--coverage", action="store_true", help="list the branches that were not reached")
    parser.add_argument("--first", action="store_true", help="stop at the first history that fails")
    parser.add_argument("--no-shrink", action="store_true", help="do not shorten a history that fails")
    return parser


def _wanted(options: argparse.Namespace, totals: Totals) -> Iterator[int]:
    if options.seed is not None:
        yield options.seed
        return
    seeds = options.seeds
    if seeds is None:
        first = random.SystemRandom().randrange(1 << 40)
        print(f"seeds from {first} on", flush=True)
        seeds = range(first, first + (100 if options.minutes is None else 1 << 40))
    yield from (seed for seed in seeds if not totals.has(seed))


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.show:
        first, *others = map(Totals.load, options.show)
        print(first.merge(others).table())
        return 0
    totals = Totals.load(options.resume) if options.resume else Totals()
    ends = time.monotonic() + 60 * options.minutes if options.minutes is not None else float("inf")
    measured = Measured() if options.coverage else None
    failed = False
    with installed():
        if measured:
            measured.start()
        for seed in _wanted(options, totals):
            if time.monotonic() >= ends:
                break
            result = run(Scenario.of(seed), print if options.trace else None)
            totals.add(result)
            if result.violation:
                failed = True
                print(f"seed {seed}: {result.violation}", flush=True)
                if not options.no_shrink:
                    short = shrink(result)
                    print(f"{short.violation}\n{written(short.history)}", flush=True)
                if options.first:
                    break
            if options.resume and totals.histories % SAVE_EVERY == 0:
                totals.save(options.resume)
        if measured:
            measured.stop()
    if options.resume:
        totals.save(options.resume)
    print(totals.table())
    if measured:
        print(measured.report())
    return int(failed)


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # else sets have another order in each process
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "headstart.testing.simulation", *sys.argv[1:]])
    gc.freeze()  # what is loaded now is no garbage of a history
    sys.exit(main())
