"""Normalize: removes the noise of clients from a conversation before it is rendered.

Conversations with the same meaning must give the same prompt. `RULES` has a rule for each kind of noise, in the order in which
they apply. `--keep-noise NAME` leaves one out. Values are never changed in place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headstart.chat.reply_memory import ConversationDigest, ReplyMemory
from headstart.errors import ConfigError
from headstart.interfaces.conversation import Conversation, Message
from headstart.output.canonical_json import HINTS, canonical_arguments
from headstart.prompt.chat_template import Template

JOIN = "\n"
"""Separates the text parts of one message, as in llama-server and vLLM."""

BETWEEN = "\n\n"
"""Separates messages that are merged because the template takes only one."""

MOST_MARKS = 4
"""Most breakpoints that are used: the last ones. Vendors allow four, and each costs tokenising the text before it."""

_MARKS = "\0marks"
"""Key under which the rule `parts` notes, for the rule `hints`, where a message's parts had hints: positions in characters."""

_HINTED = HINTS | {_MARKS}

_written = json.JSONEncoder(ensure_ascii=False).encode

_BILLING = re.compile(r"x-anthropic-billing-header:[^\n]*\n*")


@dataclass(frozen=True, slots=True)
class Ground:
    """What rules may read beside the conversation."""

    template: Template
    reply_memory: ReplyMemory


@dataclass(frozen=True, slots=True)
class Rule:
    """One kind of noise.

    Attributes:
        what: what it makes equal.
        remembers: whether it needs memory, so that the prompt depends on earlier requests. Exact mode does not use such rules.
    """

    name: str
    what: str
    apply: Callable[[Conversation, Ground], Conversation]
    remembers: bool = False


def normalise(conversation: Conversation, ground: Ground, keep: Collection[str] = ()) -> Conversation:
    """The canonical form of a conversation. `keep`: names of rules to leave out."""
    for rule in RULES:
        if rule.name not in keep:
            conversation = rule.apply(conversation, ground)
    return conversation


def normalise_reply(message: Message, conversation: Conversation, ground: Ground, keep: Collection[str] = ()) -> Message:
    """A reply to a canonical conversation, in the form that it will have in the canonical form of the next request."""
    alone = replace(conversation, messages=(message,))
    return message if "arguments" in keep else _arguments(alone, ground).messages[0]


def check_rules(names: Collection[str]) -> None:
    """Raises ConfigError for a rule that does not exist."""
    known = [rule.name for rule in RULES]
    if strange := sorted(set(names) - set(known)):
        raise ConfigError(f"--keep-noise must be one of {', '.join(known)}, not '{strange[0]}'.")


def parts_of(message: Message) -> list[dict[str, Any]]:
    """A message's content as text parts."""
    content = message.get("content")
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return list(content or ())


# ── rules ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _billing(conversation: Conversation, ground: Ground) -> Conversation:
    first = conversation.messages[0] if conversation.messages else {}
    if first.get("role") not in ("system", "developer"):
        return conversation
    content = first.get("content")
    if isinstance(content, str):
        kept: Any = _BILLING.sub("", content, count=1) if _BILLING.match(content) else content
    else:
        kept = [part for part in content or () if not _BILLING.fullmatch(part["text"])]
    if kept == content:
        return conversation
    rest = conversation.messages[1:]
    return replace(conversation, messages=({**first, "content": kept}, *rest) if kept else rest)


def _roles(conversation: Conversation, ground: Ground) -> Conversation:
    given = conversation.messages
    messages = [{**message, "role": "system"} if message["role"] == "developer" else message for message in given]
    if not ground.template.late_system:
        lead = next((number for number, message in enumerate(messages) if message["role"] != "system"), len(messages))
        head = [_merged(messages[:lead])] if lead else []
        messages = head + [{**late, "role": "user"} if late["role"] == "system" else late for late in messages[lead:]]
    if not ground.template.neighbours:
        joined: list[Message] = []
        for message in messages:
            if joined and message["role"] == joined[-1]["role"] == "user":
                joined[-1] = _merged([joined[-1], message])
            else:
                joined.append(message)
        messages = joined
    return replace(conversation, messages=tuple(messages))


def _merged(messages: Sequence[Message]) -> Message:
    if len(messages) == 1:
        return messages[0]
    parts: list[dict[str, Any]] = []
    for message in messages:
        own = parts_of(message)
        if parts and own:
            parts[-1] = {**parts[-1], "text": parts[-1]["text"] + BETWEEN.removesuffix(JOIN)}
        if own:  # a message's hints belong to its end, which is now the end of its last part
            own[-1] = {**own[-1], **{key: message[key] for key in HINTS & message.keys()}}
        parts += own
    return {**{key: item for key, item in messages[0].items() if key not in HINTS}, "content": parts}


