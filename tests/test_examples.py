from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness import Pending
from headstart.config import Settings
from headstart.interfaces.generation import GenerationParams
from headstart.interfaces.sampling import GREEDY
from headstart.serving.request import Request
from headstart.serving.runtime import Runtime
from headstart.testing.conformance import CHECKS, EngineUnderTest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def own_engine() -> Any:
    spec = importlib.util.spec_from_file_location("own_engine", EXAMPLES / "own_engine.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Attention()


OWN_ENGINE = EngineUnderTest(own_engine, prompts=8, cycles=1)


@pytest.mark.parametrize("check", CHECKS, ids=str)
def test_own_engine_conforms(check: Any) -> None:
    check(OWN_ENGINE)


def test_own_engine_gets_caching() -> None:
    """An engine in about 100 lines: the second request computes its new message, not the whole prompt."""
    run = subprocess.run([sys.executable, EXAMPLES / "own_engine.py"], capture_output=True, text=True, timeout=120, check=True)
    first, second = (
        [int(number) for number in found.groups()]
        for found in re.finditer(r"prompt +(\d+)  cached +(\d+)  computed +(\d+)", run.stdout)
    )
    assert first[1] == 0
    assert first[2] == first[0]
    assert second[1] + second[2] == second[0]
    assert 0 < second[2] <= second[0] - first[0] + 8
    assert "fox jumps over the lazy dog" in run.stdout


def test_own_engine_is_exact_as_it_claims() -> None:
    text = "It was the best of times, it was the worst of times. " * 6
    with Runtime(own_engine, Settings(reuse="exact", memory_budget=1 << 24)) as runtime:
        for prompt in (text, text + "It was", "Else", text + "It was the age"):
            request = Request(runtime.text_prompt(prompt), GenerationParams(GREEDY, max_tokens=3), keep_logits=True)
            answer = Pending(runtime, request).answer()
    assert answer.report.cached >= len(text)
    cold = own_engine()
    tokens = cold.tokenizer.tokenize(prompt)
    for at in range(0, len(tokens), 100):
        cold.prefill(1, np.array(tokens[at : at + 100], np.int32), logits=True)
    assert answer.logits is not None
    assert answer.logits.tobytes() == cold.logits(1).tobytes()
