"""Model families: how models write reasoning and tool calls into a reply.

A family is a row of the table `FAMILIES`. The family of a model is found by a test: the model's own chat template renders a
known tool call, and the family is the first one whose parser reads that call back.

Example: a template writes `<tool_call>{"name": …}</tool_call>`. The first family that can parse this is `hermes`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from headstart.errors import InvalidRequest
from headstart.interfaces.conversation import Message
from headstart.output.formats import Family, ReasoningFormat, ToolCallFormat
from headstart.output.parser import Parser, ReplyDelta, message_of
from headstart.prompt.chat_template import Template

__all__ = ["FAMILIES", "GENERIC", "PLAIN", "Family", "ReasoningFormat", "ToolCallFormat", "family_of"]

THINK = ReasoningFormat("<think>", "</think>")

REASONINGS = (
    THINK,
    ReasoningFormat("[THINK]", "[/THINK]"),
    ReasoningFormat("<thinking>", "</thinking>"),
    ReasoningFormat("<seed:think>", "</seed:think>"),
    ReasoningFormat("<|START_THINKING|>", "<|END_THINKING|>"),
    ReasoningFormat("◁think▷", "◁/think▷"),
    ReasoningFormat("<|channel>thought", "<channel|>"),
    ReasoningFormat("Here is my thought process:", "Here is my response:"),
)
"""Searched in this order in a template's source."""

HERMES = ToolCallFormat("object", open="<tool_call>", close="</tool_call>", blank="\n", between="\n")

_XML = ToolCallFormat(
    "xml",
    begin="<tool_call>",
    open="<function=",
    name_end=">",
    key="<parameter=",
    key_end=">",
    value_end="</parameter>",
    close="</function>",
    finish="</tool_call>",
    blank="\n",
    between="\n",
    each=True,
)
_INVOKE = replace(
    _XML, each=False, blank="", open='<invoke name="', name_end='">', key='<parameter name="', key_end='">', close="</invoke>"
)

PLAIN = Family("plain", reasoning=THINK)
GENERIC = Family("generic", HERMES, THINK, adapted=True)

