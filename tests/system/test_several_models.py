"""Several models in one server, as a process: three kinds of them, in memory for two."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import ollama
import psutil
import pytest

import tiny
from effort import SLOW
from headstart.models.spawn import FORKS
from hub_server import HubRepo, hub_server
from live import wait_until
from process import Here, Server, run, serving

KINDS = {"attention": "llama", "windows": "gemma3", "hybrid": "qwen35"}
CTX = "4096" if SLOW else "2048"
OPTIONS = ("--ctx", CTX, "--slots", "2", "--threads", "1", "--memory-budget", "32MiB", "--port", "0", "--log-format", "json")
CHAT = "/v1/chat/completions"
TEXT = "The quick brown fox jumps over the lazy dog near the river bank while seven old ships sail by. "


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of each kind."""
    folder = tmp_path_factory.mktemp("several")
    for name, architecture in KINDS.items():
        tiny.write(folder / f"{name}.gguf", architecture)
    return folder


@pytest.fixture(scope="module")
def several(folder: Path) -> Iterator[tuple[Server, httpx.Client]]:
    """A server of these models that keeps two of them, in exact mode."""
    with serving("--models-dir", str(folder), "--keep-loaded", "2", "--reuse", "exact", *OPTIONS) as server:
        with httpx.Client(base_url=server.address(), timeout=90) as http:
            yield server, http
        assert server.end() == 0
        server.rest()


def talk(http: httpx.Client, model: str, messages: list[dict[str, str]], **more: Any) -> dict[str, Any]:
    body = {"model": model, "messages": messages, "max_tokens": 12, "temperature": 0, **more}
    response = http.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def text_of(answer: dict[str, Any]) -> str:
    text: str = answer["choices"][0]["message"]["content"]
    return text


