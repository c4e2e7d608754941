"""Anthropic's encoder: events → the events and objects of /v1/messages.

message_start · (content_block_start · content_block_delta* · content_block_stop)* · message_delta · message_stop
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

from headstart.api import diagnostics
from headstart.api.encoder import Encoder
from headstart.api.errors import ANTHROPIC
from headstart.api.framing import frame
from headstart.api.understood import ExplanationFilter
from headstart.chat.partial_json import Members, input_of
from headstart.chat.reply_builder import ReplyBuilder, ReplyReader
from headstart.observe.report import Summary, summarise
from headstart.output.parser import ReasoningDelta, ReplyDelta, TextDelta, ToolCallDelta, ToolCallStart
from headstart.prompt.builder import Prompt
from headstart.serving.request import Request, TokenLogprob

BlockKind = Literal["thinking", "text", "tool_use"]


def event(name: str, **fields: Any) -> bytes:
    """An event with its name: clients skip events without one."""
    return frame({"type": name, **fields}, name)


@dataclass(frozen=True, slots=True)
class CacheMarks:
    """The ends of what the caller marked with `cache_control`, in tokens; 0 for none.

    Attributes:
        hour: of the marks with a time to live of one hour.
        any: of all marks.
    """

    hour: int = 0
    any: int = 0

    @staticmethod
    def of(prompt: Prompt, hours: int, *, tools: bool) -> CacheMarks:
        """The marks of a prompt. The first `hours` of them are for one hour.

        `tools`: whether tools have a mark. Templates write tools and system message together, so it counts for the end of both.
        """
        landmarks = prompt.landmarks
        found = sorted({*landmarks.breakpoints, *([landmarks.anchor] if tools else [])} - {0})
        return CacheMarks(found[min(hours, len(found)) - 1] if hours and found else 0, found[-1] if found else 0)

    def usage(self, prompt: int, cached: int) -> dict[str, Any]:
        """Anthropic's usage: three counts (new, written to the cache, read from it) that add up to the prompt's tokens."""
        hour = max(0, self.hour - cached)
        minutes = max(0, self.any - max(self.hour, cached))
        return {
            "input_tokens": prompt - cached - hour - minutes,
            "cache_creation_input_tokens": hour + minutes,
            "cache_read_input_tokens": cached,
            "cache_creation": {"ephemeral_5m_input_tokens": minutes, "ephemeral_1h_input_tokens": hour},
        }


@dataclass(frozen=True, slots=True)
class MessageOptions:
    """How to write an answer.

    Attributes:
        id, model: of the message.
        request_id: of the call, for errors.
        limit: most tokens of the reply.
        marks: of the prompt.
        shows: whether reasoning is sent; else only its signature is.
        edits: whether the caller asked for edits of the context.
        compares: whether the caller asked for the cause of a cache miss.
        known: False if this server did not send the message to compare with.
        explain: the explanation to send, from the request's own explanation.
    """

    id: str
    model: str
    request_id: str
    limit: int
    marks: CacheMarks = CacheMarks()
    shows: bool = True
    edits: bool = False
    compares: bool = False
    known: bool = True
    explain: ExplanationFilter = lambda own: own


class MessagesEncoder(Encoder):
    """/v1/messages."""

    def __init__(self, options: MessageOptions, request: Request, reader: ReplyReader) -> None:
        super().__init__([request], reader)
        self.options = options
        self._open: BlockKind | None = None
        self._index = -1
        self._members = Members()

    # ── in a stream ──────────────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, builder: ReplyBuilder) -> bytes:
        assert builder.report is not None
        summary = summarise([[builder.report]])
        usage = {**self._usage(summary), "output_tokens": 0}
        return event("message_start", message=self._message(summary, content=[], stop=None, sequence=None, usage=usage))

    def more(self, builder: ReplyBuilder, deltas: Sequence[ReplyDelta], logprobs: Sequence[TokenLogprob]) -> bytes:
        return b"".join(self._encode_delta(builder, delta) for delta in deltas)

    def finish(self, builder: ReplyBuilder, summary: Summary) -> bytes:
        ended = {"stop_reason": self._stop(builder), "stop_sequence": builder.stopped_by, "stop_details": None}
        usage = self._usage(summary) | self._output(builder, summary)
        return self._close() + event("message_delta", delta=ended, usage=usage, **self._edits(), **self.account(summary))

    def close(self, summary: Summary) -> bytes:
        return event("message_stop")

    def fail(self, error: Exception) -> bytes:
        return frame(ANTHROPIC.body(error, self.options.request_id), "error")

    def beat(self) -> bytes:
        return event("ping")

    def _encode_delta(self, builder: ReplyBuilder, delta: ReplyDelta) -> bytes:
        match delta:
            case ToolCallStart():
                block = {"id": builder.calls[delta.index].id, "name": delta.name, "input": {}}
                closed, self._members = self._close(), Members()
                return closed + self._start("tool_use", block)
            case ToolCallDelta():
                valid = self._members.feed(delta.text)
                return self._delta("input_json_delta", partial_json=valid) if valid else b""
            case ReasoningDelta():
                begun = self._switch("thinking", {"thinking": "", "signature": ""})
                return begun + (self._delta("thinking_delta", thinking=delta.text) if self.options.shows else b"")
            case TextDelta():
                return self._switch("text", {"text": "", "citations": None}) + self._delta("text_delta", text=delta.text)

    def _switch(self, kind: BlockKind, block: dict[str, Any]) -> bytes:
        return b"" if self._open == kind else self._close() + self._start(kind, block)

    def _start(self, kind: BlockKind, block: dict[str, Any]) -> bytes:
        self._open = kind
        self._index += 1
        return event("content_block_start", index=self._index, content_block={"type": kind, **block})

    def _delta(self, kind: str, **fields: str) -> bytes:
        return event("content_block_delta", index=self._index, delta={"type": kind, **fields})

    def _close(self) -> bytes:
        """Ends the open block, if there is one."""
        if self._open is None:
            return b""
        last = b""
        if self._open == "thinking":
            last = self._delta("signature_delta", signature=self._signature(self._index))
        elif self._open == "tool_use" and (missing := self._members.end()):
            last = self._delta("input_json_delta", partial_json=missing)
        self._open = None
        return last + event("content_block_stop", index=self._index)

    # ── as a whole ───────────────────────────────────────────────────────────────────────────────────────────────────

    def whole(self, summary: Summary) -> dict[str, Any]:
        (builder,) = self.builders
        return {
            **self._message(
                summary,
                content=self._content(builder),
                stop=self._stop(builder),
                sequence=builder.stopped_by,
                usage=self._usage(summary) | self._output(builder, summary),
            ),
            **self._edits(),
            **self.account(summary),
        }

    def _content(self, builder: ReplyBuilder) -> list[dict[str, Any]]:
        content: list[dict[str, Any]] = []
        for kind, alike in groupby(builder.deltas, key=type):
            deltas = list(alike)
            text = "".join(delta.text for delta in deltas if not isinstance(delta, ToolCallStart))
            if kind is TextDelta:
                content.append({"type": "text", "text": text, "citations": None})
            elif kind is ReasoningDelta:
                thinking = text if self.options.shows else ""
                content.append({"type": "thinking", "thinking": thinking, "signature": self._signature(len(content))})
            for call in (builder.calls[delta.index] for delta in deltas if isinstance(delta, ToolCallStart)):
                content.append({"type": "tool_use", "id": call.id, "name": call.name, "input": input_of(call.arguments)})
        return content

    # ── both ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _message(
        self,
        summary: Summary,
        *,
        content: list[dict[str, Any]],
        stop: str | None,
        sequence: str | None,
        usage: dict[str, Any],
    ) -> dict[str, Any]:
        return {
            "id": self.options.id,
            "type": "message",
            "role": "assistant",
            "model": self.options.model,
            "content": content,
            "stop_reason": stop,
            "stop_sequence": sequence,
            "stop_details": None,
            "usage": usage,
            "diagnostics": self._diagnostics(summary),
        }

    def _stop(self, builder: ReplyBuilder) -> str:
        if builder.stopped_by is not None:
            return "stop_sequence"
        if builder.finish == "length":
            assert builder.report is not None
            return "max_tokens" if builder.report.completion >= self.options.limit else "model_context_window_exceeded"
        return "tool_use" if builder.finish == "tool_calls" else "end_turn"

    def _usage(self, summary: Summary) -> dict[str, Any]:
        return {**self.options.marks.usage(summary.prompt, summary.cached), "service_tier": "standard"}

    def _output(self, builder: ReplyBuilder, summary: Summary) -> dict[str, Any]:
        thinking = min(builder.reasoning_tokens, summary.completion)
        return {"output_tokens": summary.completion, "output_tokens_details": {"thinking_tokens": thinking}}

    def _edits(self) -> dict[str, Any]:
        return {"context_management": {"applied_edits": []}} if self.options.edits else {}

    def _diagnostics(self, summary: Summary) -> dict[str, Any] | None:
        if not self.options.compares:
            return None
        found = diagnostics.anthropic(self.options.explain(summary.explanation), known=self.options.known)
        return {"cache_miss_reason": found} if found is not None else None

    def _signature(self, index: int) -> str:
        """A signature for reasoning: clients require it and send it back. This server does not read it."""
        return base64.b64encode(f"headstart/{self.options.id}/{index}".encode()).decode()
