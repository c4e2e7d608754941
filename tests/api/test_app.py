"""Loading, keys, metrics, llama-server's extras, and the process around them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from typing import Any

import anthropic
import httpx
import openai
import pytest

from headstart.api.sockets import listen
from headstart.errors import ConfigError, ModelError
from headstart.serving.runtime import Runtime
from headstart.testing.fake_engine import FakeEngine
from live import Server, serving, wait_until

HI: Any = [{"role": "user", "content": "hi"}]


def test_while_loading_everything_says_so_and_then_serves() -> None:
    go = threading.Event()

    def load() -> Runtime:
        assert go.wait(30)
        return Runtime(FakeEngine)

    with serving(load, wait=False) as server:
        for path in ("/health", "/v1/health"):
            response = server.http.get(path)
            assert response.status_code == 503
            assert response.json() == {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}
        for response in (server.http.get("/v1/models"), server.post("/v1/chat/completions", json={"messages": HI})):
            assert response.status_code == 503
            assert response.json()["error"]["type"] == "unavailable_error"
        assert server.http.get("/metrics").status_code == 200
        go.set()
        wait_until(lambda: server.http.get("/health").status_code == 200)
        assert server.http.get("/v1/health").json() == {"status": "ok"}
        answer = server.post("/v1/chat/completions", json={"messages": HI, "max_tokens": 1}).json()
        assert answer["model"] == "fake"  # the engine's own name


def test_every_get_has_a_head(fake: Server) -> None:
    """The OpenAPI document does not name them."""
    paths = fake.http.get("/openapi.json").json()["paths"]
    assert not any("head" in operations for operations in paths.values())
    gets = [path.replace("{", "").replace("}", "") for path, operations in paths.items() if "get" in operations]
    assert {"/health", "/v1/models", "/v1/models/model_id", "/headstart/events"} < set(gets)
    for path in (*gets, "/docs", "/redoc", "/openapi.json", "/headstart/web/nothing"):
        head = fake.http.head(path)
        with fake.http.stream("GET", path) as get:  # events do not end
            assert (head.status_code, head.content) == (get.status_code, b""), path
            assert head.headers["content-type" if "content-type" in get.headers else "location"]
            assert head.headers.get("content-type") == get.headers.get("content-type"), path
    assert int(fake.http.head("/v1/models").headers["content-length"]) == len(fake.http.get("/v1/models").content)
    assert fake.http.head("/v1/chat/completions").headers["allow"] == "POST"
    assert fake.http.head("/v1/chat/completions").status_code == 405


def test_web_pages_may_ask_if_they_are_named() -> None:
    """As a browser asks: first for leave, without the page's key."""
    page, other = "http://localhost:3000", "http://other.example"
    asks = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-os",
    }
    body = {"messages": HI, "max_tokens": 1}
    for given, allowed in (((), ()), ((page,), (page,)), (("*",), (page, other))):
        with Runtime(FakeEngine) as runtime, serving(runtime, key="k", api_keys=["k"], cors=given) as server:
            for origin in (page, other):
                before = httpx.options(f"{server.url}/v1/chat/completions", headers={"origin": origin, **asks})
                after = server.http.post("/v1/chat/completions", json=body, headers={"origin": origin})
                assert before.is_success == after.is_success == (origin in allowed)
                for answer in (before, after):
                    assert (answer.headers.get("access-control-allow-origin") in ("*", origin)) == (origin in allowed)
            assert server.http.post("/v1/chat/completions", json=body, headers={"authorization": "no"}).status_code == 401


def test_a_model_that_cannot_be_loaded_is_told() -> None:
    told: list[Exception] = []

    def load() -> Runtime:
        raise ModelError("no such file: x.gguf")

    with serving(load, wait=False, on_failure=told.append) as server:
        wait_until(lambda: bool(told))
        response = server.http.get("/health")
        assert response.status_code == 503
        assert "x.gguf" in response.json()["error"]["message"]
    assert isinstance(told[0], ModelError)


