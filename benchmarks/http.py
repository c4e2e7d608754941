"""What the HTTP layer adds to the engine's own time: `python -m benchmarks.http`.

One agent's conversation of 80 kB (tools, system prompt, calls and results), sent in each dialect, streamed; each request has a
new last message of the user, and comes right after the answer to the one before, or after a pause. From sending the body to
the first byte of the answer, which leaves when the prompt is computed, less the time from the prompt's arrival at the engine's
thread to its first token (`ttft` of `/headstart/explain`). So it is what reading, normalising, rendering, tokenising, handing
over and writing take; planning is the engine's, as are copying and computing. Replies have two tokens: the end of one, which
keeps the interpreter busy, would hold the first byte back.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from http.client import HTTPConnection
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console
from rich.table import Table

from benchmarks.servers import Setup, demo_model, headstart
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


def ask(http: HTTPConnection, path: str, body: Body, question: str, pause: float = 0.0) -> tuple[float, float, int]:
    """Milliseconds to the first byte and of the engine, after `pause` seconds; bytes of the body."""
    said = {"role": "user", "content": question}
    asked = {**body, **({"input": [*body["input"], said]} if "input" in body else {"messages": [*body["messages"], said]})}
    data = json.dumps(asked).encode()
    time.sleep(pause)
    begun = time.perf_counter()
    http.request("POST", path, data, {"content-type": "application/json"})
    response = http.getresponse()
    assert response.status == 200, response.read()
    response.read1(1)
    first = time.perf_counter() - begun
    response.read()
    http.request("GET", "/headstart/explain")
    engine = json.load(http.getresponse())["ttft"]
    return 1e3 * first, 1e3 * engine, len(data)


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
    table = Table("dialect", "body, bytes", "first byte, ms", "engine, ms", "HTTP, ms", "quartiles", title="the HTTP layer")
    setup = Setup(given.model or demo_model(), ctx=32768, slots=1)
    with (
        headstart(setup, "--settle", "off", cache=given.cache) as server,
        closing(HTTPConnection(urlsplit(server.url).netloc, timeout=600)) as http,
    ):
        for name, (path, dialect) in DIALECTS.items():
            body = dialect(chat(given.bytes))
            ask(http, path, body, "Is this the first time?")
            asked = (f"What now, by {name} number {number}?" for number in range(2 * given.rounds))
            tried = (ask(http, path, body, question, given.pause) for question in asked)
            # A sign of life (after 2.5 s, or behind a part of the prefill) may come first; then the first byte says nothing.
            samples = list(islice((one for one in tried if one[0] > one[1]), given.rounds))
            if len(samples) < given.rounds:
                raise SystemExit("Too often a sign of life comes before the answer on this machine; give a smaller --model.")
            first, engine, _ = (statistics.median(column) for column in zip(*samples, strict=True))
            low, over, high = statistics.quantiles((total - own for total, own, _ in samples), n=4)
            row = f"{samples[0][2]:,}", f"{first:.1f}", f"{engine:.1f}", f"{over:.1f}", f"{low:.1f}-{high:.1f}"
            table.add_row(name, *row)
    table.caption = f"medians of {given.rounds} requests, each after {given.pause:g} s without work"
    Console().print(table)


if __name__ == "__main__":
    main()
