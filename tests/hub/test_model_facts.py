from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headstart.engines.gguf import ModelFacts
from headstart.hub.model_facts import read_config_facts
from model_folders import CONFIG

LLAMA = ModelFacts("llama", 2048, "4bit", 2 * 4 * 2 * 16 * 2)
"""Keys and values, 4 layers, 2 heads of 16, 2 bytes."""


@pytest.mark.parametrize(
    ("config", "facts"),
    [
        (CONFIG, LLAMA),
        ({**CONFIG, "quantization": None, "torch_dtype": "bfloat16"}, ModelFacts("llama", 2048, "BF16", LLAMA.kv)),
        ({**CONFIG, "head_dim": 32}, ModelFacts("llama", 2048, "4bit", 2 * LLAMA.kv)),
        ({"model_type": "seen", "dtype": "float16", "text_config": {**CONFIG, "quantization": None}}, None),
        ({"model_type": "unknown", "num_attention_heads": 0, "hidden_size": "x"}, ModelFacts("unknown")),
        ({}, ModelFacts()),
    ],
)
def test_what_a_config_says(config: dict[str, Any], facts: ModelFacts | None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    due = facts or ModelFacts("seen", 2048, "F16", LLAMA.kv)  # the language model is a part of it
    assert read_config_facts(tmp_path) == due


def test_a_broken_config_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    assert read_config_facts(tmp_path) == ModelFacts()