def test_a_key_is_needed_except_for_health() -> None:
    with Runtime(FakeEngine) as runtime, serving(runtime, key="right", api_keys=["other", "right"]) as server:
        assert server.openai.models.list().data[0].id == "fake"
        assert httpx.get(f"{server.url}/health").status_code == 200
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic right"}, {"authorization": "Bearer"}):
            for path in ("/v1/models", "/metrics", "/slots", "/openapi.json", "/nope"):
                response = httpx.get(f"{server.url}{path}", headers=headers)
                assert response.status_code == 401
                assert response.json()["error"]["code"] == "invalid_api_key"
                assert response.headers["x-request-id"]
        assert httpx.get(f"{server.url}/v1/models", headers={"authorization": "Bearer wröng".encode()}).status_code == 401
        with pytest.raises(openai.AuthenticationError):
            server.openai.with_options(api_key="wrong").models.list()


def test_each_vendors_client_of_models_gets_its_vendors_errors() -> None:
    with Runtime(FakeEngine) as runtime, serving(runtime, key="right", api_keys=["right"]) as server:
        claude = anthropic.Anthropic(base_url=server.url, api_key="right", max_retries=0)
        assert claude.models.retrieve("fake").id == "fake"
        with pytest.raises(anthropic.NotFoundError) as unknown:
            claude.models.retrieve("nope")
        with pytest.raises(anthropic.AuthenticationError) as stranger:
            claude.with_options(api_key="wrong").models.list()
        kinds = [caught.value.body["error"]["type"] for caught in (unknown, stranger)]  # type: ignore[index, call-overload]
        assert kinds == ["not_found_error", "authentication_error"]
        with pytest.raises(openai.NotFoundError) as other:
            server.openai.models.retrieve("nope")
        assert other.value.code == "model_not_found"
        claude.close()


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_a_key_may_have_any_letters(encoding: str) -> None:
    """Headers are bytes, and clients differ in how they write such letters."""
    key = "schlüssel-à"
    with Runtime(FakeEngine) as runtime, serving(runtime, key="plain", api_keys=["plain", key, "ключ"]) as server:

        def status(given: bytes) -> int:
            return httpx.get(f"{server.url}/props", headers={"authorization": b"Bearer " + given}).status_code

        assert status(key.encode(encoding)) == 200
        assert status("ключ".encode()) == 200
        for wrong in (b"x", b"schl", key.encode(encoding)[:-1], "schlüssel-a".encode(encoding), b"schlssel-"):
            assert status(wrong) == 401


def test_a_closed_model_is_unavailable_and_never_used() -> None:
    messages = {"messages": HI, "max_tokens": 2}
    bodies: dict[str, Any] = {
        "/tokenize": {"content": "a", "with_pieces": True},
        "/detokenize": {"tokens": [65]},
        "/apply-template": messages,
        "/v1/chat/completions": messages,
        "/v1/chat/completions/input_tokens": messages,
        "/v1/completions": {"prompt": [65], "echo": True, "logprobs": 1},
    }
    with Runtime(FakeEngine) as runtime, serving(runtime) as server:
        for path, body in bodies.items():
            assert server.post(path, json=body).status_code == 200, path
        runtime.close()
        for path, body in bodies.items():
            response = server.post(path, json=body)
            assert response.status_code == 503, path
            assert response.json()["error"]["code"] == "unavailable"


def test_models(fake: Server) -> None:
    assert [model.id for model in fake.openai.models.list()] == ["fake"]
    assert fake.openai.models.retrieve("fake-alias").id == "fake"
    assert fake.http.get("/v1/models").json()["data"][0]["meta"]["n_ctx"] == 2048


