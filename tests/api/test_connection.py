"""The line between caller and engine: kept alive, and cut as soon as the caller hangs up."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from harness import check
from headstart.api.app import create_app
from headstart.api.connection import EngineCall
from headstart.api.drain import Drain
from headstart.config import Settings
from headstart.errors import InvalidRequest
from headstart.interfaces.generation import GenerationParams
from headstart.interfaces.sampling import Sampling
from headstart.observe.metrics import Metrics
from headstart.serving.request import Failed, Finished, Request
from headstart.serving.runtime import Runtime
from headstart.testing.fake_engine import FakeEngine
from live import Server, idle, raw, serving, wait_until


@pytest.fixture(scope="module")
def slow() -> Iterator[Server]:
    """One slot; 20 ms a call, 8 tokens at most; a comment after 0.2 s of silence."""
    engine = FakeEngine(slots=1, ctx=4096, batch=8, delay=0.02)
    with Runtime(lambda: engine, Settings()) as runtime:
        with serving(runtime, model_id="fake", keep_alive=0.2) as server:
            yield server
        check(runtime)


def running(server: Server) -> int:
    assert server.runtime is not None
    return int(server.runtime.snapshot()["running"])


LONG = {"prompt": "hold the line", "max_tokens": 3000, "ignore_eos": True}


@pytest.mark.parametrize("stream", [True, False])
def test_hanging_up_while_the_reply_runs_frees_the_slot_at_once(slow: Server, stream: bool) -> None:
    aborted = slow.metric("vllm:request_success_total", finished_reason="abort")
    line = raw(slow, "/v1/completions", {**LONG, "stream": stream})
    wait_until(lambda: running(slow) == 1)
    time.sleep(0.1)  # well into the reply
    line.close()
    began = time.monotonic()
    wait_until(slow.idle)
    assert time.monotonic() - began < 0.5  # the whole reply would take a minute
    wait_until(lambda: slow.metric("vllm:request_success_total", finished_reason="abort") == aborted + 1)


@pytest.mark.parametrize("stream", [True, False])
def test_hanging_up_during_prefill_keeps_the_finished_blocks(slow: Server, stream: bool) -> None:
    body = {"prompt": f"{stream} " + "a long prompt " * 40, "max_tokens": 1, "stream": stream}  # 70 calls
    assert slow.runtime is not None
    engine = slow.runtime.engine
    assert isinstance(engine, FakeEngine)
    before = engine.prefilled
    line = raw(slow, "/v1/completions", body)
    wait_until(lambda: engine.prefilled > before + 200)
    line.close()
    wait_until(slow.idle)
    done = engine.prefilled - before
    assert done < 560
    answer = slow.post("/v1/completions", json={**body, "stream": False}).json()
    assert answer["headstart"]["cached"] >= done - 8


def test_hanging_up_in_the_queue_leaves_it(slow: Server) -> None:
    assert slow.runtime is not None
    snapshot = slow.runtime.snapshot
    first = raw(slow, "/v1/completions", LONG)
    wait_until(lambda: running(slow) == 1)
    second = raw(slow, "/v1/completions", LONG)
    wait_until(lambda: snapshot()["waiting"] == 1)
    second.close()
    wait_until(lambda: snapshot()["waiting"] == 0)
    assert running(slow) == 1
    first.close()
    wait_until(slow.idle)


def test_comments_keep_a_waiting_line_alive(slow: Server) -> None:
    first = raw(slow, "/v1/completions", LONG)
    wait_until(lambda: running(slow) == 1)
    body = {"prompt": "after you", "max_tokens": 2, "stream": True}
    comments = 0
    with slow.http.stream("POST", "/v1/completions", json=body) as response:
        for line in response.iter_lines():
            if line == ": waiting":
                comments += 1
                if comments == 3:
                    first.close()
    assert comments >= 3
    assert line in ("", "data: [DONE]")


def test_comments_and_progress_tell_how_far_the_prefill_is(slow: Server) -> None:
    prompt = "progress " * 30
    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 1, "stream": True, "return_progress": True}
    with slow.http.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = [line for line in response.iter_lines() if line]
    comments = [line for line in lines if line.startswith(": prefill ")]
    progress = [json.loads(line[6:])["prompt_progress"] for line in lines if '"prompt_progress"' in line]
    assert len(comments) == len(progress) >= 30
    total = progress[0]["total"]
    assert comments[0] == f": prefill {progress[0]['processed']}/{total}"
    assert [step["processed"] for step in progress] == sorted({step["processed"] for step in progress})
    assert all(step["processed"] < step["total"] == total and step["cache"] == 0 for step in progress)
    assert progress[-1]["time_ms"] > progress[0]["time_ms"] > 0
    with slow.http.stream("POST", "/v1/chat/completions", json={**body, "return_progress": False}) as response:
        assert "prompt_progress" not in response.read().decode()


def test_the_vendors_client_skips_comments(slow: Server) -> None:
    messages: Any = [{"role": "user", "content": "a prompt with progress comments " * 5}]
    chunks = list(
        slow.openai.chat.completions.create(
            model="fake", messages=messages, max_tokens=3, stream=True, extra_body={"ignore_eos": True}
        )
    )
    assert chunks[-1].choices[0].finish_reason == "length"


async def silent() -> Any:
    """A caller who says nothing more, and stays."""
    await asyncio.Event().wait()


def call_of(runtime: Runtime) -> EngineCall:
    return EngineCall(runtime, silent, beat=5.0, metrics=Metrics("fake", lambda: None), arrived=time.monotonic(), drain=Drain())


def rests(runtime: Runtime) -> None:
    """Nothing runs, and nothing begins to."""
    assert isinstance(runtime.engine, FakeEngine)
    wait_until(lambda: idle(runtime))
    prefilled, decoded = runtime.engine.prefilled, runtime.engine.decoded
    time.sleep(0.2)
    assert idle(runtime)
    assert (runtime.engine.prefilled, runtime.engine.decoded) == (prefilled, decoded)


def test_a_call_that_failed_submits_nothing_more() -> None:
    """A prompt that ends in the same batch as the failure of another one must not start the next."""
    engine = FakeEngine(slots=2, ctx=256)
    with Runtime(lambda: engine, Settings()) as runtime:
        requests = [Request(runtime.text_prompt(text), GenerationParams(max_tokens=2)) for text in ("fails", "ends", "never")]

        async def play() -> tuple[list[type], bool, bool]:
            engine.fail_next("prefill")
            call = call_of(runtime)
            call.submit(requests)
            async with call:
                wait_until(lambda: engine.prefilled > 0 and runtime.snapshot()["running"] == 0)  # the loop stands still
                time.sleep(0.05)
                batch = await call.take()
                return [type(event) for _, event in batch], call.done, idle(runtime)

        kinds, done, still = asyncio.run(play())
        assert kinds.index(Failed) < kinds.index(Finished)
        assert done
        assert still


def test_a_call_that_nobody_waits_for_is_not_submitted(monkeypatch: pytest.MonkeyPatch) -> None:
    with Runtime(lambda: FakeEngine(slots=1, ctx=4096), Settings()) as runtime:
        monkeypatch.setattr(runtime, "submit", lambda *_: pytest.fail("it was submitted"))

        async def play() -> None:
            call = call_of(runtime)
            call.abandon()
            call.submit([Request(runtime.text_prompt("hold the line"), GenerationParams(max_tokens=1))])

        asyncio.run(play())


def test_a_call_that_is_left_after_it_was_submitted_is_cancelled() -> None:
    with Runtime(lambda: FakeEngine(slots=1, ctx=4096, delay=0.02), Settings()) as runtime:

        async def play() -> None:
            call = call_of(runtime)
            call.submit([Request(runtime.text_prompt("hold the line"), GenerationParams(max_tokens=3000, ignore_eos=True))])
            call.abandon()

        asyncio.run(play())
        rests(runtime)


def test_a_handler_that_is_cancelled_leaves_no_request_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread goes on, and has understood when nobody waits for it any more."""
    with Runtime(lambda: FakeEngine(slots=1, ctx=4096, delay=0.02), Settings()) as runtime:
        understanding, left = threading.Event(), threading.Event()
        prompt, prompts = runtime.prompter.text, []

        def slowly(*args: Any, **more: Any) -> Any:
            understanding.set()
            assert left.wait(60)
            prompts.append(prompt(*args, **more))
            return prompts[-1]

        async def play() -> None:
            transport = httpx.ASGITransport(create_app(runtime, model_id="fake"))
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
                call = asyncio.create_task(http.post("/v1/completions", json=LONG))
                await asyncio.to_thread(understanding.wait, 10)
                call.cancel()
                await asyncio.wait([call])
                left.set()

        monkeypatch.setattr(runtime.prompter, "text", slowly)
        asyncio.run(play())  # which waits for the thread
        assert prompts
        rests(runtime)


def test_a_call_of_which_one_prompt_is_refused_runs_none() -> None:
    with Runtime(lambda: FakeEngine(slots=2, ctx=4096, delay=0.02), Settings()) as runtime:
        fine = Request(runtime.text_prompt("hold the line"), GenerationParams(max_tokens=3000, ignore_eos=True))
        refused = replace(fine, params=GenerationParams(Sampling(logit_bias=((1 << 30, 1.0),))))

        async def play() -> None:
            with pytest.raises(InvalidRequest, match="logit_bias"):
                call_of(runtime).submit([fine, refused])

        asyncio.run(play())
        rests(runtime)
