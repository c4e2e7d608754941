"""The chat templates that come with headstart, and what is said of a model that brings none."""

from __future__ import annotations

import logging
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

import headstart
import tiny
from headstart import templates
from headstart.config import Settings
from headstart.errors import ConfigError, InvalidRequest
from headstart.prompt.chat_template import Template
from headstart.prompt.family_detection import GENERIC, family_of
from headstart.serving.runtime import Runtime
from headstart.testing.fake_engine import FakeEngine, FakeTokenizer
from live import serving
from process import run
from process import serving as starting

NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
SMALL = ("--ctx", "512", "--slots", "1", "--threads", "1", "--memory-budget", "16MiB")
CHAT = [("system", "S"), ("user", "a"), ("assistant", "b"), ("user", "c")]

WRITTEN = {
    "chatml": "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
    "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n",
    "command-r": "<s><|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>S<|END_OF_TURN_TOKEN|>"
    "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>a<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>b<|END_OF_TURN_TOKEN|>"
    "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>c<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
    "deepseek": "<s>S\n### Instruction:\na\n### Response:\nb\n<|EOT|>\n### Instruction:\nc\n### Response:\n",
    "deepseek2": "<s>S\n\nUser: a\n\nAssistant: b</s>User: c\n\nAssistant:",
    "deepseek3": "<s>S<｜User｜>a<｜Assistant｜>b</s><｜User｜>c<｜Assistant｜>",
    "falcon3": "<|system|>\nS\n<|user|>\na\n<|assistant|>\nb</s>\n<|user|>\nc\n<|assistant|>\n",
    "gemma": "<s><start_of_turn>user\nS\n\na<end_of_turn>\n<start_of_turn>model\nb<end_of_turn>\n"
    "<start_of_turn>user\nc<end_of_turn>\n<start_of_turn>model\n",
    "granite": "<|start_of_role|>system<|end_of_role|>S<|end_of_text|>\n<|start_of_role|>user<|end_of_role|>a<|end_of_text|>\n"
    "<|start_of_role|>assistant<|end_of_role|>b<|end_of_text|>\n<|start_of_role|>user<|end_of_role|>c<|end_of_text|>\n"
    "<|start_of_role|>assistant<|end_of_role|>",
    "llama2": "<s>[INST] <<SYS>>\nS\n<</SYS>>\n\na [/INST] b </s><s>[INST] c [/INST]",
    "llama3": "<s><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\na<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nb<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nc<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "llama4": "<s><|header_start|>system<|header_end|>\n\nS<|eot|><|header_start|>user<|header_end|>\n\na<|eot|>"
    "<|header_start|>assistant<|header_end|>\n\nb<|eot|><|header_start|>user<|header_end|>\n\nc<|eot|>"
    "<|header_start|>assistant<|header_end|>\n\n",
    "mistral-v1": "<s> [INST] S\n\na [/INST] b</s> [INST] c [/INST]",
    "mistral-v3": "<s>[INST] S\n\na[/INST] b</s>[INST] c[/INST]",
    "mistral-v3-tekken": "<s>[INST]S\n\na[/INST]b</s>[INST]c[/INST]",
    "mistral-v7": "<s>[SYSTEM_PROMPT] S[/SYSTEM_PROMPT][INST] a[/INST] b</s>[INST] c[/INST]",
    "mistral-v7-tekken": "<s>[SYSTEM_PROMPT]S[/SYSTEM_PROMPT][INST]a[/INST]b</s>[INST]c[/INST]",
    "openchat": "<s>S<|end_of_turn|>GPT4 Correct User: a<|end_of_turn|>GPT4 Correct Assistant: b<|end_of_turn|>"
    "GPT4 Correct User: c<|end_of_turn|>GPT4 Correct Assistant:",
    "phi3": "<s><|system|>\nS<|end|>\n<|user|>\na<|end|>\n<|assistant|>\nb<|end|>\n<|user|>\nc<|end|>\n<|assistant|>\n",
    "phi4": "<|im_start|>system<|im_sep|>S<|im_end|><|im_start|>user<|im_sep|>a<|im_end|>"
    "<|im_start|>assistant<|im_sep|>b<|im_end|><|im_start|>user<|im_sep|>c<|im_end|><|im_start|>assistant<|im_sep|>",
    "vicuna": "<s>S USER: a ASSISTANT: b</s>USER: c ASSISTANT:",
    "zephyr": "<|system|>\nS</s>\n<|user|>\na</s>\n<|assistant|>\nb</s>\n<|user|>\nc</s>\n<|assistant|>\n",
}
"""CHAT in each format, up to where the reply begins."""


