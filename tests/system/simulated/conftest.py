"""Histories of whole servers that failed once: each was shrunk, and printed like this. They pass now."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headstart.testing.simulation.install import installed


@pytest.fixture(autouse=True)
def simulated() -> Iterator[None]:
    with installed():
        yield
