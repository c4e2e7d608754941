"""Parts of the llama engine that need no model: the blob, the memory plan, digests of files."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from headstart.engines.base import Rows
from headstart.engines.llama import digest
from headstart.engines.llama.blob import Layout, LayoutError, parse
from headstart.engines.llama.fit import Fit, Needs, fit
from headstart.errors import ConfigError

GIB = 1 << 30

planes = st.lists(st.tuples(st.integers(0, 40), st.sampled_from([2, 34, 64, 128])), min_size=1, max_size=6)


@given(keys=planes, values=planes, streams=st.integers(1, 4), sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_what_is_joined_can_be_parsed_and_cut(
    keys: list[tuple[int, int]], values: list[tuple[int, int]], streams: int, sizes: list[int]
) -> None:
    layout = Layout(0x67677371, streams, len(keys), (*keys, *values[: len(keys)]))
    dice = np.random.default_rng(0)
    pieces = [Rows(dice.integers(0, 256, (size + 1) * layout.row_bytes, np.uint8), size + 1, size) for size in sizes]
    tokens = sum(sizes)
    blob = np.full(layout.size(tokens), 77, np.uint8)
    assert layout.join(pieces, blob) == len(blob)
    assert parse(blob, tokens) == layout
    body = layout.open(blob, tokens)
    start = 0
    for piece in pieces:
        out = np.empty(piece.take * layout.row_bytes, np.uint8)
        layout.cut(blob, body, tokens, start, start + piece.take, out)
        start += piece.take
        taken, before = 0, 0
        for _, row in layout.planes:
            given_part = piece.data[before * piece.tokens :][: row * piece.take]
            assert out[taken : taken + row * piece.take].tobytes() == given_part.tobytes()
            taken += row * piece.take
            before += row
    for damage in (blob[:-1], np.concatenate([blob, blob[:4]])):
        with pytest.raises(LayoutError):
            layout.open(damage, tokens)


def test_another_form_is_not_accepted() -> None:
    layout = Layout(1, 2, 1, ((1, 8), (1, 8)))
    blob = np.zeros(layout.size(3), np.uint8)
    layout.join([Rows(np.arange(48, dtype=np.uint8), 3, 3)], blob)
    trans = 16 + 3 * 12
    for at, word in ((0, 9), (8, 3), (12, 4), (16, 5), (20, 2), (trans, 1), (trans + 4, 2), (trans + 8, 2), (trans + 12, 16)):
        changed = blob.copy()
        changed[at : at + 4].view("<u4")[0] = word
        with pytest.raises(LayoutError):
            layout.open(changed, 3)
    # With M-RoPE each cell is 12 bytes longer: positions are then not where they were looked for.
    longer = np.concatenate([blob[:24], np.zeros(12, np.uint8), blob[24:]])
    with pytest.raises(LayoutError):
        parse(longer, 3)


def needs(available: float, row: int = 1 << 16, weights: int = GIB, budget: int = GIB) -> Needs:
    return Needs(weights=weights, row=row, state=0, budget=budget, available=int(available))


def test_fit_takes_what_there_is() -> None:
    assert fit(needs(64 * GIB), trained=8192, ctx=None, slots=None) == Fit(8192, 4)
    assert fit(needs(64 * GIB), trained=8192, ctx=1000, slots=2) == Fit(1024, 2)
    tight = fit(needs(5 * GIB), trained=131_072, ctx=None, slots=None)
    assert tight.slots == 1
    assert tight.ctx % 256 == 0
    assert 512 < tight.ctx < 32_768
    assert needs(5 * GIB).total(tight.ctx, tight.slots) <= 0.8 * 5 * GIB
    roomy = fit(needs(16 * GIB), trained=131_072, ctx=None, slots=None)
    assert roomy.ctx >= 32_768
    assert fit(needs(64 * GIB), trained=0, ctx=None, slots=1) == Fit(4096, 1)


@pytest.mark.parametrize(("ctx", "slots"), [(None, None), (65_536, None), (None, 64), (65_536, 4)])
def test_fit_refuses_with_the_numbers(ctx: int | None, slots: int | None) -> None:
    with pytest.raises(ConfigError, match=r"Too little memory: 1\.0 GiB of weights, 1\.0 GiB for --memory-budget"):
        fit(needs(2.1 * GIB), trained=131_072, ctx=ctx, slots=slots)


# ── digests ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_digest_is_remembered_for_as_long_as_the_file_looks_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, memo = tmp_path / "weights", tmp_path / "memo"
    file.write_bytes(b"weights")
    read: list[int] = []

    def once_more() -> bytes:
        monkeypatch.setattr(digest, "_known", {})  # another process
        read.clear()
        with monkeypatch.context() as patched:
            patched.setattr(digest, "_read", lambda path, _: (read.append(1), blake3(path.read_bytes()).digest())[1])
            return digest.digest(file, memo)

    assert once_more() == blake3(b"weights").digest()
    assert read
    assert once_more() == blake3(b"weights").digest()
    assert not read
    look = file.stat()
    file.write_bytes(b"WEIGHTS")
    os.utime(file, ns=(look.st_atime_ns, look.st_mtime_ns))
    assert once_more() == blake3(b"WEIGHTS").digest(), "same path, size, modification time and inode"
    for damage in (b"", b"[]", b'{"x": 1}', b"\xff"):
        (memo / digest.MEMO).write_bytes(damage)
        assert once_more() == blake3(b"WEIGHTS").digest()
        assert read
    assert once_more()
    assert not read
