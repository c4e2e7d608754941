"""Plugin for pytest: `pytest --engine my_engine` runs the conformance checks on an engine (docs/engines.md).

Without other arguments only these checks run. With paths the tests there run too.
"""

from __future__ import annotations

from pathlib import Path

import pytest

SUITE = Path(__file__).parent / "suite.py"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("headstart", "headstart: conformance of an engine")
    group.addoption("--engine", metavar="ENGINE", help="module:Class, module, FILE.py:Class, or a model's path")
    group.addoption("--engine-blocks", type=int, default=3, metavar="N", help="full blocks that most checks compute (3)")
    group.addoption(
        "--engine-prompts", type=int, default=60, metavar="N", help="random prompts that are compared with cold runs (60)"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--engine") is None:
        return
    given = config.args if config.args_source is pytest.Config.ArgsSource.ARGS else []
    config.args = [*given, str(SUITE)]
