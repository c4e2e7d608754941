"""Many random histories of each kind of tiny MLX model, in parts that can be resumed.

`python tests/mlx_parts.py FILE [--openblas] [--long-every N] [--first SEED] [--histories N] [--part N] [--minutes N]
[--kinds KIND …]`

Each part is a process of its own. Its result is a line of FILE, and a part that stands there is not run again. The kinds take
turns, so that an interrupted run has seen all of them. At the end, and for parts of an earlier run, the sums of each kind are
printed as a table; the exit code is 1 if any bit was wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx_process
import tiny_hf

Line = dict[str, Any]
LONG_EVERY = 25
"""One history of so many has prompts of more than 1,500 tokens, by default."""


def parts(kinds: Sequence[str], seeds: range, size: int) -> Iterator[tuple[str, int, int]]:
    """(kind, first seed, number of histories)."""
    for first in seeds[::size]:
        for kind in kinds:
            yield kind, first, min(size, seeds.stop - first)


def lines(file: Path) -> list[Line]:
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()] if file.exists() else []


def table(found: Sequence[Line]) -> Iterator[str]:
    yield "| tiny model | blocks | histories | compared | other bits than cold | restored | long prompts | tokens reused |"
    yield "|---|---|---:|---:|---:|---:|---:|---:|"
    for kind in dict.fromkeys(line["kind"] for line in found):
        own = [line for line in found if line["kind"] == kind]
        sums = {name: sum(line[name] for line in own) for name in _SUMMED}
        how = {f"{line['block_size']}, {'calls over several' if line['chunking'] else 'one call each'}" for line in own}
        yield (
            f"| {kind} | {'; '.join(sorted(how))} | {sums['histories']} | {sums['compared']} "
            f"| {sums['wrong'] + sums['wrong_replies']} | {sums['restoring']} | {sums['long']} "
            f"| {sums['reused'] / sums['prompted']:.0%} of {sums['prompted']:,} |"
        )


_SUMMED = ("histories", "compared", "wrong", "wrong_replies", "restoring", "long", "reused", "prompted")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--kinds", nargs="+", default=list(tiny_hf.MODELS), metavar="KIND")
    parser.add_argument("--openblas", action="store_true", help="in place of MLX's own BLAS")
    parser.add_argument("--long-every", type=int, default=LONG_EVERY, metavar="N", help="one of N has long prompts (25)")
    parser.add_argument("--histories", type=int, default=300, help="of each kind (300)")
    parser.add_argument("--first", type=int, default=0, help="seed of the first of them (0), where others have run before")
    parser.add_argument("--part", type=int, default=25, help="histories of a part (25)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no part after so many minutes")
    given = parser.parse_args()
    models = given.file.with_suffix(".models")
    blas = mlx_process.openblas() if given.openblas else None
    if given.openblas and blas is None:
        parser.error("there is no OpenBLAS: apt-get install libopenblas0-pthread, or set OPENBLAS_LIBRARY")
    until = time.monotonic() + 60 * given.minutes
    done = {(line["kind"], line["first"]) for line in lines(given.file)}
    for kind, first, count in parts(given.kinds, range(given.first, given.first + given.histories), given.part):
        if (kind, first) in done:
            continue
        if time.monotonic() > until:
            break
        found = mlx_process.run(tiny_hf.named(models, kind), count, first=first, long=given.long_every, blas=blas)
        with given.file.open("a", encoding="utf-8") as out:
            out.write(json.dumps({"kind": kind, "first": first, **found}) + "\n")
    for text in table(lines(given.file)):
        print(text)
    return int(any(line["wrong"] or line["wrong_replies"] or not line["exact"] for line in lines(given.file)))


if __name__ == "__main__":
    sys.exit(main())
