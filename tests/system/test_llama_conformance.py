"""llama.cpp keeps the contract, with tiny models of every kind of architecture and type of KV."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tiny
from driving import SMALL
from headstart.engines.llama import LlamaEngine
from headstart.testing.conformance import CHECKS, EngineUnderTest
from promises import PROMISES

BLOCKS = 4
"""More tokens than the windows of tiny models see."""
MODELS: dict[str, dict[str, Any]] = {kind: {"architecture": kind} for kind in tiny.ARCHITECTURES} | {
    "lfm2 with windows": {"architecture": "lfm2", "window": tiny.WINDOW},
}
TYPES = ["llama q8_0", "llama bf16", "gemma3 q8_0", "qwen35 bf16"]
FAST = ["llama", "gemma3", "mamba2", "qwen35"]
"""KV alone, windows, state alone, and both."""
ALL = [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in (*MODELS, *TYPES) if name not in FAST)]


@pytest.fixture(scope="module", params=ALL)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineUnderTest]:
    name, _, kv_type = request.param.partition(" ") if request.param in TYPES else (request.param, "", "f16")
    path = tiny.write(tmp_path_factory.mktemp("conformance") / "tiny.gguf", **MODELS[name])
    options = replace(SMALL, model=str(path), kv_type=kv_type, ctx=512).engine_options()

    def another() -> LlamaEngine:
        block_size = found.engine.traits.block_size
        return LlamaEngine.load(replace(options, slots=1, ctx=1024), block_size=block_size)

    found = EngineUnderTest(lambda: LlamaEngine.load(options), another, blocks=BLOCKS)
    assert found.engine.traits.exact, found.engine.traits.notes
    assert found.engine.traits.stateful == (name != "llama")
    yield found
    found.close()


@pytest.mark.parametrize("check", PROMISES)
def test_llama_conforms(subject: EngineUnderTest, check: Any) -> None:
    check(subject)


@pytest.mark.parametrize("kv_type", ["f16", "bf16", "q8_0"])
def test_kv_of_each_type_comes_back_as_it_went(tiny_model: Path, kv_type: Any) -> None:
    options = replace(SMALL, model=str(tiny_model), kv_type=kv_type).engine_options()
    subject = EngineUnderTest(lambda: LlamaEngine.load(options, block_size=64))
    for check in CHECKS:
        if check.traits == ("sliceable", "movable"):
            check(subject)
    assert subject.engine.shape.transfer_bytes >= subject.engine.shape.ctx * subject.engine.shape.kv_bytes_per_token
    subject.close()