def _parts(conversation: Conversation, ground: Ground) -> Conversation:
    return replace(conversation, messages=tuple(map(_joined, conversation.messages)))


def _joined(message: Message) -> Message:
    content = message.get("content")
    if isinstance(content, str):
        return message
    text, marks = "", []
    for part in content or ():
        text += (JOIN if text else "") + part["text"]
        if HINTS & part.keys():
            marks.append(len(text))
    return {**message, "content": text, **({_MARKS: marks} if marks else {})}


def _hints(conversation: Conversation, ground: Ground) -> Conversation:
    breakpoints = list(conversation.breakpoints)
    for number, message in enumerate(conversation.messages):
        content = message.get("content")
        marks = message.get(_MARKS, [])
        if isinstance(content, str) and not HINTS.isdisjoint(message):
            marks = [*marks, len(content)]
        breakpoints += [(number, mark) for mark in marks]
    return replace(
        conversation,
        messages=tuple(map(_without_hints, conversation.messages)),
        tools=tuple(map(_without_hints, conversation.tools)),
        breakpoints=tuple(sorted(set(breakpoints))[-MOST_MARKS:]),
    )


def _without_hints(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    kept = value if _HINTED.isdisjoint(value) else {key: item for key, item in value.items() if key not in _HINTED}
    content = kept.get("content")
    return {**kept, "content": [*map(_without_hints, content)]} if isinstance(content, list) else kept


def _arguments(conversation: Conversation, ground: Ground) -> Conversation:
    functions = [tool["function"] for tool in conversation.tools]
    schemas = {function["name"]: function.get("parameters") for function in functions}

    def canonical(call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        arguments = canonical_arguments(function.get("arguments"), schemas.get(function["name"]))
        if ground.template.text_arguments and not isinstance(arguments, str):
            arguments = _written(arguments)
        return {**call, "function": {**function, "arguments": arguments}}

    def with_canonical_calls(message: Message) -> Message:
        calls = message.get("tool_calls")
        return {**message, "tool_calls": [canonical(call) for call in calls]} if calls else message

    return replace(conversation, messages=tuple(map(with_canonical_calls, conversation.messages)))


def _schemas(conversation: Conversation, ground: Ground) -> Conversation:
    if not conversation.tools:
        return conversation
    return replace(conversation, tools=ground.reply_memory.tools(conversation.salt, conversation.tools))


def _reasoning(conversation: Conversation, ground: Ground) -> Conversation:
    if not ground.reply_memory.replies:
        return conversation
    digest = ConversationDigest(conversation.salt)
    messages = list(conversation.messages)
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            reasoning = ground.reply_memory.reasoning(digest, message)
            # openai's stream helper for Node keeps only the last delta of a field that it does not know.
            if reasoning is not None and reasoning.rstrip().endswith((message.get("reasoning_content") or "").rstrip()):
                messages[number] = {**message, "reasoning_content": reasoning}
        digest.add(message)
    return replace(conversation, messages=tuple(messages))


def _clock(conversation: Conversation, ground: Ground) -> Conversation:
    if "strftime_now" not in ground.template.source or "strftime_now" in conversation.template_kwargs:
        return conversation
    roles = [message["role"] for message in conversation.messages]
    until = roles.index("user") + 1 if "user" in roles else len(roles)
    beginning = json.dumps([conversation.tools, conversation.messages[:until]], default=str)
    clock = ground.reply_memory.clock(conversation.salt, beginning, begins="assistant" not in roles)
    return replace(conversation, template_kwargs={**conversation.template_kwargs, "strftime_now": clock})


RULES: tuple[Rule, ...] = (
    Rule("billing", "Claude Code's first system block, which has its version and differs between conversations", _billing),
    Rule("roles", "developer and system; late system messages and users, if the template takes none; adjacent users", _roles),
    Rule("parts", "a text, and a list of parts with that text", _parts),
    Rule("hints", "with or without cache_control and prompt_cache_breakpoint; the last four become checkpoints", _hints),
    Rule("schemas", "tools with other spacing or order of keys", _schemas),
    Rule("arguments", "arguments of tool calls with other spacing or order of keys", _arguments),
    Rule("reasoning", "a reply, and the same without its reasoning or with only the end of it", _reasoning, remembers=True),
    Rule("clock", "the date in a template: it stays that of the conversation's first request", _clock, remembers=True),
)
