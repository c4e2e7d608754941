"""Real agents end to end: each reads a file with a tool of its own, and goes on, through this server and nothing else.

A part stands in for the model's choice of tokens (`agents.part`); all that is asked is then asked again of the bundled model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import templates
import tiny_hf
from agents.clients import CLIENTS, CannotRun
from agents.part import FIRST, NOTES, SECOND, THIRD
from agents.perform import Performance, perform
from headstart.config import Settings
from headstart.engines.llama import LlamaEngine
from headstart.serving.runtime import Runtime
from live import Server, serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = Path(__file__).resolve().parents[2]
CTX = 24_576
LIMITS = {"/v1/messages": "max_tokens", "/v1/chat/completions": "max_tokens", "/v1/responses": "max_output_tokens"}
"""What bounds a reply, by route; calls of others are not of the conversation."""


@pytest.fixture(scope="module")
def performed(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A client's performance on llama.cpp, by its name; each is given once."""

    @cache
    def given(name: str) -> Performance:
        try:
            return perform(CLIENTS[name], tiny_model, tmp_path_factory.mktemp("agent"))
        except CannotRun as reason:
            pytest.skip(f"{name} cannot run here: {reason}")

    return given


@pytest.fixture(scope="module")
def bundled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The bundled model, unscripted, with a template that has tools."""
    template = tmp_path_factory.mktemp("template") / "tools.jinja"
    template.write_text(templates.TOOLS, "utf-8")
    settings = Settings(ctx=CTX, slots=1, memory_budget=2 << 30, chat_template=template)
    with serving(lambda: Runtime(lambda: LlamaEngine.load(settings.engine_options()), settings), model_id="demo") as server:
        server.http.timeout = 900
        yield server


def route(call: dict[str, Any]) -> str:
    return str(call["path"]).split(" ")[1].partition("?")[0]


def conversed(performance: Performance) -> list[dict[str, Any]]:
    """The calls that go on with a conversation: those with tools."""
    return [call for call in performance.calls if route(call) in LIMITS and call["tools"]]


@pytest.mark.parametrize("name", CLIENTS)
def test_a_task_what_follows_and_another(performed: Any, name: str) -> None:
    check(performed(name))


@pytest.mark.parametrize(("name", "kind"), [("llm", "lfm2")])
def test_the_same_with_mlx(name: str, kind: str, tmp_path: Path) -> None:
    """Prompts of agents are long: the tokenizer has learnt their words, or there would be a token for each byte."""
    words = "".join(path.read_text("utf-8") for path in sorted((ROOT / "docs").glob("*.md")))
    model = tiny_hf.write(tmp_path / kind, kind, words=words, max_position_embeddings=65_536)
    try:
        check(perform(CLIENTS[name], model, tmp_path))
    except CannotRun as reason:
        pytest.skip(f"{name} cannot run here: {reason}")


def check(performance: Performance) -> None:
    """All commands did their task, and no token was computed twice."""
    for run, answer in zip(performance.runs, (FIRST, SECOND, THIRD), strict=True):
        assert run["code"] == 0, run
        assert answer in run["out"], run
    assert [(call["path"], call["status"]) for call in performance.calls if call["status"] >= 400] == []
    first, second, third, other = conversed(performance)
    assert not first["reported"]
    assert NOTES.split()[0] in json.dumps(second["body"]), "its tool has read the file"
    assert NOTES.split()[0] not in json.dumps(first["body"])
    for call in (second, third):
        assert call["reported"] > 0
        assert call["computed"] <= 1.02 * call["cost"] + 64, call["path"]
        # What it has sent beyond the call before it, and not what the server made of that.
        assert call["computed"] <= 1.02 * call["added"] + 64, call["path"]
        assert '"cause":null' in call["answer"], "nothing was missed"
    assert other["reported"] >= other["head"] - 64, "two conversations share tools and system"
    assert other["computed"] <= 1.02 * other["cost"] + 64


@pytest.mark.parametrize("name", ["claude-code", "opencode", "codex", "llm"])
def test_its_bodies_on_the_bundled_model(performed: Any, bundled: Server, name: str) -> None:
    """Whatever the model says to them."""
    for call in performed(name).calls:
        limit = LIMITS.get(route(call))
        if limit is not None:
            method, path = call["path"].split(" ")
            assert method == "POST"
            response = bundled.post(path, json={**call["body"], limit: 8})
            assert response.status_code == 200, response.text
            assert "error" not in {json.loads(line[6:]).get("type") for line in response.text.splitlines() if _is_object(line)}


def _is_object(line: str) -> bool:
    return line.startswith("data: {")
