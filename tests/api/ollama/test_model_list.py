from __future__ import annotations

import math

import pytest

from headstart.api.ollama.model_list import NEVER, running
from headstart.api.served_models import ServedModel


@pytest.mark.parametrize(
    ("expires", "shown"),
    [(0.0, "1970-01-01T00:00:00.000000Z"), (None, NEVER), (1e11, NEVER), (1e300, NEVER), (math.inf, NEVER)],
)
def test_a_time_after_the_calendar_is_never(expires: float | None, shown: str) -> None:
    assert running(ServedModel("a", "loaded", expires=expires))["expires_at"] == shown
