"""Why a fleet does not start, in one line."""

from __future__ import annotations

import platform
import traceback

import pytest

from headstart.errors import ConfigError, ModelError
from headstart.fleet.cluster.starting import reason_in, reasoned
from headstart.names import option


def reported(error: Exception) -> str:
    """What Ray reports about a constructor that raises."""
    try:
        with reasoned():
            raise error
    except ConfigError:
        return f"The deployment failed to start 3 times in a row. Error:\nray::Replica()\n{traceback.format_exc()}\nmore"


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (ModelError("There is no model '/m.gguf';\n give another."), "There is no model '/m.gguf'; give another."),
        (ConfigError(f"Too little memory; lower {option('ctx')}."), "Too little memory; lower --ctx."),
        (MemoryError("20 GB"), "MemoryError: 20 GB"),
    ],
)
def test_the_reason_of_a_process_arrives_with_its_machine(error: Exception, why: str) -> None:
    assert reason_in(reported(error)) == f"on {platform.node()}: {why}"


def test_other_reports_have_none() -> None:
    assert reason_in("Traceback (most recent call last):\nRuntimeError: Failed to bind to address '127.0.0.1:80'.") is None
