"""`headstart warm`: prompts are computed ahead of time, and whoever sends one waits for their own words only."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

import headstart
from headstart.api.auth import Key
from headstart.chat import tenancy
from headstart.cli.main import main
from headstart.cli.warm import Wanted, read
from headstart.errors import ConfigError

SYSTEM = "You keep the house, and you know where everything is. " * 12
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]


def salt_of_team(cache_salt: str) -> str:
    """The salt that a server gives to requests with a key named `team`."""
    return tenancy.salt(tenancy.policy_of(None, several=True), Key.of("secret", "team").tenant, "user", cache_salt)


def warm(*arguments: str, memory: str = "64MiB") -> int:
    with pytest.raises(SystemExit) as end:
        main(["warm", *arguments, "--ctx", "2048", "--memory-budget", memory])
    assert isinstance(end.value.code, int)
    return end.value.code


def main_ends(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 0


@pytest.mark.parametrize("form", ["text", "body", "lines"])
def test_the_first_request_computes_its_own_words_only(
    form: str, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    chat: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
    tools = TOOLS if form == "lines" else None
    body = json.dumps({"messages": chat, "tools": tools, "model": "any"})
    written = {"text": SYSTEM, "body": body, "lines": f"{body}\n\n{body}\n"}[form]
    file, folder = tmp_path / "prompts", tmp_path / "cache"
    file.write_text(written)
    whose, salt = ((), "alice") if form != "body" else (("--tenant", "team"), salt_of_team("alice"))
    assert warm(str(file), str(tiny_model), "--cache-dir", str(folder), "--salt", "alice", *whose) == 0
    told = capsys.readouterr().out
    assert "stored: " in told
    assert ("ready: 2 prompts of" if form == "lines" else "ready: 1 prompt of") in told
    for line in told.splitlines()[1:-1]:
        identity, place = line.split()
        assert place.startswith(str(file))
        main_ends(["cache", "show", identity, "--cache-dir", str(folder)])
        assert capsys.readouterr().out.splitlines()[-2].startswith(f"{identity} ")
    with headstart.open(tiny_model, ctx=2048, cache_dir=folder) as hs:
        chat.append({"role": "user", "content": "Where is the key?"})
        alice = hs.chat(chat, max_tokens=1, salt=salt, tools=tools or ()).report
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
    body = {"messages": [message], "chat_template_kwargs": {"x": 1}, "cache_salt": "bob"}
    lines = of(f"{json.dumps(body)}\n\n{json.dumps([message])}\n")
    assert [one.options for one in lines] == [{"template": {"x": 1}, "salt": "bob"}, {}]
    assert [one.place.rsplit(":", 1)[1] for one in lines] == ["1", "3"]
    (thoughtless,) = of(json.dumps({"messages": [message], "reasoning_effort": "none"}))
    assert thoughtless.options == {"template": {"reasoning_effort": "none", "enable_thinking": False}}
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe"))
    assert read("-", "system")[0].messages == [{"role": "system", "content": "from a pipe"}]
    for text, name, says in (
        ("", "a.txt", "is empty"),
        ("{", "a.json", "is not JSON"),
        ("[" * 100_000, "a.json", "is not JSON: it is nested too deeply"),
        ("[1]\n" + "[" * 100_000, "a.jsonl", "line 2: it is nested too deeply"),
        ('{"messages": [{"role": "user"}]}\n{', "a.jsonl", "line 2"),
        ('{"a": 1}', "b.json", "no chat request"),
        (json.dumps({"messages": [message], "cache_salt": 5}), "c.json", "cache_salt must be a text"),
        (json.dumps({"messages": [message], "reasoning_effort": 5}), "c.json", "reasoning_effort must be a text"),
        (json.dumps({"messages": [message], "chat_template_kwargs": []}), "c.json", "chat_template_kwargs must be an object"),
        (json.dumps({"messages": [message], "system": "Be."}), "c.json", "`system` beside the messages is Anthropic's form"),
    ):
        with pytest.raises(ConfigError, match=says):
            of(text, name)
    with pytest.raises(ConfigError, match="Cannot read"):
        read(str(tmp_path / "nowhere"), "user")


@pytest.mark.parametrize(
    ("options", "memory", "mend"),
    [
        (("--disk-budget", "1"), "64MiB", "give more --disk-budget"),
        ((), "0", "give more --memory-budget"),
        ((), "256KiB", "give more --memory-budget"),
    ],
)
def test_what_is_not_stored_is_said(
    options: tuple[str, ...], memory: str, mend: str, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompt"
    file.write_text(SYSTEM * 3)
    assert warm(str(file), str(tiny_model), "--cache-dir", str(tmp_path / "cache"), *options, memory=memory) == 1
    told = capsys.readouterr()
    assert mend in told.err.splitlines()[-1]
    assert f"  not stored    {file}" in told.out


@pytest.mark.parametrize(("options", "why"), [((), "see above"), (("--disk-budget", "0"), "--disk-budget is 0")])
def test_a_folder_that_cannot_be_used_is_said_at_once(
    options: tuple[str, ...], why: str, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompt"
    file.write_text(SYSTEM)
    folder = tmp_path / "folder" if options else file
    assert warm(str(file), str(tiny_model), "--cache-dir", str(folder), *options) == 2
    told = capsys.readouterr()
    assert f"{folder} cannot be used ({why})" in told.err.splitlines()[-1]
    assert not told.out


def test_a_prompt_that_fails_leaves_what_came_before_it(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headstart.observe.prefill.FIRST", 0.0)
    file, folder = tmp_path / "prompts.jsonl", tmp_path / "cache"
    bodies = ({"messages": [{"role": "user", "content": text}], "cache_salt": "bob"} for text in (SYSTEM * 8, "word " * 5000))
    file.write_text("".join(f"{json.dumps(body)}\n" for body in bodies))
    assert warm(str(file), str(tiny_model), "--cache-dir", str(folder), "--salt", "alice") == 2
    told = capsys.readouterr()
    assert told.err.splitlines()[-1].startswith(f"headstart: {file}:2: ")
    assert told.err.endswith("a conversation may have 2,048. Shorten it, or give a larger --ctx, the same as the server's.\n")
    assert "prefill" in told.err, "one of several calls is heard of"
    assert "ready: 1 prompt of" in told.out
    with headstart.open(tiny_model, ctx=2048, cache_dir=str(folder)) as hs:
        assert hs.runtime.settings.cache_dir == folder
        warmed = hs.chat(SYSTEM * 8 + "!", max_tokens=1, salt="bob").report
        assert warmed.tiers == {"disk": warmed.cached}
        assert warmed.cached > 128
        assert hs.chat(SYSTEM * 8 + "!", max_tokens=1, salt="alice").report.cached == 0


def test_paths_may_be_texts() -> None:
    settings = headstart.Settings(cache_dir="a", chat_template="b", lora="c")  # type: ignore[arg-type]
    assert (settings.cache_dir, settings.chat_template, settings.lora) == (Path("a"), Path("b"), Path("c"))
    with pytest.raises(ConfigError, match="cache_dir= must be a path, not 5"):
        headstart.Settings(cache_dir=5)  # type: ignore[arg-type]
