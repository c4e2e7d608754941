"""Chat model: from a conversation to a request, and from a reply to a message, for every dialect and the library.

conversation ─▶ normalize ─▶ prompt ─▶ request ─▶ (engine thread) ─▶ reply builder ─▶ message
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from headstart.chat.normalize import RULES, Ground, normalise, normalise_reply
from headstart.chat.reply_builder import ReplyBuilder, ReplyReader
from headstart.chat.reply_memory import Moment, ReplyMemory
from headstart.errors import ContextTooLong, InvalidRequest
from headstart.interfaces.conversation import Conversation, Format, Message, Tool
from headstart.interfaces.engine import Grammar
from headstart.interfaces.generation import GenerationParams
from headstart.output.grammar import grammar_for
from headstart.prompt.builder import Prompt
from headstart.prompt.family_detection import Family
from headstart.serving.expiry import Erasure
from headstart.serving.request import Request
from headstart.serving.runtime import Runtime

log = logging.getLogger("headstart.chat")

_PLAIN = Family("text")
_SCHEMA = "failed to compile JSON schema: "
"""llguidance's words before the error in a schema."""


class ChatModel:
    """A loaded model with the memory of its conversations. Thread-safe.

    Args:
        keep_noise: names of rules in `normalize.RULES` to leave out. Exact mode also leaves out the rules that need memory.

    Attributes:
        reply_memory: the parts of replies that callers may not send back.
    """

    def __init__(self, runtime: Runtime, keep_noise: Collection[str] = ()) -> None:
        self.runtime = runtime
        self.reply_memory = ReplyMemory()
        exact = {rule.name for rule in RULES if rule.remembers} if runtime.reuse == "exact" else set()
        self._keep_noise = frozenset(keep_noise) | exact
        self._ground = Ground(runtime.prompter.template, self.reply_memory)
        self._wipes = 0  # how often a chain has been deleted from the disk
        runtime.on_erase(self._erase)

    def prompt(self, conversation: Conversation, *, use_reply_tokens: bool = True) -> tuple[Conversation, Prompt]:
        """A conversation in its canonical form, and its prompt.

        Raises what `Runtime.chat_prompt` raises, and InvalidRequest if two tools have the same name.
        """
        conversation = self.canonical(conversation)
        return conversation, self.runtime.chat_prompt(conversation, use_reply_tokens=use_reply_tokens)

    def canonical(self, conversation: Conversation) -> Conversation:
        """The canonical form of a conversation. Raises InvalidRequest if two tools have the same name."""
        names = Counter(tool["function"]["name"] for tool in conversation.tools)
        if twice := next((name for name, times in names.items() if times > 1), None):
            raise InvalidRequest(f"Invalid 'tools': two have the name '{twice[:100]}'.", param="tools")
        return _prefilled(normalise(conversation, self._ground, self._keep_noise))

    def count(self, conversation: Conversation) -> int:
        """Tokens of a conversation's prompt, even if it does not fit: clients count in order to know when to compact."""
        try:
            return len(self.prompt(conversation)[1])
        except ContextTooLong as error:
            return error.prompt_tokens

    def request(self, conversation: Conversation, params: GenerationParams, seed: str) -> tuple[Request, ReplyReader]:
        """The request for a reply, and how to parse the reply.

        Args:
            seed: the id of the answer; the ids of tool calls are derived from it.

        Raises:
            InvalidRequest: the template refuses the messages, a schema or grammar cannot be used, or a tool does not exist.
            ContextTooLong: the conversation does not fit.
        """
        _check(conversation)
        conversation, prompt = self.prompt(conversation, use_reply_tokens=params.reuse)
        family = self.runtime.prompter.family
        thinking = family.opened(prompt.text)
        calls = bool(conversation.tools) and conversation.choice.mode != "none"
        reader = ReplyReader(conversation, family, calls, thinking, conversation.prefill, seed, self.moment())

        request = Request(
            prompt,
            params,
            grammar=self._grammar(reader),
            visible=self.runtime.prompter.visible,
            alias=seed,
        )
        return request, reader

    def remember(self, builders: Sequence[ReplyBuilder]) -> None:
        """Records complete replies for later requests. Call it before the caller's client can send them back.

        It takes milliseconds. Do not call it on an event loop.
        """
        for builder in builders:
            reader = builder.reader
            if reader is None:
                self.runtime.remember(builder.turn)
                continue
            conversation, message = reader.conversation, builder.message
            if builder.turn is not None:
                raw: Message = {"role": "assistant", "content": builder.turn.reply}
                self.runtime.remember(builder.turn, self._sent_back(message, conversation), parsed=builder.parsed or raw)
            if conversation.messages and not self.late(conversation.salt, reader.moment):
                self.reply_memory.reply(conversation.salt, conversation.messages, message)

    def _sent_back(self, message: Message, conversation: Conversation) -> Message:
        """A reply as it will be in the canonical form of the next conversation."""
        try:
            return normalise_reply(message, conversation, self._ground, self._keep_noise)
        except Exception:  # a model may write anything
            log.exception("a reply could not be normalised")
            return message

    def moment(self) -> Moment:
        """The current moment."""
        return Moment(self.runtime.clock(), self._wipes)

    def late(self, salt: str, since: Moment) -> bool:
        """Whether data that arrived at a moment must not be kept: it has expired, or its chain may have been deleted since."""
        return since.wipes != self._wipes or self.runtime.due(salt, since.time)

    def _erase(self, erasure: Erasure) -> None:
        if erasure.hints:
            self.reply_memory.clear()
        self._wipes += erasure.stay is not None

    # ── grammars ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def plain_grammar(self, wanted: Format | None) -> Grammar | None:
        """The grammar for raw text in a format. Raises InvalidRequest."""
        if wanted is None:
            return None
        return grammar_for(_PLAIN, response_format=response_format(wanted), controls=self.runtime.prompter.controls)

    def _grammar(self, reader: ReplyReader) -> Grammar | None:
        conversation = reader.conversation
        choice = conversation.choice
        tools = callable_tools(conversation) if reader.tools else ()
        named = {"type": "function", "function": {"name": choice.name}}
        controls = self.runtime.prompter.controls

        def build(tools: Sequence[Tool], choice: Any, parallel: bool, text: Format | None) -> Grammar | None:
            return grammar_for(reader.family, tools, choice, parallel, response_format(text), reader.thinking, controls)

        wanted = conversation.format
        grammar = build(tools, choice.mode if choice.name is None else named, choice.parallel, wanted)
        if grammar is None:
            return None
        param = wanted.param if wanted is not None else "tools"
        try:
            return self.runtime.check_grammar(grammar, salt=conversation.salt, param=param)
        except InvalidRequest as error:
            if _SCHEMA not in error.message:
                raise
            # The caller does not see the combined grammar, so a position in it would not help. Checking each schema alone
            # shows which one is wrong.
            for tool in tools:
                what = f"Invalid 'tools': the schema of '{tool['function']['name'][:100]}'"
                self._blame(build([tool], "required", False, None), what, "tools")
            self._blame(build((), "none", False, wanted), f"Invalid '{param}': its schema", param)
            raise

    def _blame(self, grammar: Grammar | None, what: str, param: str) -> None:
        try:
            if grammar is not None:
                self.runtime.check_grammar(grammar)
        except InvalidRequest as error:
            why = error.message.partition(_SCHEMA)[2] or error.message
            raise InvalidRequest(f"{what} cannot be followed: {why}", param=param) from None


