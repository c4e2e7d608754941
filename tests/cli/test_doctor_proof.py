"""What doctor says of block size and calls."""

from __future__ import annotations

import re
from typing import Any

import pytest

from headstart.cli.doctor_proof import blocks_and_calls
from headstart.testing.fake_engine import FakeEngine


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({}, "blocks of 64 tokens; calls of up to 512"),
        (
            {"block_size": 256},
            "blocks of 256 tokens, not 64: up to 255 known tokens are computed again, not 63; calls of up to 512",
        ),
        (
            {"block_size": 128, "chunking": False},
            "blocks of 128 tokens, not 64: .*; calls of 128, not up to 512: prefill at [0-9,]+ tokens/s, not [0-9,]+",
        ),
        ({"block_size": 512, "chunking": False}, "blocks of 512 tokens, not 64: .*; calls of 512"),
        ({"canonical": False}, "blocks of 64 tokens; no size was found exact"),
    ],
)
def test_what_falling_back_cost(options: dict[str, Any], line: str) -> None:
    engine = FakeEngine(**{"ctx": 1024, "block_size": 64, "batch": 512, **options})
    assert re.fullmatch(line, blocks_and_calls(engine))
    assert engine.length(0) == 0
