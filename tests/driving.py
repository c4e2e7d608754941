"""Short functions to drive an engine."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from headstart.config import Settings
from headstart.engines.llama import LlamaEngine
from headstart.engines.llama.blob import BlobLayout
from headstart.interfaces.engine import KVSegment, Span

# One thread: several threads wait for each other, which is very slow on busy cores.
SMALL = Settings(ctx=1024, slots=3, threads=1, memory_budget=0)


def tokens_of(engine: LlamaEngine, count: int, seed: int = 1) -> Any:
    return np.random.default_rng(seed).integers(32, engine.tokenizer.n_vocab, count).astype(np.int32)


def fill(engine: LlamaEngine, slot: int, tokens: Any, *sizes: int, logits: bool = False) -> None:
    """Appends the tokens in calls of these sizes; without sizes in one call."""
    start = engine.length(slot)
    for size in sizes or (len(tokens),):
        engine.prefill(slot, tokens[:size], logits=logits)
        tokens = tokens[size:]
    assert not len(tokens)
    assert engine.length(slot) > start


def export(engine: LlamaEngine, slot: int, *points: int) -> list[KVSegment]:
    """The KV between these positions."""
    spans = [Span(a, b, np.full((b - a) * engine.shape.kv_bytes_per_token, 7, np.uint8)) for a, b in pairwise(points)]
    engine.export_kv(slot, spans)
    return [KVSegment(span.data, span.stop - span.start, span.stop - span.start) for span in spans]


def checkpoint(engine: LlamaEngine, slot: int) -> Any:
    out = np.full(engine.shape.state_bytes + 5, 7, np.uint8)
    size = engine.export_checkpoint(slot, out)
    assert size <= engine.shape.state_bytes
    assert (out[size:] == 7).all()
    return out[:size].copy()


def last_cells(blob: Any, form: BlobLayout, tokens: int, cells: int) -> Any:
    """The blob with only the last `cells` cells in its window."""
    assert form.window is not None
    part = form.window.size(tokens)
    at = len(blob) - form.recurrence - part
    window = form.window.open(blob[at : at + part], 0, tokens)
    seen = np.empty(cells * form.window.kv_bytes_per_token, np.uint8)
    window.cut(tokens - cells, tokens, seen)
    again = np.zeros(form.window.size(cells), np.uint8)
    form.window.join([KVSegment(seen, cells, cells)], again)
    form.window.cells_of(again, 8, cells)["position"] += tokens - cells
    return np.concatenate([blob[:at], again, blob[at + part :]])


def empty(engine: LlamaEngine) -> None:
    for slot in range(engine.shape.slots):
        engine.truncate(slot, 0)
