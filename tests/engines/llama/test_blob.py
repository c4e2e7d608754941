"""The blob and its parts: what is taken apart is put together again."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from driving import last_cells
from headstart.engines.llama.blob import BlobLayout, learn
from headstart.engines.llama.part import Layout, LayoutError, parse
from headstart.interfaces.engine import KVSegment

MAGIC = 0x67677371
_planes = st.lists(st.tuples(st.integers(0, 40), st.sampled_from([2, 34, 64, 128])), min_size=1, max_size=6)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    keys, values = draw(_planes), draw(_planes)
    return Layout(draw(st.integers(1, 4)), len(keys), (*keys, *values[: len(keys)]), draw(st.sampled_from([0, 12])))


def dice(layout: Layout, tokens: int, take: int | None = None) -> KVSegment:
    data = np.random.default_rng(tokens).integers(0, 256, tokens * layout.kv_bytes_per_token, np.uint8)
    return KVSegment(data, tokens, tokens if take is None else take)


@given(layout=layouts(), blank=st.integers(0, 9), sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_what_is_joined_can_be_opened_and_cut(layout: Layout, blank: int, sizes: list[int]) -> None:
    segments = [dice(layout, size + 1, size) for size in sizes]
    tokens = blank + sum(sizes)
    data = np.zeros(layout.size(tokens), np.uint8)
    assert layout.join(segments, data, blank=blank) == len(data)
    part = layout.open(data, 0, tokens)
    start = blank
    if blank:
        out = np.empty(blank * layout.kv_bytes_per_token, np.uint8)
        part.cut(0, blank, out)
        assert not out.any()
    for segment in segments:
        out = np.empty(segment.take * layout.kv_bytes_per_token, np.uint8)
        part.cut(start, start + segment.take, out)
        start += segment.take
        taken, before = 0, 0
        for row in (layout.extra, *(row for _, row in layout.planes)):
            given_part = segment.data[before * segment.tokens :][: row * segment.take]
            assert out[taken : taken + row * segment.take].tobytes() == given_part.tobytes()
            taken += row * segment.take
            before += row
    for damage in (data[:-1], np.concatenate([data, data[:4]])):
        with pytest.raises(LayoutError):
            layout.open(damage, 0, tokens)
    for elsewhere in (-1, 1):
        with pytest.raises(LayoutError, match="order"):
            layout.open(data, elsewhere, tokens)


@given(layout=layouts(), tokens=st.integers(2, 9), behind=st.binary(max_size=30))
def test_a_layout_is_read_off_one_part(layout: Layout, tokens: int, behind: bytes) -> None:
    size = layout.size(tokens)
    data = np.concatenate([np.zeros(size, np.uint8), np.frombuffer(behind, np.uint8)])
    layout.join([dice(layout, tokens)], data)
    assert parse(data, tokens, 12 + layout.kv_bytes_per_token) == layout
    for wrong in (-1, 1, 12):
        with pytest.raises(LayoutError):
            parse(data[:size], tokens, 12 + layout.kv_bytes_per_token + wrong)


def test_another_form_is_not_accepted() -> None:
    layout = Layout(2, 1, ((1, 8), (1, 8)))
    data = np.zeros(layout.size(3), np.uint8)
    layout.join([KVSegment(np.arange(48, dtype=np.uint8), 3, 3)], data)
    trans = 8 + 3 * 12
    for at, word in ((0, 3), (4, 4), (8, 5), (12, 2), (trans, 1), (trans + 4, 2), (trans + 8, 2), (trans + 12, 16)):
        changed = data.copy()
        changed[at : at + 4].view("<u4")[0] = word
        with pytest.raises(LayoutError):
            layout.open(changed, 0, 3)
    # Cells of 16 bytes: positions are then not where they were looked for.
    longer = np.concatenate([data[:16], np.zeros(4, np.uint8), data[16:]])
    with pytest.raises(LayoutError, match="order"):
        parse(longer, 3, 28)


def recurrence(tokens: int, size: int) -> np.ndarray:
    """As llama.cpp begins it."""
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    if size:
        data[:12].view("<u4")[:] = (1, tokens - 1, 0)
    return data


@given(
    rows=st.none() | layouts(),
    window=st.none() | layouts(),
    size=st.sampled_from([0, 12, 77]),
    seen=st.integers(2, 9),
    before=st.sampled_from([0, 64]),
)
def test_blobs_are_taken_apart_and_put_together(
    rows: Layout | None, window: Layout | None, size: int, seen: int, before: int
) -> None:
    form, tokens = BlobLayout(MAGIC, rows, window, size), before + seen
    segments = [dice(rows, tokens)] if rows is not None else [KVSegment(np.empty(0, np.uint8), tokens, tokens)]
    cells = seen if window is not None else 0
    state = np.concatenate(
        [
            np.array([tokens, cells], np.uint32).view(np.uint8),
            dice(window, cells).data if window is not None else np.empty(0, np.uint8),
            recurrence(tokens, size),
        ]
    )
    assert len(state) == form.checkpoint_size(cells)
    form.check(state, tokens)
    assert form.blank(state) == (before if window is not None else 0)
    whole, partial = np.zeros(form.size(tokens, tokens), np.uint8), np.zeros(form.size(tokens, tokens), np.uint8)
    whole, partial = whole[: form.join(segments, state, whole)], partial[: form.join(None, state, partial)]
    if window is not None and before:
        # llama.cpp does not give back what the window no longer sees.
        whole, partial = last_cells(whole, form, tokens, cells), last_cells(partial, form, tokens, cells)
    opened = form.open(whole, tokens)
    assert (opened.kv is None) == (rows is None)
    out = np.full(len(state) + 4, 9, np.uint8)
    for blob, part in ((whole, False), (partial, True)):
        assert form.cut_checkpoint(form.open(blob, tokens, partial=part), tokens, out) == len(state)
        assert out[: len(state)].tobytes() == state.tobytes()
        for damage in (blob[:-1], np.concatenate([blob, blob[:1]]), np.concatenate([blob[:1] ^ 1, blob[1:]])):
            with pytest.raises(LayoutError):
                form.open(damage, tokens, partial=part)
    with pytest.raises(LayoutError, match="does not fit"):
        form.cut_checkpoint(opened, tokens, out[: len(state) - 1])
    for length in (tokens - 1, tokens + 1):
        with pytest.raises(LayoutError, match="was due"):
            form.check(state, length)
        relabelled = state.copy()
        relabelled[:4].view("<u4")[0] = length
        if size:
            with pytest.raises(LayoutError, match=r"recurrent state|in its window"):
                form.check(relabelled, length)
    for damage in (state[:-1], np.concatenate([state, state[:1]]), state[:7], state[:0]):
        with pytest.raises(LayoutError):
            form.check(damage, tokens)
    if before == 0:  # a window that holds all, as at load
        each = 12 + (rows.kv_bytes_per_token if rows is not None else -12)
        beside = 12 + window.kv_bytes_per_token if window is not None else 0
        assert learn(whole, partial, tokens, each=each + beside, each_partial=beside) == form
        if len(partial) > 8:
            partial[-1] ^= 1
            with pytest.raises(LayoutError, match="does not end"):
                learn(whole, partial, tokens, each=each + beside, each_partial=beside)


@given(layout=layouts(), length=st.integers(3, 200))
def test_a_window_has_a_cell_for_each_earlier_token(layout: Layout, length: int) -> None:
    form, seen = BlobLayout(MAGIC, None, layout), dice(layout, 3)
    state = np.concatenate([np.array([length, 3], np.uint32).view(np.uint8), seen.data])
    blob = np.zeros(form.size(length, length), np.uint8)
    blob = blob[: form.join(None, state, blob)]
    window = form.open(blob, length, partial=True).window
    assert window is not None
    assert (window.tokens, form.blank(state)) == (length, length - 3)
    out = np.empty_like(seen.data)
    window.cut(window.tokens - 3, window.tokens, out)
    assert out.tobytes() == seen.data.tobytes()