def said(*turns: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": text} for role, text in turns]


def template(name: str) -> Template:
    return Template(templates.built_in(name).source, NAMES)


def test_each_has_a_file_and_a_format() -> None:
    folder = files("headstart") / "data" / "templates"
    assert {Path(str(file)).stem for file in folder.iterdir()} == set(templates.BUILT_IN) == set(WRITTEN)


@pytest.mark.parametrize("name", templates.BUILT_IN)
def test_a_conversation_is_written_in_its_format(name: str) -> None:
    assert template(name).render(said(*CHAT)) == WRITTEN[name]


@pytest.mark.parametrize("name", templates.BUILT_IN)
def test_it_grows_at_its_end_and_loses_nothing(name: str) -> None:
    one = template(name)
    assert one.render(said(*CHAT)).startswith(one.render(said(*CHAT[:3]), generation=False))
    assert one.render(said(*CHAT[1:])).count("a") >= 1
    assert "QQ" in one.render(said(("system", "QQ"))), "a system message alone"
    begun = one.render(said(("system", "QQ"), ("assistant", "b"), ("user", "c")))
    assert "QQ" in begun, "a system message before a reply"
    assert begun.count("QQ") == 1
    empty = {"role": "assistant", "content": None}
    assert "None" not in one.render([*said(("user", "a")), empty, *said(("user", "c"))])
    assert family_of(one).calls == GENERIC.calls


@pytest.mark.parametrize("name", templates.BUILT_IN)
def test_a_late_system_message_is_written_or_refused(name: str) -> None:
    """What is refused the server writes as a user's message."""
    late = said(("user", "a"), ("system", "QQ"), ("user", "c"))
    if template(name).late_system:
        assert "QQ" in template(name).render(late)
    else:
        with pytest.raises(InvalidRequest, match="in front only"):
            template(name).render(late)


@pytest.mark.parametrize(
    ("controls", "likely"),
    [
        (["<s>", "<|im_start|>", "<|im_end|>"], "chatml"),
        (["<|im_start|>", "<|im_end|>", "<|im_sep|>"], "phi4"),
        (["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"], "llama3"),
        (["<start_of_turn>", "<end_of_turn>"], "gemma"),
        (["<s>", "</s>"], None),
        ([], None),
    ],
)
def test_a_model_without_a_template_is_told_by_its_tokens(controls: list[str], likely: str | None) -> None:
    assert templates.guess(controls) == likely


# ── a name or a file ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_name_is_a_built_in_one_and_a_path_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("llama3").write_text("mine")
    chosen = Settings(chat_template="llama3").template()
    assert chosen is not None
    assert (chosen.origin, chosen.name) == ("built-in", "llama3")
    for path in ("./llama3", Path("llama3"), str(tmp_path / "llama3")):
        chosen = Settings(chat_template=path).template()
        assert chosen is not None
        assert (chosen.origin, chosen.source) == ("file", "mine")


@pytest.mark.parametrize(("wrong", "meant"), [("llama-3", "you mean llama3?"), ("Gemma", "you mean gemma?"), ("x9", "")])
def test_an_unknown_name_gets_the_list(wrong: str, meant: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings(chat_template=wrong).template()
    assert meant in str(caught.value)
    assert "Built in are chatml, command-r," in str(caught.value)


# ── what is said ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_model_without_a_template_is_said_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """To the library's callers too, once."""

    def said(tokenizer: FakeTokenizer, **settings: Any) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.WARNING), Runtime(lambda: FakeEngine(tokenizer=tokenizer), Settings(1 << 20, **settings)):
            return [record.getMessage() for record in caplog.records]

    def Settings(budget: int, **more: Any) -> headstart.Settings:
        return headstart.Settings(memory_budget=budget, **more)

    (line,) = said(FakeTokenizer(chat_template=None))
    assert "none in the model" in line
    assert "choose another with chat_template=" in line
    assert "look like those of chatml" in line
    assert said(FakeTokenizer(chat_template=None), chat_template="llama3") == []
    assert said(FakeTokenizer()) == []


def test_clients_are_told_where_the_template_comes_from() -> None:
    def told(**settings: Any) -> Any:
        engine = FakeEngine(tokenizer=FakeTokenizer(chat_template=None))
        with Runtime(lambda: engine, Settings(memory_budget=1 << 20, **settings)) as runtime, serving(runtime) as server:
            (card,) = server.http.get("/v1/models").json()["data"]
            props = server.http.get("/props").json()
            assert card["meta"]["chat_template"] == props["headstart"]["chat_template"]
            return card["meta"]["chat_template"], props["chat_template"]

    assert told() == ({"origin": "none", "name": "chatml"}, templates.built_in("chatml").source)
    assert told(chat_template="gemma") == ({"origin": "built-in", "name": "gemma"}, templates.built_in("gemma").source)


def test_the_server_says_it(tmp_path: Path) -> None:
    model = str(tiny.write(tmp_path / "model.gguf", chat_template=""))
    with starting(model, *SMALL, "--port", "0", "--no-disk") as server:
        line = server.line("none in the model")
        assert "--chat-template" in line
        server.line("listening")
        assert server.end() == 0


@pytest.mark.slow
def test_doctor_says_it(tmp_path: Path) -> None:
    model = str(tiny.write(tmp_path / "model.gguf", chat_template=""))
    result = run("doctor", model, *SMALL, "--seconds", "0", COLUMNS="300")
    assert result.returncode == 0, result.stderr
    assert "none in the model: conversations are written as ChatML" in result.stdout


@pytest.mark.slow
def test_doctor_says_which_one_was_chosen(tmp_path: Path) -> None:
    model = str(tiny.write(tmp_path / "model.gguf", chat_template=""))
    result = run("doctor", model, *SMALL, "--seconds", "0", "--chat-template", "zephyr", COLUMNS="300")
    assert result.returncode == 0, result.stderr
    assert "zephyr (built-in)" in result.stdout
    assert "none in the model" not in result.stdout + result.stderr
