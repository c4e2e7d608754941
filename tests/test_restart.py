"""A server that is killed, started again, and goes on where it was: the real engine, the real model, real files."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from harness import ask as ask_runtime
from headstart.config import Settings
from headstart.engines.base import GREEDY
from headstart.engines.llama import LlamaEngine
from headstart.runtime.runtime import Runtime
from headstart.stores.disk.format import checksum, decode, header_size
from process import serving

Messages = list[dict[str, str]]
OPTIONS = ("--ctx", "4096", "--slots", "1", "--memory-budget", "256MiB", "--port", "0")
WORDS = "the house water garden letter market window bridge captain summer winter travel music paper stone river".split()


def text(seed: int, words: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=words))


def post(url: str, messages: Messages, **options: Any) -> dict[str, Any]:
    body = {"messages": messages, "max_tokens": 24, "temperature": 0, **options}
    found: dict[str, Any] = httpx.post(f"{url}/chat/completions", json=body, timeout=120).raise_for_status().json()
    return found


def address(line: str) -> str:
    return next(word.removeprefix("url=") for word in line.split() if word.startswith("url="))


@pytest.mark.parametrize("reuse", ["fast", "exact"])
def test_killed_and_started_again(tmp_path: Path, reuse: str) -> None:
    options = (*OPTIONS, "--cache-dir", str(tmp_path), "--reuse", reuse)
    chat: Messages = [{"role": "system", "content": text(1, 400)}, {"role": "user", "content": "Say something."}]
    with serving(*options) as server:
        url = address(server.line("listening"))
        first = post(url, chat)
        time.sleep(2)
        server.end(signal.SIGKILL)
    reply = first["choices"][0]["message"]["content"]
    chat += [{"role": "assistant", "content": reply}, {"role": "user", "content": "Go on."}]
    with serving(*options) as server:
        url = address(server.line("listening"))
        second = post(url, chat)
        assert server.end() == 0
    new = second["usage"]["prompt_tokens"] - first["usage"]["prompt_tokens"]
    assert second["headstart"]["computed"] <= new + 64
    assert second["headstart"]["tiers"]["disk"] >= first["usage"]["prompt_tokens"] - 64


def test_a_restart_changes_no_bit(tmp_path: Path, demo_model: Path) -> None:
    settings = Settings(str(demo_model), ctx=1024, slots=1, memory_budget=64 << 20, reuse="exact", cache_dir=tmp_path)
    chat: list[dict[str, Any]] = [{"role": "system", "content": text(2, 300)}, {"role": "user", "content": "Say something."}]
    logits = []
    for folder in (tmp_path, tmp_path, None):
        with Runtime(LlamaEngine.load(settings), Settings(**_with(settings, cache_dir=folder))) as rt:
            answer = ask_runtime(rt, chat, sampling=GREEDY, max_tokens=4, keep_logits=True)
            logits.append(answer)
    kept, restored, cold = logits
    assert restored.report.tiers["disk"] >= 256
    assert cold.report.cached == 0
    assert all(one.logits is not None for one in logits)
    assert kept.logits.tobytes() == restored.logits.tobytes() == cold.logits.tobytes()  # type: ignore[union-attr]


def _with(settings: Settings, **changes: Any) -> dict[str, Any]:
    import dataclasses

    return {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)} | changes


def check_objects(folder: Path) -> int:
    """How many objects there are; each must be whole, whatever interrupted its making."""
    paths = list((folder / "objects").iterdir())
    for path in paths:
        data = np.frombuffer(path.read_bytes(), np.uint8)
        header = decode(data[: header_size(data[:32].tobytes())].tobytes(), len(data))
        assert checksum(data[header.at :]) == header.checksum
        assert path.stem == header.label.key.hex()
    return len(paths)


@pytest.mark.parametrize("kill", [*range(5), *(pytest.param(number, marks=pytest.mark.slow) for number in range(5, 50))])
def test_killed_under_load(tmp_path: Path, tiny_model: Path, kill: int) -> None:
    """Whatever the kill interrupts, what comes back is the answer: exact mode against a server that has no disk."""
    dice = random.Random(kill)
    options = (str(tiny_model), *OPTIONS, "--threads", "1", "--reuse", "exact")
    chats: list[Messages] = [[{"role": "user", "content": text(100 * kill + number, 250)}] for number in range(4)]
    with serving(*options, "--cache-dir", str(tmp_path)) as server:
        url = address(server.line("listening"))
        with httpx.Client(timeout=60) as http:
            deadline = time.monotonic() + dice.uniform(0.2, 1.5)
            while time.monotonic() < deadline:
                chat = dice.choice(chats)
                http.post(f"{url}/chat/completions", json={"messages": chat, "max_tokens": 2, "temperature": 0})
        server.end(signal.SIGKILL)
    intact = check_objects(tmp_path)
    with serving(*options, "--cache-dir", str(tmp_path)) as server, serving(*options, "--no-disk") as cold:
        urls = [address(one.line("listening")) for one in (server, cold)]
        restored = 0
        for chat in chats:
            warm, fresh = (post(url, chat, logprobs=True, top_logprobs=5) for url in urls)
            assert warm["choices"] == fresh["choices"]
            restored += warm["headstart"]["tiers"].get("disk", 0)
        assert not list((tmp_path / "tmp").iterdir())
        assert server.end() == 0
    assert not intact or restored
