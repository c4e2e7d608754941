"""Totals: what many histories have shown together, as a table, and as a file from which a run goes on."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from headstart.testing.simulation.faults import KINDS
from headstart.testing.simulation.run import Result

CLIENTS = (
    "turn",
    "edit",
    "edit last",
    "branch",
    "again",
    "retry",
    "style",
    "other template",
    "flood",
    "abort",
    "restart",
    "second server",
    "pin",
    "unpin",
    "delete",
    "list",
    "rm",
    "verify",
    "gc",
)
"""What clients and operators do, in the order of the table."""


@dataclass
class Totals:
    """Sums over histories.

    Attributes:
        done: ranges of seeds, from the first to the last.
        seconds: CPU time.
        virtual: seconds of the virtual clock.
        failures: violations by seed.
        sizes: how many histories had so many requests.
    """

    done: list[list[int]] = field(default_factory=list)
    histories: int = 0
    seconds: float = 0.0
    virtual: float = 0.0
    requests: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)
    seen: Counter[str] = field(default_factory=Counter)
    sizes: Counter[int] = field(default_factory=Counter)
    failures: dict[int, str] = field(default_factory=dict)

    def add(self, result: Result) -> None:
        seed = result.history.seed
        if self.done and self.done[-1][1] == seed - 1:
            self.done[-1][1] = seed
        else:
            self.done.append([seed, seed])
        self.histories += 1
        self.seconds += result.seconds
        self.virtual += result.virtual
        self.requests += result.requests
        self.faults += result.faults
        self.lost += result.lost
        self.seen += result.seen
        self.sizes[sum(result.requests.values())] += 1
        if result.violation:
            self.failures[seed] = result.violation

    def has(self, seed: int) -> bool:
        """Whether the history of a seed is among them."""
        return any(first <= seed <= last for first, last in self.done)

    def merge(self, others: Iterable[Totals]) -> Totals:
        """The sums of these totals and of others, whose seeds are different ones."""
        found = Totals()
        for one in (self, *others):
            found.done += one.done
            found.histories += one.histories
            found.seconds += one.seconds
            found.virtual += one.virtual
            for name in ("requests", "faults", "lost", "seen", "sizes"):
                getattr(found, name).update(getattr(one, name))
            found.failures.update(one.failures)
        return found

    def save(self, path: Path) -> None:
        new = path.with_suffix(".new")
        new.write_text(json.dumps(vars(self)), "utf-8")
        new.replace(path)

    @classmethod
    def load(cls, path: Path) -> Totals:
        """The totals in a file; none if there is no file."""
        if not path.exists():
            return cls()
        data = json.loads(path.read_text("utf-8"))
        for name in ("requests", "faults", "lost", "seen"):
            data[name] = Counter(data[name])
        data["sizes"] = Counter({int(size): times for size, times in data["sizes"].items()})
        data["failures"] = {int(seed): what for seed, what in data["failures"].items()}
        return cls(**data)

    def table(self) -> str:
        """The table that a run prints."""
        requests = self.requests.total()
        median = statistics.median(self.sizes.elements()) if self.sizes else 0
        rows = [
            ("seeds", ", ".join(f"{first}..{last}" for first, last in self.done)),
            ("histories", f"{self.histories:,}"),
            ("violations", f"{len(self.failures):,}"),
            ("requests", f"{requests:,}, {median:g} a history (median)"),
            ("of them", ", ".join(f"{outcome} {count:,}" for outcome, count in self.requests.most_common())),
            ("requests a second of CPU", f"{requests / self.seconds:.0f}" if self.seconds else "–"),
            ("virtual hours", f"{self.virtual / 3600:,.1f}"),
            ("steps checked", f"{self.seen['step']:,}"),
            ("evicted", f"{self.seen['evicted from memory']:,} from memory, {self.seen['evicted from disk']:,} from disk"),
            ("faults met", f"{self.faults.total():,}"),
            *((f"  {kind}", f"{count:,}") for kind, count in Counter(dict.fromkeys(KINDS, 0) | self.faults).most_common()),
            ("power failures took", ", ".join(f"{what} {count:,}" for what, count in self.lost.most_common())),
            ("clients did", ", ".join(f"{what} {self.seen[what]:,}" for what in CLIENTS if self.seen[what])),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:{width}}  {value}" for name, value in rows)
