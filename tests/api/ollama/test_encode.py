"""Streams of Ollama's dialect say what the answer without a stream says, however the reply is cut."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from effort import examples
from headstart.api.ollama.encode import OllamaChatEncoder
from headstart.chat.reply_builder import ReplyReader
from headstart.chat.reply_memory import Moment
from headstart.interfaces.conversation import Conversation
from headstart.interfaces.generation import GenerationParams
from headstart.interfaces.tokens import as_tokens
from headstart.observe.report import summarise
from headstart.prompt.builder import Prompt
from headstart.prompt.family_detection import FAMILIES
from headstart.serving.request import Delta, Event, Finished, Report, Request

FAMILY = {family.name: family for family in FAMILIES}["glm"]
TOOL = {"type": "function", "function": {"name": "rm", "parameters": {"properties": {"path": {"type": "string"}}}}}
REPORT = Report(prompt=1, live=0, restored=0, computed=1, completion=1, mode="fast")

CALL = "<tool_call>rm\n<arg_key>path</arg_key>\n<arg_value>/a</arg_value>\n</tool_call>"
PARTS = [CALL, CALL.replace("/a", "/b"), CALL[:40], "Hello.", "\n\n", "a <tool_call> tag ", "<tool", "<think>", "</think>"]


def encoder() -> OllamaChatEncoder:
    conversation = Conversation(({"role": "user", "content": "hi"},), tools=(TOOL,))
    reader = ReplyReader(conversation, FAMILY, True, False, "", "seed", Moment(0.0, 0))
    return OllamaChatEncoder("fake", Request(Prompt("hi", as_tokens([1])), GenerationParams()), reader)


def said(messages: Sequence[Any]) -> tuple[str, str, list[Any]]:
    """The reasoning, the text and the calls of the messages."""
    return (
        "".join(message.get("thinking", "") for message in messages),
        "".join(message["content"] for message in messages),
        [call for message in messages for call in message.get("tool_calls", ())],
    )


@examples(400)
@given(st.lists(st.sampled_from(PARTS), max_size=6).map("".join), st.lists(st.integers(0, 400), max_size=8))
@example("a <tool_call> tag: " + CALL, [47])
@example(CALL + "Hello." + CALL, [70, 110])
def test_a_stream_says_the_same(reply: str, cuts: list[int]) -> None:
    ends = [0, *sorted(cut % (len(reply) + 1) for cut in cuts), len(reply)]
    end, summary = Finished(0, "stop", REPORT), summarise([[REPORT]])
    events: list[Event] = [*(Delta(0, reply[one:other]) for one, other in pairwise(ends)), end]
    streamed, whole = encoder(), encoder()
    lines = b"".join(streamed.encode(0, event, 0.0, lambda *_: summary) for event in events).splitlines()
    whole.take(0, Delta(0, reply))
    whole.take(0, end)
    assert said([json.loads(line)["message"] for line in lines]) == said([whole.whole(summary)["message"]])
