from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness import check
from headstart.config import Settings
from headstart.serving.runtime import Runtime
from headstart.testing.fake_engine import FakeEngine
from live import Server, serving


@pytest.fixture(scope="session")
def fake() -> Iterator[Server]:
    """A server on the fake engine: 2 slots, 2,048 tokens each, blocks of 8."""
    with Runtime(lambda: FakeEngine(slots=2, ctx=2048), Settings(memory_budget=32 << 20)) as runtime:
        with serving(runtime, model_id="fake", aliases=("fake-alias",)) as server:
            yield server
        check(runtime)
