"""Parser: a reply's text → answer, reasoning and tool calls.

It is incremental: text is passed on as soon as it cannot be the beginning of a marker. Nothing that a model writes is an error.
Text that only looks like a call is passed on as text, and an incomplete call keeps its complete part.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from headstart.interfaces.conversation import Message
from headstart.output.canonical_json import canonical_arguments
from headstart.output.formats import Family, ReasoningFormat
from headstart.output.json_values import ControlEscaper
from headstart.output.scanner import Incremental, Scanner, TextSink
from headstart.output.schemas import schemas_of
from headstart.output.tool_calls import SHORT, CallReader

_MESSAGE = "<|message|>"
_HEADS = ("<|start|>", "<|channel|>")
_ENDS = ("<|end|>", "<|call|>", "<|return|>", *_HEADS)
_RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<]+)")


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More of the answer.

    Attributes:
        text: what is new.
    """

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of the reasoning.

    Attributes:
        text: what is new.
    """

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A tool call begins. Its arguments follow.

    Attributes:
        index: which call of the reply, from 0.
        name: of the function.
    """

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """More of a call's arguments.

    Attributes:
        index: which call of the reply, from 0.
        text: what is new of the JSON text.
    """

    index: int
    text: str


ReplyDelta = TextDelta | ReasoningDelta | ToolCallStart | ToolCallDelta


def message_of(deltas: Iterable[ReplyDelta], ids: Sequence[str] = ()) -> dict[str, Any]:
    """The message that a client sends back. `ids`: of the calls in their order; `call_0`, … where there are too few."""
    content: list[str] = []
    thought: list[str] = []
    calls: list[tuple[str, list[str]]] = []
    for delta in deltas:
        match delta:
            case TextDelta(text):
                content.append(text)
            case ReasoningDelta(text):
                thought.append(text)
            case ToolCallStart(_, name):
                calls.append((name, []))
            case ToolCallDelta(index, text):
                calls[index][1].append(text)
    message: dict[str, Any] = {"role": "assistant", "content": "".join(content)}
    if thought:
        message["reasoning_content"] = "".join(thought)
    if calls:
        message["tool_calls"] = [
            {
                "id": ids[number] if number < len(ids) else f"call_{number}",
                "type": "function",
                "function": {"name": name, "arguments": "".join(arguments)},
            }
            for number, (name, arguments) in enumerate(calls)
        ]
    return message


