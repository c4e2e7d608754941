"""The agent case: a status line in the middle of the system prompt changes at the third of four requests.

By default on a tiny model; on the bundled one it is `slow`.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
import pytest

from harness import Answer, Messages, Oracle, assistant, system, user
from headstart.engines.llama import LlamaEngine
from headstart.interfaces.tokens import Tokens, common_prefix
from headstart.prefix_cache.blocks import Chain, last_block_boundary
from headstart.serving.runtime import Runtime
from live import wait_until
from process import SHARED, serving
from restarts import BLOCK_SIZE, ask, assert_near, assert_same, load, running, written
from talks import talk

CTX = 2048
REPLY = 12
HANDBOOK = files("headstart").joinpath("data/handbook.txt").read_text("utf-8")
TOOLS = [
    {"name": "find_tool", "description": "Looks for a tool in the shed.", "parameters": {"name": "string"}},
    {"name": "lend", "description": "Lends a tool to a member.", "parameters": {"tool": "string", "member": "string"}},
]
STATUS = ("No jobs wait.", "No jobs wait.", "3 jobs wait, 1 has failed.", "3 jobs wait, 1 has failed.")
RESULTS = (
    "Lend a ladder to Tom.",
    '{"tool": "find_tool", "result": [{"id": 17, "name": "ladder", "in": true}, {"id": 18, "name": "step", "in": false}]}',
    '{"tool": "lend", "result": "lent until Saturday 14:00", "fee": 2.5}',
    '{"tool": "find_tool", "result": "the shed is closed"}',
)


def opening(status: str) -> dict[str, Any]:
    return system(f"{HANDBOOK[:450]}\nTools: {json.dumps(TOOLS)}\nStatus: {status}\n{HANDBOOK[450:800]}")


def requests(replies: list[str]) -> Messages:
    """The request that follows on so many replies."""
    messages = [opening(STATUS[len(replies)]), user(RESULTS[0])]
    for reply, result in zip(replies, RESULTS[1:], strict=False):
        messages += [assistant(reply), user(result)]
    return messages


@pytest.fixture(scope="module", params=["tiny", pytest.param("demo", marks=pytest.mark.slow)])
def model(request: pytest.FixtureRequest) -> Path:
    found: Path = request.getfixturevalue(f"{request.param}_model")
    return found


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[LlamaEngine]:
    loaded = load(model, slots=1, ctx=CTX)
    yield loaded
    loaded.close()


def on_disk(rt: Runtime, prompt: Tokens, *, canonical: bool) -> bool:
    """Whether the disk has all of a prompt but its open tail. `canonical`: and none of it derived."""
    chain = Chain(rt.scheduler.slots[0].root, BLOCK_SIZE, prompt[: last_block_boundary(len(prompt), BLOCK_SIZE)])
    entries = [rt.cache.index.get(piece) for piece in chain.ids]
    return all(entry is not None and entry.copies.get("disk") in (True, canonical) for entry in entries)


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("mode", ["fast", "exact"])
def test_four_requests(engine: LlamaEngine, tmp_path: Path, mode: str, restart: bool) -> None:
    oracle, replies, answers, costs = Oracle(), list[str](), list[Answer](), list[int]()

    def request(rt: Runtime) -> None:
        messages = requests(replies)
        costs.append(oracle.cost(rt.chat_prompt(talk(messages)).tokens))
        answer = ask(rt, messages, max_tokens=REPLY)
        oracle.learn(answer)
        answers.append(answer)
        replies.append(answer.text)

    with running(engine, mode, tmp_path) as rt:
        for _ in range(3):
            request(rt)
        written(rt)
        wait_until(lambda: on_disk(rt, answers[2].prompt, canonical=mode == "exact"))
        if not restart:
            request(rt)
    if restart:
        with running(engine, mode, tmp_path) as rt:
            request(rt)
        assert answers[3].report.tiers == {"disk": answers[3].report.cached}

    _, second, third, fourth = answers
    change = common_prefix(third.prompt, second.prompt)
    assert BLOCK_SIZE < change < len(rt.prompter.chat(talk([opening(STATUS[2])])).tokens) - BLOCK_SIZE, (
        "in the middle of the system prompt"
    )
    assert third.report.computed <= len(third.prompt) - change + 64
    for answer, cost, earlier in ((second, costs[1], answers[0]), (fourth, costs[3], third)):
        unsettled = len(earlier.finish.tokens) if mode == "exact" else 0
        assert answer.report.computed <= 1.02 * cost + unsettled + 64
    (assert_same if mode == "exact" else assert_near)([fourth], engine)


@pytest.mark.slow  # by default test_restart kills a server, and a new runtime takes the place of one in test_four_requests
@pytest.mark.parametrize("mode", ["fast", "exact"])
def test_four_requests_and_a_kill_before_the_last(model: Path, engine: LlamaEngine, tmp_path: Path, mode: str) -> None:
    options = (str(model), *SHARED, "--port", "0")
    oracle, replies = Oracle(), list[str]()
    with running(engine, memory=0) as rt:

        def post(url: str, **more: Any) -> tuple[dict[str, Any], int]:
            """An answer, and its O."""
            messages = requests(replies)
            prompt = rt.chat_prompt(talk(messages)).tokens
            body = {"messages": messages, "max_tokens": REPLY, "temperature": 0, "logprobs": True, "top_logprobs": 3, **more}
            answer: dict[str, Any] = httpx.post(f"{url}/chat/completions", json=body, timeout=120).raise_for_status().json()
            assert answer["usage"]["prompt_tokens"] == len(prompt)
            cost = oracle.cost(prompt)
            reply = answer["choices"][0]["message"]["content"]
            oracle.learn_tokens([*prompt.tolist(), *engine.tokenizer.tokenize(reply)])
            return answer, cost

        with serving(*options, "--cache-dir", str(tmp_path), "--reuse", mode) as server:
            url = address(server.line("listening"))
            for _ in range(3):
                answer, cost = post(url)
                replies.append(answer["choices"][0]["message"]["content"])
            assert answer["headstart"]["computed"] <= cost + 64
            time.sleep(2)
            server.end(signal.SIGKILL)
        unsettled = answer["usage"]["completion_tokens"] if mode == "exact" else 0
        with serving(*options, "--cache-dir", str(tmp_path), "--reuse", mode) as server:
            url = address(server.line("listening"))
            answer, cost = post(url)
            if mode == "exact":
                fresh, _ = post(url, cache_prompt=False)
                assert answer["choices"] == fresh["choices"], "what was said, and its log-probabilities"
            assert server.end() == 0
    assert answer["headstart"]["computed"] <= 1.02 * cost + unsettled + 64
    assert answer["headstart"]["tiers"] == {"disk": answer["headstart"]["cached"]}


def address(line: str) -> str:
    return next(word.removeprefix("url=") for word in line.split() if word.startswith("url="))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fast", "exact"])
def test_a_recorded_agent_whose_status_changes(demo_model: Path, data_dir: Path | None, tmp_path: Path, mode: str) -> None:
    """What came back is what was recorded, not what this model replied; a restart before each request."""
    if data_dir is None:
        pytest.skip("no recorded conversations: set HEADSTART_DATA")
    recorded = json.loads((data_dir / "taubench" / "gpt-4o-airline.json").read_text())[0]["traj"]
    chat = [
        {
            "role": "user" if one["role"] == "tool" else one["role"],
            "content": one["content"] or json.dumps(one.get("tool_calls")),
        }
        for one in recorded
    ]
    policy, asked = chat[0]["content"], [number for number, one in enumerate(chat) if one["role"] == "user"][:6]
    engine, oracle, answers = load(demo_model, slots=1, ctx=4096), Oracle(), list[Answer]()
    for number, end in enumerate(asked):
        middle = f"{policy[: len(policy) // 2]}\nStatus: {number // 3} jobs wait.\n{policy[len(policy) // 2 :]}"
        with running(engine, mode, tmp_path) as rt:
            messages = [system(middle), *chat[1 : end + 1]]
            cost = oracle.cost(rt.chat_prompt(talk(messages)).tokens)
            answers.append(ask(rt, messages, max_tokens=1))
            oracle.learn(answers[-1])
            assert answers[-1].report.computed <= 1.02 * cost + 64
    (assert_same if mode == "exact" else assert_near)(answers[-1:], engine)
    engine.close()
