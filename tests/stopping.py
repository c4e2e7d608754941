"""A loaded server that stops or fails: clients of three dialects, and the answer that each of them must get.

The server is the real command in its own process. Only its engine is the fake one, so that it starts at once.
"""

from __future__ import annotations

import json
import random
import re
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from headstart.tiers.shared.keys import FleetKeys
from process import Server, started

KEYS = ("sk-first-3f9a27c1", "Schlüssel/7+d==", "short9")
WRONG = "sk-nobodys-5be1aa"
SECRET = "the treasure lies under"
"""A text in every prompt, and in everything else that a client sends."""
REPLY = b"qjxz"
"""The letters of every reply."""
FAULT = "internal error (RuntimeError)"
"""The log's text for an injected fault."""

ENGINE = """
import random, sys, time
from headstart.cli.main import main
from headstart.testing.fake_engine import FakeEngine
from headstart.engines.llama import LlamaEngine

loading, share, seed = float(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
dice = random.Random(seed)

class Faulty(FakeEngine):
    # Fails as foreign code does: with an exception that quotes what it was given.
    seen = b""

    def _maybe(self, where):
        if dice.random() < share:
            raise RuntimeError(f"injected in {where}: " + self.seen.decode("utf-8", "replace"))

    def prefill(self, slot, tokens, *, logits):
        self.seen = bytes(token for token in tokens.tolist() if token < 256)
        super().prefill(slot, tokens, logits=logits)
        self._maybe("prefill")

    def decode(self, steps):
        super().decode(steps)
        self._maybe("decode")

    def sample(self, slot, sampler):
        token = super().sample(slot, sampler)
        self._maybe("sample")
        return token

    def export_kv(self, slot, spans):
        super().export_kv(slot, spans)
        self._maybe("export_kv")

    def import_kv(self, slot, segments):
        super().import_kv(slot, segments)
        self._maybe("import_kv")

def load(cls, options, progress=None, anew=False):
    if loading:
        print("loads", file=sys.stderr, flush=True)
        time.sleep(loading)
    return Faulty(slots=2, ctx=4096, batch=256, delay=0.003, alphabet=b"qjxz")

LlamaEngine.load = classmethod(load)
main(sys.argv[4:])
"""


@dataclass
class Tally:
    """How the clients' requests ended. `bad`: reasons why some had no proper end."""

    ends: Counter[str] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)


@contextmanager
def loaded(
    model: Path, folder: Path, seed: int, *options: str, loading: float = 0.0, faults: float = 0.0, clients: int = 6
) -> Iterator[tuple[Server, Tally, list[threading.Thread]]]:
    """A server under load. Its clients continue until it reports that it stops, or is gone."""
    keys = folder / "keys.txt"
    keys.write_text(f"alice = {KEYS[0]}\n{KEYS[1]}\n", "utf-8")
    keys.chmod(0o600)
    command = [sys.executable, "-c", ENGINE, str(loading), str(faults), str(seed), "serve", str(model), "--port", "0"]
    given = ("--api-key", KEYS[2], "--api-key-file", str(keys), *options)
    with started([*command, *given], PYTHONIOENCODING="utf-8") as server:
        tally, over, threads = Tally(), threading.Event(), list[threading.Thread]()
        if loading:
            server.line("loads")
        else:
            url = server.address()
            threads = [threading.Thread(target=client, args=(url, seed * 100 + n, tally, over)) for n in range(clients)]
        for thread in threads:
            thread.start()
        try:
            yield server, tally, threads
        finally:
            over.set()
            server.process.kill()
            for thread in threads:
                thread.join(60)


def shared(folder: Path, url: str) -> list[str]:
    """Options for a shared store, whose key file is in `folder`."""
    FleetKeys.generate().save(folder / "fleet.key")
    return ["--shared", url, "--shared-key-file", str(folder / "fleet.key")]