FAMILIES = (
    Family("hermes", HERMES, THINK),
    Family("qwen-xml", _XML, THINK),
    Family("seed", replace(_XML, blank="", begin="<seed:tool_call>", finish="</seed:tool_call>")),
    Family("minimax", replace(_INVOKE, begin="<minimax:tool_call>", finish="</minimax:tool_call>"), THINK),
    Family(
        "glm",
        ToolCallFormat(
            "xml",
            open="<tool_call>",
            name_end="\n",
            key="<arg_key>",
            key_end="</arg_key>\n<arg_value>",
            value_end="</arg_value>",
            close="</tool_call>",
            between="\n",
        ),
        THINK,
        extra=("</arg_key>", "<arg_value>"),
    ),
    Family(
        "mistral",
        ToolCallFormat("named", open="[TOOL_CALLS]", separator="[ARGS]", name_pattern=r"\s*(.*?)\s*(?:\[CALL_ID\].*)?"),
    ),
    Family("mistral-list", ToolCallFormat("list", open="[TOOL_CALLS]", blank=" ")),
    Family(
        "deepseek-r1",
        ToolCallFormat(
            "named",
            begin="<｜tool▁calls▁begin｜>",
            open="<｜tool▁call▁begin｜>",
            prefix="function<｜tool▁sep｜>",
            separator="\n```json\n",
            close="\n```<｜tool▁call▁end｜>",
            finish="<｜tool▁calls▁end｜>",
            between="\n",
        ),
        THINK,
        extra=("<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    ),
    Family(
        "deepseek",
        ToolCallFormat(
            "named",
            begin="<｜tool▁calls▁begin｜>",
            open="<｜tool▁call▁begin｜>",
            separator="<｜tool▁sep｜>",
            close="<｜tool▁call▁end｜>",
            finish="<｜tool▁calls▁end｜>",
        ),
        THINK,
    ),
    Family(
        "kimi",
        ToolCallFormat(
            "named",
            begin="<|tool_calls_section_begin|>",
            open="<|tool_call_begin|>",
            separator="<|tool_call_argument_begin|>",
            name_pattern=r"\s*(?:functions\.)?(.*?)(?::\d+)?\s*",
            close="<|tool_call_end|>",
            finish="<|tool_calls_section_end|>",
        ),
    ),
    Family("phi", ToolCallFormat("list", open="<|tool_call|>", close="<|/tool_call|>")),
    Family("phi-each", ToolCallFormat("object", open="<|tool_call|>", close="<|/tool_call|>")),
    Family("nemotron", ToolCallFormat("list", open="<TOOLCALL>", close="</TOOLCALL>"), THINK),
    Family("granite", ToolCallFormat("list", open="<|tool_call|>")),
    Family(
        "cohere",
        ToolCallFormat("list", open="<|START_ACTION|>", close="<|END_ACTION|>", name="tool_name", arguments="parameters"),
    ),
    Family(
        "harmony",
        ToolCallFormat("channels"),
        extra=("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>"),
    ),
    Family(
        "gemma4",
        ToolCallFormat("keyed", open="<|tool_call>", prefix="call:", quote='<|"|>', close="<tool_call|>"),
        ReasoningFormat("<|channel>thought", "<channel|>"),
        extra=("<|channel>",),
    ),
    Family("lfm-json", ToolCallFormat("list", open="<|tool_call_start|>", close="<|tool_call_end|>")),
    Family("lfm", ToolCallFormat("python", open="<|tool_call_start|>", close="<|tool_call_end|>")),
    Family("llama4", ToolCallFormat("python", begin="<|python_start|>", finish="<|python_end|>")),
    Family("llama", ToolCallFormat("object", begin="<|python_tag|>", arguments="parameters", between="; ")),
)
"""Tried in this order on the text that a template renders."""


def _variants(family: Family) -> list[Family]:
    """A family as in the table, and its variant: with values on lines of their own, or without."""
    if family.calls is None or family.calls.syntax != "xml":
        return [family]
    return [family, replace(family, calls=replace(family.calls, blank="" if family.calls.blank else "\n"))]


_PROBE = "headstart_probe"
_VALUES = {"headstart_key": "headstart value", "headstart_count": 3}
_TYPES = {"headstart_key": {"type": "string"}, "headstart_count": {"type": "integer"}}
_TOOL = {
    "type": "function",
    "function": {"name": _PROBE, "description": "?", "parameters": {"type": "object", "properties": _TYPES, "required": []}},
}


def family_of(template: Template) -> Family:
    """The family of a template. Never raises.

    It is `GENERIC`, whose form the prompt explains, if tools or calls are missing from the rendered text, or if no family can
    parse the calls. (Those that nearly are Hermes' are taken for them: its parser accepts more.) The form of its reasoning is
    the one that the template's source contains.
    """
    found = _family(template)
    if found.calls is not None and found.calls.syntax == "channels":
        return found
    return replace(found, reasoning=next((each for each in REASONINGS if each.close in template.source), None))


def _family(template: Template) -> Family:
    asked: Message = {"role": "user", "content": "?"}
    header = _rendered(template, [asked], generation=True)
    if _PROBE not in header:
        return GENERIC
    fallback = GENERIC
    id = f"functions.{_PROBE}:0" if template.call_ids == "named" else "call00000"
    for arguments in (_VALUES, json.dumps(_VALUES)):
        call = {"id": id, "type": "function", "function": {"name": _PROBE, "arguments": arguments}}
        calling = _rendered(template, [asked, {"role": "assistant", "content": "", "tool_calls": [call]}], generation=False)
        if calling.count(_PROBE) <= header.count(_PROBE):
            continue
        reply = _behind(header, calling)
        if HERMES.open in reply and '"name"' in reply:
            fallback = FAMILIES[0]
        for family in chain.from_iterable(map(_variants, FAMILIES)):
            if family.calls is not None and _written_as(family.calls, reply):
                parser = Parser(family, tools=[_TOOL])
                if _is_probe(parser.feed(reply) + parser.end()):
                    key = "parameters" if '"parameters"' in reply else "arguments"
                    return replace(family, calls=replace(family.calls, arguments=key))
    return fallback


def _written_as(calls: ToolCallFormat, reply: str) -> bool:
    """Whether the test call is written with the marks of `calls`, exactly. (Parsers accept more.)"""
    inside = {"object": r"\s*\{", "list": r"\s*\[\s*\{"}.get(calls.syntax, "")
    value = f"{calls.blank}{_VALUES['headstart_key']}{calls.blank}{calls.value_end}" if calls.syntax == "xml" else ""
    return (
        all(marker in reply for marker in calls.written)
        and re.search(re.escape(calls.open) + inside, reply) is not None
        and value in reply
    )


def _rendered(template: Template, messages: Sequence[Message], *, generation: bool) -> str:
    try:
        return template.render(messages, tools=[_TOOL], generation=generation)
    except InvalidRequest:
        return ""


def _behind(header: str, calling: str) -> str:
    """The text of `calling` after `header`, from the start of a marker on: two markers may begin with the same text."""
    at = next((at for at, (one, other) in enumerate(zip(header, calling, strict=False)) if one != other), len(header))
    while at < len(header) and at and not (header[at - 1].isspace() or header[at - 1] in ">]"):
        at -= 1
    return calling[at:]


def _is_probe(deltas: Sequence[ReplyDelta]) -> bool:
    calls = message_of(deltas).get("tool_calls") or ()
    try:
        return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls] == [(_PROBE, _VALUES)]
    except ValueError:
        return False
