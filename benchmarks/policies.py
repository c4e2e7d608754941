"""Retention policies on recorded traffic, between LRU and the offline optimum: `python -m benchmarks.policies [--data DIR]`.

The policy was tuned on the other halves: of Mooncake's traces the second half of the requests is counted (the cache sees
all, as a server does that has been running), of the coding agents' sessions the second half of the sessions is replayed. The
runs of miniswe were left alone; how they overlap is not recorded and decides all, so they are replayed in two ways and are
not in the mean. A budget is a part of all different blocks of what is replayed.
"""

from __future__ import annotations

import argparse
import os
import statistics
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from headstart.replay import OPTIMUM, Costs, Result, closed, policies, replay, working_set
from headstart.traces import Trace, read, sample

ROOT = Path(__file__).resolve().parents[1]
PARTS = (0.05, 0.1, 0.25)
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
    options = parser.parse_args()
    console = Console()
    work = workloads(options.data)
    if not work:
        console.print(f"There is no recorded traffic in {options.data}: a generated trace must do.")
        work = [Workload(sample())]
    figures = measure(work, console)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "policies.md").write_text(markdown(figures, work) + "\n")
    plot(figures, options.out / "policies.png")
    console.print(markdown(figures, work), markup=False, soft_wrap=True)


if __name__ == "__main__":
    main()
