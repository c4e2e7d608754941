"""Cache list: prints chains, blocks and totals on disk for people, in 80 columns or more."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headstart.errors import HeadstartError
from headstart.interfaces.tier import KV, STATE
from headstart.units import count, show_size, show_span

if TYPE_CHECKING:
    from rich.text import Text

    from headstart.tiers.disk import Disk, Label, StoredModel
    from headstart.tiers.disk.catalog import Row
    from headstart.tiers.disk.chains import StoredChain

SOME = 48
"""Most tokens whose text is shown."""


# ── names and texts ──────────────────────────────────────────────────────────────────────────────────────────────────


class Names:
    """The models' names and the texts of tokens, as far as they are known. Use it as a context manager.

    Texts are shown only to the folder's owner, and only if the model's file is unchanged.
    """

    def __init__(self, disk: Disk) -> None:
        self._models: Mapping[bytes, StoredModel] = disk.catalog.models()
        self._shown = not hasattr(os, "geteuid") or os.stat(disk.folder).st_uid == os.geteuid()
        self._texts: dict[bytes, Callable[[Iterable[int]], str] | None] = {}
        self._open = ExitStack()

    def __enter__(self) -> Names:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def model(self, fingerprint: bytes) -> str | None:
        """The model's name; None if it is not recorded."""
        known = self._models.get(fingerprint)
        return None if known is None else known.name

    def words(self, rows: Sequence[Row]) -> str | None:
        """The beginning of the text of consecutive blocks, on one line; None if it is not known."""
        tokens = [token for row in rows for token in row.label.tokens][:SOME]
        text = self._text(rows[0].label.fingerprint) if rows else None
        if text is None:
            return None
        return " ".join("".join(char if char.isprintable() else " " for char in text(tokens)).split())

    def chain(self, chain: StoredChain) -> str | None:
        """The beginning of a chain's text, and the beginning of the part that no other chain shares."""
        first, own = self.words(chain.rows), self.words(chain.rows[chain.shared :]) if chain.shared else None
        return first if first is None or own is None else f"{_cut(first)} ▸ {own}"

    def _text(self, fingerprint: bytes) -> Callable[[Iterable[int]], str] | None:
        if fingerprint not in self._texts:
            self._texts[fingerprint] = self._vocabulary(self._models.get(fingerprint))
        return self._texts[fingerprint]

    def _vocabulary(self, model: StoredModel | None) -> Callable[[Iterable[int]], str] | None:
        if model is None or not self._shown or not model.at_hand:
            return None
        from headstart.engines.words import Words

        try:
            words = Words(Path(model.file))
        except HeadstartError:
            return None
        self._open.callback(words.close)
        return words.text


def _cut(text: str, most: int = 24) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def ago(then: float) -> str:
    """The age of a time, for people."""
    return f"{show_span(max(0.0, time.time() - then))} ago"


def entry_counts(labels: Iterable[Label]) -> str:
    """`3 blocks and 1 checkpoint`."""
    kinds = [label.kind for label in labels]
    return counted(kinds.count(KV), kinds.count(STATE))


def counted(blocks: int, checkpoints: int) -> str:
    return count(blocks, "block") + (f" and {count(checkpoints, 'checkpoint')}" if checkpoints else "")


def sizes(totals: Mapping[str, Any]) -> str:
    """Bytes of KV and of checkpoints."""
    if not totals["checkpoints"]:
        return show_size(totals["bytes"])
    states = totals["checkpoint_bytes"]
    return f"{show_size(totals['bytes'])} ({show_size(totals['bytes'] - states)} of KV, {show_size(states)} of checkpoints)"


# ── pages ────────────────────────────────────────────────────────────────────────────────────────────────────────────

_Entry = tuple[Sequence[str], str]
"""The columns' figures, and a line below them."""


