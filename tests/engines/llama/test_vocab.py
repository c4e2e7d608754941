"""A vocabulary without weights gives the tokens of the whole model."""

from __future__ import annotations

from pathlib import Path

import pytest

from headstart.engines.llama import LlamaEngine
from headstart.engines.llama.binding import lib
from headstart.engines.options import EngineOptions

TEXTS = ("", "Hello, world!", " two  blanks ", "<|im_start|>user", "Füße 日本語 🙂", "\x00\n\t\r", "a" * 300)


@pytest.mark.parametrize("model", ["tiny_model", "demo_model"])
def test_a_vocabulary_alone_is_that_of_the_model(model: str, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(model)
    options = EngineOptions(str(path), ctx=256, slots=1, threads=1)
    engine, alone = LlamaEngine.load(options, block_size=64), LlamaEngine.load_tokenizer(options)
    try:
        whole = engine.tokenizer
        for name in ("n_vocab", "bos", "controls", "eog", "chat_template", "names"):
            assert getattr(alone, name) == getattr(whole, name), name
        ends = {token for token in range(whole.n_vocab) if lib.llama_vocab_is_eog(whole._vocab, token)}
        assert whole.eog == ends  # only a few tokens are asked
        assert [alone.tokenize(text) for text in TEXTS] == [whole.tokenize(text) for text in TEXTS]
        assert [*map(alone.token_bytes, range(alone.n_vocab))] == [*map(whole.token_bytes, range(whole.n_vocab))]
    finally:
        alone.close()
        alone.close()
        engine.close()
