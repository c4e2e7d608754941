from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness import check
from headstart.config import Settings
from headstart.engines.llama import LlamaEngine
from headstart.serving.runtime import Runtime
from headstart.testing.fake_engine import FakeEngine
from live import Server, serving


@pytest.fixture(scope="session")
def fake() -> Iterator[Server]:
    """A server on the fake engine: 2 slots, 2,048 tokens each, blocks of 8."""
    with Runtime(FakeEngine(slots=2, ctx=2048), Settings(memory_budget=32 << 20)) as runtime:
        with serving(runtime, model_id="fake", aliases=("fake-alias",)) as server:
            yield server
        check(runtime)


@pytest.fixture(scope="session")
def real() -> Iterator[Server]:
    """A server on the bundled model."""
    settings = Settings(model="demo", ctx=2048, slots=2, threads=2, memory_budget=256 << 20)

    def load() -> Runtime:
        return Runtime(LlamaEngine.load(settings, block_size=64), settings)

    with serving(load, model_id="demo") as server:
        yield server
