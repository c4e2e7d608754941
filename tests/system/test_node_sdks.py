"""The vendors' SDKs for Node against a real server: what they make of its answers, streams, errors and usage."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from platformdirs import user_cache_path

import templates
from harness import check
from headstart.config import Settings
from headstart.engines.llama import LlamaEngine
from headstart.serving.runtime import Runtime
from headstart.testing.fake_engine import FakeEngine, FakeTokenizer
from hub_server import HubRepo, named_hub
from live import Server, serving, wait_until
from scripted import Scripted

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PACKAGES = ("openai@7.57.0", "@anthropic-ai/sdk@1.12.0", "ollama@0.6.4")
OLDEST = 20
"""The first Node that all packages load in."""
SCRIPTS = Path(__file__).parents[1] / "node"
NO_NETWORK = re.compile(r"\b(ENOTFOUND|EAI_AGAIN|ECONNREFUSED|ECONNRESET|ETIMEDOUT|ENETUNREACH|EHOSTUNREACH|ENOTCACHED)\b")

KEY = "sk-right"
BLOCK_SIZE = 16
THOUGHT = "<think>\nTwo cities.\n</think>\n\n"
ARGUMENTS = [{"city": "Oslo", "days": 3}, {"city": "Rome", "days": 1}]
CALLS = ['<tool_call>\n{"name": "weather", "arguments": ' + json.dumps(one) + "}\n</tool_call>" for one in ARGUMENTS]
SAID = "\n".join([THOUGHT + "I look.", *CALLS])
RIVERS = ["The Loire.", "The Ebro.", "The Po."]
RIVER = '{"river": "Ebro", "navigable": true}'
LOOP = [CALLS[1], "Rain again."]


def installed() -> Path:
    """A folder with the packages, made once a machine; skips where that cannot be."""
    for program in ("node", "npm"):
        if shutil.which(program) is None:
            pytest.skip(f"there is no {program}")
    version = subprocess.run(["node", "--version"], capture_output=True, text=True, check=True).stdout.strip()
    if int(version.lstrip("v").split(".")[0]) < OLDEST:
        pytest.skip(f"Node {version} is too old for the SDKs: {OLDEST} or later")
    folder = user_cache_path("headstart-tests") / "node-sdks" / "+".join(PACKAGES).replace("/", "-")
    if not folder.is_dir():
        # Beside it first: what is there under its name is whole.
        fresh = folder.with_name(f"{folder.name}.{os.getpid()}")
        fresh.mkdir(parents=True)
        quiet = (
            "--ignore-scripts",
            "--no-audit",
            "--no-fund",
            "--no-save",
            "--fetch-retries=1",
            "--fetch-retry-mintimeout=1000",
        )
        done = subprocess.run(["npm", "install", "--prefix", str(fresh), *quiet, *PACKAGES], capture_output=True, text=True)
        if done.returncode:
            shutil.rmtree(fresh)
            reason = NO_NETWORK.search(done.stderr)
            assert reason is not None, done.stderr
            pytest.skip(f"npm cannot install the SDKs without a network: {reason[0]}")
        fresh.rename(folder)
    return folder


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts beside the packages, where Node looks for what they import."""
    packages = installed() / "node_modules"
    folder = tmp_path_factory.mktemp("node") / "scripts"
    shutil.copytree(SCRIPTS, folder)
    (folder / "node_modules").symlink_to(packages, target_is_directory=True)
    return folder


