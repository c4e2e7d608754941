"""What the HTTP layer adds to the engine's own time: `python -m benchmarks.http`.

One agent's conversation of 80 kB (tools, system prompt, calls and results), sent in each dialect, streamed; each request has a
new last message of the user. From sending the body to the first byte of the first token, less the time that the engine
had the prompt (`timings.prompt_ms`): reading, normalising, rendering, tokenising, looking up, writing. Replies have one
token, so that nothing is held back until a second one shows that it is no mark.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
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
    return {"messages": messages, "tools": listed, "max_tokens": 1, "stream": True, "temperature": 0}


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
    rest_of = {"max_output_tokens": 1, "stream": True, "temperature": 0, "store": False}
    return {"instructions": system["content"], "input": items, "tools": listed, **rest_of}


DIALECTS: dict[str, tuple[str, Callable[[Body], Body]]] = {
    "chat completions": ("/v1/chat/completions", lambda body: body),
    "messages": ("/v1/messages", anthropic),
    "responses": ("/v1/responses", responses),
}


def ask(http: httpx.Client, path: str, body: Body, question: str) -> tuple[float, float, int]:
    """Milliseconds to the first token's bytes and of the engine; bytes of the body."""
    said = {"role": "user", "content": question}
    asked = {**body, **({"input": [*body["input"], said]} if "input" in body else {"messages": [*body["messages"], said]})}
    data = json.dumps(asked).encode()
    begun, first, engine = time.perf_counter(), 0.0, 0.0
    with http.stream("POST", path, content=data, headers={"content-type": "application/json"}) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            first = first or (time.perf_counter() if '"delta"' in line and '"role"' not in line else 0.0)
            engine = next(_timings(json.loads(line[6:])), engine)
    return 1e3 * (first - begun), engine, len(data)


def _timings(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        if "prompt_ms" in value:
            yield float(value["prompt_ms"])
        for item in value.values():
            yield from _timings(item)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.http", description=__doc__)
    parser.add_argument("--bytes", type=int, default=80_000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--model", type=Path, default=None)
    given = parser.parse_args()
    table = Table("dialect", "body, bytes", "first token, ms", "engine, ms", "HTTP and all else, ms", title="the HTTP layer")
    setup = Setup(given.model or demo_model(), ctx=32768, slots=1)
    with headstart(setup, "--settle", "off") as server, httpx.Client(base_url=server.url, timeout=600) as http:
        for name, (path, dialect) in DIALECTS.items():
            body = dialect(chat(given.bytes))
            ask(http, path, body, "Is this the first time?")
            samples = [ask(http, path, body, f"What now, at {number}?") for number in range(given.rounds)]
            first, engine, _ = (statistics.median(column) for column in zip(*samples, strict=True))
            over = statistics.median(total - own for total, own, _ in samples)
            table.add_row(name, f"{samples[0][2]:,}", f"{first:.1f}", f"{engine:.1f}", f"{over:.1f}")
    table.caption = f"medians of {given.rounds} requests"
    Console().print(table)


if __name__ == "__main__":
    main()
