"""Retention policies on recorded traffic, between LRU and the offline optimum: `python -m benchmarks.policies [--data DIR]`.

The policy was tuned on the other halves: of Mooncake's traces the second half of the requests is counted (the cache sees
all, as a server does that has been running), of the coding agents' sessions the second half of the sessions is replayed. The
runs of miniswe were left alone; how they overlap is not recorded and decides all, so they are replayed in two ways and are
not in the mean. A budget is a part of all different blocks of what is replayed.

`--told` asks instead what knowing more would be worth: `value` is told after each request which of its blocks are used again,
though not when; and is told the opposite in some part of the requests.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from rich.console import Console

from headstart.replay import OPTIMUM, Cache, Costs, Result, chain_of, closed, policies, replay, working_set
from headstart.traces import Request, Trace, read, sample

ROOT = Path(__file__).resolve().parents[1]
PARTS = (0.05, 0.1, 0.25)
WRONG = (0.0, 0.15, 0.3)
"""In which parts of the requests `Told` is told the opposite."""
COSTS = Costs(0.0024, 23_040)
"""Of the bundled model on two cores."""


@dataclass(frozen=True)
class Workload:
    """A trace.

    Attributes:
        first: the first request that is counted.
        mean: whether it is in the mean.
    """

    trace: Trace
    first: int = 0
    mean: bool = True


def workloads(data: Path) -> list[Workload]:
    """What there is of the recorded traffic."""
    found: list[Workload] = []
    for name in ("conversation", "synthetic"):
        file = data / "mooncake" / f"{name}_trace.jsonl"
        if file.exists():
            trace = read([file], name=f"Mooncake {name}")
            found.append(Workload(trace, len(trace.requests) // 2))
    sessions = sorted((data / "claude-code").glob("*.json.gz"))
    if sessions:
        found.append(Workload(read(sessions[len(sessions) // 2 :], grid=512, name="coding agents")))
    if (data / "miniswe").is_dir():
        for every in (10, 30):
            trace = read([data / "miniswe"], every=every, name=f"miniswe, every {every} s")
            found.append(Workload(trace, mean=False))
    return found


Figures = dict[tuple[str, float, str], Result]
"""By trace, part and policy."""


def measure(work: list[Workload], console: Console) -> Figures:
    figures: Figures = {}
    for one in work:
        total = working_set(one.trace)
        for part in PARTS:
            for policy in policies():
                result = replay(one.trace, policy, int(total * part), COSTS, first=one.first)
                figures[one.trace.name, part, policy] = result
                console.print(f"[dim]{one.trace.name}, {part:.0%}, {policy}: {result.hit / result.prompt:.1%}[/]")
    return figures


def gaps(figures: Figures, trace: str, policy: str) -> list[float]:
    """The parts of the gap from LRU to the optimum that a policy closes, at the budgets where there is one."""
    return [
        gap for part in PARTS if (gap := closed(*(figures[trace, part, name] for name in (policy, "lru", OPTIMUM)))) is not None
    ]


class Told(Cache):
    """`value` with the length of the reply, by which it learns, replaced by whether a block is used again."""

    AGAIN, NEVER = 600, 10

    def __init__(self, trace: Trace, room: int, wrong: float) -> None:
        super().__init__("value", room, COSTS)
        self._dice = random.Random(1)
        self._wrong = wrong
        self._again: list[dict[bytes, bool]] = []
        known: set[bytes] = set()
        for request in reversed(trace.requests):
            ids = chain_of(request).ids
            self._again.append({piece: piece in known for piece in ids})
            known.update(ids)
        self._again.reverse()

    def serve(self, number: int, request: Request) -> int:
        found = super().serve(number, request)
        wrong = self._dice.random() < self._wrong
        for again in (True, False):
            told = [piece for piece, used in self._again[number].items() if (used != wrong) == again]
            self.retention.replied(told, self.AGAIN if again else self.NEVER)
        return found


def told(work: Workload, part: float) -> list[float | None]:
    """The parts of the gap that are closed by `Told`, by how often it is wrong."""
    budget = int(working_set(work.trace) * part)
    lru, best = (replay(work.trace, policy, budget, COSTS, first=work.first) for policy in ("lru", OPTIMUM))

    def share(wrong: float) -> float | None:
        cache, hit = Told(work.trace, budget // work.trace.grid, wrong), 0
        for number, request in enumerate(work.trace.requests):
            hit += cache.serve(number, request) * work.trace.grid * (number >= work.first)
        return closed(replace(lru, hit=hit), lru, best)

    return [*map(share, WRONG)]


def markdown(figures: Figures, work: list[Workload]) -> str:
    """One table: hits of all prompt tokens, and how much of the gap is closed."""
    names = policies()
    lines = [
        "| trace | budget | " + " | ".join(names) + " | gap closed by `value` | `value` / LRU |",
        "|---|---:|" + "---:|" * (len(names) + 2),
    ]
    for trace in (one.trace.name for one in work):
        for part in PARTS:
            ours, lru, best = (figures[trace, part, name] for name in ("value", "lru", OPTIMUM))
            gap = closed(ours, lru, best)
            shares = " | ".join(f"{figures[trace, part, name].hit / ours.prompt:.1%}" for name in names)
            shown = "–" if gap is None else f"{gap:.0%}"
            lines.append(f"| {trace} | {part:.0%} | {shares} | {shown} | {ours.hit / max(1, lru.hit):.3f} |")
    means = {
        one.trace.name: statistics.mean(found) for one in work if one.mean and (found := gaps(figures, one.trace.name, "value"))
    }
    shown = ", ".join(f"{trace} {mean:.0%}" for trace, mean in means.items())
    return "\n".join([*lines, "", f"Gap closed, mean of the budgets: {shown}; of these {statistics.mean(means.values()):.0%}."])


def plot(figures: Figures, path: Path) -> None:
    """A panel a trace: hits over budget, a line a policy."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    traces = list(dict.fromkeys(trace for trace, _, _ in figures))
    figure, panels = pyplot.subplots(1, len(traces), figsize=(3.4 * len(traces), 3.4), squeeze=False)
    styles = {OPTIMUM: ("black", "--"), "value": ("#c44e52", "-"), "lru": ("#4878a8", "-")}
    for axes, trace in zip(panels[0], traces, strict=True):
        for name in policies():
            color, style = styles.get(name, ("#b0b0b0", {"lfu": "-", "gdsf": ":", "twice": "-."}.get(name, "-")))
            results = [figures[trace, part, name] for part in PARTS]
            axes.plot(PARTS, [one.hit / one.prompt for one in results], color=color, linestyle=style, marker=".", label=name)
        axes.set_title(trace, fontsize=10)
        axes.set_xscale("log")
        axes.set_xticks(PARTS, [f"{part:.0%}" for part in PARTS])
        axes.minorticks_off()
        axes.set_xlabel("budget")
        axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    panels[0][0].set_ylabel("prompt tokens found")
    panels[0][-1].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.policies", description=__doc__)
    given = os.environ.get("HEADSTART_DATA")
    parser.add_argument("--data", type=Path, default=Path(given) if given else ROOT.parent / "shared" / "data")
    parser.add_argument("--out", type=Path, default=Path("bench-out"), help="folder for the table and the plot")
    parser.add_argument("--told", action="store_true", help="show what knowing more would be worth")
    options = parser.parse_args()
    console = Console()
    work = workloads(options.data)
    if not work:
        console.print(f"There is no recorded traffic in {options.data}: a generated trace must do.")
        work = [Workload(sample())]
    if options.told:
        for one, part in product((one for one in work if one.mean), PARTS):
            shares = ", ".join("–" if share is None else f"{share:.0%}" for share in told(one, part))
            console.print(
                f"{one.trace.name}, {part:.0%}: {shares} (told wrong in {', '.join(f'{wrong:.0%}' for wrong in WRONG)})"
            )
        return
    figures = measure(work, console)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "policies.md").write_text(markdown(figures, work) + "\n")
    plot(figures, options.out / "policies.png")
    console.print(markdown(figures, work), markup=False, soft_wrap=True)


if __name__ == "__main__":
    main()
