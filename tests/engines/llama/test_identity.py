"""The identity of an engine, which all that it has stored hangs on."""

from __future__ import annotations

import pytest
from blake3 import blake3

from headstart.engines.llama.identity import digest_of, quantization


def test_what_is_on_disk_stays_under_its_fingerprint() -> None:
    """The form that identities have always been digested in."""
    said = b'{"build": null, "grid": 64, "system": "CPU : AVX2 = 1"}'
    assert digest_of({"system": "CPU : AVX2 = 1", "grid": 64, "build": None}) == blake3(said).digest()


@pytest.mark.parametrize(
    ("described", "written"),
    [
        ("llama 135M Q4_K - Medium", "Q4_K_M"),
        ("llama 256M Q8_0", "Q8_0"),
        ("qwen3 0.6B BF16", "BF16"),
        ("llama 7B all F32", "F32"),
        ("llama 7B IQ2_XXS - 2.0625 bpw", "IQ2_XXS"),
        ("llama 7B mostly Q4_1, some F16", "Q4_1"),
        ("gpt-oss 20B MXFP4 MoE", "MXFP4"),
        ("llama ?B unknown, may not work", None),
    ],
)
def test_a_quantisation_is_written_as_in_names_of_files(described: str, written: str | None) -> None:
    assert quantization(described) == written
