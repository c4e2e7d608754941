"""Tree: the stored entries as few stretches, for eyes. Pure.

A stretch is a run of entries without a branch. A hundred chats behind one system prompt are a stretch with a hundred branches,
of which the latest used are shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from headstart.cli.top.state import ShownEntry, TopState

BRANCHES = 6
"""Most branches that are shown at one place."""
LINES = 200
"""Most lines."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive entries without a branch between them.

    Attributes:
        first: the id of its first entry, which stays while it grows.
        tiers: its tokens, by the fastest tier that has them.
        evicted_next: how many of its entries are evicted next, by the reason.
        used: when it, or what continues it, was used last; 0 if that is unknown.
        below: tokens of all that continues it.
    """

    first: str
    start: int
    tokens: int
    tiers: Mapping[str, int]
    pinned: bool
    checkpoints: int
    evicted_next: Mapping[str, int]
    used: float
    branches: tuple[Stretch, ...] = ()
    below: int = 0


@dataclass(frozen=True, slots=True)
class TreeLine:
    """A line: a stretch, or `folded` ones that are left out, with `tokens` of them and of all that continues them."""

    indent: str
    stretch: Stretch | None
    tokens: int
    folded: int = 0


def stretches(state: TopState) -> tuple[Stretch, ...]:
    """The stretches at the beginning of prompts, the latest used first. An entry without its beginning begins one too."""
    after: dict[str | None, list[ShownEntry]] = {}
    checkpoints: Counter[str | None] = Counter()
    for entry in state.entries.values():
        if entry.checkpoint:
            checkpoints[entry.parent] += 1
        else:
            after.setdefault(entry.parent if entry.parent in state.entries else None, []).append(entry)
    soon, made = state.evicted_next, dict[str, Stretch]()
    heads = after.get(None, [])
    todo = [(entry, False) for entry in heads]
    runs: dict[str, list[ShownEntry]] = {}
    while todo:  # branches before the stretch that they continue; without recursion, because chats are long
        head, ready = todo.pop()
        if not ready:
            run = runs[head.id] = [head]
            while len(next_ones := after.get(run[-1].id, [])) == 1:
                run += next_ones
            todo.append((head, True))
            todo += [(entry, False) for entry in next_ones]
            continue
        run = runs.pop(head.id)
        branches = _sorted([made.pop(entry.id) for entry in after.get(run[-1].id, [])])
        made[head.id] = _stretch(run, branches, sum(checkpoints[entry.id] for entry in run), soon)
    return _sorted([made[entry.id] for entry in heads])


def _sorted(found: Sequence[Stretch]) -> tuple[Stretch, ...]:
    return tuple(sorted(found, key=lambda one: (-one.used, one.start, one.first)))


def _stretch(run: Sequence[ShownEntry], branches: tuple[Stretch, ...], checkpoints: int, soon: Mapping[str, str]) -> Stretch:
    tiers: Counter[str] = Counter()
    for entry in run:
        tiers["memory" if "memory" in entry.tiers else "disk"] += entry.tokens
    return Stretch(
        run[0].id,
        run[0].start,
        sum(entry.tokens for entry in run),
        tiers,
        any(entry.pinned for entry in run),
        checkpoints,
        Counter(soon[entry.id] for entry in run if entry.id in soon),
        max([entry.used or 0.0 for entry in run] + [branch.used for branch in branches]),
        branches,
        sum(branch.tokens + branch.below for branch in branches),
    )


def lines(roots: Sequence[Stretch], most: int = LINES) -> list[TreeLine]:
    """The lines of a tree. Branches that were not used for long are folded; so is what follows the last line."""
    found = [*_walk(roots)]
    if len(found) <= most:
        return found
    kept, rest = found[: most - 1], found[most - 1 :]
    return [*kept, TreeLine("", None, sum(line.tokens for line in rest), sum(line.folded or 1 for line in rest))]


def _walk(roots: Sequence[Stretch]) -> Iterator[TreeLine]:
    todo = [(TreeLine("", one, one.tokens), "") for one in reversed(roots)]  # a line, and what stands before its branches
    while todo:
        line, lead = todo.pop()
        yield line
        if line.stretch is None:
            continue
        shown, rest = line.stretch.branches[:BRANCHES], line.stretch.branches[BRANCHES:]
        below = [(TreeLine(f"{lead}├─ ", one, one.tokens), f"{lead}│  ") for one in shown]
        if rest:
            tokens = sum(one.tokens + one.below for one in rest)
            below.append((TreeLine(f"{lead}└─ ", None, tokens, len(rest)), ""))
        elif shown:
            below[-1] = (TreeLine(f"{lead}└─ ", shown[-1], shown[-1].tokens), f"{lead}   ")
        todo += reversed(below)
