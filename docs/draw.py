"""Draws the pictures of the docs: `make docs`.

docs/demo.svg shows one bar a request of `make demo`, and which of its tokens were computed. docs/demo.json has the data: the
tokens that `headstart demo --json` prints. They are the same in every run. Times are not: README.md has those of one run.

The arrows of docs/packages.svg are the imports of the sources. docs/benchmarks.svg and docs/policies.svg show tables of
docs/benchmarks.md. The other drawings are described here by hand.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headstart.cli.canvas import Canvas

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))

from benchmarks.plots import page_policies, page_ratios  # noqa: E402

SOURCES = HERE.parent / "src" / "headstart"


# ── one run ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def demo(turns: list[dict[str, Any]] | None = None) -> str:
    """One bar a request: which tokens of its prompt were in the slot, restored and computed."""
    turns = turns or json.loads((HERE / "demo.json").read_text("utf-8"))
    width, left, right, top, step = 900, 250, 116, 62, 22
    scale = (width - left - right) / max(turn["prompt"] for turn in turns)
    prompt, computed = (sum(turn[name] for turn in turns) for name in ("prompt", "computed"))
    title = f"{len(turns)} requests, {prompt:,} prompt tokens: {computed:,} computed, {prompt - computed:,} reused"
    canvas = Canvas(width, top + step * len(turns) + 12, title)
    x: float = left
    legend = {"live": "still in its slot", "restored": "restored from memory or disk", "computed": "computed"}
    for kind, meaning in legend.items():
        canvas.rect(x, 36, 12, 12, kind)
        canvas.text(x + 18, 47, meaning)
        x += 44 + 7 * len(meaning)
    for number, turn in enumerate(turns):
        x, y = left, top + step * number
        canvas.text(left - 10, y + 12, f"{turn['user']} {turn['kind']}", "end")
        tokens = {"live": turn["cached"] - turn["restored"], "restored": turn["restored"], "computed": turn["computed"]}
        for kind, count in tokens.items():
            if count:
                size = max(count * scale, 2)  # a single token is made wide enough to be visible
                canvas.rect(x, y, size, 14, kind)
                x += size
        canvas.text(x + 8, y + 12, f"{turn['computed']:,} computed")
    return canvas.svg()


# ── tiers ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def tiers() -> str:
    """Where KV and checkpoints are, and when they move."""
    canvas = Canvas(920, 512, "Tiers, and what moves when")
    for x, name, what in (
        (30, "Slots", "one live sequence each, in the engine"),
        (355, "Memory", "an arena of equal cells, hard budget"),
        (680, "Disk", "one object a block, hard budget"),
    ):
        canvas.box(x, 44, 210, 76, name, *_two_lines(what))
    canvas.arrow(240, 66, 353, 66, "save")
    canvas.arrow(353, 104, 242, 104, "restore")
    canvas.arrow(565, 66, 678, 66, "write behind")
    canvas.arrow(678, 104, 567, 104, "prefetch")
    columns: tuple[tuple[int, str, tuple[str, ...]], ...] = (
        (30, "Save: KV leaves a slot", (
            "before the slot is reused", "when another request needs it", "after 50 ms without work",
            "every 5 s of a long request, if there is a disk", "",
        )),
        (30, "Checkpoints leave a slot", (
            "during prefill, exactly at their position", "during decoding, at each block boundary",
            "(fast mode; replaces the one before)",
        )),
        (355, "Restore: into a slot", (
            "all entries of a plan in one import", "only entries that are in memory", "", "", "",
        )),
        (355, "Evicted from memory", (
            "before a cell is assigned", "least prefill saved per byte × chance of reuse", "leaves a ghost",
        )),
        (680, "Write behind: memory to disk", (
            "full blocks, then their checkpoints", "on a thread of its own", "derived checkpoints after 10 s", "", "",
        )),
        (680, "Prefetch: disk to memory", (
            "when a plan needs the entry", "at most 4 at a time, each checked",
            "in parts while replies run",
        )),
    )  # fmt: skip
    y = {30: 154, 355: 154, 680: 154}
    for x, head, lines in columns:
        canvas.text(x, y[x], head, "head")
        canvas.texts(x, y[x] + 20, lines, "small")
        y[x] += 20 + 17 * len(lines) + 14
    rules = "An entry that only the disk has goes through memory. Open tails stay in memory."
    canvas.text(30, 382, f"{rules} A bad object is quarantined, and the plan is made again.", "small")
    canvas.box(30, 416, 210, 76, "Memory", "of each server")
    canvas.box(355, 416, 210, 76, "Shared tier", "one store for a fleet,", "with --shared")
    canvas.arrow(240, 438, 353, 438, "offer")
    canvas.arrow(353, 476, 242, 476, "fetch")
    shared = (
        "offer: canonical blocks and checkpoints,", "parents first, on a thread of its own",
        "fetch: before a request gets a slot; it is", "parked, and computes what does not come",
    )  # fmt: skip
    canvas.texts(600, 430, shared, "small")
    return canvas.svg()


def _two_lines(text: str) -> tuple[str, str]:
    first, _, rest = text.partition(", ")
    return f"{first},", rest


# ── threads ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def threads() -> str:
    """A request as a sequence."""
    lanes = {"caller": (110, "Caller's threads"), "engine": (380, "Engine thread"), "disk": (640, "Disk thread"),
             "reader": (850, "Reader threads")}  # fmt: skip
    steps: tuple[tuple[str, str, str], ...] = (
        ("caller", "caller", "render, tokenise"),
        ("caller", "engine", "request, through a queue"),
        ("engine", "engine", "hash, match blocks, plan"),
        ("engine", "reader", "read objects into cells"),
        ("reader", "engine", "checked bytes (engine waits)"),
        ("engine", "engine", "restore, then prefill in calls"),
        ("engine", "engine", "decode (fast mode: one call for all)"),
        ("engine", "caller", "events, through a sink"),
        ("caller", "caller", "parse, encode, send"),
        ("caller", "caller", "at the end: render the turn"),
        ("caller", "engine", "what will be sent back"),
        ("engine", "disk", "offer pinned views of cells"),
        ("disk", "disk", "write, fsync, then the catalogue"),
        ("disk", "engine", "notices: stored, found, gone"),
        ("engine", "engine", "idle: save, then settle"),
    )
    height = 96 + 34 * len(steps)
    canvas = Canvas(960, height, "The threads, as a sequence")
    for x, name in lanes.values():
        canvas.line(x, 72, x, height - 12, "line dashed")
        canvas.box(x - 80, 42, 160, 30, name)
    for number, (start, end, text) in enumerate(steps):
        y = 102 + 34 * number
        x1, x2 = lanes[start][0], lanes[end][0]
        if start == end:
            width = 7 * len(text) + 16
            canvas.rect(x1 - width / 2, y - 15, width, 24, "wash", 4)
            canvas.text(x1, y + 2, text, "middle")
        elif abs(x1 - x2) > 400:  # the label would stand on another lane
            canvas.arrow(x1, y, x2, y)
            canvas.text((min(x1, x2) + 640) / 2, y - 5, text, "middle")
        else:
            canvas.arrow(x1, y, x2, y, text)
    return canvas.svg()


# ── packages ─────────────────────────────────────────────────────────────────────────────────────────────────────────

PLACES: dict[str, tuple[float, int, str]] = {
    "cli": (1, 0, "commands"),
    "api": (0, 1, "HTTP, a folder a dialect"),
    "models": (3, 1, "several in one server"),
    "library": (2, 1, "in a Python process"),
    "observe": (0, 2, "metrics, logs"),
    "events": (-1, 2, "for all who watch"),
    "chat": (1.5, 2, "conversations"),
    "serving": (1, 3, "one engine thread"),
    "tiers": (0, 4, "memory, disk, shared store"),
    "explain": (1, 4, "why it was computed"),
    "testing": (3, 5, "fake engine"),
    "hub": (2.5, 3, "models by name"),
    "engines": (2, 6, "llama.cpp"),
    "prefix_cache": (-0.5, 6, "what is known and kept"),
    "prompt": (1, 5, "messages to tokens"),
    "output": (1, 6, "replies to messages"),
    "fleet": (-1, 1, "several machines"),
    "web": (-1, 3, "the page"),
    "interfaces": (1, 7, "contracts, value types"),
}
"""Each package's column, row and subject in the drawing."""


