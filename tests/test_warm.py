"""`headstart warm`: prompts are computed ahead of time, and whoever sends one waits for their own words only."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

import headstart
from headstart.cli import main
from headstart.errors import ConfigError
from headstart.warm import Wanted, read

SYSTEM = "You keep the house, and you know where everything is. " * 12
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]


def warm(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(["warm", *arguments, "--ctx", "2048", "--memory-budget", "64MiB"])
    assert isinstance(end.value.code, int)
    return end.value.code


@pytest.mark.parametrize("form", ["text", "body", "lines"])
def test_the_first_request_computes_its_own_words_only(
    form: str, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chat: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
    tools = TOOLS if form == "lines" else None
    body = json.dumps({"messages": chat, "tools": tools, "model": "any"})
    written = {"text": SYSTEM, "body": body, "lines": f"{body}\n\n{body}\n"}[form]
    file, folder = tmp_path / "prompts", tmp_path / "cache"
    file.write_text(written)
    assert warm(str(file), str(tiny_model), "--cache-dir", str(folder), "--salt", "alice") == 0
    told = capsys.readouterr().out
    assert "stored: " in told
    with headstart.open(tiny_model, ctx=2048, cache_dir=folder) as hs:
        chat.append({"role": "user", "content": "Where is the key?"})
        alice = hs.chat(chat, max_tokens=1, salt="alice", tools=tools or ()).report
        assert alice.tiers["disk"] == alice.restored >= alice.prompt - 128 > 0
        bob = hs.chat(chat, max_tokens=1, salt="bob", tools=tools or ()).report
        assert bob.cached == 0


def test_a_conversation_is_warmed_up_to_what_every_next_message_shares(tiny_model: Path) -> None:
    chat = [{"role": "user", "content": SYSTEM}, {"role": "assistant", "content": "It is in the drawer, I think."}]
    shown: list[tuple[int, int]] = []
    with headstart.open(tiny_model, ctx=2048, cache_dir=None) as hs:
        first = hs.warm(chat, progress=lambda done, total: shown.append((done, total)))
        assert first.computed == first.prompt
        assert shown
        second = hs.chat([*chat, {"role": "user", "content": "Thanks."}], max_tokens=1).report
        assert second.cached >= (first.prompt - 1) // 64 * 64
        with pytest.raises(headstart.ContextTooLong):
            hs.warm("word " * 5000)
        with pytest.raises(headstart.InvalidRequest):
            hs.warm([])


def test_forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def of(text: str, name: str = "prompts") -> list[Wanted]:
        (tmp_path / name).write_text(text)
        return read(str(tmp_path / name), "user")

    message = {"role": "user", "content": "a"}
    assert of("just a text")[0].messages == [{"role": "user", "content": "just a text"}]
    assert of('{"not": "a request"}')[0].messages == [{"role": "user", "content": '{"not": "a request"}'}]
    assert of("[1]\n[2]")[0].messages == [{"role": "user", "content": "[1]\n[2]"}]
    assert of(json.dumps([message]))[0].messages == [message]
    lines = of(f"{json.dumps({'messages': [message], 'chat_template_kwargs': {'x': 1}})}\n\n{json.dumps([message])}\n")
    assert [one.options for one in lines] == [{"template": {"x": 1}}, {}]
    assert [one.place.rsplit(":", 1)[1] for one in lines] == ["1", "3"]
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe"))
    assert read("-", "system")[0].messages == [{"role": "system", "content": "from a pipe"}]
    for text, name, says in (
        ("", "a.txt", "is empty"),
        ("{", "a.json", "is not JSON"),
        ('{"messages": [{"role": "user"}]}\n{', "a.jsonl", "line 2"),
        ('{"a": 1}', "b.json", "no chat request"),
    ):
        with pytest.raises(ConfigError, match=says):
            of(text, name)
    with pytest.raises(ConfigError, match="Cannot read"):
        read(str(tmp_path / "nowhere"), "user")


def test_a_disk_without_room_is_said(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompt"
    file.write_text(SYSTEM)
    assert warm(str(file), str(tiny_model), "--cache-dir", str(tmp_path / "cache"), "--disk-budget", "1") == 1
    assert "--disk-budget" in capsys.readouterr().err
    file.write_text("word " * 5000)
    assert warm(str(file), str(tiny_model), "--cache-dir", str(tmp_path / "cache")) == 2
    assert "prompt:" in capsys.readouterr().err
