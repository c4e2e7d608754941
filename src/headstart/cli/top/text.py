"""Text: lines for the screen, made of states. Pure. All text of the server passes `plain`, and none is read as markup."""

from __future__ import annotations

import time
from collections.abc import Mapping
from math import ceil

from rich.text import Text

from headstart.cli.look import GOOD, LOOKS, cells, plain
from headstart.cli.top.savings import Savings
from headstart.cli.top.state import RequestRow, SlotRow, TierSize, TopState
from headstart.cli.top.tree import Stretch, TreeLine
from headstart.units import show_size, show_span

DIM, WARN, MARKED = "dim", f"bold {LOOKS['computed'].dark}", GOOD[1]
BAR = 20
"""Cells of a bar of tiers."""
PROGRESS = 12
"""Cells of the progress bar of a prefill."""
CLOCK = "%H:%M:%S"


def bar(parts: Mapping[str, int], width: int) -> Text:
    """Tokens by tier: a letter a cell."""
    found = Text()
    for name, count in cells(parts, width).items():
        found.append(LOOKS[name].letter * count, LOOKS[name].terminal)
    return found


def legend() -> Text:
    """What letters and colours mean."""
    found = Text()
    for look in LOOKS.values():
        found.append(look.letter, look.terminal).append(f" {look.place}  ")
    return found.append("▼", MARKED).append(" checkpoint")


def level(used: float, whole: float, width: int) -> Text:
    """A level: how much of the whole is used."""
    full = min(width, round(width * used / whole)) if whole else 0
    return Text().append("█" * full, LOOKS["memory"].light).append("░" * (width - full), DIM)


# ── slots ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def slot_line(slot: SlotRow, requests: Mapping[int, RequestRow]) -> Text:
    """A slot: during a prefill with a progress bar."""
    found = Text(f"{slot.number:>3} ").append(f"{plain(slot.state):8}", DIM if slot.state == "idle" else "bold")
    row = requests.get(slot.request) if slot.request is not None else None
    if slot.state == "prefill":
        share = slot.tokens / slot.total if slot.total else 0.0
        found.append_text(level(slot.tokens, slot.total, PROGRESS)).append(
            f" {slot.tokens:,} of {slot.total:,} ({share:.0%}){_left(slot.left)}"
        )
    elif slot.state == "reply":
        found.append(f"{slot.reply:,} tokens after a prompt of {slot.total:,}")
    elif slot.tokens:
        found.append(f"holds {slot.tokens:,} tokens", DIM)
    if row is not None:
        found.append(f"   {plain(row.id)}", DIM)
    return found


def _left(seconds: float | None) -> str:
    """Without false precision, as on the page."""
    if seconds is None:
        return ""
    words = f"{ceil(seconds)} s" if seconds < 100 else f"{ceil(seconds / 60)} min"
    return f", {'less than a second' if seconds < 1 else words} left"


# ── the tree ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def tree_line(line: TreeLine, now: float) -> Text:
    """A stretch of the tree: its tiers, tokens and marks."""
    found = Text().append(line.indent, DIM)
    one = line.stretch
    if one is None:
        return found.append(f"… {line.folded:,} more: {line.tokens:,} tokens", DIM)
    found.append_text(bar(one.tiers, max(len(one.tiers), min(BAR, one.tokens // 64)))).append(f" {one.tokens:,}")
    if one.start and not line.indent:
        found.append(f" from token {one.start:,}, what precedes is gone", DIM)
    if one.pinned:
        found.append("  pinned", MARKED)
    if one.checkpoints:
        found.append(f"  {one.checkpoints} ▼", MARKED)
    for why, count in one.evicted_next.items():
        found.append(f"  evicted next: {count} {plain(why)}", WARN)
    return found.append(f"  {_ago(one, now)}", DIM)


def _ago(one: Stretch, now: float) -> str:
    seconds = now - one.used
    if not one.used or seconds < 1:
        return "now" if one.used else ""
    return f"{show_span(seconds)} ago"


def tree_head(state: TopState) -> str:
    """How much is stored."""
    kv = [entry for entry in state.entries.values() if not entry.checkpoint]
    head = f"{sum(entry.tokens for entry in kv):,} tokens in {len(kv):,} entries"
    others = state.others.get("tokens", 0)
    return head + (f"; {others:,} of others" if others else "")


# ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def requests_head(width: int) -> Text:
    """The names of the columns. `width`: of the bars of tiers."""
    names = f"{'time':8} {'state':9} {'prompt':{width}} {'tokens':>7} {'queue':>6} {'prefill':>7} {'decode':>6}  cause"
    return Text(names, DIM)


def request_line(row: RequestRow, width: int) -> Text:
    """A request: when it came, its prompt as a bar of tiers, its seconds, and why known text was computed."""
    found = Text().append(time.strftime(CLOCK, time.localtime(row.at)), DIM)
    found.append(f" {plain(row.state):9}", STYLES.get(row.state, "bold")).append(" ")
    if row.computed is None:  # what is not cached is not computed yet
        shown = bar(row.tiers, max(len(row.tiers), width * row.cached // max(1, row.prompt)))
    else:
        shown = bar({**row.tiers, "computed": row.computed}, width)
    found.append_text(shown).append(" " * (width - len(shown)) + f" {row.prompt:>7,}")
    for name, size in (("queued", 6), ("prefill", 7), ("decode", 6)):
        found.append(f" {_seconds(row.seconds.get(name)):>{size}}")
    if row.cause is not None:
        found.append(f"  {plain(row.cause)}", WARN).append(f" {row.recomputed:,}" if row.recomputed else "")
    return found


_RUNNING = dict.fromkeys(("queued", "prefill", "reply"), "bold")
STYLES = {**_RUNNING, "stop": DIM, "length": DIM, "ended": DIM, "cancelled": WARN, "failed": WARN}
"""How a state of a request looks."""


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


# ── savings ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def savings_lines(found: Savings, tiers: Mapping[str, TierSize]) -> Text:
    """What reuse has saved, and how full the tiers are."""
    share = found.cached / found.prompt if found.prompt else 0.0
    parts, by_tier = {**found.tiers, "computed": found.computed}, Text()
    for name, look in LOOKS.items():
        if parts.get(name):
            by_tier.append(look.letter, look.terminal).append(f" {parts[name]:,}  ")
    decode = "–" if found.decode is None else f"{found.decode:,.0f}"
    lines = {
        "saved": Text(f"{found.cached:,} tokens ({share:.0%}){_about(found.saved)}", "bold"),
        "prompt": bar(parts, BAR).append(f" {found.prompt:,} tokens"),
        "": by_tier,
        "first": Text(f"token after {_seconds(found.warm)} s warm, {_seconds(found.cold)} s cold; then {decode} tokens/s"),
    }
    for name, size in tiers.items():
        lines[plain(name)] = level(size.used, size.budget, BAR).append(f" {show_size(size.used)} of {show_size(size.budget)}")
    return joined([Text().append(f"{name:8}", DIM).append_text(value) for name, value in lines.items()])


def _about(seconds: float | None) -> str:
    return "" if seconds is None else f", about {seconds:,.1f} s"


def joined(lines: list[Text]) -> Text:
    """Lines below each other, each cut where the screen ends."""
    return Text("\n", no_wrap=True, overflow="ellipsis", end="").join(lines)