def imports() -> dict[str, set[str]]:
    """For each package the packages that it imports anywhere."""
    found: dict[str, set[str]] = {path.name: set() for path in SOURCES.iterdir() if (path / "__init__.py").exists()}
    for package, needs in found.items():
        for path in sorted((SOURCES / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.ImportFrom) and node.module:
                    names = [f"{node.module}.{alias.name}" for alias in node.names]
                elif isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                else:
                    continue
                needs |= {name.split(".")[1] for name in names if name.startswith("headstart.")} & found.keys() - {package}
    return found


def arrows(needs: dict[str, set[str]]) -> list[tuple[str, str]]:
    """The imports that no chain of other imports implies."""

    def below(package: str) -> set[str]:
        return needs[package].union(*map(below, needs[package])) if needs[package] else set()

    return sorted(
        (package, other)
        for package, others in needs.items()
        for other in others
        if not any(other in below(third) for third in others - {other})
    )


def packages() -> str:
    """Packages, and who imports whom."""
    needs = imports()
    if missing := needs.keys() - PLACES.keys():
        raise SystemExit(f"docs/draw.py: give a place to {', '.join(sorted(missing))}")
    shown = {name: place for name, place in PLACES.items() if name in needs}
    canvas = Canvas(930, 620, "Packages: an arrow means imports, what other arrows imply is left out")
    for name, (column, row, subject) in shown.items():
        canvas.box(225 + 200 * column, 44 + 71 * row, 190, 44, name, subject)
    for start, end in arrows(needs):
        (c1, r1, _), (c2, r2, _) = shown[start], shown[end]
        if r1 == r2:
            canvas.arrow(210 + 225 * c1, 66 + 71 * r1, 18 + 225 * c2, 66 + 71 * r2)
            continue
        shift = max(-60.0, min(60.0, 40 * (c2 - c1)))
        canvas.arrow(320 + 200 * c1 + shift, 88 + 71 * r1, 320 + 200 * c2 - shift, 42 + 71 * r2)
    return canvas.svg()


# ── a chain ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def chain() -> str:
    """A prompt as blocks, with the ids and the checkpoints."""
    canvas = Canvas(920, 330, "A chain: blocks, open tail and checkpoints")
    left, block, y = 110, 92, 118
    canvas.text(left, 62, "the prompt's tokens, block size 64", "small")
    for at, text in ((0, "system, tools"), (2.3, "earlier messages"), (5.2, "last user message"), (7.75, "header")):
        canvas.text(left + at * block + 4, 82, text)
        canvas.line(left + at * block, 88, left + at * block, y, "line dashed")
    for number in range(8):
        x = left + number * block
        width = block if number < 7 else 0.97 * block
        canvas.rect(x, y, width, 34, "box" if number < 7 else "derived")
        canvas.text(x + width / 2, y + 22, f"block {number}" if number < 7 else "open tail", "middle")
        if number < 7:
            canvas.text(x + width / 2, y + 92, f"id {number}", "middle head")
            canvas.arrow(x + width / 2, y + 34, x + width / 2, y + 76)
            canvas.arrow(x + width / 2 - block + (18 if number else 34), y + 88, x + width / 2 - 20, y + 88)
    canvas.text(left - block / 2, y + 92, "root", "middle head")
    for boundary in (2, 4, 5, 7):
        canvas.flag(left + boundary * block, y - 2)
    lines = (
        "id = hash(id of the block before, the block's tokens).  root = hash(fingerprint, salt).",
        "The open tail has an id too. It is kept in memory, and replaced by the block that covers it.",
        "Green: checkpoints of a prefill: at the end of system and tools, on the lattice, where known prompts differ,",
        "and at the last boundary before the generation header. Only models with state need them.",
    )
    canvas.texts(20, y + 134, lines, "small", 20)
    return canvas.svg()


# ── the planner ──────────────────────────────────────────────────────────────────────────────────────────────────────


def planner() -> str:
    """How a request gets its slot."""
    canvas = Canvas(920, 440, "The planner's choice")
    canvas.box(320, 44, 280, 46, "A request", "its chain, the index, all slots, measured costs")
    canvas.arrow(460, 90, 460, 118)
    canvas.box(280, 120, 360, 46, "Is more of it being computed right now?", "for another request, with the same root")
    canvas.arrow(640, 143, 738, 143, "yes")
    canvas.box(740, 120, 160, 46, "Wait", "until that is computed")
    canvas.arrow(460, 166, 460, 192)
    canvas.text(472, 184, "no")
    for x, head, lines in (
        (20, "Stay in a free slot", ("keep the shared tokens,", "or rewind to a checkpoint")),
        (325, "Restore into the oldest slot", ("the longest prefix of entries", "in memory or on disk")),
        (630, "Compute everything", ("into the oldest slot", "")),
    ):
        canvas.box(x, 196, 270, 76, head, *[line for line in lines if line])
        canvas.arrow(x + 135, 272, 460 + (x - 325) * 0.42, 306)
    canvas.box(230, 308, 460, 62, "The least expected seconds", "computed × prefill + restored × restore",
               "+ what the owner of the slot must restore later")  # fmt: skip
    rules = "Exact mode counts canonical KV only. At least one token is always computed, so logits are never stale."
    canvas.text(460, 400, rules, "middle small")
    rules = "If an entry turns out bad while it is restored, it is dropped and the plan is made again without it."
    canvas.text(460, 420, rules, "middle small")
    return canvas.svg()


# ── settle ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def settle() -> str:
    """A turn before and after settle."""
    canvas = Canvas(920, 372, "A turn before and after settle")
    parts = {"system": 170, "question": 120, "reasoning": 170, "answer": 120, "next question": 120}
    y = {1: 66, 2: 148, 3: 230}

    def bar(row: int, head: str, *kinds: tuple[str, str]) -> None:
        x = 20.0
        canvas.text(x, y[row] - 8, head, "head")
        for name, kind in kinds:
            canvas.rect(x, y[row], parts[name], 30, kind)
            canvas.text(x + parts[name] / 2, y[row] + 20, name, "middle")
            x += parts[name] + 3

    bar(1, "1. The reply has ended. Its KV comes from decoding.",
        ("system", "restored"), ("question", "restored"), ("reasoning", "derived"), ("answer", "derived"))  # fmt: skip
    bar(2, "2. Idle: the turn is prefilled as the client will send it back, without the reasoning that the template strips.",
        ("system", "restored"), ("question", "restored"), ("answer", "computed"))  # fmt: skip
    bar(3, "3. The next request computes its new message only.",
        ("system", "restored"), ("question", "restored"), ("answer", "restored"), ("next question", "computed"))  # fmt: skip
    x = 20
    for kind, meaning in (("restored", "canonical KV, cached"), ("derived", "derived KV"), ("computed", "prefilled now")):
        canvas.rect(x, 290, 12, 12, kind)
        canvas.text(x + 18, 301, meaning)
        x += 60 + 7 * len(meaning)
    lines = (
        "Without step 2 the next request would compute the answer too, because the prompt differs where the reasoning was.",
        "Settling starts after 0.25 s without work, runs one call at a time, and pauses when a request arrives.",
        "It ends at the last block boundary that all next messages share.",
    )
    canvas.texts(20, 326, lines, "small")
    return canvas.svg()


# ── benchmarks ───────────────────────────────────────────────────────────────────────────────────────────────────────


def benchmarks() -> str:
    """The first table of docs/benchmarks.md."""
    return page_ratios((HERE / "benchmarks.md").read_text("utf-8"))


def policies() -> str:
    """The table of policies in docs/benchmarks.md."""
    return page_policies((HERE / "benchmarks.md").read_text("utf-8"))


DRAWINGS: dict[str, Callable[[], str]] = {
    f"{made.__name__}.svg": made for made in (demo, tiers, threads, packages, chain, planner, settle, benchmarks, policies)
}

if __name__ == "__main__":
    for name, made in DRAWINGS.items():
        (HERE / name).write_text(made(), "utf-8")
