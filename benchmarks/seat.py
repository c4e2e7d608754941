"""A server that is asked, left idle, killed and restarted; and the ideal cache for comparison."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import httpx

from benchmarks.client import Client, Messages, Sample
from benchmarks.servers import Server

REPLY = 24
"""Tokens of a reply."""
THINK = 2.0
"""Seconds that a reader takes, and that a server has before it is killed."""

WARM_UP: Messages = [{"role": "user", "content": "Warm up."}]

Start = Callable[[], AbstractContextManager[Server]]


class Seat:
    """One server during a run, with the prompts that it got. `bias`: the `logit_bias` of every request."""

    def __init__(self, start: Start, bias: dict[str, float]) -> None:
        self._start, self._bias = start, bias
        self._stack = ExitStack()
        self.asked: list[tuple[Messages, Sample]] = []
        self._open()

    def _open(self) -> None:
        self._server = self._stack.enter_context(self._start())
        self._client = Client(self._server)
        # mlx_lm.server reports that it is healthy before its model is loaded.
        self._client.chat(WARM_UP, 2, logit_bias=self._bias)

    @property
    def url(self) -> str:
        return self._server.url

    def close(self) -> None:
        self._stack.close()

    def ask(self, messages: Messages) -> str:
        sample = self._client.chat(messages, REPLY, logit_bias=self._bias)
        self.asked.append(([*messages], sample))
        return sample.text

    def think(self) -> None:
        time.sleep(THINK)

    def restart(self) -> None:
        self.think()
        self._server.process.kill()
        self._server.process.wait()
        self._stack.close()
        self._open()

    def rest(self) -> None:
        """Waits until it is idle, at most 10 s, so that its background work does not slow another server."""
        for _ in range(40):
            if self._server.process.cpu_percent(0.25) < 10:
                return

    def tokens(self, messages: Messages, reply: str = "") -> list[int]:
        """The tokens of a prompt followed by a reply. Uses llama-server's routes."""
        text = self._post("/apply-template", {"messages": messages})["prompt"] + reply
        return list(self._post("/tokenize", {"content": text, "add_special": True, "parse_special": True})["tokens"])

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return dict(httpx.post(self._server.url + path, json=body, timeout=60).raise_for_status().json())


class Ideal:
    """A cache that keeps everything."""

    def __init__(self, *known: list[int]) -> None:
        self._known = list(known)

    def computes(self, prompt: list[int]) -> int:
        """Tokens of a prompt that it computes: at least one, because the reply needs the last token's logits."""
        return max(1, len(prompt) - max((_common(known, prompt) for known in self._known), default=0))

    def keep(self, tokens: list[int]) -> None:
        self._known.append(tokens)


def _common(one: list[int], other: list[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))
