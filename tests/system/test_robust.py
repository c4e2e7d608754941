"""Many clients that abort at random, over HTTP, on the real engine: no wrong answer, no stuck slot, no 5xx, no leak."""

from __future__ import annotations

import asyncio
import gc
import random
from collections import Counter
from pathlib import Path

import httpx
import psutil
import pytest

from harness import Pending, ask, assistant, system, user
from headstart.config import Settings
from headstart.engines.llama import LlamaEngine
from headstart.interfaces.generation import GenerationParams
from headstart.interfaces.sampling import Sampling
from headstart.serving.request import Request
from headstart.serving.runtime import Runtime
from live import serving, wait_until
from talks import talk

CLIENTS = 64
WORDS = "stone river garden letter bridge market winter music harbour engine".split()


def conversation(number: int) -> list[dict[str, str]]:
    """One of a few conversations that share beginnings, of one to about ten blocks."""
    rng = random.Random(number)
    chat = [system(" ".join(random.Random(number % 3).choices(WORDS, k=60)))]
    for turn in range(rng.randrange(1, 4)):
        if turn:
            chat.append(assistant(" ".join(rng.choices(WORDS, k=12))))
        chat.append(user(" ".join(rng.choices(WORDS, k=rng.choice([5, 40, 120])))))
    return chat


Key = tuple[int, int, int]
"""Conversation, seed, tokens."""


async def client(http: httpx.AsyncClient, name: int, until: float, answers: dict[Key, str], seen: Counter[str]) -> None:
    rng, loop = random.Random(name), asyncio.get_running_loop()
    while loop.time() < until:
        key = (rng.randrange(12), rng.randrange(2), rng.choice([1, 8, 24]))
        body = {
            "messages": conversation(key[0]),
            "seed": key[1],
            "max_tokens": key[2],
            "temperature": 0.9,
            "stream": rng.random() < 0.5,
        }
        patience = rng.choice([0.02, 0.2, 1.0, 30.0])
        try:
            async with asyncio.timeout(patience):
                if body["stream"]:
                    async with http.stream("POST", "/v1/chat/completions", json=body) as response:
                        seen[str(response.status_code)] += 1
                        async for _ in response.aiter_lines():
                            pass
                    continue
                response = await http.post("/v1/chat/completions", json=body)
        except (TimeoutError, httpx.HTTPError):
            seen["aborted"] += 1
            continue
        seen[str(response.status_code)] += 1
        if response.status_code == 429:
            await asyncio.sleep(min(0.2, float(response.headers["retry-after"])))
        elif response.status_code == 200:
            text = response.json()["choices"][0]["message"]["content"]
            assert answers.setdefault(key, text) == text, f"two answers to {key}"


async def storm(url: str, seconds: float) -> tuple[dict[Key, str], Counter[str]]:
    answers: dict[Key, str] = {}
    seen: Counter[str] = Counter()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as http:
        until = asyncio.get_running_loop().time() + seconds
        await asyncio.gather(*(client(http, name, until, answers, seen) for name in range(CLIENTS)))
    return answers, seen


@pytest.mark.slow  # by default the fake engine meets such clients: test_http_abort, test_faults
@pytest.mark.parametrize("seconds", [8, pytest.param(600, marks=pytest.mark.timeout(1200))])
def test_clients_that_abort_at_random(tiny_model: Path, seconds: float) -> None:
    settings = Settings(str(tiny_model), ctx=2048, slots=4, threads=1, reuse="exact", memory_budget=24 << 20, queue=32)
    with Runtime(lambda: LlamaEngine.load(settings.engine_options()), settings) as rt, serving(rt) as server:
        answers, seen = asyncio.run(storm(server.url, seconds))
        wait_until(server.idle)
        wait_until(lambda: rt.scheduler.idle and not any(slot.dirty for slot in rt.scheduler.slots), 60)
        rt.cache.store.check()
        for slot in rt.scheduler.slots:
            assert rt.engine.length(slot.number) == len(slot)
        assert rt.cache.memory.used <= settings.memory_budget
    assert seen["200"] > 50
    assert seen["aborted"] > 50
    assert set(seen) <= {"200", "429", "aborted"}, seen
    assert len(answers) > 20
    cold = Settings(str(tiny_model), ctx=2048, slots=1, threads=1, reuse="exact", memory_budget=0)
    with Runtime(lambda: LlamaEngine.load(cold.engine_options(), block_size=64), cold) as rt:
        for (number, seed, tokens), text in answers.items():
            request = Request(
                rt.chat_prompt(talk(conversation(number))),
                GenerationParams(Sampling(temperature=0.9, seed=seed), max_tokens=tokens, reuse=False),
            )
            assert Pending(rt, request).answer().text == text, (number, seed, tokens)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_resident_memory_over_2000_requests_of_200_users(tiny_model: Path) -> None:
    """Faults: limits that are parsed but not kept; growth that nobody sees until the machine is full."""
    budget = 48 << 20
    settings = Settings(str(tiny_model), ctx=2048, slots=4, memory_budget=budget)
    gc.collect()
    process = psutil.Process()
    with Runtime(lambda: LlamaEngine.load(settings.engine_options()), settings) as rt:
        base = process.memory_info().rss  # model, context and libraries
        chats = [[system(" ".join(random.Random(number).choices(WORDS, k=80)))] for number in range(200)]
        peaks: list[int] = []
        for turn in range(10):
            for number, chat in enumerate(chats):
                chat.append(user(" ".join(random.Random(turn * 1000 + number).choices(WORDS, k=12))))
                chat.append(assistant(ask(rt, chat, max_tokens=4).text))
                assert rt.cache.memory.used <= budget
            peaks.append(process.memory_info().rss)
        assert rt.cache.store.counters["evicted"] > 0
        assert max(peaks) <= (base + budget) * 1.15, (base, peaks)