def chain_page(chains: Iterable[StoredChain], names: Names) -> Text:
    """Each chain in two lines: its figures, then its model and first words."""
    found: list[_Entry] = []
    for chain in chains:
        data, fingerprint = chain.data(), chain.rows[-1].label.fingerprint
        notes = [count(len(chain.checkpoints), "checkpoint")] if chain.checkpoints else []
        notes += ["pinned"] if data["pinned"] else []
        notes += [] if chain.complete else ["its beginning is gone"]
        sizes = show_size(chain.allocated), show_size(data["own_bytes"])
        saves = f"{data['seconds']:,.1f} s"
        figures = data["id"][:12], f"{chain.tokens:,}", *sizes, saves, ago(data["used"]), ", ".join(notes)
        words = names.chain(chain) or f"{count(chain.tokens, 'token')}, {count(chain.shared, 'block')} shared with others"
        found.append((figures, f"{_cut(names.model(fingerprint) or f'model {fingerprint.hex()[:8]}', 40)}: {words}"))
    return _page(("id", "tokens", "size", "its own", "saves", "used", ""), found)


def block_page(chain: StoredChain, names: Names) -> Text:
    """A chain, each block in two lines: its figures, then its first words or tokens."""
    found: list[_Entry] = []
    for row in chain.rows:
        label, state = row.label, chain.checkpoints.get(row.label.key)
        notes = ["pinned"] if row.pinned else []
        notes += [] if label.canonical else ["derived"]
        notes += ["derived checkpoint"] if state is not None and not state.label.canonical else []
        span = f"{label.start:,} – {label.start + len(label.tokens):,}"
        sizes = show_size(row.allocated), "" if state is None else show_size(state.allocated)
        words = names.words([row])
        text = f"tokens {' '.join(map(str, label.tokens[:12]))}{' …' * (len(label.tokens) > 12)}" if words is None else words
        found.append(((label.key.hex()[:12], span, *sizes, ago(row.used), ", ".join(notes)), text))
    return _page(("block", "tokens", "size", "checkpoint", "used", ""), found)


def _page(columns: Sequence[str], entries: Sequence[_Entry]) -> Text:
    """Columns as wide as needed. The first and the last two are left-aligned, the others right-aligned. Long lines are cut."""
    from rich.text import Text

    terminal_width = shutil.get_terminal_size((80, 24)).columns
    table = [columns, *(figures for figures, _ in entries)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    left = {0, len(columns) - 2, len(columns) - 1}
    page = Text()
    for number, figures in enumerate(table):
        cells = (
            f"{cell:{'<' if at in left else '>'}{width}}" for at, (cell, width) in enumerate(zip(figures, widths, strict=True))
        )
        lines = [Text("  ".join(cells).rstrip(), "" if number else "bold")]
        lines += [Text(f"  {entries[number - 1][1]}", "dim")] if number else []
        for line in lines:
            line.truncate(terminal_width, overflow="ellipsis")
            page.append_text(line).append("\n")
    return page


def stats_lines(data: Mapping[str, Any], pinned: str) -> list[str]:
    """`headstart cache stats` for people."""
    lines = [("folder", data["folder"])]
    if data["chains"]:
        lines += [
            ("blocks", f"{data['blocks']:,} in {count(data['chains'], 'chain')}"),
            ("size", sizes(data)),
            ("saves", f"{data['seconds']:,.0f} s of prefill, if each block is used once"),
            ("pinned", pinned),
        ]
    else:
        lines += [("blocks", "none: nothing is stored here")]
    more = f"{show_size(data['reserved_bytes'])} more of the budget are reserved for it"
    lines += [
        ("bad", f"{show_size(data['put_aside_bytes'])} in quarantine"),
        ("catalogue", f"{show_size(data['catalogue_bytes'])}; {more}"),
    ]
    for model in data["models"]:
        name = model["name"] or "a model that has not been served since"
        lines += [
            ("model", f"{_cut(name, 56)} ({model['fingerprint'][:8]})"),
            ("", f"{counted(model['blocks'], model['checkpoints'])}, used {ago(model['used'])}"),
            ("", sizes(model)),
        ]
    return [f"{topic:10}{text}" for topic, text in lines]
