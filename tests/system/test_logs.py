"""What a log never has: a key, a prompt or a reply. Something is raised in every layer, and the log is searched."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

import headstart
from headstart.observe import redaction
from headstart.tiers.shared.keys import FleetKeys
from process import run, serving, started
from stopping import KEYS, SECRET

FORMS = ("console", "json")
A_FORM = (pytest.param("console", marks=pytest.mark.slow), "json")
"""Of what needs a server; both forms hide the same, which test_whatever_is_raised_or_logged_its_values_stay_out shows."""

LOOSE = """
import asyncio, gc, logging, sys, threading, warnings
import structlog
from headstart.errors import ContextTooLong, InvalidRequest
from headstart.observe import logs, redaction, tracebacks

form, secret, key = sys.argv[1:]
logs.configure(form)
tracebacks.install()
redaction.hide([key, "tiny"])

def fail():
    prompt, headers = secret, {"authorization": f"Bearer {key}"}
    try:
        {}[prompt]
    except KeyError as error:
        raise ValueError(f"cannot use {prompt}") from error

try:
    fail()
except ValueError as caught:
    structlog.get_logger("headstart.a").exception("one", error=caught, words=[caught])
    logging.getLogger("headstart.b").exception("two: %s", caught)
    logging.getLogger("uvicorn.error").error("three", exc_info=caught)
    logging.getLogger("other").warning("four: %s", secret)
    try:
        raise InvalidRequest(f"Invalid: {secret}") from caught
    except InvalidRequest as refused:
        structlog.get_logger("headstart.c").exception("five", error=refused)
logging.getLogger("headstart.d").error("six %d", secret)
structlog.get_logger("headstart.e").info(
    f"seven {key}", key=key, headers=[(b"authorization", f"Bearer {key}".encode())], raw=f"x-api-key: other-{key[::-1]}",
    word="tiny", size="tinyness", raised=ContextTooLong(8, 4))

async def lost():
    asyncio.ensure_future(asyncio.to_thread(fail))
    await asyncio.sleep(0.2)
    gc.collect()
    asyncio.get_running_loop().call_soon(fail)
    await asyncio.sleep(0.1)

asyncio.run(lost())
thread = threading.Thread(target=fail)
thread.start()
thread.join()

class Loose:
    def __del__(self):
        fail()

Loose()
warnings.warn(secret)
raise ExceptionGroup(secret, [ValueError(secret), OSError(28, secret)])
"""


@pytest.mark.parametrize("form", FORMS)
def test_whatever_is_raised_or_logged_its_values_stay_out(form: str) -> None:
    found = run(form, SECRET, KEYS[0], code=LOOSE)
    assert found.returncode == 1
    assert not found.stdout
    log = found.stderr
    assert SECRET not in log
    assert KEYS[0] not in log
    assert KEYS[0][::-1] not in log
    for told in ("one", "two: ValueError", "three", "four", "five", "seven [key]", "never retrieved", "UserWarning"):
        assert told in log, told
    assert log.count("ValueError") >= 8
    assert "No space left on device" in log
    assert "context holds 4 tokens" in log, "headstart's own words are told"
    assert "tinyness" in log, "a short key is hidden as a word only"
    assert "word=tiny" not in log
    assert "in fail" in log, "where it happened is told"
    if form == "json":
        lines = [json.loads(line) for line in log.splitlines()]
        assert all({"event", "level", "logger", "timestamp"} <= set(line) for line in lines)


PLANTED = """
import sys
from headstart.chat import prompt_model
from headstart.chat import reply_builder
from headstart.api import auth
from headstart.cli.main import main
from headstart.testing.fake_engine import FakeEngine
from headstart.engines.llama import LlamaEngine
from headstart.serving import job
from headstart.serving import runtime
from headstart.serving import scheduler
from headstart.tiers.disk import Disk
from headstart.tiers.shared.folder import FolderStore

def plant(place, name, word, says, after=False):
    inner = getattr(place, name)
    def planted(*args, **how):
        found = inner(*args, **how) if after else None
        said = says(args)
        if word in said:
            raise RuntimeError(f"planted in {name}: {said!r}")
        return found if after else inner(*args, **how)
    setattr(place, name, planted)

class Odd(auth.Keys):
    def find(self, candidates):
        brought = list(candidates)
        if b"middleware" in b"".join(brought):
            raise RuntimeError(f"planted: {brought}")
        return super().find(brought)

import headstart.api.entrance as entrance
entrance.Keys = Odd
waiting = lambda args: str([job.request.prompt.text for job in args[0].waiting])
plant(prompt_model, "normalise", "in the handler", str)
plant(reply_builder.ReplyBuilder, "end", "in the telling", lambda args: str(args[0].reader.conversation.messages))
plant(scheduler.Scheduler, "_take_in", "in the loop", waiting, True)
plant(job.Job, "turn", "in the record", lambda args: args[0].request.prompt.text)
plant(runtime.Runtime, "close", "", lambda args: sys.argv[2], True)
if sys.argv[1] == "start":
    def load(cls, options, progress=None, anew=False):
        raise RuntimeError(f"planted in load: {sys.argv[2]}")
else:
    def load(cls, options, progress=None, anew=False):
        engine = FakeEngine(ctx=4096, batch=256)
        exports = [sys.argv[2]] * 2  # later ones work, so that there is something to write
        plant(engine, "export_kv", sys.argv[2], lambda args: exports.pop() if exports else "")
        return engine
