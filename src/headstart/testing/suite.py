"""The conformance checks as tests, for `pytest --engine` (`plugin.py`)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headstart.testing.conformance import CHECKS, ConformanceCheck, EngineUnderTest
from headstart.testing.named_engine import engine_maker


@pytest.fixture(scope="session")
def engine_under_test(pytestconfig: pytest.Config) -> Iterator[EngineUnderTest]:
    name, blocks, prompts = (pytestconfig.getoption(option) for option in ("engine", "engine_blocks", "engine_prompts"))
    subject = EngineUnderTest(engine_maker(name), blocks=blocks, prompts=prompts, name=name)
    print(subject.engine.facts.name, *subject.engine.traits.notes, sep="\n")
    yield subject
    subject.close()


@pytest.mark.parametrize("check", CHECKS, ids=str)
def test_engine(check: ConformanceCheck, engine_under_test: EngineUnderTest) -> None:
    check(engine_under_test)
