"""Placements of checkpoints on recorded and generated conversations: `python -m benchmarks.checkpoints [--data DIR]`.

Each placement in `PLACEMENTS` is tried with each workload, first with memory for everything, then with budgets that KV and
checkpoints share. A budget is a share of the size of the KV of all different blocks.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from benchmarks.conversations import generated
from benchmarks.lines import BLOCK_SIZE, Lines, Result, Shape, prepare, replay
from benchmarks.placements import PLACEMENTS
from benchmarks.recordings import recorded
from headstart.units import show_size

ROOT = Path(__file__).resolve().parents[1]
SHAPES = (Shape("Qwen3-Next", 24 << 10, 75 << 20), Shape("LFM2", 12 << 10, 160 << 10))
PARTS = (0.1, 0.3)
COMPETE = ("edited", "again", "reasoning", "taubench", "agents")
"""Ends of the names of the workloads that are replayed with budgets."""


def measure(lines: Lines, console: Console) -> Iterator[tuple[str, list[Result], bool]]:
    """Rows of the table: the memory, the results of all placements, and whether the memory was unlimited."""
    runs = [("unlimited", SHAPES[0], float("inf"))]
    if lines.name.endswith(COMPETE):
        for shape in SHAPES:
            budgets = (part * lines.blocks * BLOCK_SIZE * shape.kv_bytes_per_token for part in PARTS)
            runs += ((f"{shape.name}, {show_size(budget)}", shape, budget) for budget in budgets)
    for memory, shape, budget in runs:
        results: list[Result] = []
        for name, placement in PLACEMENTS.items():
            result = replay(lines, placement, shape, budget)
            console.print(f"[dim]{lines.name}, {memory}, {name}: {result.computed / result.prompt:.1%} computed[/]")
            results.append(result)
        yield memory, results, budget == float("inf")


def table(data: Path, console: Console) -> Iterator[str]:
    yield "| workload | memory | optimum | " + " | ".join(PLACEMENTS) + " |"
    yield "|---|---|---:|" + "---:|" * len(PLACEMENTS)
    for workload in (*recorded(data), *generated()):
        lines = prepare(workload)
        for memory, results, unlimited in measure(lines, console):
            cells = [f"{one.optimum / one.prompt:.1%}" for one in results[:1]]
            for one in results:
                held = f" · {one.held / lines.ends:.1f} ({one.most})" if unlimited else ""
                cells.append(f"{one.computed / one.prompt:.1%}{held}")
            yield f"| {lines.name} | {memory} | " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoints", description=__doc__)
    given = os.environ.get("HEADSTART_DATA")
    parser.add_argument("--data", type=Path, default=Path(given) if given else ROOT.parent / "shared" / "data")
    parser.add_argument("--out", type=Path, default=Path("bench-out"), help="folder for the table")
    options = parser.parse_args()
    console = Console()
    if not options.data.is_dir():
        console.print(f"There is no recorded traffic in {options.data}: generated conversations must do.")
    text = "\n".join(table(options.data, console))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "checkpoints.md").write_text(text + "\n")
    console.print(text, markup=False, soft_wrap=True)


if __name__ == "__main__":
    main()
