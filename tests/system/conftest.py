from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from browser import chromium
from headstart.config import Settings
from headstart.engines.llama import LlamaEngine
from headstart.serving.runtime import Runtime
from live import Server, serving

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="session")
def real() -> Iterator[Server]:
    """A server on the bundled model."""
    settings = Settings(model="demo", ctx=2048, slots=2, threads=2, memory_budget=256 << 20)

    def load() -> Runtime:
        return Runtime(lambda: LlamaEngine.load(settings.engine_options(), block_size=64), settings)

    with serving(load, model_id="demo") as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found
