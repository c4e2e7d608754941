from __future__ import annotations

import struct
from pathlib import Path

import pytest

from headstart.engines.gguf import ModelFacts, most_tokens, read_facts

GIB = 1 << 30


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def string(value: str) -> bytes:
    return struct.pack("<I", 8) + text(value)


def number(value: int) -> bytes:
    return struct.pack("<II", 4, value)


def numbers(*values: int) -> bytes:
    return struct.pack("<IIQ", 9, 4, len(values)) + struct.pack(f"<{len(values)}I", *values)


def words(*values: str) -> bytes:
    return struct.pack("<IIQ", 9, 8, len(values)) + b"".join(map(text, values))


def header(version: int = 3, **values: bytes) -> bytes:
    keys = b"".join(text(name.replace("__", ".")) + value for name, value in values.items())
    return b"GGUF" + struct.pack("<IQQ", version, 1, len(values)) + keys


KNOWN = {
    "general__architecture": string("qwen3"),
    "qwen3__context_length": number(40_960),
    "qwen3__block_count": number(28),
    "qwen3__embedding_length": number(1024),
    "qwen3__attention__head_count": number(16),
    "qwen3__attention__head_count_kv": number(8),
    "qwen3__attention__key_length": number(128),
    "qwen3__attention__value_length": number(128),
}


def facts(data: bytes, tmp_path: Path) -> ModelFacts:
    (tmp_path / "m.gguf").write_bytes(data)
    return read_facts(tmp_path / "m.gguf")


def test_what_the_header_says(tmp_path: Path) -> None:
    wanted = ModelFacts("qwen3", 40_960, "Q8_0", 28 * 8 * 256 * 2, 28)
    tokens = {"tokenizer__ggml__tokens": words("a", "b"), "tokenizer__ggml__scores": numbers(1, 2)}
    assert facts(header(**KNOWN, general__file_type=number(7), **tokens), tmp_path) == wanted
    assert facts(header(**KNOWN, **tokens, general__file_type=number(7)), tmp_path) == wanted
    per_layer = KNOWN | {"qwen3__attention__head_count_kv": numbers(8, 0, 0, 4)}
    assert facts(header(**per_layer), tmp_path) == ModelFacts("qwen3", 40_960, "", 12 * 256 * 2, 28)
    hybrid = KNOWN | {"qwen3__full_attention_interval": number(4)}
    assert facts(header(**hybrid), tmp_path).kv == 7 * 8 * 256 * 2
    heads = {"qwen3__attention__head_count": numbers(0, 16), "qwen3__attention__key_length": number(0)}
    assert facts(header(**(KNOWN | heads)), tmp_path).kv == 28 * 8 * (64 + 128) * 2
    form = {"tokenizer__huggingface__json": string("x" * (2 << 20)), **KNOWN, "general__file_type": number(7)}
    assert facts(header(**form), tmp_path) == wanted, "whatever stands before"
    odd = KNOWN | {"qwen3__attention__head_count_kv": words("8", "none")}  # ended `headstart models` with a traceback
    assert facts(header(**odd), tmp_path) == ModelFacts("qwen3", 40_960, "", 0, 28)


def test_what_real_files_say(tiny_model: Path, demo_model: Path) -> None:
    assert read_facts(demo_model) == ModelFacts("llama", 8192, "Q4_1", 30 * 3 * 128 * 2, 30)
    assert read_facts(tiny_model).architecture == "llama"


WHOLE = header(**KNOWN, tokenizer__ggml__tokens=words("a", "b"))


@pytest.mark.parametrize(
    "data",
    [
        *(WHOLE[:cut] for cut in range(0, len(WHOLE), 7)),
        b"GGUF" + b"\xff" * 100,
        header(version=99, **KNOWN),
        header(general__architecture=number(3)),
        header(general__architecture=struct.pack("<I", 77)),
        header(general__architecture=struct.pack("<IQ", 8, 1 << 62)),
        header(x=struct.pack("<IIQ", 9, 4, 1 << 62)),
        header(x=struct.pack("<IIQ", 9, 9, 1)),
    ],
)
def test_a_broken_header_says_nothing(data: bytes, tmp_path: Path) -> None:
    assert facts(data, tmp_path) == ModelFacts()
    assert read_facts(tmp_path / "missing.gguf") == ModelFacts()


def test_the_longest_conversation_that_fits() -> None:
    model = ModelFacts("qwen3", 40_960, "Q8_0", 114_688)
    assert most_tokens(model, GIB, 64 * GIB) == 40_960
    assert 512 <= most_tokens(model, GIB, 3 * GIB) < 40_960
    assert most_tokens(model, GIB, GIB) == 0
