"""Parts of the llama engine that need no model: the blob, the memory plan, digests of files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from driving import last_cells
from headstart.engines.llama import digest
from headstart.engines.llama.blob import BlobLayout, learn
from headstart.engines.llama.fit import Fit, Needs, fit
from headstart.engines.llama.identity import digest_of
from headstart.engines.llama.part import Layout, LayoutError, parse
from headstart.errors import ConfigError
from headstart.interfaces.engine import KVSegment

GIB = 1 << 30

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
    pieces = [dice(layout, size + 1, size) for size in sizes]
    tokens = blank + sum(sizes)
    data = np.zeros(layout.size(tokens), np.uint8)
    assert layout.join(pieces, data, blank=blank) == len(data)
    part = layout.open(data, 0, tokens)
    start = blank
    if blank:
        out = np.empty(blank * layout.kv_bytes_per_token, np.uint8)
        part.cut(0, blank, out)
        assert not out.any()
    for piece in pieces:
        out = np.empty(piece.take * layout.kv_bytes_per_token, np.uint8)
        part.cut(start, start + piece.take, out)
        start += piece.take
        taken, before = 0, 0
        for row in (layout.extra, *(row for _, row in layout.planes)):
            given_part = piece.data[before * piece.tokens :][: row * piece.take]
            assert out[taken : taken + row * piece.take].tobytes() == given_part.tobytes()
            taken += row * piece.take
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
    pieces = [dice(rows, tokens)] if rows is not None else [KVSegment(np.empty(0, np.uint8), tokens, tokens)]
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
    whole, partial = whole[: form.join(pieces, state, whole)], partial[: form.join(None, state, partial)]
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
    with pytest.raises(LayoutError, match="room"):
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


def needs(available: float, row: int = 1 << 16, weights: int = GIB, state: int = 0) -> Needs:
    return Needs(weights=weights, row=row, state=state, available=int(available))


def bytes_of(given: Needs, found: Fit) -> int:
    return given.weights + given.slots(found.ctx, found.slots) + found.budget


def test_fit_takes_what_there_is() -> None:
    for budget in (GIB, None):
        most = Fit(8192, 4, budget or 4 * GIB)
        assert fit(needs(64 * GIB), trained=8192, ctx=None, slots=None, budget=budget) == most
        assert fit(needs(64 * GIB), trained=8192, ctx=1000, slots=2, budget=budget) == Fit(1024, 2, most.budget)
        assert fit(needs(64 * GIB), trained=0, ctx=None, slots=1, budget=budget) == Fit(4096, 1, most.budget)
        roomy = fit(needs(16 * GIB), trained=131_072, ctx=None, slots=None, budget=budget)
        assert roomy.ctx >= 32_768
        # State takes its room in every slot, whatever the context.
        assert needs(GIB, state=GIB).slots(1024, 3) == needs(GIB).slots(1024, 3) + 3 * GIB
        stateful = [needs(size * GIB, row=0, state=GIB) for size in (7, 16)]
        few, many = (fit(given, trained=8192, ctx=None, slots=None, budget=budget) for given in stateful)
        assert few.ctx == many.ctx == 8192
        assert 1 <= few.slots < many.slots == 4
    tight = fit(needs(5 * GIB), trained=131_072, ctx=None, slots=None, budget=GIB)
    assert tight.slots == 1
    assert tight.ctx % 256 == 0
    assert 512 < tight.ctx < 32_768
    assert bytes_of(needs(5 * GIB), tight) <= 0.8 * 5 * GIB


@given(size=st.floats(1.5, 400), row=st.sampled_from([23_040, 1 << 16, 1 << 17, 1 << 19]), weights=st.integers(1, 40))
def test_fit_with_nothing_given(size: float, row: int, weights: int) -> None:
    """It never plans for more than there is; and where there is enough, a whole conversation can come back."""
    given = needs(size * GIB, row, weights * GIB)
    try:
        found = fit(given, trained=131_072, ctx=None, slots=None, budget=None)
    except ConfigError:
        assert given.weights + given.slots(512, 1) > 0.7 * given.available - GIB
        return
    assert bytes_of(given, found) <= given.available
    if found.ctx == 512:
        assert found.budget <= max(4 * GIB, given.whole(512))
        assert bytes_of(given, found) <= max(0.8 * given.available, given.weights + given.slots(512, 1) + given.whole(512))
    if found.ctx > 512:
        assert bytes_of(given, found) <= 0.8 * given.available
        assert found.budget >= min(4 * GIB, 0.9 * given.slots(found.ctx, 1)), "memory that is short is shared"
    if found.slots > 1:
        assert found.ctx >= 32_768
        assert found.budget >= 2 * given.slots(found.ctx, 1)


def test_fit_leaves_agents_a_context_where_memory_is_short() -> None:
    """Eight billion parameters in four bits, 128 KiB a token; agents begin with some 17,000."""
    for size, least in ((9.5, 10_000), (12, 17_000), (16, 30_000), (24, 32_768)):
        found = fit(needs(size * GIB, 1 << 17, int(4.7 * GIB)), trained=131_072, ctx=None, slots=None, budget=None)
        assert found.ctx >= least, (size, found)


@pytest.mark.parametrize(("ctx", "slots"), [(None, None), (65_536, None), (None, 64), (65_536, 4)])
def test_fit_refuses_with_the_numbers(ctx: int | None, slots: int | None) -> None:
    with pytest.raises(ConfigError, match=r"Too little memory: 1\.0 GiB of weights, 1\.0 GiB for memory_budget="):
        fit(needs(2.1 * GIB), trained=131_072, ctx=ctx, slots=slots, budget=GIB)
    with pytest.raises(ConfigError, match=r"Too little memory: 1\.0 GiB of weights, \d+\.\d GiB for"):
        fit(needs(1.11 * GIB), trained=131_072, ctx=ctx, slots=slots, budget=None)


# ── digests ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_digest_is_remembered_for_as_long_as_the_file_looks_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, memo = tmp_path / "weights", tmp_path / "memo"
    file.write_bytes(b"weights")
    read: list[int] = []

    def reading(path: Path, _: object) -> bytes:
        read.append(1)
        return blake3(path.read_bytes()).digest()

    def once_more() -> bytes:
        monkeypatch.setattr(digest, "_known", {})  # another process
        read.clear()
        with monkeypatch.context() as patched:
            patched.setattr(digest, "_read", reading)
            return digest.digest(file, memo)

    assert once_more() == blake3(b"weights").digest()
    assert read
    assert once_more() == blake3(b"weights").digest()
    assert not read
    look = file.stat()
    file.write_bytes(b"WEIGHTS")
    os.utime(file, ns=(look.st_atime_ns, look.st_mtime_ns))
    assert once_more() == blake3(b"WEIGHTS").digest(), "same path, size, modification time and inode"
    unbounded = json.dumps({str(file.resolve()): [[float("inf")], "00"]}).encode()
    for damage in (b"", b"[]", b'{"x": 1}', b"\xff", b"[" * 200_000, unbounded):
        (memo / digest.MEMO).write_bytes(damage)
        assert once_more() == blake3(b"WEIGHTS").digest()
        assert read
    assert once_more()
    assert not read


def test_what_is_on_disk_stays_under_its_fingerprint() -> None:
    """The form that identities have always been digested in."""
    said = b'{"build": null, "grid": 64, "system": "CPU : AVX2 = 1"}'
    assert digest_of({"system": "CPU : AVX2 = 1", "grid": 64, "build": None}) == blake3(said).digest()