@contextmanager
def hanging() -> Iterator[str]:
    """The address of a store that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as bound:
        yield f"valkey://127.0.0.1:{bound.getsockname()[1]}"


def client(url: str, seed: int, tally: Tally, over: threading.Event) -> None:
    dice = random.Random(seed)
    with httpx.Client(base_url=url, timeout=60) as http:
        while not over.is_set():
            try:
                end = ask(http, dice)
            except httpx.ConnectError:
                end = "not connected"
            except Exception as error:
                tally.bad.append(f"{type(error).__name__}: {error}")
                return
            tally.ends[end] += 1
            if end in ("not connected", "refused 503", "refused 529", "stream ended"):
                return


def ask(http: httpx.Client, dice: random.Random) -> str:
    """Sends a random request, and returns how it ended. Raises AssertionError if it had no proper end."""
    kind = dice.choice(list(DIALECTS))
    path, body = DIALECTS[kind](dice)
    stream = dice.random() < 0.5
    key, status = dice.choice(KEYS), 200
    if (odd := dice.random()) < 0.05:
        key, status = WRONG, 401
    elif odd < 0.1:
        body["model"], status = SECRET, 404
    elif odd < 0.15:
        body["temperature"], status = SECRET, 400
    header = {"x-api-key": key.encode()} if dice.random() < 0.5 else {"authorization": b"Bearer " + key.encode()}
    with http.stream("POST", path, json={**body, "stream": stream}, headers=header) as response:
        text = response.read().decode()
        if response.status_code != 200:
            error = response.json()["error"]
            assert error["message"], text
            if response.status_code in (503, 529):
                assert response.headers["retry-after"], response.headers
                assert response.status_code == (529 if kind == "messages" else 503)
            else:
                assert response.status_code in (status, 429, 500), text
            return f"refused {response.status_code}"
        assert status == 200, f"{status} was due"
        return streamed(kind, text) if stream else whole(kind, json.loads(text))


def whole(kind: str, answer: dict[str, Any]) -> str:
    wanted = {"chat": "choices", "responses": "output", "messages": "content"}[kind]
    assert wanted in answer, answer
    return "answered"


def streamed(kind: str, text: str) -> str:
    data = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    assert text.endswith("\n\n"), f"cut in the middle: {text[-200:]!r}"
    assert data, "an empty stream"
    if kind == "chat":
        assert data[-1] == "[DONE]", text[-300:]
        last = json.loads(data[-2])
        if "error" in last:
            return _fault(last["error"]["message"])
        assert last["choices"][0]["finish_reason"], text[-300:]
        return "streamed"
    last = json.loads(data[-1])
    if kind == "responses":
        if last["type"] == "response.failed":
            return _fault(last["response"]["error"]["message"])
        assert last["type"] in ("response.completed", "response.incomplete"), text[-300:]
        return "streamed"
    if last["type"] == "error":
        return _fault(last["error"]["message"])
    assert last["type"] == "message_stop", text[-300:]
    return "streamed"


def _fault(message: str) -> str:
    return "stream ended" if "stopping" in message else "stream failed"


def _prompt(dice: random.Random) -> str:
    return " ".join(f"{SECRET} tree {dice.randrange(50)}." for _ in range(dice.randint(1, 20)))


def _chat(dice: random.Random) -> tuple[str, dict[str, Any]]:
    messages = [{"role": "user", "content": _prompt(dice)}]
    return "/v1/chat/completions", {"messages": messages, "max_tokens": _length(dice), "ignore_eos": True}


def _responses(dice: random.Random) -> tuple[str, dict[str, Any]]:
    return "/v1/responses", {"input": _prompt(dice), "max_output_tokens": max(16, _length(dice)), "ignore_eos": True}


def _messages(dice: random.Random) -> tuple[str, dict[str, Any]]:
    messages = [{"role": "user", "content": _prompt(dice)}]
    return "/v1/messages", {"model": "claude", "messages": messages, "max_tokens": _length(dice)}


def _length(dice: random.Random) -> int:
    return dice.choice([3, 30, 300, 2000])


DIALECTS = {"chat": _chat, "responses": _responses, "messages": _messages}


def leaks(log: str) -> list[str]:
    """The lines of a log that contain a key, a prompt or a reply."""
    hidden = [*KEYS, WRONG, SECRET, *(ascii(key)[1:-1] for key in KEYS)]
    said = re.compile(f"[{REPLY.decode()}]{{6,}}")
    return [line for line in log.splitlines() if any(one in line for one in hidden) or said.search(line)]


def stop(server: Server, dice: random.Random, *, twice: bool) -> tuple[int, float]:
    """Sends signals, and returns the exit code and the seconds until the end."""
    begun = time.monotonic()
    server.process.send_signal(dice.choice([signal.SIGTERM, signal.SIGINT]))
    if twice:
        time.sleep(dice.uniform(0.0, 0.5))
        server.process.send_signal(dice.choice([signal.SIGTERM, signal.SIGINT]))
    code = server.process.wait(60)
    return code, time.monotonic() - begun
