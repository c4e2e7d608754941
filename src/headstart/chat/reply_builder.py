"""Draft: one reply as it grows, from text to what was said, thought and called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from blake3 import blake3

from headstart.chat.partial_json import is_object
from headstart.chat.reply_memory import Moment
from headstart.interfaces.conversation import Conversation, Message
from headstart.output.parser import Parser, ReasoningDelta, ReplyDelta, TextDelta, ToolCallDelta, ToolCallStart, message_of
from headstart.prompt.family_detection import Family
from headstart.serving.request import Delta, Finished, Report, Started, TokenLogprob

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class ReplyReader:
    """How the replies to a dialogue are read.

    Attributes:
        tools: whether they may call tools; else marks of a call are text.
        thinking: whether the prompt has already opened their reasoning.
        begun: the beginning of the reply that the caller gave.
        seed: of the ids of calls: the same reply has the same ids.
        moment: when the dialogue came.
    """

    conversation: Conversation
    family: Family
    tools: bool
    thinking: bool
    begun: str
    seed: str
    moment: Moment

    @property
    def parsed(self) -> bool:
        """Whether there can be more in a reply than text."""
        return self.tools or self.family.reasoning is not None or bool(self.family.extra)

    def parser(self) -> Parser:
        return Parser(self.family, tools=self.conversation.tools if self.tools else (), thinking=self.thinking)

    def call_id(self, choice: int, index: int) -> str:
        digest = blake3(f"{self.seed}/{choice}/{index}".encode()).hexdigest()
        return f"call_{digest[:24]}"

    def message(self, text: str, *, cut: bool = False) -> dict[str, Any]:
        """The message that a caller makes of a reply, and sends back. `cut`: it would have gone on."""
        parser = self.parser()
        pieces = [*parser.feed(text), *parser.end(cut=cut)]
        calls = sum(isinstance(piece, ToolCallStart) for piece in pieces)
        return self.complete(message_of(pieces, [self.call_id(0, index) for index in range(calls)]))

    def complete(self, message: Message) -> dict[str, Any]:
        """With what the caller had begun."""
        return {**message, "content": self.begun + (message.get("content") or "")}


@dataclass(slots=True)
class ToolCallBuilder:
    """A tool call as it grows. `arguments`: JSON text."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class ReplyBuilder:
    """One reply. `index`: its place in the answer; `choice`: its number among the replies to its prompt.

    Attributes:
        reading: None where text is all there is.
        pieces: what the caller was told so far, in the order in which the model wrote it.
        said, thought, called: the same by kind.
        prompt_logprobs: those of its prompt, if they were asked for.
        finish: how it ended; `stopped_by`: the stop text that ended it.
        reasoning_tokens: about how many tokens were thought: those with which more of a thought became certain.
        report: what its prompt cost, as soon as it started.
        began: when that was, in seconds after the call came in.
        deltas: about how many tokens there are so far: those with which more of the text became certain.
    """

    index: int
    choice: int = 0
    reader: ReplyReader | None = None
    pieces: list[ReplyDelta] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    thought: list[str] = field(default_factory=list)
    called: list[ToolCallBuilder] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None
    stopped_by: str | None = None
    reasoning_tokens: int = 0
    report: Report | None = None
    began: float = 0.0
    deltas: int = 0
    _parser: Parser | None = None

    def __post_init__(self) -> None:
        if self.reader is not None:
            self._parser = self.reader.parser() if self.reader.parsed else None

    def start(self, event: Started) -> None:
        self.report = event.report
        self.prompt_logprobs = event.prompt_logprobs

    def take(self, event: Delta) -> Sequence[ReplyDelta]:
        """What is new with more text."""
        self.deltas += 1
        self.logprobs.extend(event.logprobs)
        if self._parser is None:
            return self._keep([TextDelta(event.text)] if event.text else [])
        pieces = self._keep(self._parser.feed(event.text))
        self.reasoning_tokens += any(isinstance(piece, ReasoningDelta) for piece in pieces)
        return pieces

    def end(self, event: Finished) -> Sequence[ReplyDelta]:
        """What is still to be told when it is complete."""
        pieces = self._keep(self._parser.end(cut=event.cut)) if self._parser is not None else ()
        self.report = event.report
        self.stopped_by = event.stopped_by
        self.finish = event.reason
        if self.called and event.reason == "stop" and all(is_object(one.arguments) for one in self.called):
            self.finish = "tool_calls"
        return pieces

    @property
    def text(self) -> str:
        return "".join(self.said)

    @property
    def reasoning(self) -> str:
        return "".join(self.thought)

    @property
    def message(self) -> Message:
        """As the caller will send it back."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.thought:
            message["reasoning_content"] = self.reasoning
        if self.called:
            message["tool_calls"] = [
                {"id": one.id, "type": "function", "function": {"name": one.name, "arguments": one.arguments}}
                for one in self.called
            ]
        return self.reader.complete(message) if self.reader is not None else message

    def _keep(self, pieces: Sequence[ReplyDelta]) -> Sequence[ReplyDelta]:
        self.pieces += pieces
        for piece in pieces:
            if isinstance(piece, TextDelta):
                self.said.append(piece.text)
            elif isinstance(piece, ReasoningDelta):
                self.thought.append(piece.text)
            elif isinstance(piece, ToolCallStart):
                assert self.reader is not None
                self.called.append(ToolCallBuilder(self.reader.call_id(self.choice, piece.index), piece.name))
            elif isinstance(piece, ToolCallDelta):
                self.called[piece.index].arguments += piece.text
        return pieces
