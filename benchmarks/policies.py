"""Retention policies on recorded traffic, between LRU and the offline optimum: `python -m benchmarks.policies [--data DIR]`.

The policy was tuned on the other halves of the data. In Mooncake's traces, the second half of the requests is counted; the
cache sees all, like a server that has run for a while. Of the coding agents' sessions, the second half is replayed. The runs of
miniswe were not used for tuning. How they overlap is not recorded, but decides the result, so they are replayed in two ways and
are not in the mean. A budget is a share of all different blocks that are replayed.

`--resamples 10` shows the influence of chance (10 minutes): it repeats the measurement ten times, with a random four fifths of
Mooncake's conversations, and with the agents' sessions in another order.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from benchmarks.plots import policy_curves
from headstart.replay import OPTIMUM, ReplayCosts, ReplayResult, closed, policies, replay, working_set
from headstart.traces import Trace, read, sample

ROOT = Path(__file__).resolve().parents[1]
PARTS = (0.05, 0.1, 0.25)
DRAWN = 0.8
"""Share of the conversations in a resample."""
COSTS = ReplayCosts(0.0024, 23_040)
"""Costs of the bundled model on two cores."""


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
    """The recorded traffic in the folder."""
    found = tuned(data)
    if (data / "miniswe").is_dir():
        for every in (10, 30):
            trace = read([data / "miniswe"], every=every, name=f"miniswe, every {every} s")
            found.append(Workload(trace, mean=False))
    return found


def tuned(data: Path, dice: random.Random | None = None) -> list[Workload]:
    """The traces whose other halves the policy was tuned on; with `dice` a resample of them."""
    found: list[Workload] = []
    for name in ("conversation", "synthetic"):
        file = data / "mooncake" / f"{name}_trace.jsonl"
        if file.exists():
            trace = read([file], name=f"Mooncake {name}")
            whole = Workload(trace, len(trace.requests) // 2)
            found.append(drawn(whole, dice) if dice else whole)
    sessions = sorted((data / "claude-code").glob("*.json.gz"))
    if sessions:
        held = sessions[len(sessions) // 2 :]
        if dice:
            dice.shuffle(held)
        found.append(Workload(read(held, block_size=512, name="coding agents")))
    return found


def drawn(work: Workload, dice: random.Random) -> Workload:
    """A random part of a trace's conversations. Requests with the same first block are one conversation, unless more than a
    hundredth of all requests have that block."""
    requests = work.trace.requests
    uses = Counter(block for request in requests for block in set(request.blocks))
    names = [next((block for block in one.blocks if uses[block] * 100 <= len(requests)), ~n) for n, one in enumerate(requests)]
    kept = {name for name in dict.fromkeys(names) if dice.random() < DRAWN}
    numbers = [number for number, name in enumerate(names) if name in kept]
    trace = replace(work.trace, requests=tuple(requests[number] for number in numbers))
    return Workload(trace, sum(number < work.first for number in numbers))


Figures = dict[tuple[str, float, str], ReplayResult]
"""By trace, part and policy."""


def measure(work: list[Workload], console: Console, names: Sequence[str]) -> Figures:
    figures: Figures = {}
    for one in work:
        total = working_set(one.trace)
        for part in PARTS:
            for policy in names:
                result = replay(one.trace, policy, int(total * part), COSTS, first=one.first)
                figures[one.trace.name, part, policy] = result
                console.print(f"[dim]{one.trace.name}, {part:.0%}, {policy}: {result.hit / result.prompt:.1%}[/]")
    return figures


def gaps(figures: Figures, trace: str, policy: str) -> list[float]:
    """The shares of the gap between LRU and the optimum that a policy closes, at the budgets with a gap."""
    return [
        gap for part in PARTS if (gap := closed(*(figures[trace, part, name] for name in (policy, "lru", OPTIMUM)))) is not None
    ]


def means(figures: Figures, work: list[Workload]) -> dict[str, float]:
    """For each trace that counts: the share of the gap that `value` closes, as the mean over the budgets."""
    names = [one.trace.name for one in work if one.mean]
    return {name: statistics.mean(found) for name in names if (found := gaps(figures, name, "value"))}


def resamples(data: Path, times: int, console: Console) -> str:
    """A sentence about the influence of chance on the share of the gap that `value` closes."""
    found: dict[str, list[float]] = {}
    for seed in range(times):
        work = tuned(data, random.Random(seed))
        closes = means(measure(work, console, ("value", "lru", OPTIMUM)), work)
        for name, part in (*closes.items(), ("of these", statistics.mean(closes.values()))):
            found.setdefault(name, []).append(part)
    shown = (f"{name} {statistics.mean(one):.0%} ({min(one):.0%} – {max(one):.0%})" for name, one in found.items())
    return f"Gap closed in {times} resamples, mean (least – most): {', '.join(shown)}."


def markdown(figures: Figures, work: list[Workload]) -> str:
    """A table: the share of prompt tokens that hit, and the share of the gap that is closed."""
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
    closes = means(figures, work)
    shown = ", ".join(f"{trace} {mean:.0%}" for trace, mean in closes.items())
    lines += ["", f"Gap closed, mean of the budgets: {shown}; of these {statistics.mean(closes.values()):.0%}."]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.policies", description=__doc__)
    given = os.environ.get("HEADSTART_DATA")
    parser.add_argument("--data", type=Path, default=Path(given) if given else ROOT.parent / "shared" / "data")
    parser.add_argument("--out", type=Path, default=Path("bench-out"), help="folder for the table and the plot")
    parser.add_argument("--resamples", type=int, metavar="N", help="instead: how far chance goes, by N resamples")
    options = parser.parse_args()
    console = Console()
    work = workloads(options.data)
    if not work:
        console.print(f"There is no recorded traffic in {options.data}: a generated trace must do.")
        work = [Workload(sample())]
    elif options.resamples:
        console.print(resamples(options.data, options.resamples, console), markup=False, soft_wrap=True)
        return
    figures = measure(work, console, policies())
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "policies.md").write_text(markdown(figures, work) + "\n")
    console.print(markdown(figures, work), markup=False, soft_wrap=True)
    shares = {(trace, f"{part:.0%}", name): one.hit / one.prompt for (trace, part, name), one in figures.items()}
    (options.out / "policies.svg").write_text(policy_curves(shares), "utf-8")


if __name__ == "__main__":
    main()
