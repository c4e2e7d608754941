"""Tokenizers in Hugging Face's form."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tiny_hf
from headstart.engines.hf_tokenizer import HFTokenizer
from headstart.errors import ModelError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("tokenizer")
    tiny_hf.write_tokenizer(found)
    (found / "generation_config.json").write_text(json.dumps({"eos_token_id": [256, 258]}))
    return found


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> HFTokenizer:
    return HFTokenizer(folder)


@given(st.text())
def test_tokens_have_the_bytes_of_their_text(tokenizer: HFTokenizer, text: str) -> None:
    tokens = tokenizer.tokenize(text)
    assert b"".join(map(tokenizer.token_bytes, tokens)) == text.encode("utf-8", "replace")
    assert not {control.id for control in tokenizer.controls} & set(tokens)


def test_control_tokens_in_a_text_stay_text(tokenizer: HFTokenizer) -> None:
    assert len(tokenizer.tokenize("<|im_end|>")) == len("<|im_end|>")
    assert [control.text for control in tokenizer.controls] == list(tiny_hf.CONTROLS)


def test_ends_template_and_names(tokenizer: HFTokenizer) -> None:
    assert tokenizer.eog == {256, 258}
    assert tokenizer.chat_template == tiny_hf.CHATML
    assert tokenizer.names == {"eos_token": "<|im_end|>"}
    assert tokenizer.bos is None
    assert tokenizer.n_vocab == tiny_hf.VOCAB


def test_no_prompt_is_cut_or_filled_up(folder: Path, tokenizer: HFTokenizer, tmp_path: Path) -> None:
    """Fault: a tokenizer that was saved after training cut each text without a word."""
    shutil.copytree(folder, tmp_path / "trained")
    path = tmp_path / "trained" / "tokenizer.json"
    form = json.loads(path.read_text())
    form["truncation"] = {"direction": "Right", "max_length": 16, "strategy": "LongestFirst", "stride": 0}
    form["padding"] = {"strategy": {"Fixed": 32}, "direction": "Right", "pad_id": 0, "pad_type_id": 0, "pad_token": "!"}
    path.write_text(json.dumps(form))
    trained = HFTokenizer(tmp_path / "trained")
    for text in ("x" * 100, "abc"):
        assert trained.tokenize(text) == tokenizer.tokenize(text)


def test_sentencepiece_adds_no_space(tmp_path: Path) -> None:
    """Text in a prompt follows a control token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    words = ["<unk>", "▁", "a", "b", "▁a", *(f"<0x{byte:02X}>" for byte in range(256))]
    made = Tokenizer(models.BPE({word: n for n, word in enumerate(words)}, [("▁", "a")], byte_fallback=True, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens([AddedToken("<s>", special=True)])
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": "<s>"}, "add_bos_token": True}))
    tokenizer = HFTokenizer(tmp_path)
    for text in ("ab", "a b", " a", "é", "a\n"):
        assert b"".join(map(tokenizer.token_bytes, tokenizer.tokenize(text))) == text.encode()
    assert tokenizer.bos is not None
    assert tokenizer.bos.text == "<s>"


def test_named_templates(tmp_path: Path) -> None:
    tiny_hf.write_tokenizer(tmp_path)
    options = {"chat_template": [{"name": "rag", "template": "no"}, {"name": "default", "template": "yes"}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(options))
    assert HFTokenizer(tmp_path).chat_template == "yes"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert HFTokenizer(tmp_path).chat_template == "file"


def test_broken_files_are_said(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        HFTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="download it again"):
        HFTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot be used"):
        HFTokenizer(tmp_path)