class Parser:
    """Reads one reply. The joined deltas do not depend on how the text is cut.

    A call of an unknown function is also a call: the client decides what to do with it.

    Args:
        family: how the model writes.
        tools: those of the request, in OpenAI's form: their schemas give types to parameters that are written as plain
            text. True if they are not known. Without any, markers of calls are plain text.
        thinking: whether the prompt has opened the reasoning already (see `Family.opened`).

    Attributes:
        left_out: whether the end of a cut reply is in no delta, because it is the beginning of a marker or of a call.
    """

    def __init__(self, family: Family, *, tools: bool | Sequence[Mapping[str, Any]] = False, thinking: bool = False) -> None:
        self._family = family
        self._schemas = {} if isinstance(tools, bool) else schemas_of(tools)
        self._calls = family.calls if tools else None
        self._scan = Scanner()
        self._out: list[ReplyDelta] = []
        self._blank = ""
        self._has_text = False
        self._thought_blank = ""
        self._thought = False
        self._count = 0
        self._escaper = ControlEscaper()
        self._cut = False
        self.left_out = False
        self._trims = family.calls is not None and family.calls.syntax == "channels"
        self._machine = self._channels() if self._trims else self._reply(thinking)

    def feed(self, text: str) -> list[ReplyDelta]:
        """The deltas that `text` completes."""
        self._scan.add(text)
        next(self._machine, None)
        return self._given()

    def end(self, *, cut: bool = False) -> list[ReplyDelta]:
        """The last deltas of a complete reply. `cut`: the reply was cut, so a marker or a call at its end that is not complete
        is left out.
        """
        self._cut = cut
        self._scan.finish()
        next(self._machine, None)
        if self._blank and not self._count and not self._trims:
            self._out.append(TextDelta(self._blank))
            self._blank = ""
        return self._given()

    def _given(self) -> list[ReplyDelta]:
        """The deltas since the last call. Neighbours of one kind are joined."""
        out: list[ReplyDelta] = []
        for _, group in groupby(self._out, key=lambda delta: (type(delta), getattr(delta, "index", None))):
            first, *rest = group
            if rest and not isinstance(first, ToolCallStart):
                first = replace(
                    first, text=first.text + "".join(delta.text for delta in rest if not isinstance(delta, ToolCallStart))
                )
            out.append(first)
        self._out.clear()
        return out

    # ── what goes out ────────────────────────────────────────────────────────────────────────────────────────────────

    def _say(self, text: str) -> None:
        # Blanks wait for what follows: before a call they are the template's.
        if self._calls is None and not self._trims:
            self._out.append(TextDelta(text))
            return
        text = self._blank + text
        kept = text.rstrip()
        self._blank = text[len(kept) :]
        if kept:
            self._out.append(TextDelta(kept))
            self._has_text = True

    def _think(self, text: str) -> None:
        text = self._thought_blank + text
        if not self._thought:
            text = text.lstrip("\n")
        kept = text.rstrip("\n")
        self._thought_blank = text[len(kept) :]
        if kept:
            self._out.append(ReasoningDelta(kept))
            self._thought = True

    def _call(self, name: str) -> None:
        if not self._has_text:
            self._blank = ""
        self._out.append(ToolCallStart(self._count, name))
        self._count += 1
        self._escaper = ControlEscaper()

    def _argue(self, text: str) -> None:
        if text:
            self._out.append(ToolCallDelta(self._count - 1, self._escaper.feed(text)))

    # ── the parts of a reply ─────────────────────────────────────────────────────────────────────────────────────────

    def _reply(self, thinking: bool) -> Incremental[None]:
        scan, reasoning = self._scan, self._family.reasoning
        if reasoning is not None:
            if not thinking:
                scan.keep()
                yield from scan.blanks()
                thinking = yield from scan.take(reasoning.open)
                if not thinking:
                    if scan.starved and self._unfinished():
                        return
                    scan.rewind()
            if thinking:
                yield from self._reason(reasoning)
        calls = self._calls
        if calls is None:
            yield from scan.until((), self._say)
            return
        reader = CallReader(scan, calls, self._schemas, self._call, self._argue)
        if not calls.open:
            scan.keep()
            if not (yield from reader.bare()):
                if self._breaks_off():
                    return
                scan.rewind()
        markers = tuple(filter(None, (calls.begin, calls.open)))
        while found := (yield from scan.until(markers, self._say)):
            scan.keep(len(found))
            if not (yield from reader.read(found)):
                if self._breaks_off():
                    return
                # Text that waited in vain for more is not searched again: that would take quadratic time.
                markers = () if scan.spent else markers
                scan.rewind(len(found))
                self._say(found)
        self._rest(self._say)

    def _breaks_off(self) -> bool:
        """Whether the reply ended inside a call or a header, and was cut or has a call already. Then that part is no text."""
        if not self._scan.starved or not (self._cut or self._count):
            return False
        self._leave_out()
        return True

    def _unfinished(self) -> bool:
        """Whether the unread text is the beginning of a marker, as in `_breaks_off`. If it begins with a letter or digit, it is
        text.
        """
        if self._scan.unread[:1].isalnum() or not self._scan.unread or not (self._cut or self._count):
            return False
        self._leave_out()
        return True

    def _leave_out(self) -> None:
        self._scan.drop()
        self._blank = ""
        self.left_out = self._cut

    def _rest(self, sink: TextSink) -> None:
        """Gives `sink` the rest of the reply, in which no marker follows."""
        if not self._unfinished() and self._scan.unread:
            sink(self._scan.unread)
            self._scan.drop()

    def _reason(self, reasoning: ReasoningFormat) -> Incremental[None]:
        self._scan.kept = None
        if (yield from self._scan.until((reasoning.close,), self._think)):
            yield from self._scan.blanks("\n")
        else:
            self._rest(self._think)

    # ── gpt-oss ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _channels(self) -> Incremental[None]:
        """Messages with a header each: its channel says what it is, its recipient what it calls."""
        scan = self._scan
        found = ""  # the marker that was read last, if a header begins with it
        while True:
            scan.keep(len(found))
            header = yield from self._header(found)
            if header is None and self._breaks_off():
                return
            sink = self._say if header is None else self._channel(header)
            if header is None:
                scan.rewind(len(found))
                self._say(found)
            scan.kept = None
            found = yield from scan.until(_HEADS if header is None else _ENDS, sink)
            if not found:
                self._rest(sink)
                return
            if found not in _HEADS:
                found = ""

    def _header(self, found: str) -> Incremental[str | None]:
        """The header of a message, with the marker that begins it; None if this is no header."""
        scan = self._scan
        if not found:
            yield from scan.blanks()
            for found in (*_HEADS, "to="):
                if (yield from scan.take(found)):
                    break
            else:
                return None
        head = yield from scan.within(SHORT, _MESSAGE, *_ENDS[:3])
        if head is None or not (yield from scan.take(_MESSAGE)):
            return None
        return found + head[0]

    def _channel(self, header: str) -> TextSink:
        """What receives the message after a header."""
        recipient = _RECIPIENT.search(header)
        if recipient is not None and self._calls is not None:
            self._call(recipient[1])
            return self._argue
        if header.partition("<|channel|>")[2].lstrip().startswith("analysis"):
            self._thought_blank = "\n\n" if self._thought else ""
            return self._think
        self._blank = "\n\n" if self._has_text else ""
        return self._say


def parse(family: Family, text: str, tools: Sequence[Mapping[str, Any]], *, thinking: bool) -> Message:
    """The message of a complete reply."""
    parser = Parser(family, tools=tools, thinking=thinking)
    return message_of([*parser.feed(text), *parser.end()])


def meaning(message: Message) -> Any:
    """A value that is equal for messages with the same content, reasoning and calls, whatever the white space around them and
    the order of arguments."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    called = [(call["name"], canonical_arguments(call["arguments"], None)) for call in calls]
    return message["content"].strip(), message.get("reasoning_content", "").strip(), called
