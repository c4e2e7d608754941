"""Chat model: a loaded model as conversations see it, whichever dialect or caller they come from.

conversation ─▶ normalize ─▶ prompt ─▶ request ─▶ (engine thread) ─▶ reply builder ─▶ message
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headstart.chat.normalize import RULES, Ground, normalise, normalise_reply
from headstart.chat.reply_builder import ReplyReader
from headstart.chat.reply_memory import Moment, ReplyMemory
from headstart.errors import ContextTooLong, InvalidRequest
from headstart.interfaces.conversation import Conversation, Format, Message, Tool
from headstart.interfaces.engine import Grammar, Sampling
from headstart.output.grammar import grammar_for
from headstart.prompt.builder import Prompt
from headstart.prompt.family_detection import Family
from headstart.serving.expiry import Erasure
from headstart.serving.request import Request
from headstart.serving.runtime import Runtime

_PLAIN = Family("text")
_SCHEMA = "failed to compile JSON schema: "
"""llguidance's words in front of what is wrong with a schema."""


@dataclass(frozen=True, slots=True)
class GenerationParams:
    """How replies are generated.

    Attributes:
        max_tokens: most tokens of a reply; None for as many as the context holds.
        stop: texts that end a reply and are not part of it.
        choices: replies to draw.
        reuse: whether cached KV may be used.
        ignore_eos: the model's end tokens are never drawn.
    """

    sampling: Sampling
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    choices: int = 1
    reuse: bool = True
    ignore_eos: bool = False


class ChatModel:
    """A loaded model, and what is remembered of the conversations with it. Thread-safe.

    Args:
        keep_noise: names of rules of `normalize` to leave out. Exact mode leaves out those that remember.

    Attributes:
        recall: what replies held that callers may not send back.
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
        """A conversation without the noise of its client. Raises InvalidRequest if two tools have the same name."""
        names = Counter(tool["function"]["name"] for tool in conversation.tools)
        if twice := next((name for name, times in names.items() if times > 1), None):
            raise InvalidRequest(f"Invalid 'tools': two have the name '{twice[:100]}'.", param="tools")
        return _prefilled(normalise(conversation, self._ground, self._keep_noise))

    def count(self, conversation: Conversation) -> int:
        """Tokens of a conversation's prompt, also of one that does not fit: clients count to know when to compact."""
        try:
            return len(self.prompt(conversation)[1])
        except ContextTooLong as error:
            return error.prompt_tokens

    def request(self, conversation: Conversation, params: GenerationParams, seed: str) -> tuple[Request, ReplyReader]:
        """The request for a reply, and how that is read.

        Args:
            seed: of the ids of calls; the id of the answer.

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

        def returns(text: str, cut: bool) -> Message:
            return normalise_reply(reader.message(text, cut=cut), conversation, self._ground, self._keep_noise)

        request = Request(
            prompt=prompt,
            sampling=params.sampling,
            max_tokens=params.max_tokens,
            stop=params.stop,
            choices=params.choices,
            reuse=params.reuse,
            ignore_eos=params.ignore_eos,
            grammar=self._grammar(reader),
            visible=self.runtime.prompter.visible,
            alias=seed,
            returns=returns,
        )
        return request, reader

    def remember(self, reader: ReplyReader, messages: Sequence[Message]) -> None:
        """Keeps what the caller may not send back of replies."""
        conversation = reader.conversation
        if not conversation.messages or self.late(conversation.salt, reader.moment):
            return
        for message in messages:
            self.reply_memory.reply(conversation.salt, conversation.messages, message)

    def moment(self) -> Moment:
        """Now."""
        return Moment(self.runtime.clock(), self._wipes)

    def late(self, salt: str, since: Moment) -> bool:
        """Whether nothing may be kept of what came at a moment: it is old, or a chain was deleted since, perhaps its."""
        return since.wipes != self._wipes or self.runtime.due(salt, since.time)

    def _erase(self, erasure: Erasure) -> None:
        if erasure.hints:
            self.reply_memory.clear()
        self._wipes += erasure.stay is not None

    # ── grammars ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def plain_grammar(self, wanted: Format | None) -> Grammar | None:
        """What a text must be that is not parsed. Raises InvalidRequest."""
        if wanted is None:
            return None
        return grammar_for(_PLAIN, response_format=response_format(wanted), controls=self.runtime.prompter.controls)

    def _grammar(self, reader: ReplyReader) -> Grammar | None:
        conversation = reader.conversation
        choice = conversation.choice
        tools = callable_tools(conversation) if reader.tools else ()
        named = {"type": "function", "function": {"name": choice.name}}
        controls = self.runtime.prompter.controls

        def made(tools: Sequence[Tool], choice: Any, parallel: bool, form: Format | None) -> Grammar | None:
            return grammar_for(reader.family, tools, choice, parallel, response_format(form), reader.thinking, controls)

        wanted = conversation.format
        grammar = made(tools, choice.mode if choice.name is None else named, choice.parallel, wanted)
        if grammar is None:
            return None
        param = wanted.param if wanted is not None else "tools"
        try:
            return self.runtime.check_grammar(grammar, salt=conversation.salt, param=param)
        except InvalidRequest as error:
            if _SCHEMA not in error.message:
                raise
            # A place in a grammar that nobody sees tells nothing: each schema alone tells which one it is.
            for tool in tools:
                what = f"Invalid 'tools': the schema of '{tool['function']['name'][:100]}'"
                self._blame(made([tool], "required", False, None), what, "tools")
            self._blame(made((), "none", False, wanted), f"Invalid '{param}': its schema", param)
            raise

    def _blame(self, grammar: Grammar | None, what: str, param: str) -> None:
        try:
            if grammar is not None:
                self.runtime.check_grammar(grammar)
        except InvalidRequest as error:
            said = error.message.partition(_SCHEMA)[2] or error.message
            raise InvalidRequest(f"{what} cannot be followed: {said}", param=param) from None


def response_format(wanted: Format | None) -> Mapping[str, Any] | None:
    """A format in OpenAI's form."""
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
        raise InvalidRequest("A reply that is begun can only have text in it.", param="messages")
    return replace(conversation, messages=tuple(messages), prefill=last["content"], continues=False)


def _check(conversation: Conversation) -> None:
    names = [tool["function"].get("name") for tool in conversation.tools]
    choice = conversation.choice
    for name in (choice.name, *(choice.allowed or ())):
        if name is not None and name not in names:
            raise InvalidRequest(f"Invalid 'tool_choice': there is no tool '{name[:100]}'.", param="tool_choice")
    if choice.mode == "required" and not names:
        raise InvalidRequest("Invalid 'tool_choice': a call is required, but there are no 'tools'.", param="tool_choice")
