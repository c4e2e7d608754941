"""Tool loops over HTTP with templates that lack something: what the server answered can be sent back to it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headstart.config import Settings
from headstart.serving.runtime import Runtime
from headstart.testing.fake_engine import FakeEngine, FakeTokenizer
from live import serving
from scripted import Scripted
from templates import NAMED_IDS, NINE, NO_SYSTEM, ONE_CALL, THINKING, TOOLS

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
SYSTEM = {"role": "system", "content": "You look things up before you answer, and say what you have found. " * 4}
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    '{"city": "Paris"}<|tool_call_end|><|tool_calls_section_end|>'
)


@pytest.mark.parametrize(
    ("source", "reply"),
    [
        (TOOLS, HERMES),
        (NO_SYSTEM, HERMES),
        (ONE_CALL, f"{HERMES}\n{HERMES}"),
        (NINE, f"{HERMES}\n{HERMES}"),
        (NAMED_IDS, KIMI),
        (THINKING, f"<think>\nI must look.\n</think>\n\n{HERMES}"),
    ],
    ids=["complete", "no system", "one call", "nine characters", "ids for names", "thinking"],
)
def test_a_reply_with_calls_can_be_sent_back_with_their_results(source: str, reply: str) -> None:
    """Fault: vendors' own templates refused the ids, the second call or the system message, and lost the reasoning."""
    engine = Scripted(FakeEngine(slots=1, ctx=4096, tokenizer=FakeTokenizer(chat_template=source)))
    with Runtime(lambda: engine, Settings(memory_budget=16 << 20, settle="off")) as runtime, serving(runtime) as server:
        messages: list[dict[str, Any]] = [SYSTEM, {"role": "user", "content": "How is it in Paris?"}]

        def ask(text: str) -> Any:
            engine.say(text)
            body = {"messages": messages, "tools": [TOOL], "max_tokens": 600, "temperature": 0}
            answer = server.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            return answer.json()

        message = ask(reply)["choices"][0]["message"]
        calls = message["tool_calls"]
        assert all(json.loads(call["function"]["arguments"]) == {"city": "Paris"} for call in calls)
        messages += [message, *({"role": "tool", "tool_call_id": call["id"], "content": "sunny"} for call in calls)]
        answer = ask("Sunny.")
        assert answer["choices"][0]["message"]["content"] == "Sunny."
        if len(calls) == 1:
            assert answer["headstart"]["computed"] < 120, "only the results are new"