plant(Disk, "write", "", lambda args: sys.argv[2])
plant(FolderStore, "have", "", lambda args: sys.argv[2])
plant(FolderStore, "get_into", "", lambda args: sys.argv[2])
LlamaEngine.load = classmethod(load)
main(sys.argv[3:])
"""


def planted(where: str, model: Path, form: str, folder: Path) -> list[str]:
    command = [sys.executable, "-c", PLANTED, where, SECRET, "serve", str(model), "--port", "0", "--log-format", form]
    FleetKeys.generate().save(folder / "fleet.key")
    (folder / "store").mkdir()
    shared = ["--shared", (folder / "store").as_uri(), "--shared-key-file", str(folder / "fleet.key")]
    return [*command, *shared, "--cache-dir", str(folder), "--api-key", KEYS[0], "--api-key", "middleware-9c11"]


@pytest.mark.parametrize("form", A_FORM)
def test_a_fault_in_any_layer_is_answered_and_logged_without_what_it_was_about(
    tmp_path: Path, tiny_model: Path, form: str
) -> None:
    with started(planted("", tiny_model, form, tmp_path)) as server:
        url = server.address()
        answers = [say(url, f"{SECRET} " * 9 + where, stream) for where in PLACES for stream in (False, True)]
        fine = say(url, f"{SECRET} " * 9, False)
        middleware = httpx.get(f"{url}/v1/models", headers={"x-api-key": "middleware-9c11"})
        refused = [
            httpx.post(f"{url}/v1/chat/completions", content=f'{{"{SECRET}'.encode(), headers=bearer()),
            httpx.post(f"{url}/v1/chat/completions", json={"messages": SECRET}, headers=bearer()),
            httpx.post(f"{url}/v1/chat/completions", json={"messages": [], "model": SECRET}, headers=bearer()),
            httpx.post(f"{url}/v1/chat/completions", json={"messages": [], "logit_bias": {SECRET: 1}}, headers=bearer()),
            httpx.post(f"{url}/headstart/explain", json={SECRET: {}}, headers=bearer()),
            httpx.get(f"{url}/v1/responses/{SECRET}", headers=bearer()),
        ]
        assert server.end() == 0
        log = "".join(server.rest())
    for status, text in answers:
        assert status in (200, 500)
        assert "error" in text, "each is told that something failed"
        assert "planted" not in text, "nobody is told what an exception quotes"
    assert fine[0] == 200
    assert middleware.status_code == 500
    assert middleware.json()["error"]["code"] == "internal_error"
    assert all(one.status_code in (400, 404) for one in refused)
    assert SECRET not in log
    assert KEYS[0] not in log
    assert "middleware-9c11" not in log
    assert "planted" not in log.replace(" in planted", "")
    assert "in planted" in log
    assert log.count("internal error") >= 3
    assert log.count("the model could not be closed") == 1
    assert "an internal error while writing to the shared store" in log
    assert "an internal error while reading from the shared store" in log


PLACES = ("in the handler", "in the telling", "in the loop", "in the record")


def bearer() -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[0]}"}


def say(url: str, text: str, stream: bool) -> tuple[int, str]:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": text}], "max_tokens": 40, "stream": stream}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers=bearer(), timeout=30)
    assert not stream or answer.status_code == 500 or answer.text.endswith("data: [DONE]\n\n")
    return answer.status_code, answer.text


@pytest.mark.parametrize("form", A_FORM)
def test_a_fault_at_the_start_ends_the_server_with_one_line(tmp_path: Path, tiny_model: Path, form: str) -> None:
    with started(planted("start", tiny_model, form, tmp_path)) as server:
        log = "".join(server.rest())
        assert server.process.wait(60) == 1
    assert SECRET not in log
    assert log.splitlines()[-1] == "headstart: The model could not be loaded (RuntimeError); the log says where."
    assert "in load" in log


def test_a_key_that_is_refused_leaves_a_line_and_is_told_why(tiny_model: Path, tmp_path: Path) -> None:
    with serving(str(tiny_model), "--port", "0", "--no-disk", "--api-key", KEYS[0], "--ctx", "512") as server:
        url = server.address()
        wrong = httpx.get(f"{url}/v1/models", headers={"authorization": "Bearer sk-not-this-one"})
        missing = httpx.get(f"{url}/v1/models")
        assert server.end() == 0
        log = "".join(server.rest())
    assert wrong.status_code == missing.status_code == 401
    assert "is not known" in wrong.json()["error"]["message"]
    assert "Authorization: Bearer" in missing.json()["error"]["message"]
    lines = [line for line in log.splitlines() if "refused" in line and "stopped" not in line]
    assert len(lines) == 2
    for line in lines:
        assert "status=401" in line
        assert "client=127.0.0.1" in line
        assert "/v1/models" in line
    assert "sk-not-this-one" not in log


def test_redaction_hides_whole_keys_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction, "_known", {})
    redaction.hide(["sk1-longkey", "sk1-longkey-second-part"])
    for line, shown in (
        ("a sk1-longkey-second-part b", "a [key] b"),
        ("a sk1-longkey b", "a [key] b"),
        ("Authorization: Token abc", "Authorization: Token [key]"),
        ("Authorization: Digest abc", "Authorization: Digest [key]"),
        ("{'authorization': 'Bearer abc'}", "{'authorization': 'Bearer [key]'}"),
        ("(b'x-api-key', b'abc')", "(b'x-api-key', b'[key]')"),
        ("cookie: a=b; c=d", "cookie: [key]"),
        ("api_key=abc", "api_key=[key]"),
    ):
        assert redaction.redact(line) == shown
    for path in Path(headstart.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and " " in node.value
                and not {*"<\n"} & set(node.value)
            ):
                assert redaction.redact(node.value) == node.value, f"{path}: a text of ours"