NAMES = [
    "vllm:prompt_tokens_total",
    "vllm:prompt_tokens_cached_total",
    "vllm:generation_tokens_total",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:time_to_first_token_seconds_count",
    "vllm:inter_token_latency_seconds_count",
    "vllm:e2e_request_latency_seconds_count",
    "vllm:request_queue_time_seconds_count",
    "vllm:request_prefill_time_seconds_count",
    "vllm:request_decode_time_seconds_count",
    "vllm:request_success_total",
    "sglang:cached_tokens_total",
    "sglang:evicted_tokens_total",
    "headstart:computed_tokens_total",
    "headstart:restored_tokens_total",
    "headstart:cached_tokens_total",
    "headstart:misses_total",
    "headstart:refused_total",
    "headstart:store_used_bytes",
    "headstart:store_budget_bytes",
    "headstart:store_evictions_total",
    "headstart:store_saved_total",
]


def test_metrics_have_the_names_that_dashboards_know_and_agree_with_the_answers() -> None:
    with Runtime(lambda: FakeEngine(slots=2)) as runtime, serving(runtime, model_id="fake") as server:
        answers = []
        for tenant in ("a", "b", "a"):
            messages = [{"role": "user", "content": f"a question of {tenant}, which is asked again later"}]
            body = {"messages": messages, "max_tokens": 6, "ignore_eos": True}
            answers.append(server.post("/v1/chat/completions", json=body).json())
        server.post("/v1/chat/completions", json={"messages": []})
        server.post("/v1/completions", json={"prompt": "streamed", "stream": True, "max_tokens": 6, "ignore_eos": True}).read()
        prompt = sum(answer["usage"]["prompt_tokens"] for answer in answers) + len("streamed")
        cached = sum(answer["headstart"]["cached"] for answer in answers)
        for name in NAMES:
            server.metric(name)
        assert cached > 0
        assert server.metric("vllm:prompt_tokens_total", model_name="fake") == prompt
        assert server.metric("vllm:prefix_cache_queries_total") == prompt
        for name in ("vllm:prompt_tokens_cached_total", "vllm:prefix_cache_hits_total"):
            assert server.metric(name) == cached
        assert server.metric("sglang:cached_tokens_total") == server.metric("headstart:cached_tokens_total") == cached
        assert server.metric("headstart:computed_tokens_total") == prompt - cached
        assert server.metric("vllm:request_success_total") == 4
        assert server.metric("vllm:time_to_first_token_seconds_count") == 4
        assert 15 <= server.metric("vllm:inter_token_latency_seconds_count") <= 20
        assert server.metric("headstart:misses_total", cause="first_time") >= 1
        assert server.metric("headstart:refused_total", status="400") == 1
        assert server.metric("vllm:num_requests_running") == server.metric("vllm:num_requests_waiting") == 0
        assert server.metric("headstart:store_used_bytes", tier="memory") > 0


def test_tokens_and_text(fake: Server) -> None:
    def tokens(**body: Any) -> Any:
        return fake.post("/tokenize", json=body).json()["tokens"]

    assert tokens(content="hé") == list("hé".encode())
    assert tokens(content="<|im_start|>a") == [256, 97]
    assert tokens(content="<|im_start|>a", parse_special=False) == list(b"<|im_start|>a")
    assert tokens(content="hé", with_pieces=True) == [
        {"id": 104, "piece": "h"},
        {"id": 195, "piece": [195]},
        {"id": 169, "piece": [169]},
    ]
    assert tokens(content="") == []
    assert len(tokens(content="x" * 5000)) == 5000  # more than the context: it is only counted
    assert fake.post("/detokenize", json={"tokens": [256, *"hé".encode()]}).json() == {"content": "<|im_start|>hé"}
    assert fake.post("/detokenize", json={"tokens": [259]}).status_code == 400
    assert fake.post("/tokenize", json={"content": 5}).json()["error"]["param"] == "content"


