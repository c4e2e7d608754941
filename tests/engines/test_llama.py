"""The llama engine on real models: bytes, bits and errors."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny
from driving import SMALL, empty, export, fill, tokens_of
from headstart.config import Settings
from headstart.engines import model_file
from headstart.engines.llama import LlamaEngine
from headstart.engines.llama import devices as llama_devices
from headstart.engines.llama.binding import lib
from headstart.engines.llama.devices import GPU, Device
from headstart.engines.llama.padding import Padding
from headstart.errors import ConfigError, EngineError, ModelError
from headstart.interfaces.engine import Span, Step
from headstart.interfaces.sampling import GREEDY, Sampling
from headstart.prompt.builder import Prompter
from headstart.prompt.chat_template import Template
from talks import talk

EXACT_TEXTS = [
    "plain",
    "  spaces at both ends  ",
    "\n\nlines\n\n\tand tabs\n",
    "déjà vu — 日本語 🤷🏽‍♀️ \u200b end",
    "def f(x):\n    return {'a': [1, 2]}  # 1234567890",
    "",
]


@pytest.fixture(scope="module")
def demo() -> Iterator[LlamaEngine]:
    settings = replace(SMALL, ctx=512, threads=2)  # as in tests/library, so that it is proved once
    engine = LlamaEngine.load(settings.engine_options())
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def small(tiny_model: Path) -> Iterator[LlamaEngine]:
    engine = LlamaEngine.load(replace(SMALL, model=str(tiny_model)).engine_options())
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def _empty_slots(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    for name in ("demo", "small"):
        if name in request.fixturenames:
            empty(request.getfixturevalue(name))


# ── text ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def tokenised_whole(tokenizer: Any, text: str) -> list[int]:
    """Tokens of a rendered text in one call, in which llama.cpp itself finds the control tokens."""
    data = text.encode("utf-8", "replace")
    tokens = np.empty(len(data) + 8, np.int32)
    pointer = tokens.ctypes.data_as(lib.llama_token_p)
    count = int(lib.llama_tokenize(tokenizer._vocab, data, len(data), pointer, len(tokens), False, True))
    found: list[int] = tokens[:count].tolist()
    return found


def test_tokenising_in_segments_equals_tokenising_whole(demo: LlamaEngine) -> None:
    tokenizer = demo.tokenizer
    template = tokenizer.chat_template
    assert template is not None
    prompter = Prompter(tokenizer, Template(template, tokenizer.names))
    for text in EXACT_TEXTS:
        for role in ("user", "assistant"):
            messages = [{"role": "system", "content": text}, {"role": role, "content": text}]
            prompt = prompter.chat(talk(messages))
            assert prompt.tokens.tolist() == tokenised_whole(tokenizer, prompt.text)
            assert b"".join(map(tokenizer.token_bytes, prompt.tokens.tolist())).decode() == prompt.text
    for control in tokenizer.controls:
        assert tokenised_whole(tokenizer, control.text) == [control.id]


def test_what_the_vocabulary_says(demo: LlamaEngine) -> None:
    tokenizer = demo.tokenizer
    names = {control.id: control.text for control in tokenizer.controls}
    assert {"<|im_start|>", "<|im_end|>", "<|endoftext|>"} <= set(names.values())
    assert "<|im_end|>" in {names[token] for token in tokenizer.eog}
    assert tokenizer.names["eos_token"] == "<|im_end|>"
    assert tokenizer.bos is None
    assert b"".join(tokenizer.token_bytes(token) for token in tokenizer.tokenize("🤷🏽‍♀️")).decode() == "🤷🏽‍♀️"
    assert tokenizer.tokenize("lone \ud800 surrogate")


# ── rows ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_restored_equals_cold_on_the_grid(demo: LlamaEngine) -> None:
    block_size, tokens = demo.traits.block_size, tokens_of(demo, 202)
    tail = tokens[192:]
    fill(demo, 0, tokens[:192])
    fill(demo, 0, tail, logits=True)
    cold = demo.logits(0)
    fill(demo, 2, tokens_of(demo, 77, seed=3))  # a neighbour
    rows = export(demo, 0, *range(0, 193, block_size))
    for kept in (1, 3):
        demo.release()
        demo.import_kv(1, rows[:kept])
        if kept < 3:
            fill(demo, 1, tokens[kept * block_size : 192])
        fill(demo, 1, tail, logits=True)
        assert demo.logits(1).tobytes() == cold.tobytes()


def test_a_flipped_bit_in_a_restored_row_changes_the_logits(demo: LlamaEngine) -> None:
    tokens = tokens_of(demo, 140)
    fill(demo, 0, tokens[:128])
    (rows,) = export(demo, 0, 0, 128)
    fill(demo, 0, tokens[128:], logits=True)
    cold = demo.logits(0)
    half = len(rows.data) // 2
    row = demo.shape.kv_bytes_per_token // 60  # 30 layers, K and V
    for at in (1, 64 * row + 1, half + 1):  # signs in K of tokens 0 and 64, and in V of token 0, in the first layer
        rows.data[at] ^= 0x80
        demo.import_kv(1, [rows])
        rows.data[at] ^= 0x80
        fill(demo, 1, tokens[128:], logits=True)
        assert demo.logits(1).tobytes() != cold.tobytes()
    demo.import_kv(1, [rows])
    fill(demo, 1, tokens[128:], logits=True)
    assert demo.logits(1).tobytes() == cold.tobytes()


@pytest.mark.slow  # by default a tiny model shows it: test_exactness
def test_a_grid_of_32_breaks_exactness(demo_model: Path) -> None:
    engine = LlamaEngine.load(replace(SMALL, model=str(demo_model)).engine_options(), block_size=32)
    assert engine.traits.block_size == 32
    tokens = tokens_of(engine, 96)
    fill(engine, 0, tokens)
    fill(engine, 1, tokens, 32, 64)
    assert export(engine, 0, 0, 96)[0].data.tobytes() != export(engine, 1, 0, 96)[0].data.tobytes()
    engine.close()


def test_refused_moves_leave_a_known_state(small: LlamaEngine) -> None:
    fill(small, 0, tokens_of(small, 100))
    (rows,) = export(small, 0, 0, 100)
    with pytest.raises(EngineError, match="holds 100 tokens"):
        export(small, 0, 50, 101)
    with pytest.raises(EngineError, match="too few"):
        small.export_kv(0, [Span(0, 10, np.empty(9 * small.shape.kv_bytes_per_token, np.uint8))])
    for bad in ([replace(rows, take=101)], [replace(rows, data=rows.data[:-1])], [rows] * 11):
        fill(small, 1, tokens_of(small, 5))
        with pytest.raises(EngineError):
            small.import_kv(1, bad)
        assert small.length(1) == 0
    small.truncate(0, 0)
    with pytest.raises(EngineError, match="cannot be cut"):
        small.truncate(0, 1)


# ── computing ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_decode_in_a_batch(small: LlamaEngine) -> None:
    fill(small, 0, tokens_of(small, 64), logits=True)
    first = small.logits(0)
    fill(small, 2, tokens_of(small, 70, seed=2))
    with pytest.raises(EngineError, match="no logits"):
        small.logits(0)
    small.decode([Step(2, 40), Step(0, 41)])
    assert (small.length(0), small.length(1), small.length(2)) == (65, 0, 71)
    assert small.logits(0).tobytes() != small.logits(2).tobytes()
    assert small.logits(0).shape == first.shape == (small.tokenizer.n_vocab,)
    with Drawing(small, GREEDY) as draw:
        assert draw(0) == int(small.logits(0).argmax())
        assert draw(2) == int(small.logits(2).argmax())
    with pytest.raises(EngineError, match="different slots"):
        small.decode([Step(0, 1), Step(0, 2)])


def test_a_bad_token_is_an_error_and_changes_nothing(small: LlamaEngine) -> None:
    fill(small, 0, tokens_of(small, 10))
    with pytest.raises(EngineError, match="invalid token"):
        small.prefill(0, np.array([5, 10**6], np.int32), logits=True)
    assert small.length(0) == 10
    fill(small, 0, tokens_of(small, 10))
    assert small.length(0) == 20


class Drawing:
    """`with Drawing(engine, sampling) as draw: draw(slot)`."""

    def __init__(self, engine: LlamaEngine, sampling: Sampling) -> None:
        self.engine, self.sampler = engine, engine.sampler(sampling)

    def __enter__(self) -> Any:
        return lambda slot: self.engine.sample(slot, self.sampler)

    def __exit__(self, *_: object) -> None:
        self.sampler.close()
        self.sampler.close()


def test_sampling(demo: LlamaEngine) -> None:
    fill(demo, 0, np.array(demo.tokenizer.tokenize("The capital of France is"), np.int32), logits=True)
    logits = demo.logits(0)
    best, second = np.argsort(logits)[::-1][:2].tolist()

    def draws(count: int = 1, **options: Any) -> list[int]:
        with Drawing(demo, Sampling(**options)) as draw:
            return [draw(0) for _ in range(count)]

    assert draws(3, temperature=0) == [best] * 3
    assert draws(temperature=0, logit_bias=((best, -100.0),)) == [second]
    assert draws(temperature=0, logit_bias=((second, 100.0),)) == [second]
    # Penalties see what was drawn, not the prompt; and forget it with the sampler.
    assert draws(2, temperature=0, presence_penalty=2.0 + float(logits[best] - logits[second])) == [best, second]
    assert draws(2, temperature=0, presence_penalty=99.0, penalty_last_n=0) == [best, best]
    random = {"temperature": 1.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    assert draws(20, seed=7, **random) == draws(20, seed=7, **random)
    assert draws(20, seed=7, **random) != draws(20, seed=8, **random)
    assert draws(20, **random) != draws(20, **random)
    assert draws(20, seed=-1, **random) == draws(20, seed=-1, **random)
    assert set(draws(50, temperature=5.0, top_k=1, seed=1)) == {best}
    assert set(draws(50, temperature=5.0, top_k=0, top_p=1e-6, min_p=0.0, seed=1)) == {best}
    assert set(draws(50, temperature=1.0, top_k=0, top_p=1.0, min_p=1.0, seed=1)) == {best}


# ── traits, identity, shape ──────────────────────────────────────────────────────────────────────────────────────────


def test_traits_are_measured(demo: LlamaEngine) -> None:
    assert demo.traits.block_size == 64
    assert demo.traits.chunking
    assert demo.traits.canonical
    assert demo.traits.sliceable
    assert not demo.traits.decode_is_prefill
    assert demo.facts.details["proof_seconds"] > 0
    assert [demo.length(slot) for slot in range(3)] == [0, 0, 0]


@pytest.mark.parametrize("start", [0, 64, 256])
def test_a_padded_tail_may_end_a_call_of_blocks(demo: LlamaEngine, start: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the bits of a call of its own, also where this processor pads few tails."""
    monkeypatch.setattr(demo, "_padding", Padding(1.0, 1000.0, 1.0))
    tokens = tokens_of(demo, start + 192)
    assert not demo.fills_block(demo.shape.ctx - 63, 32), "the context has no room for a tile"
    for count in (33, 63, 64):
        stop = start + 128 + count
        assert demo.fills_block(start + 128, count)
        for slot in (0, 1):
            demo.truncate(slot, 0)
        fill(demo, 0, tokens[:stop], *[64] * ((start + 128) // 64), count, logits=True)
        logits, kv = demo.logits(0), export(demo, 0, 0, stop)[0].data.tobytes()
        fill(demo, 1, tokens[:stop], *[start] * (start > 0), stop - start, logits=True)
        assert demo.length(1) == stop
        assert export(demo, 1, 0, stop)[0].data.tobytes() == kv
        assert demo.logits(1).tobytes() == logits.tobytes()


@pytest.mark.slow  # bf16 computes slowly; that the proof finds the trait, test_proof shows on the fake
def test_with_rows_of_bf16_decoding_is_prefill() -> None:
    other = LlamaEngine.load(replace(SMALL, kv_type="bf16", slots=2).engine_options())
    assert other.traits.decode_is_prefill
    assert other.traits.canonical
    # The trait, as it is used: a reply's rows are those of a prompt that contains it.
    tokens = tokens_of(other, 150)
    fill(other, 0, tokens)
    fill(other, 1, tokens[:101])
    for token in tokens[101:].tolist():
        other.decode([Step(1, token)])
    assert export(other, 1, 0, 150)[0].data.tobytes() == export(other, 0, 0, 150)[0].data.tobytes()
    other.close()


ACCELERATOR = 3
"""ggml's number of a BLAS."""


def test_the_fingerprint_is_what_changes_numbers(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = replace(SMALL, model=str(tiny_model))
    copy = shutil.copy(tiny_model, tmp_path / "copy.gguf")
    other = tiny.write(tmp_path / "other.gguf", seed=1)

    def print_of(settings: Settings, block_size: int = 64) -> bytes:
        engine = LlamaEngine.load(settings.engine_options(), block_size=block_size)  # nothing is proved then
        engine.close()
        engine.close()
        return engine.fingerprint

    same = print_of(base)
    assert len(same) == 32
    assert print_of(replace(base, slots=1, ctx=512, threads=2, model=str(copy))) == same
    assert print_of(replace(base, model=str(other))) != same
    assert print_of(replace(base, kv_type="q8_0")) != same
    assert print_of(base, block_size=32) != same
    adapters = [tiny.write_adapter(tmp_path / f"{seed}.gguf", seed) for seed in (0, 1)]
    assert len({print_of(replace(base, lora=adapter)) for adapter in adapters} | {same}) == 3
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    assert print_of(base) == same, "nothing reads it here"
    real = llama_devices.devices()
    for kind, reads in ((GPU, False), (ACCELERATOR, True)):
        monkeypatch.setattr(llama_devices, "devices", lambda kind=kind: [*real, Device(kind, "another")])
        with_device = print_of(base)
        assert with_device != same, "without any layer on it too"
        monkeypatch.setenv("OPENBLAS_CORETYPE", f"Zen{kind}")
        assert (print_of(base) != with_device) == reads


def test_rope_that_depends_on_the_context_is_in_the_fingerprint(tmp_path: Path) -> None:
    """Fault: without the original context in the file, which is then the trained one, KV of the other factors was taken."""
    model, made = tiny.write(tmp_path / "long.gguf", long_rope=True), []
    for ctx in (tiny.CTX - 256, tiny.CTX, tiny.CTX + 256):
        engine = LlamaEngine.load(replace(SMALL, model=str(model), ctx=ctx, slots=1).engine_options(), block_size=64)
        fill(engine, 0, tokens_of(engine, 70))
        made.append((engine.fingerprint, export(engine, 0, 0, 70)[0].data.tobytes()))
        engine.close()
    assert made[0] == made[1]
    assert made[1][0] != made[2][0]
    assert made[1][1] != made[2][1]


def test_an_adapter_is_applied(tiny_model: Path, tmp_path: Path) -> None:
    logits = []
    for lora in (None, tiny.write_adapter(tmp_path / "adapter.gguf")):
        engine = LlamaEngine.load(replace(SMALL, model=str(tiny_model), lora=lora).engine_options(), block_size=64)
        fill(engine, 0, tokens_of(engine, 70), logits=True)
        logits.append(engine.logits(0))
        engine.close()
    assert np.abs(logits[0] - logits[1]).max() > 0.01


def test_shape_and_progress(tiny_model: Path) -> None:
    seen: list[float] = []
    settings = Settings(model=str(tiny_model), ctx=300, threads=1, memory_budget=0)
    engine = LlamaEngine.load(settings.engine_options(), progress=seen.append)
    assert engine.shape.ctx == 512
    assert engine.shape.slots == 4
    assert engine.shape.batch == 512
    assert engine.facts.name == "tiny llama 0"
    assert engine.facts.details["architecture"] == "llama"
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
    engine.close()
    least = LlamaEngine.load(Settings(model=str(tiny_model), ctx=1, slots=1, threads=1, memory_budget=0).engine_options())
    assert least.shape.ctx == least.shape.batch == 256
    assert least.traits.canonical
    least.close()


def test_nothing_is_printed(tiny_model: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "headstart.llama"):
        LlamaEngine.load(replace(SMALL, model=str(tiny_model)).engine_options()).close()
    assert capfd.readouterr() == ("", "")
    assert any("llama_model_loader" in record.message for record in caplog.records)


# ── errors ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def one_line(model: Path | str, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        LlamaEngine.load(replace(SMALL, model=str(model), **options).engine_options())
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_files_that_are_no_model(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "There is no model" in one_line(tmp_path / "missing.gguf")
    assert "folder" in one_line(tmp_path)
    text = tmp_path / "text.gguf"
    text.write_text("hello")
    assert "not a GGUF file" in one_line(text)
    empty = tmp_path / "empty.gguf"
    empty.touch()
    assert "not a GGUF file" in one_line(empty)
    data = tiny_model.read_bytes()
    (tmp_path / "short.gguf").write_bytes(data[: len(data) // 2])
    assert "data is not within the file bounds" in one_line(tmp_path / "short.gguf")
    (tmp_path / "shorter.gguf").write_bytes(data[:200])
    assert "cannot load" in one_line(tmp_path / "shorter.gguf")
    name = b"general.architecture"
    at = data.index(name) + len(name) + 12
    assert data[at : at + 5] == b"llama"
    (tmp_path / "new.gguf").write_bytes(data[:at] + b"lmaoo" + data[at + 5 :])
    assert "unknown model architecture: 'lmaoo'" in one_line(tmp_path / "new.gguf")
    shutil.copy(tiny_model, tmp_path / "m-00001-of-00002.gguf")
    assert "m-00002-of-00002.gguf" in one_line(tmp_path / "m-00001-of-00002.gguf")
    monkeypatch.setattr(model_file, "_DEMO_PACKAGE", "no_such_package")
    with pytest.raises(ModelError, match=r"pip install 'headstart\[demo\]'"):
        model_file.locate("demo")


def test_adapters_that_do_not_fit(tiny_model: Path, tmp_path: Path) -> None:
    assert "There is no adapter" in one_line(tiny_model, lora=tmp_path / "missing.gguf")
    assert "cannot use the adapter" in one_line(tiny_model, lora=tiny_model)


def test_settings_that_cannot_work(tiny_model: Path) -> None:
    assert "Too little memory" in one_line(tiny_model, memory_budget=1 << 50)
    assert "Lower memory_budget=, ctx= or slots=" in one_line(tiny_model, ctx=1 << 30)
    assert "at least 1" in one_line(tiny_model, slots=0)
    assert "no GPU support" in one_line(tiny_model, gpu_layers=1)


@pytest.mark.parametrize(
    ("given", "turns"), [({}, "2000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")]
)
def test_workers_spin_briefly_unless_the_environment_says_otherwise(given: dict[str, str], turns: str) -> None:
    others = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    program = "import os, headstart.engines.llama; print(os.environ.get('GOMP_SPINCOUNT'))"
    done = subprocess.run([sys.executable, "-c", program], env={**others, **given}, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == turns