def response_format(wanted: Format | None) -> Mapping[str, Any] | None:
    """A format as OpenAI's `response_format`."""
    if wanted is None or wanted.kind == "json_object":
        return None if wanted is None else {"type": "json_object"}
    if wanted.kind == "json_schema":
        return {"type": "json_schema", "json_schema": {"schema": json.loads(wanted.text), "strict": wanted.strict}}
    return {"type": wanted.kind, wanted.kind: wanted.text}


def callable_tools(conversation: Conversation) -> tuple[Tool, ...]:
    """The tools that a reply may call."""
    allowed = conversation.choice.allowed
    return tuple(tool for tool in conversation.tools if allowed is None or tool["function"]["name"] in allowed)


def _prefilled(conversation: Conversation) -> Conversation:
    """A last message that the reply continues becomes `prefill`."""
    if not conversation.continues:
        return conversation
    *messages, last = conversation.messages
    if last.get("tool_calls") or not isinstance(last["content"], str):
        raise InvalidRequest("A message that the reply continues may contain only text.", param="messages")
    return replace(conversation, messages=tuple(messages), prefill=last["content"], continues=False)


def _check(conversation: Conversation) -> None:
    names = [tool["function"].get("name") for tool in conversation.tools]
    choice = conversation.choice
    for name in (choice.name, *(choice.allowed or ())):
        if name is not None and name not in names:
            raise InvalidRequest(f"Invalid 'tool_choice': there is no tool '{name[:100]}'.", param="tool_choice")
    if choice.mode == "required" and not names:
        raise InvalidRequest("Invalid 'tool_choice': a call is required, but there are no 'tools'.", param="tool_choice")