def test_slots_and_props(fake: Server) -> None:
    slots = fake.http.get("/slots").json()
    assert [slot["id"] for slot in slots] == [0, 1]
    assert all(slot["n_ctx"] == 2048 and slot["is_processing"] is False for slot in slots)
    props = fake.http.get("/props").json()
    assert props["total_slots"] == 2
    assert props["default_generation_settings"]["n_ctx"] == 2048
    assert "im_start" in props["chat_template"]


def test_an_event_loop_under_load_still_answers(fake: Server) -> None:
    """Parsing and tokenising a large prompt must not hold up others."""
    body = {"messages": [{"role": "user", "content": "x" * 4_000_000}]}
    done = threading.Event()

    def large() -> None:
        fake.post("/v1/chat/completions", json=body)
        done.set()

    thread = threading.Thread(target=large)
    thread.start()
    answered = 0
    while not done.is_set():
        assert fake.http.get("/health").elapsed.total_seconds() < 1
        answered += 1
    thread.join()
    assert answered >= 2


# ── the process ──────────────────────────────────────────────────────────────────────────────────────────────────────

PROGRAM = """
import sys, time
from headstart.api.entrance import Network
from headstart.api.serve import serve
from headstart.config import Settings
from headstart.testing.fake_engine import FakeEngine
from headstart.errors import ConfigError, ModelError
from headstart.serving.runtime import Runtime

def load(settings):
    if settings.model == "missing.gguf":
        raise ModelError("missing.gguf is missing")
    return Runtime(lambda: FakeEngine(ctx=100_000, delay=0.01), settings)

try:
    serve(Settings(model=sys.argv[1]), Network(sys.argv[2], int(sys.argv[3]), log_format="json"), load=load)
except ConfigError as error:
    sys.exit(f"config: {error}")
"""


def start(model: str, host: str = "127.0.0.1", port: int = 0) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, model, host, str(port)], stderr=subprocess.PIPE, text=True, env={**os.environ}
    )


def test_serve_listens_logs_and_ends_gracefully() -> None:
    with start("models/my-model.gguf", "0.0.0.0") as process:
        assert process.stderr is not None
        warning, listening = (json.loads(process.stderr.readline()) for _ in range(2))
        assert warning["level"] == "warning"
        assert "--api-key" in warning["event"]
        port = int(listening["url"].rsplit(":", 1)[1].removesuffix("/v1"))
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20) as http:
            wait_until(lambda: http.get("/health").status_code == 200)
            assert http.get("/v1/models").json()["data"][0]["id"] == "my-model"
            body = {"model": "my-model.gguf", "prompt": "finish this", "max_tokens": 60, "stream": True, "ignore_eos": True}
            with http.stream("POST", "/v1/completions", json=body) as response:
                lines = response.iter_lines()
                next(lines)
                process.send_signal(signal.SIGTERM)
                assert [line for line in lines if line][-1] == "data: [DONE]"  # a running answer is finished first
        assert process.wait(20) == 0
        logged = [json.loads(line) for line in process.stderr]
    done = next(line for line in logged if line["event"] == "finished")
    assert (done["prompt"], done["computed"], done["cached"], done["completion"]) == (11, 11, 0, 60)
    assert {"restored", "ttft_ms", "tokens_per_s", "cause", "id"} <= set(done)


def test_serve_fails_with_the_loaders_own_words() -> None:
    with start("missing.gguf") as process:
        _, err = process.communicate(timeout=20)
    assert process.returncode == 1
    assert err.splitlines()[-1] == "config: missing.gguf is missing"


def test_a_port_in_use_names_the_option() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"{port}.*--port"):
            listen("127.0.0.1", port)


@pytest.mark.parametrize(
    ("host", "port", "option"),
    [("no.such.host.invalid", 0, "--host"), ("192.0.2.1", 0, "--host"), ("127.0.0.1", 70000, "--port")],
)
def test_an_address_that_cannot_be_used_names_the_option(host: str, port: int, option: str) -> None:
    with pytest.raises(ConfigError, match=option):
        listen(host, port)
