from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.hub.reference import ModelRef, parse


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("Qwen/Qwen3-0.6B-GGUF", ModelRef("Qwen", "Qwen3-0.6B-GGUF")),
        ("Qwen/Qwen3-0.6B-GGUF:Q8_0", ModelRef("Qwen", "Qwen3-0.6B-GGUF", "Q8_0")),
        ("hf.co/Qwen/Qwen3-0.6B-GGUF:q8_0", ModelRef("Qwen", "Qwen3-0.6B-GGUF", "q8_0")),
        ("https://huggingface.co/Qwen/Qwen3-0.6B-GGUF/", ModelRef("Qwen", "Qwen3-0.6B-GGUF")),
        ("hf:Qwen/Qwen3-0.6B-GGUF", ModelRef("Qwen", "Qwen3-0.6B-GGUF")),
        ("a/b:Q4_K_M/b-Q4_K_M.gguf", ModelRef("a", "b", "Q4_K_M/b-Q4_K_M.gguf")),
    ],
)
def test_what_is_a_reference(text: str, wanted: ModelRef) -> None:
    assert parse(text) == wanted


NO_REFERENCES = [
    *("model.gguf", "models/qwen.gguf", "demo", "llama3.2:1b", "a/b/c", "/a/b", "../b", "a/..", "a/b..c", "a--b/c", "a/b--c"),
    *("a/b:../../etc", "a/b:/etc/passwd", "a/b:x//y", "a/b:x/./y", "a/b:", "a/.b", "-a/b", "a/b\0", "a/b\nc", "ä/b", "", "~/b"),
    "https://x.org/a/b",
]


@pytest.mark.parametrize("text", NO_REFERENCES)
def test_what_is_none(text: str) -> None:
    assert parse(text) is None


PARTS = st.text(alphabet="aB0.-_~\\ \0", max_size=5)


@given(st.lists(PARTS, min_size=1, max_size=5), st.lists(st.sampled_from("//://"), min_size=4, max_size=4))
def test_no_reference_leads_out_of_a_folder(parts: list[str], between: list[str]) -> None:
    reference = parse("".join(part + mark for part, mark in zip(parts, [*between[: len(parts) - 1], ""], strict=True)))
    if reference is not None:
        for part in (reference.owner, reference.name):
            assert part not in ("", ".", "..")
            assert not set(part) & set("/\\\0:")
        assert ".." not in reference.variant.split("/")
        assert not reference.variant.startswith("/")
        assert parse(str(reference)) == reference
