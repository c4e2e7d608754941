"""Reply builder: one growing reply, from text to answer, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from blake3 import blake3

from headstart.chat.partial_json import is_object
from headstart.chat.reply_memory import Moment
from headstart.interfaces.conversation import Conversation, Message
from headstart.output.parser import Parser, ReasoningDelta, ReplyDelta, TextDelta, ToolCallDelta, ToolCallStart
from headstart.prompt.family_detection import Family
from headstart.serving.request import Delta, Finished, Report, Started, TokenLogprob
from headstart.serving.turn import Turn

FinishReason = Literal["stop", "length", "tool_calls"]


def call_id(seed: str, choice: int, index: int) -> str:
    """The id of a call in a reply, from the seed of the answer, the reply's number and the call's number."""
    return f"call_{blake3(f'{seed}/{choice}/{index}'.encode()).hexdigest()[:24]}"


@dataclass(frozen=True, slots=True)
class ReplyReader:
    """How the replies to a conversation are parsed.

    Attributes:
        tools: whether they may call tools; else the markers of calls are text.
        thinking: whether the prompt ends inside reasoning.
        prefill: the beginning of the reply, if the caller sent one.
        seed: for the ids of calls: the same reply has the same ids.
        moment: when the conversation arrived.
    """

    conversation: Conversation
    family: Family
    tools: bool
    thinking: bool
    prefill: str
    seed: str
    moment: Moment

    @property
    def parsed(self) -> bool:
        """Whether replies can contain more than text."""
        return self.tools or self.family.reasoning is not None or bool(self.family.extra)

    def parser(self) -> Parser:
        return Parser(self.family, tools=self.conversation.tools if self.tools else (), thinking=self.thinking)

    def call_id(self, choice: int, index: int) -> str:
        return call_id(self.seed, choice, index)

    def complete(self, message: Message) -> dict[str, Any]:
        """The message with the beginning that the caller sent."""
        return {**message, "content": self.prefill + (message.get("content") or "")}


@dataclass(slots=True)
class ToolCallBuilder:
    """A growing tool call. `arguments`: JSON text."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class ReplyBuilder:
    """One reply. `index`: its place in the answer; `choice`: its number among the replies to its prompt.

    Attributes:
        reader: None for raw text.
        deltas: what the caller got so far, in the model's order.
        texts, thoughts, calls: the same by kind.
        prompt_logprobs: of the prompt's tokens, if requested.
        finish: how it ended; None before.
        stopped_by: the stop text that ended it.
        reasoning_tokens: approximate tokens of reasoning; tokens that gave no new text are not counted.
        report: the costs of the prompt, once the reply has started.
        turn: for `Runtime.remember`, once the reply is complete.
        began: when it started, in seconds after the arrival of the call.
        tokens: approximate tokens so far; tokens that gave no new text are not counted.
    """

    index: int
    choice: int = 0
    reader: ReplyReader | None = None
    deltas: list[ReplyDelta] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[ToolCallBuilder] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None
    stopped_by: str | None = None
    reasoning_tokens: int = 0
    report: Report | None = None
    turn: Turn | None = None
    began: float = 0.0
    tokens: int = 0
    _parser: Parser | None = None

    def __post_init__(self) -> None:
        if self.reader is not None:
            self._parser = self.reader.parser() if self.reader.parsed else None

    def start(self, event: Started) -> None:
        self.report = event.report
        self.prompt_logprobs = event.prompt_logprobs

    def take(self, event: Delta) -> Sequence[ReplyDelta]:
        """The deltas of more text."""
        self.tokens += 1
        self.logprobs.extend(event.logprobs)
        if self._parser is None:
            return self._keep([TextDelta(event.text)] if event.text else [])
        deltas = self._keep(self._parser.feed(event.text))
        self.reasoning_tokens += any(isinstance(delta, ReasoningDelta) for delta in deltas)
        return deltas

    def end(self, event: Finished) -> Sequence[ReplyDelta]:
        """The last deltas, when the reply is complete."""
        deltas = self._keep(self._parser.end(cut=event.cut)) if self._parser is not None else ()
        self.report, self.turn = event.report, event.turn
        self.stopped_by = event.stopped_by
        self.finish = event.reason
        if self.calls and event.reason == "stop" and all(is_object(call.arguments) for call in self.calls):
            self.finish = "tool_calls"
        return deltas

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def reasoning(self) -> str:
        return "".join(self.thoughts)

    @property
    def parsed(self) -> Message | None:
        """The reply as a message; None if the message leaves out its end, because it was cut there."""
        if self._parser is not None and self._parser.left_out:
            return None
        return self._message

    @property
    def message(self) -> Message:
        """The message that the caller will send back."""
        return self.reader.complete(self._message) if self.reader is not None else self._message

    @property
    def _message(self) -> Message:
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.thoughts:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.calls
            ]
        return message

    def _keep(self, deltas: Sequence[ReplyDelta]) -> Sequence[ReplyDelta]:
        self.deltas += deltas
        for delta in deltas:
            if isinstance(delta, TextDelta):
                self.texts.append(delta.text)
            elif isinstance(delta, ReasoningDelta):
                self.thoughts.append(delta.text)
            elif isinstance(delta, ToolCallStart):
                assert self.reader is not None
                self.calls.append(ToolCallBuilder(self.reader.call_id(self.choice, delta.index), delta.name))
            elif isinstance(delta, ToolCallDelta):
                self.calls[delta.index].arguments += delta.text
        return deltas
