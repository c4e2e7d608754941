"""Exact mode with a library that is exact in the small only: MLX with OpenBLAS, and prompts of more than 1,500 tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

import mlx_process
import tiny_hf

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(mlx_process.openblas() is None, reason="apt-get install libopenblas0-pthread, or set OPENBLAS_LIBRARY"),
]


@pytest.mark.parametrize("kind", list(tiny_hf.KINDS))
def test_what_is_proved_holds_in_long_histories(kind: str, tmp_path: Path) -> None:
    """`-s` shows what was proved of each kind, and the share that was reused."""
    found = mlx_process.run(tiny_hf.write(tmp_path / kind, kind), 32, blas=mlx_process.openblas())
    how = "calls over several" if found["chunking"] else "one call each"
    share = found["reused"] / found["prompted"]
    print(
        f"\n| {kind} | {found['block_size']}, {how} | {found['compared']} | {found['long']} "
        f"| {found['wrong'] + found['wrong_replies']} | {share:.0%} |"
    )
    assert found["exact"], found["notes"]
    assert (found["wrong"], found["wrong_replies"]) == (0, 0)
    assert found["long"] >= 30
    assert found["restoring"] > 0
    assert share > 0


def test_what_is_not_proved_does_not_hold(tmp_path: Path) -> None:
    """Blocks of 64 in calls of any number, as the plain build of MLX allows: the test above can fail."""
    found = mlx_process.run(tiny_hf.write(tmp_path / "llama", "llama"), 20, 64, blas=mlx_process.openblas())
    assert found["wrong"] > 0