def run(scripts: Path, name: str, server: Server, model: str = "fake") -> Any:
    """What a script reports."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("OPENAI_", "ANTHROPIC_", "NODE_"))}
    command = ["node", str(scripts / f"{name}.mjs"), server.url, KEY, model]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def server() -> Iterator[Server]:
    """Two slots of 4,096 tokens; the template knows tools and strips old reasoning."""
    engine = Scripted(
        FakeEngine(slots=2, ctx=4096, block_size=BLOCK_SIZE, batch=512, tokenizer=FakeTokenizer(chat_template=templates.TOOLS))
    )
    with Runtime(lambda: engine, Settings(memory_budget=64 << 20)) as runtime:
        with serving(runtime, model_id="fake", key=KEY, api_keys=(KEY,)) as served:
            yield served
        check(runtime)


def engine_of(server: Server) -> Scripted:
    assert server.runtime is not None
    assert isinstance(server.runtime.engine, Scripted)
    return server.runtime.engine


def performed(scripts: Path, name: str, server: Server, *replies: str) -> Any:
    """A script with these replies, each of which it must have asked for."""
    engine = engine_of(server)
    engine.say(*replies)
    found = run(scripts, name, server)
    assert not engine.replies, "a reply that was written down was not given"
    return found


def grows(turns: list[tuple[int, int, int]]) -> None:
    """Whether each of (prompt, reply, cached) has what the turn before it had computed and said."""
    for (prompt, reply, _), (longer, _, cached) in pairwise(turns):
        assert prompt + reply - BLOCK_SIZE <= cached < longer


def of_chat(usage: Any) -> tuple[int, int, int]:
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    return usage["prompt_tokens"], usage["completion_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def of_response(usage: Any) -> tuple[int, int, int]:
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    return usage["input_tokens"], usage["output_tokens"], usage["input_tokens_details"]["cached_tokens"]


def of_message(usage: Any) -> tuple[int, int, int]:
    cached = usage["cache_read_input_tokens"]
    return usage["input_tokens"] + usage["cache_creation_input_tokens"] + cached, usage["output_tokens"], cached


def test_chat_completions(scripts: Path, server: Server) -> None:
    found = performed(scripts, "chat", server, *RIVERS, SAID, "It rains.", *LOOP, RIVER, RIVER)
    assert [turn["choices"][0]["message"]["content"] for turn in found["turns"]] == RIVERS
    assert {turn["choices"][0]["finish_reason"] for turn in found["turns"]} == {"stop"}
    grows([of_chat(turn["usage"]) for turn in found["turns"]])

    streamed, (choice,) = found["streamed"], found["streamed"]["final"]["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert streamed["reasoning"].strip() == "Two cities."
    assert streamed["snapshot"].strip() == choice["message"]["content"].strip() == "I look."
    assert [json.loads(call["function"]["arguments"]) for call in choice["message"]["tool_calls"]] == ARGUMENTS
    assert len({call["id"] for call in choice["message"]["tool_calls"]}) == 2
    for index, arguments in enumerate(ARGUMENTS):
        fragments = [text for at, text in streamed["fragments"] if at == index]
        assert len(fragments) > 1
        assert json.loads("".join(fragments)) == arguments
        assert streamed["done"][index] == {"index": index, "name": "weather", "parsed_arguments": arguments}
    prompt, reply, _ = of_chat(streamed["final"]["usage"])
    assert (streamed["usage"]["prompt_tokens"], streamed["usage"]["completion_tokens"]) == (prompt, reply)
    assert reply == len(SAID) + 1
    assert found["answered"]["choices"][0]["message"]["content"] == "It rains."
    # The stream helper gives back only the end of what was thought, and yet nothing is computed again.
    grows([of_chat(streamed["final"]["usage"]), of_chat(found["answered"]["usage"])])

    assert (found["loop"]["content"], found["loop"]["ran"]) == (LOOP[-1], [ARGUMENTS[1]])
    assert [message["role"] for message in found["loop"]["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert found["parsed"] == found["parsed_stream"] == json.loads(RIVER)


def test_responses(scripts: Path, server: Server) -> None:
    found = performed(scripts, "responses", server, *RIVERS, SAID, "It rains.", "It pours.", RIVER, RIVER)
    assert [turn["output_text"] for turn in found["turns"]] == RIVERS
    assert {turn["status"] for turn in found["turns"]} == {"completed"}
    grows([of_response(turn["usage"]) for turn in found["turns"]])
    last = found["turns"][-1]
    assert {key: found["retrieved"][key] for key in ("id", "output", "usage")} == {
        key: last[key] for key in ("id", "output", "usage")
    }
    assert len(found["items"]) == 1, "those of its own body"
    assert found["gone"] == "NotFoundError"

    kinds = [kind for kind, _ in found["events"]]
    assert [number for _, number in found["events"]] == list(range(len(kinds)))
    assert (kinds[:2], kinds[-1]) == (["response.created", "response.in_progress"], "response.completed")
    streamed = found["streamed"]
    assert [item["type"] for item in streamed["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 4
    assert streamed["output_text"].strip() == found["snapshots"]["text"].strip() == "I look."
    assert [json.loads(item["arguments"]) for item in streamed["output"][2:]] == ARGUMENTS
    assert json.loads(found["snapshots"]["arguments"]) == ARGUMENTS[1]
    assert streamed["output"][0]["encrypted_content"]
    prompt, reply, _ = of_response(streamed["usage"])
    assert found["counted"] == {"object": "response.input_tokens", "input_tokens": prompt}
    assert streamed["usage"]["output_tokens_details"]["reasoning_tokens"] > 0

    assert (found["stateless"]["output_text"], found["stored"]["output_text"]) == ("It rains.", "It pours.")
    (longer, _, cached), (same, _, again) = of_response(found["stateless"]["usage"]), of_response(found["stored"]["usage"])
    assert longer == same
    assert prompt + reply - BLOCK_SIZE <= cached <= again
    assert found["parsed"] == found["parsed_stream"] == json.loads(RIVER)


def test_messages(scripts: Path, server: Server) -> None:
    found = performed(scripts, "messages", server, *RIVERS, SAID, "It rains.", *LOOP, RIVER, RIVER)
    assert [turn["content"][0]["text"] for turn in found["turns"]] == RIVERS
    usages = [of_message(turn["usage"]) for turn in found["turns"]]
    grows(usages)
    assert [prompt for prompt, _, _ in usages] == found["counted"]

    streamed = found["streamed"]
    assert streamed["stop_reason"] == "tool_use"
    thought, text, *calls = streamed["content"]
    assert (thought["type"], thought["thinking"].strip()) == ("thinking", "Two cities.")
    assert "".join(found["thoughts"]) == thought["thinking"]
    assert thought["signature"]
    assert found["text"].strip() == text["text"].strip() == "I look."
    assert [(call["type"], call["name"], call["input"]) for call in calls] == [
        ("tool_use", "weather", one) for one in ARGUMENTS
    ]
    assert len(found["fragments"]) > 2
    assert found["events"].count("content_block_start") == found["events"].count("content_block_stop") == 4
    assert (found["events"][0], found["events"][-2:]) == ("message_start", ["message_delta", "message_stop"])
    assert found["answered"]["content"][0]["text"] == "It rains."
    grows([of_message(streamed["usage"]), of_message(found["answered"]["usage"])])

    assert found["loop"]["ran"] == [ARGUMENTS[1]]
    assert found["loop"]["final"]["content"][0]["text"] == LOOP[-1]
    assert found["parsed"] == found["parsed_stream"] == json.loads(RIVER)


def test_ollama(scripts: Path, server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with named_hub(monkeypatch, tmp_path) as hub:
        hub.repos["Own/Tiny-GGUF"] = HubRepo({"tiny-Q8_0.gguf": b"GGUF".ljust(400_000, b"x")})
        found = performed(scripts, "ollama", server, SAID, SAID, "It rains.", RIVERS[0], RIVERS[0], "All of it. " * 50)
    (begun, *progress, _, last) = found["fetched"]
    assert (begun["status"], last["status"], found["again"]["status"]) == ("pulling manifest", "success", "success")
    assert {part["total"] for part in progress} == {progress[-1]["completed"]} == {400_000}
    assert hub.sent == 400_000, "it was fetched once"
    whole, streamed = found["whole"], found["streamed"]
    assert [call["function"]["arguments"] for call in whole["message"]["tool_calls"]] == ARGUMENTS
    assert streamed["calls"] == whole["message"]["tool_calls"]
    assert (streamed["content"], streamed["thinking"]) == (whole["message"]["content"], whole["message"]["thinking"])
    assert streamed["parts"] > 10
    assert found["answered"]["message"]["content"] == "It rains."
    turns = [
        (turn["prompt_eval_count"], turn["eval_count"], turn["headstart"]["cached"])
        for turn in (streamed["last"], found["answered"])
    ]
    grows(turns)
    assert found["prompt"]["response"] == found["parts"]["content"] == RIVERS[0]
    assert found["seen"] == "A"
    wait_until(server.idle)
    lists = found["lists"]
    assert lists["tags"]["models"][0]["model"] == lists["ps"]["models"][0]["model"] == "fake:latest"
    assert "tools" in lists["show"]["capabilities"]
    assert lists["version"]["version"]
    statuses = {name: (error["name"], error["status"]) for name, error in found["refusals"].items()}
    assert statuses == {
        "embed": ("ResponseError", 501),
        "model": ("ResponseError", 404),
        "stream": ("ResponseError", 404),
        "key": ("ResponseError", 401),
    }
    assert "no embeddings" in found["refusals"]["embed"]["message"]
    assert (found["load"]["done_reason"], found["pulled"]["status"]) == ("unload", "success")


def test_refusals_are_the_sdks_classes(scripts: Path, server: Server) -> None:
    found = run(scripts, "refusals", server)
    assert all(error["known"] and error["request"].startswith("req_") for error in found.values())
    seen = {name: (error["class"], error["status"], error["type"]) for name, error in found.items()}
    invalid = "invalid_request_error"
    assert seen == {
        "chat 401": ("AuthenticationError", 401, invalid),
        "chat 404": ("NotFoundError", 404, invalid),
        "chat 400": ("BadRequestError", 400, invalid),
        "chat long": ("BadRequestError", 400, invalid),
        "chat long stream": ("BadRequestError", 400, invalid),
        "responses 404": ("NotFoundError", 404, invalid),
        "responses 400": ("BadRequestError", 400, invalid),
        "responses stream": ("BadRequestError", 400, invalid),
        "messages 401": ("AuthenticationError", 401, "authentication_error"),
        "messages 404": ("NotFoundError", 404, "not_found_error"),
        "messages 400": ("BadRequestError", 400, invalid),
        "messages long": ("BadRequestError", 400, invalid),
        "messages stream": ("BadRequestError", 400, invalid),
    }
    assert {name: (error["code"], error["param"]) for name, error in found.items() if error.get("code")} == {
        "chat 401": ("invalid_api_key", None),
        "chat 404": ("model_not_found", "model"),
        "chat long": ("context_length_exceeded", "messages"),
        "chat long stream": ("context_length_exceeded", "messages"),
        "responses 404": ("previous_response_not_found", "previous_response_id"),
        "responses stream": ("context_length_exceeded", "messages"),
    }
    assert found["chat 400"]["param"] == "temperature"
    assert found["responses 400"]["param"] == "input[0].call_id"
    for name in ("messages long", "messages stream"):
        assert "prompt is too long" in found[name]["message"]


def test_a_stream_that_is_left_frees_its_slot(scripts: Path, server: Server) -> None:
    inner = engine_of(server).engine
    assert isinstance(inner, FakeEngine)
    before = server.metric("vllm:request_success_total", finished_reason="abort")
    inner.delay = 0.01  # the reply takes half a minute, unless it is given up
    try:
        found = performed(scripts, "abort", server, *["All of it. " * 300] * 3, "Free.")
        wait_until(server.idle)
    finally:
        inner.delay = 0.0
    assert server.metric("vllm:request_success_total", finished_reason="abort") == before + 3
    for one in ("chat", "claude"):
        assert found[one]["seen"].startswith("A")
        assert (found[one]["error"], found[one]["aborted"]) == ("APIUserAbortError", True)
    assert found["responses"]["seen"].startswith("A")
    assert found["after"] == "Free."


@pytest.fixture
def bundled(demo_model: Path, tmp_path: Path) -> Iterator[Server]:
    """The bundled model in exact mode; its template has tools, and names no reasoning, with which any reply could begin."""
    template = tmp_path / "tools.jinja"
    template.write_text(templates.TOOLS.replace("think>", "aside>"), "utf-8")
    settings = Settings(
        model="demo", ctx=2048, slots=2, threads=2, memory_budget=256 << 20, reuse="exact", chat_template=template
    )

    def load() -> Runtime:
        return Runtime(lambda: LlamaEngine.load(settings.engine_options(), block_size=64), settings)

    with serving(load, model_id="demo", key=KEY, api_keys=(KEY,)) as served:
        yield served


def test_the_bundled_model(scripts: Path, bundled: Server) -> None:
    found = run(scripts, "bundled", bundled, "demo")
    said = {
        "chat": lambda answer: answer["choices"][0]["message"]["content"],
        "responses": lambda answer: answer["output_text"],
        "messages": lambda answer: answer["content"][0]["text"],
    }
    counted = {"chat": of_chat, "responses": of_response, "messages": of_message}
    called = {
        "chat": lambda call: [json.loads(one["function"]["arguments"]) for one in call["message"]["tool_calls"]],
        "responses": lambda call: [json.loads(item["arguments"]) for item in call if item["type"] == "function_call"],
        "messages": lambda call: [block["input"] for block in call["content"] if block["type"] == "tool_use"],
    }
    words = {said[name](found[name]["first"]) for name in said}
    assert len(words) == 1, "the same conversation in three dialects"
    assert len(words.pop()) > 3
    for name, dialect in found.items():
        assert said[name](dialect["streamed"]) == said[name](dialect["first"]), name
        (prompt, _, _), (longer, _, cached) = (counted[name](dialect[turn]["usage"]) for turn in ("first", "second"))
        assert prompt - 64 <= cached < longer, name
        assert dialect["second"]["headstart"]["computed"] == longer - cached, name
        assert set(dialect["parsed"]) == {"river", "navigable"}, name
        assert dialect["parsed"]["river"] in ("Loire", "Ebro", "Po"), name
        calls = called[name](dialect["call"])
        assert calls, name
        for given in calls:
            assert set(given) == {"city", "days"}, name
            assert given["city"] in ("Oslo", "Rome"), name
            assert given["days"] in (1, 2, 3), name