def state(http: httpx.Client, name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(one for one in http.get("/headstart/models").json()["models"] if one["name"] == name)
    return found


@dataclass(frozen=True)
class Turn:
    """A request of a conversation. `new`: tokens beyond the last prompt and reply; `computed`: what entered the engine."""

    model: str
    messages: list[dict[str, str]]
    reply: str
    new: int
    computed: int


def converse(http: httpx.Client, rounds: int) -> list[Turn]:
    """Conversations with all models in turn, request by request."""
    talks: dict[str, list[dict[str, str]]] = {name: [{"role": "system", "content": 6 * TEXT + name}] for name in KINDS}
    known = dict.fromkeys(KINDS, 0)
    found = []
    for number in range(rounds):
        for name, messages in talks.items():
            messages.append({"role": "user", "content": f"Turn {number}: say more about it."})
            answer = talk(http, name, messages)
            new = answer["usage"]["prompt_tokens"] - known[name]
            found.append(Turn(name, list(messages), text_of(answer), new, answer["headstart"]["computed"]))
            known[name] = answer["usage"]["total_tokens"]
            messages.append({"role": "assistant", "content": text_of(answer)})
    return found


def check(http: httpx.Client, rounds: int) -> str:
    """Returns what happened, for people: `pytest -s` shows it."""
    before = sum(one["loads"] for one in http.get("/headstart/models").json()["models"])
    turns = converse(http, rounds)
    loads = sum(one["loads"] for one in http.get("/headstart/models").json()["models"]) - before
    assert loads >= len(turns) // 2  # with memory for two of three, no order of unloading needs fewer switches
    later = [turn for turn in turns if len(turn.messages) > 2]
    for turn in sorted(later, key=lambda turn: turn.model):  # without a switch between each
        assert text_of(talk(http, turn.model, turn.messages, cache_prompt=False)) == turn.reply  # against an empty cache
        assert turn.computed <= turn.new + 64, (turn.model, len(turn.messages), turn.computed, turn.new)
    beyond = sorted(turn.computed - turn.new for turn in later)
    middle = beyond[len(beyond) // 2]
    return f"{len(turns)} requests, {loads} loads; computed beyond the new tokens: {beyond[0]} to {beyond[-1]}, median {middle}"


def test_each_model_goes_on_where_it_was_after_others_took_its_place(several: tuple[Server, httpx.Client]) -> None:
    check(several[1], 2)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_hundred_requests_in_turn(several: tuple[Server, httpx.Client]) -> None:
    print(check(several[1], 67))


def test_a_client_sees_all_models_and_uses_each_by_name(several: tuple[Server, httpx.Client]) -> None:
    _, http = several
    listed = http.get("/v1/models").json()["data"]
    assert {model["id"] for model in listed} == {*KINDS}
    assert {model["state"] for model in listed} <= {"loaded", "unloaded", "loading"}
    message = [{"role": "user", "content": "Hello."}]
    assert talk(http, "hybrid.gguf", message)["model"] == "hybrid"
    assert http.get("/v1/models/hybrid").json()["max_tokens"] == int(CTX) - 1
    assert http.get("/props", params={"model": "hybrid"}).json()["model_alias"] == "hybrid"
    assert http.get("/upstream/hybrid/props").json()["model_alias"] == "hybrid"
    for path in ("/props?model=hybrid", "/upstream/hybrid/props", "/headstart/events?model=hybrid", "/health"):
        assert (http.head(path).status_code, http.head(path).content) == (200, b""), path
    refusal = http.post(CHAT, json={"model": "other", "messages": message})
    assert refusal.status_code == 404
    assert "served are 'attention', 'hybrid', 'windows'" in refusal.json()["error"]["message"]
    reply = http.post("/v1/messages", json={"model": "hybrid", "max_tokens": 4, "messages": message}).json()
    assert (reply["type"], reply["model"]) == ("message", "hybrid")
    first = http.post("/v1/responses", json={"model": "hybrid", "input": 3 * TEXT, "max_output_tokens": 4}).json()
    assert http.get(f"/v1/responses/{first['id']}").json()["model"] == "hybrid"
    assert http.post("/v1/models/unload", json={"model": "hybrid"}).json()["success"]
    wait_until(lambda: state(http, "hybrid")["state"] == "absent")
    both = {"previous_response_id": first["id"], "input": "More.", "max_output_tokens": 4}
    second = http.post("/v1/responses", json=both).json()
    assert (second["model"], second["previous_response_id"]) == ("hybrid", first["id"])
    assert second["headstart"]["cached"] > 0
    assert http.get(f"/v1/responses/{first['id']}").json() == first


def test_one_log_line_a_request_and_no_prompt_in_it(several: tuple[Server, httpx.Client]) -> None:
    server, http = several
    headers = {"x-request-id": "req-of-this-test"}
    body = {"model": "hybrid", "max_tokens": 4, "messages": [{"role": "user", "content": "Xyzzy."}]}
    assert http.post(CHAT, json=body, headers=headers).status_code == 200
    line = json.loads(server.line("req-of-this-test"))
    assert (line["event"], line["model"], line["client"]) == ("finished", "hybrid", "127.0.0.1")
    http.post("/tokenize", json={"content": "a", "model": "hybrid"}, headers={"x-request-id": "later"})
    assert not [text for text in server.lines if "Xyzzy" in text]


@pytest.mark.slow
def test_a_stream_that_waits_gets_comments_and_other_models_go_on(several: tuple[Server, httpx.Client]) -> None:
    """A stopped process stands for one that takes long to be unloaded."""
    _, http = several
    message = [{"role": "user", "content": "Hello."}]
    for name in ("attention", "windows"):
        talk(http, name, message)
    ready = {name: state(http, name).get("pid") for name in KINDS}
    held = {name: psutil.Process(pid) for name, pid in ready.items() if pid is not None}
    (absent,) = ready.keys() - held.keys()
    seen: list[str] = []
    texts: list[str] = []
    lines: list[bytes] = []

    def stream() -> None:
        body = {"model": absent, "stream": True, "messages": message, "max_tokens": 4}
        with httpx.stream("POST", f"{http.base_url}{CHAT}", json=body, timeout=90) as response:
            assert response.status_code == 200
            for line in response.iter_lines():
                seen.append(line)

    def stream_of_ollama() -> None:
        with ollama.Client(str(http.base_url)) as client:
            parts = [*client.chat(absent, message, stream=True, options={"num_predict": 4, "temperature": 0})]
            texts.append("".join(part.message.content or "" for part in parts))

    def blanks() -> None:
        body = {"model": absent, "messages": message, "options": {"num_predict": 4, "temperature": 0}}
        with httpx.stream("POST", f"{http.base_url}/api/chat", json=body, timeout=90) as response:
            assert response.headers["content-type"] == "application/x-ndjson"
            lines.append(b"".join(response.iter_raw()))

    for process in held.values():
        process.suspend()
    threads = [threading.Thread(target=stream_in, daemon=True) for stream_in in (stream, stream_of_ollama, blanks)]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: any(state(http, name)["state"] == "unloading" for name in held))
        leaving = next(name for name in held if state(http, name)["state"] == "unloading")
        stays = next(name for name in held if name != leaving)
        held[stays].resume()
        assert http.get("/health").json() == {"status": "ok"}
        talk(http, stays, message)
        wait_until(lambda: bool(seen))  # a comment comes with each beat of 2.5 s
    finally:
        for process in held.values():
            process.resume()
    for thread in threads:
        thread.join(60)
    assert f": unloading {leaving}, then loading {absent}" in seen
    assert seen[-2:] == ["data: [DONE]", ""]
    (line,), (text,) = lines, texts
    assert line.startswith(b" ")
    assert "".join(json.loads(one)["message"]["content"] for one in line.splitlines()) == text


def test_a_process_that_is_killed_takes_only_its_requests_along(several: tuple[Server, httpx.Client]) -> None:
    _, http = several
    message = [{"role": "user", "content": "Count."}]
    assert http.post("/v1/models/unload", json={"model": "hybrid"}).is_success  # so that the two others need not give way
    talk(http, "windows", message)
    other = state(http, "windows")["pid"]
    talk(http, "attention", message)
    pid = state(http, "attention")["pid"]
    answers: list[httpx.Response] = []
    body = {"model": "attention", "messages": message, "max_tokens": 1500, "ignore_eos": True}
    thread = threading.Thread(target=lambda: answers.append(http.post(CHAT, json=body)))
    thread.start()
    wait_until(lambda: state(http, "attention")["running"] == 1)
    os.kill(pid, signal.SIGKILL)
    thread.join(30)
    assert answers[0].status_code == 502
    assert "SIGKILL" in answers[0].json()["error"]["message"]
    talk(http, "attention", message)
    assert state(http, "windows")["pid"] == other


def test_metrics_and_stats_are_of_all_or_of_one(several: tuple[Server, httpx.Client]) -> None:
    _, http = several
    talk(http, "windows", [{"role": "user", "content": "Hello."}])
    text = http.get("/metrics").text
    assert 'headstart:model_state{model_name="windows",state="ready"} 1.0' in text
    assert 'vllm:prompt_tokens_total{model_name="windows"}' in text
    assert text.count("# TYPE vllm:prompt_tokens_total counter") == 1
    assert http.get("/headstart/stats", params={"model": "windows"}).json()["model"] == "windows"
    absent = next(one["name"] for one in http.get("/headstart/models").json()["models"] if one["state"] == "absent")
    assert http.get("/slots", params={"model": absent}).status_code == 503
    assert state(http, absent)["state"] == "absent"


def test_models_are_loaded_and_unloaded_on_demand(several: tuple[Server, httpx.Client]) -> None:
    _, http = several
    assert http.post("/models/load", json={"model": "windows"}).json()["success"]
    assert state(http, "windows")["state"] == "ready"
    assert http.post("/models/unload", json={"model": "windows"}).json()["success"]
    wait_until(lambda: state(http, "windows")["state"] == "absent")


@pytest.mark.slow
def test_ollamas_clients_say_for_how_long_a_model_is_kept(several: tuple[Server, httpx.Client]) -> None:
    _, http = several
    with ollama.Client(str(http.base_url)) as client:
        message = [{"role": "user", "content": "Hello."}]
        client.chat("windows", message, keep_alive="5m", options={"num_predict": 2})
        (kept,) = [one for one in client.ps().models if one.model == "windows:latest"]
        assert kept.expires_at is not None
        assert kept.expires_at.timestamp() - time.time() < 301
        client.chat("windows", message, keep_alive=-1, options={"num_predict": 2})
        (kept,) = [one for one in client.ps().models if one.model == "windows:latest"]
        assert kept.expires_at is not None
        assert kept.expires_at.year > 2100
        assert client.generate("windows", keep_alive=0).done_reason == "unload"  # what `ollama stop` sends
        wait_until(lambda: state(http, "windows")["state"] == "absent")
        assert client.generate("windows", keep_alive=0).done_reason == "unload"
        assert state(http, "windows")["state"] == "absent"
        assert client.generate("windows", "Hello.", keep_alive=0, options={"num_predict": 2}).done
        wait_until(lambda: state(http, "windows")["state"] == "absent")


def test_ps_shows_what_is_loaded(several: tuple[Server, httpx.Client], here: Here) -> None:
    _, http = several
    talk(http, "windows", [{"role": "user", "content": "Hello."}])
    shown = here("ps", "--url", str(http.base_url)).stdout
    assert re.search(r"^windows +ready +[\d.]+ MiB +0 +0", shown, re.MULTILINE), shown
    assert "for all models; default: attention" in shown
    assert json.loads(here("ps", "--json", "--url", str(http.base_url)).stdout)["keep_loaded"] == 2


PULLED = ("Own/Tiny-GGUF", "hf.co/Own/Tiny-GGUF", "Own/Tiny-GGUF:Q8_0", "hf.co/Own/Tiny-GGUF:q8_0", "tiny-Q8_0")
"""Names of a model that a client has fetched."""
HELLO = [{"role": "user", "content": "Hello."}]


def removed(**variables: str) -> subprocess.CompletedProcess[str]:
    """`headstart rm` of it."""
    return run("rm", PULLED[2], "--yes", **variables)


@pytest.mark.slow
def test_a_model_that_a_client_fetches_is_served_at_once_and_after_kill_9(folder: Path, tmp_path: Path) -> None:
    """The server is killed in the middle of the download, and once more when it has served the model."""
    data = (folder / "windows.gguf").read_bytes()
    with hub_server() as hub:
        fresh = {"HF_HOME": str(tmp_path / "hf"), "HEADSTART_STATE_DIR": str(tmp_path / "state"), "HF_TOKEN": ""}
        hub.repos["Own/Tiny-GGUF"] = HubRepo({"tiny-Q8_0.gguf": data})
        hub.faults.stall = len(data) * 2 // 5
        with ollama_server(folder, "--allow-pull", HF_ENDPOINT=hub.url, **fresh) as (server, client):
            with pytest.raises(ollama.ResponseError, match="is not served here"):
                client.chat("Own/Tiny-GGUF", HELLO)
            thread = begun(lambda: [*client.pull("hf.co/Own/Tiny-GGUF", stream=True)])
            wait_until(lambda: any(path.stat().st_size >= len(data) // 5 for path in tmp_path.rglob("*.incomplete")))
            server.process.kill()
            thread.join(30)
            server.rest()
        hub.faults.stall = None
        hub.faults.resume.set()
        with ollama_server(folder, "--allow-pull", HF_ENDPOINT=hub.url, **fresh) as (server, client):
            assert [model.model for model in client.list().models] == ["attention:latest"]
            assert [line.status for line in client.pull("hf.co/Own/Tiny-GGUF", stream=True)][-1] == "success"
            assert not hub.contents()[-1].range.startswith("bytes=0-")
            assert "Own/Tiny-GGUF:Q8_0" in [model.model for model in client.list().models]
            for name in (*PULLED, "attention"):
                assert client.chat(name, HELLO, options={"num_predict": 2}).done
            assert client.pull("Own/Tiny-GGUF:Q8_0").status == "success"
            assert client.chat(PULLED[0], HELLO, options={"num_predict": 2}).done
            assert "is in use by" in removed(**fresh).stderr
            assert client.chat("attention", HELLO, options={"num_predict": 2}).done
            assert removed(**fresh).returncode == 0
            assert "Own/Tiny-GGUF:Q8_0" not in [model.model for model in client.list().models]
            with pytest.raises(ollama.ResponseError, match="is not served here") as gone:
                client.chat("Own/Tiny-GGUF", HELLO)
            assert gone.value.status_code == 404
            sent = hub.sent
            assert client.pull("Own/Tiny-GGUF:Q8_0").status == "success"
            assert hub.sent == sent + len(data)
            assert client.chat("Own/Tiny-GGUF", HELLO, options={"num_predict": 2}).done
            server.process.kill()
            server.rest()
        with ollama_server(folder, "--allow-pull", HF_HUB_OFFLINE="1", **fresh) as (server, client):
            assert [model.model for model in client.list().models] == ["attention:latest", "Own/Tiny-GGUF:Q8_0"]
            for name in (*PULLED, "attention"):
                assert client.chat(name, HELLO, options={"num_predict": 2}).done
            assert server.end() == 0
            server.rest()


@pytest.mark.slow
def test_a_server_of_named_models_serves_no_others(folder: Path, tmp_path: Path) -> None:
    """A caller may fetch one, and is told so."""
    fresh = {"HF_HOME": str(tmp_path / "hf"), "HEADSTART_STATE_DIR": str(tmp_path / "state"), "HF_TOKEN": ""}
    with hub_server() as hub, ollama_server(folder, HF_ENDPOINT=hub.url, **fresh) as (server, client):
        hub.repos["Own/Tiny-GGUF"] = HubRepo({"tiny-Q8_0.gguf": (folder / "windows.gguf").read_bytes()})
        *_, hint, last = client.pull("Own/Tiny-GGUF", stream=True)
        assert (last.status, "--allow-pull" in (hint.status or "")) == ("success", True)
        assert [model.model for model in client.list().models] == ["attention:latest"]
        with pytest.raises(ollama.ResponseError, match="is not served here"):
            client.chat("Own/Tiny-GGUF", HELLO)
        assert server.end() == 0
        server.rest()


@contextlib.contextmanager
def ollama_server(folder: Path, *options: str, **variables: str) -> Iterator[tuple[Server, ollama.Client]]:
    """A server that has one model with a name and keeps one, and Ollama's client of it."""
    models = (f"attention={folder / 'attention.gguf'}", "--keep-loaded", "1", *options)
    with serving(*models, *OPTIONS, **variables) as server, ollama.Client(server.address()) as client:
        yield server, client


@pytest.mark.slow
def test_a_broken_model_is_refused_with_its_cause_and_others_are_served(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(100))
    with serving(f"good={folder / 'attention.gguf'}", f"bad={tmp_path / 'broken.gguf'}", *OPTIONS) as server:
        with httpx.Client(base_url=server.address(), timeout=90) as http:
            message = [{"role": "user", "content": "Hello."}]
            refusal = http.post(CHAT, json={"model": "bad", "messages": message})
            assert refusal.status_code == 503
            assert "The model 'bad' could not be loaded: " in refusal.json()["error"]["message"]
            assert int(refusal.headers["retry-after"]) >= 1
            assert state(http, "bad")["state"] == "failed"
            assert talk(http, "good", message)["model"] == "good"
            processes = psutil.Process(server.process.pid).children(recursive=True)
        os.kill(server.process.pid, signal.SIGKILL)
        psutil.wait_procs(processes, timeout=30)
        assert not [process for process in processes if process.is_running()]
        server.rest()


@pytest.mark.slow
def test_keys_and_tenants_are_checked_at_the_front_and_kept_apart_behind_it(folder: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.txt"
    keys.write_text("operator = key-of-operator\nann = key-of-ann\nbob = key-of-bob\n")
    keys.chmod(0o600)
    messages = [{"role": "user", "content": 6 * TEXT}]
    models = (f"a={folder / 'attention.gguf'}", f"b={folder / 'windows.gguf'}")
    with serving(*models, "--api-key-file", str(keys), *OPTIONS) as server:
        with httpx.Client(base_url=server.address(), timeout=90) as http:
            body = {"model": "a", "messages": messages, "max_tokens": 2}
            assert http.post(CHAT, json=body).status_code == 401
            cached = []
            for name in ("ann", "bob", "ann"):
                answer = http.post(CHAT, json=body, headers={"x-api-key": f"key-of-{name}"})
                cached.append(answer.json()["headstart"]["cached"] > 0)
            assert cached == [False, False, True]
            for name, status in (("ann", 403), ("operator", 200)):
                headers = {"x-api-key": f"key-of-{name}"}
                assert http.get("/metrics", headers=headers).status_code == status
                assert http.get("/slots", headers=headers).status_code == status
                assert http.post("/models/load", json={"model": "b"}, headers=headers).status_code == status
            chat = http.post("/api/chat", json={"model": "b:latest", "messages": messages, "stream": False}, headers=headers)
            assert chat.json()["model"] == "b:latest"
        assert server.end() == 0
        log = "".join(server.rest())
    assert "key-of-" not in log
    assert TEXT[:20] not in log


@pytest.mark.slow
def test_a_front_that_is_killed_while_a_model_loads_leaves_nothing_behind(folder: Path) -> None:
    with serving(f"a={folder / 'attention.gguf'}", f"b={folder / 'windows.gguf'}", *OPTIONS) as server:
        url = server.address()
        body = {"model": "a", "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 2}

        def ask() -> None:
            with contextlib.suppress(httpx.HTTPError):
                httpx.post(f"{url}{CHAT}", json=body, timeout=60)

        thread = threading.Thread(target=ask)
        thread.start()
        front = psutil.Process(server.process.pid)
        wait_until(lambda: len(front.children(recursive=True)) >= (2 if FORKS else 1))  # a fork server, and a model's process
        children = front.children(recursive=True)
        os.kill(front.pid, signal.SIGKILL)
        thread.join(30)
        assert not psutil.wait_procs(children, timeout=30)[1]
        server.rest()
    with serving(f"a={folder / 'attention.gguf'}", f"b={folder / 'windows.gguf'}", *OPTIONS) as server:
        assert httpx.post(f"{server.address()}{CHAT}", json=body, timeout=90).status_code == 200
        assert server.end() == 0
        server.rest()


def begun(call: Callable[[], object]) -> threading.Thread:
    """A call in a thread. Errors of the connection end it."""

    def run_it() -> None:
        with contextlib.suppress(httpx.HTTPError):
            call()

    thread = threading.Thread(target=run_it)
    thread.start()
    return thread


@pytest.mark.slow
def test_a_process_that_is_killed_while_it_loads_fails_its_requests_and_the_next_one_loads_it(folder: Path) -> None:
    answers: list[httpx.Response] = []
    models = (f"a={folder / 'attention.gguf'}", f"b={folder / 'windows.gguf'}")
    with serving(*models, *OPTIONS) as server, httpx.Client(base_url=server.address(), timeout=90) as http:
        body = {"model": "a", "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 2}
        thread = begun(lambda: answers.append(httpx.post(f"{http.base_url}{CHAT}", json=body, timeout=60)))
        wait_until(lambda: state(http, "a")["state"] == "loading" and "pid" in state(http, "a"))
        os.kill(state(http, "a")["pid"], signal.SIGKILL)
        thread.join(30)
        assert answers[0].status_code == 503
        assert "ended by SIGKILL" in answers[0].json()["error"]["message"]
        assert state(http, "a")["state"] == "failed"
        wait_until(lambda: http.post(CHAT, json=body).status_code == 200)
        assert server.end() == 0
        server.rest()


@pytest.mark.slow
@pytest.mark.parametrize("who", ["process", "front"])
def test_a_kill_during_an_unload_leaves_nothing_that_a_restart_does_not_mend(who: str, folder: Path, tmp_path: Path) -> None:
    """A stopped process stands for one that takes long to save. What it had not saved is computed again, with the same bits."""
    options = ("--reuse", "exact", "--keep-loaded", "1", *OPTIONS)
    models = (f"a={folder / 'attention.gguf'}", f"b={folder / 'windows.gguf'}", *options)
    messages = [{"role": "user", "content": 6 * TEXT}]
    variables = {"HEADSTART_CACHE_DIR": str(tmp_path)}
    with serving(*models, **variables) as server, httpx.Client(base_url=server.address(), timeout=90) as http:
        wanted = text_of(talk(http, "a", messages))
        process = psutil.Process(state(http, "a")["pid"])
        process.suspend()
        thread = begun(lambda: httpx.post(f"{http.base_url}{CHAT}", json={"model": "b", "messages": messages}, timeout=60))
        wait_until(lambda: state(http, "a")["state"] == "unloading")
        if who == "process":
            process.kill()
            thread.join(60)
            assert state(http, "b")["state"] == "ready"
            assert text_of(talk(http, "a", messages)) == wanted
            assert server.end() == 0
        else:
            children = psutil.Process(server.process.pid).children(recursive=True)
            server.process.kill()
            process.resume()
            thread.join(60)
            assert not psutil.wait_procs(children, timeout=60)[1]
            server.rest()
    with serving(*models, **variables) as server:
        with httpx.Client(base_url=server.address(), timeout=90) as http:
            assert text_of(talk(http, "a", messages)) == wanted
            assert text_of(talk(http, "a", messages, cache_prompt=False)) == wanted
        assert server.end() == 0
        server.rest()
    checked = run("cache", "verify", "--cache-dir", str(tmp_path))
    assert checked.returncode == 0, checked.stdout + checked.stderr
