"""Many callers that hang up at random: nobody gets a wrong answer, no slot is stuck, nothing is a 5xx."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import httpx
import pytest

from effort import SLOW
from headstart.config import Settings
from headstart.serving.runtime import Runtime
from headstart.testing.fake_engine import FakeEngine
from live import serving, wait_until

CLIENTS = 64 if SLOW else 32
SECONDS = 600.0 if SLOW else 1.0
ANSWERS, ABORTS = (30, 20) if SLOW else (20, 12)
"""The least that there has to be, however long that takes on a busy machine."""


def script(dice: random.Random) -> list[dict[str, Any]]:
    """One of a few conversations, at one of its turns, so that prefixes are shared."""
    tale = dice.randrange(12)
    turns = dice.randrange(1, 5)
    messages: list[dict[str, Any]] = [{"role": "system", "content": f"You are number {tale % 3}. " * 8}]
    for turn in range(turns):
        messages.append({"role": "user", "content": f"tale {tale}, question {turn}: and then?"})
        messages.append({"role": "assistant", "content": f"answer {turn} of tale {tale}"})
    return messages[:-1]


async def client(
    number: int, url: str, until: float, answers: list[tuple[list[dict[str, Any]], str]], hung_up: list[int]
) -> None:
    dice = random.Random(number)
    loop = asyncio.get_running_loop()
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        while loop.time() < until or len(answers) < ANSWERS or len(hung_up) < ABORTS:
            messages, stream = script(dice), dice.random() < 0.5
            body = {"messages": messages, "max_tokens": 16, "temperature": 0, "stream": stream}
            call = asyncio.create_task(http.post("/v1/chat/completions", json=body))
            patience = dice.uniform(0.0, 0.3) if dice.random() < 0.5 else None
            try:
                response = await asyncio.wait_for(call, patience)
            except TimeoutError:
                hung_up.append(number)
                continue
            assert response.status_code in (200, 429), response.text
            if response.status_code == 429:
                await asyncio.sleep(dice.uniform(0.1, 0.5))
            elif stream:
                assert response.text.endswith("data: [DONE]\n\n")
                assert '"error"' not in response.text
            else:
                answers.append((messages, response.json()["choices"][0]["message"]["content"]))


@pytest.mark.timeout(int(SECONDS) + 120)
def test_callers_that_hang_up_harm_nobody() -> None:
    answers: list[tuple[list[dict[str, Any]], str]] = []
    hung_up: list[int] = []

    async def crowd(url: str) -> None:
        until = asyncio.get_running_loop().time() + SECONDS
        await asyncio.gather(*(client(number, url, until, answers, hung_up) for number in range(CLIENTS)))

    # A budget that holds a third of it, so that eviction takes part.
    settings = Settings(reuse="exact", queue=24, memory_budget=20_000)
    engine = FakeEngine(slots=4, ctx=1024, delay=0.0005)
    with Runtime(lambda: engine, settings) as runtime, serving(runtime, model_id="fake") as server:
        asyncio.run(crowd(server.url))
        wait_until(lambda: server.idle() and runtime.scheduler.idle)
        runtime.cache.store.check()
        evicted = runtime.snapshot()["counters"]["memory"].get("evicted", 0)
        assert server.metric("vllm:request_success_total", finished_reason="error") == 0
    assert len(hung_up) >= ABORTS
    assert len(answers) >= ANSWERS
    assert evicted > 0
    cold: dict[str, str] = {}
    with (
        Runtime(lambda: FakeEngine(slots=4, ctx=1024), Settings(reuse="exact")) as runtime,
        serving(runtime, model_id="fake") as server,
    ):
        for messages, content in answers:
            key = repr(messages)
            if key not in cold:
                body = {"messages": messages, "max_tokens": 16, "temperature": 0, "cache_prompt": False}
                cold[key] = server.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
            assert content == cold[key]
    assert len(cold) >= ANSWERS // 2
