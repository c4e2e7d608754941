"""Chat model: from a conversation to a request, and from a reply to a message, for every dialect and the library.

conversation ─▶ normalize ─▶ prompt ─▶ request ─▶ (engine thread) ─▶ reply builder ─▶ message
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from headstart.chat.normalize import normalise_reply
from headstart.chat.prompt_model import PromptModel
from headstart.chat.reply_builder import ReplyBuilder, ReplyReader
from headstart.chat.reply_memory import Moment
from headstart.errors import InvalidRequest
from headstart.interfaces.conversation import Conversation, Format, Message, Tool
from headstart.interfaces.generation import GenerationParams
from headstart.interfaces.sampling import Grammar
from headstart.output.grammar import grammar_for
from headstart.prompt.family_detection import Family
from headstart.serving.expiry import Erasure
from headstart.serving.request import Request
from headstart.serving.runtime import Runtime

log = logging.getLogger("headstart.chat")

_PLAIN = Family("text")
_SCHEMA = "failed to compile JSON schema: "
"""llguidance's words before the error in a schema."""


class ChatModel(PromptModel):
    """A loaded model with the memory of its conversations. Thread-safe.

    Args:
        keep_noise: as for `PromptModel`.
    """

    def __init__(self, runtime: Runtime, keep_noise: Collection[str] = ()) -> None:
        super().__init__(runtime.prompts, keep_noise)
        self.runtime = runtime
        self._deletion_count = 0  # how often a chain has been deleted from the disk
        runtime.on_erase(self._erase)

    def request(self, conversation: Conversation, params: GenerationParams, seed: str) -> tuple[Request, ReplyReader]:
        """The request for a reply, and how to parse the reply.

        Args:
            seed: the id of the answer; the ids of tool calls are derived from it.

        Raises:
            InvalidRequest: the template refuses the messages, a schema or grammar cannot be used, or a tool does not exist.
            ContextTooLong: the conversation does not fit.
        """
        conversation, prompt = self.reply_prompt(conversation, use_reply_tokens=params.reuse)
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
            if conversation.messages and not self.must_forget(conversation.salt, reader.moment):
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
        return Moment(self.runtime.clock(), self._deletion_count)

    def must_forget(self, salt: str, since: Moment) -> bool:
        """Whether data that arrived at a moment must not be kept: it has expired, or its chain may have been deleted since."""
        return since.deletion_count != self._deletion_count or self.runtime.due(salt, since.time)

    def _erase(self, erasure: Erasure) -> None:
        if erasure.hints:
            self.reply_memory.clear()
        self._deletion_count += erasure.chains

    # ── grammars ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def plain_grammar(self, wanted: Format | None) -> Grammar | None:
        """The grammar for raw text in a format. Raises InvalidRequest."""
        if wanted is None:
            return None
        with _naming(wanted):
            return grammar_for(_PLAIN, response_format=response_format(wanted), controls=self.runtime.prompter.controls)

    def _grammar(self, reader: ReplyReader) -> Grammar | None:
        conversation = reader.conversation
        choice = conversation.choice
        tools = callable_tools(conversation)
        others = len(tools) < len(conversation.tools)
        mode: Any = choice.mode if choice.name is None else {"type": "function", "function": {"name": choice.name}}
        controls = self.runtime.prompter.controls

        def build(tools: Sequence[Tool], choice: Any, parallel: bool, text: Format | None, others: bool) -> Grammar | None:
            form = response_format(text)
            with _naming(text):
                return grammar_for(reader.family, tools, choice, parallel, form, reader.thinking, controls, others)

        def check(tools: Sequence[Tool]) -> Grammar | None:
            grammar = build(tools, mode, choice.parallel, wanted, others)
            return None if grammar is None else self.runtime.check_grammar(grammar, salt=conversation.salt, param=param)

        def alone(tool: Tool) -> Grammar | None:
            return build([tool], "required", False, None, False)

        wanted = conversation.format
        param = wanted.param if wanted is not None else "tools"
        try:
            return check(tools)
        except InvalidRequest as error:
            if _SCHEMA not in error.message:
                raise
        # The caller does not see the combined grammar, so a position in it would not help. Checking each schema alone shows
        # which one is wrong.
        tools = tuple(self._followed(tool, alone) for tool in tools)
        self._blame(build((), "none", False, wanted, False), f"Invalid '{param}': its schema", param)
        return check(tools)

    def _followed(self, tool: Tool, alone: Callable[[Tool], Grammar | None]) -> Tool:
        """A tool with as much of its schema as can be followed. Raises InvalidRequest if it is strict, and not all can be.

        Args:
            alone: the grammar of a call of a tool.
        """
        function = tool["function"]
        what = f"Invalid 'tools': the schema of '{function['name'][:100]}'"
        if function.get("strict"):
            self._blame(alone(tool), what, "tools")
            return tool
        for schema in (function.get("parameters"), without_patterns(function.get("parameters"))):
            weaker: Tool = {**tool, "function": {**function, "parameters": schema}}
            with suppress(InvalidRequest):
                self._blame(alone(weaker), what, "tools")
                return weaker
        log.info("a tool's schema cannot be followed, so its arguments are free")
        return {**tool, "function": {"name": function["name"]}}

    def _blame(self, grammar: Grammar | None, what: str, param: str) -> None:
        try:
            if grammar is not None:
                self.runtime.check_grammar(grammar)
        except InvalidRequest as error:
            why = error.message.partition(_SCHEMA)[2] or error.message
            raise InvalidRequest(f"{what} cannot be followed: {why}", param=param) from None


@contextmanager
def _naming(wanted: Format | None) -> Iterator[None]:
    """Errors about a format name the caller's field."""
    try:
        yield
    except InvalidRequest as error:
        if wanted is not None and error.param == "response_format":
            error.param = wanted.param
        raise


def response_format(wanted: Format | None) -> Mapping[str, Any] | None:
    """A format as OpenAI's `response_format`."""
    if wanted is None or wanted.kind == "json_object":
        return None if wanted is None else {"type": "json_object"}
    if wanted.kind == "json_schema":
        return {"type": "json_schema", "json_schema": {"schema": json.loads(wanted.text), "strict": wanted.strict}}
    return {"type": wanted.kind, wanted.kind: wanted.text}


def without_patterns(schema: Any) -> Any:
    """A JSON schema without its regular expressions: clients write some, with look-ahead, that llguidance cannot read."""
    if isinstance(schema, Mapping):
        return {key: without_patterns(value) for key, value in schema.items() if key != "pattern" or not isinstance(value, str)}
    return [without_patterns(one) for one in schema] if isinstance(schema, list | tuple) else schema


def callable_tools(conversation: Conversation) -> tuple[Tool, ...]:
    """The tools that a reply may call."""
    allowed = conversation.choice.allowed
    return tuple(tool for tool in conversation.tools if allowed is None or tool["function"]["name"] in allowed)
