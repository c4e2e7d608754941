from __future__ import annotations

import pytest

from headstart.hub.quantization import PREFERENCE, preference, quantization_of


@pytest.mark.parametrize(
    ("file", "wanted"),
    [
        ("Qwen3-0.6B-Q8_0.gguf", "Q8_0"),
        ("llama-2-7b-chat.Q4_K_M.gguf", "Q4_K_M"),
        ("qwen2.5-0.5b-instruct-q4_k_m-00001-of-00002.gguf", "Q4_K_M"),
        ("gemma-3-270m-it-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("gemma-3-1b-it-qat-Q4_0.gguf", "Q4_0"),
        ("phi-2-fp16.gguf", "F16"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("Bonsai-IQ2_XXS.gguf", "IQ2_XXS"),
        ("BitNet-TQ1_0.gguf", "TQ1_0"),
        ("Q6_K/DeepSeek-00001-of-00009.gguf", "Q6_K"),
        ("BF16/model-Q5_K_S.gguf", "Q5_K_S"),
        ("Q8-tips.gguf", "Q8"),
        ("model-Q4_K_M_v2.gguf", "Q4_K_M"),
        ("model.gguf", ""),
        ("F16ish.gguf", ""),
    ],
)
def test_the_name_says_it(file: str, wanted: str) -> None:
    assert quantization_of(file) == wanted


def test_every_preferred_form_is_read_from_names() -> None:
    assert len(set(PREFERENCE)) == len(PREFERENCE)
    assert [quantization_of(f"model-{name.lower()}.gguf") for name in PREFERENCE] == list(PREFERENCE)
    assert preference("Q4_K_M") < preference("Q8_0") < preference("Q2_K") < preference("F16") < preference("")
