"""A streaming client that measures times, the same for every server."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx

from benchmarks.servers import Server

Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Sample:
    """One request: tokens, and seconds since it was sent.

    `computed`: prompt tokens that the server reports as computed; `at`: when each delta of text arrived.
    """

    text: str
    prompt: int
    computed: int
    completion: int
    wall: float
    at: tuple[float, ...]

    @property
    def ttft(self) -> float:
        return self.at[0]

    @property
    def rate(self) -> float:
        """Tokens a second, from the first token to the last."""
        return (self.completion - 1) / (self.at[-1] - self.at[0])

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in zip(self.at, self.at[1:], strict=False)]


class Client:
    """Talks to one server."""

    def __init__(self, server: Server) -> None:
        self.server = server
        # A new connection for each request: a server may close an idle one while the other server is measured.
        self._http = httpx.Client(base_url=server.url, timeout=600, limits=httpx.Limits(max_keepalive_connections=0))

    def chat(self, messages: Messages, tokens: int, **options: Any) -> Sample:
        """A greedy reply of exactly `tokens` tokens."""
        body = {"messages": messages, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        body |= {"stream_options": {"include_usage": True}, **options}
        at: list[float] = []
        text = ""
        usage: dict[str, Any] = {}
        timings: dict[str, Any] = {}
        begun = time.perf_counter()
        with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                raise RuntimeError(f"{self.server.name}: {response.read()[:500]!r}")
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line[6:])
                usage = chunk.get("usage") or usage
                timings = chunk.get("timings") or timings
                for choice in chunk["choices"]:
                    # Some servers have a separate field for reasoning.
                    pieces = (choice["delta"].get(field) for field in ("content", "reasoning_content", "reasoning"))
                    for piece in filter(None, pieces):
                        at.append(time.perf_counter() - begun)
                        text += piece
        wall = time.perf_counter() - begun
        prompt = usage["prompt_tokens"]
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        return Sample(text, prompt, timings.get("prompt_n", prompt - cached), usage["completion_tokens"], wall, tuple(at))

    def together(self, conversations: list[Messages], tokens: int, **options: Any) -> list[Sample]:
        """Replies to all conversations at the same time."""
        with ThreadPoolExecutor(len(conversations)) as pool:
            return list(pool.map(lambda messages: self.chat(messages, tokens, **options), conversations))
