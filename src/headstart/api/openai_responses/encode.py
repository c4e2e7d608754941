"""Responses' encoder: events → the stream and the object of POST /v1/responses."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from headstart.api.diagnostics import responses
from headstart.api.encoder import Encoder
from headstart.api.errors import message_of
from headstart.api.framing import comment, frame
from headstart.api.openai_responses.items import ResponsesItem, Tools
from headstart.api.openai_responses.output import Emitted, Output
from headstart.api.openai_responses.store import item_id
from headstart.api.scores import token_scores
from headstart.api.understood import ExplanationFilter
from headstart.chat.reply_builder import ReplyBuilder, ReplyReader
from headstart.errors import ContextTooLong, Overloaded
from headstart.observe.report import Summary
from headstart.output.parser import ReplyDelta, TextDelta
from headstart.serving.request import Delta, Event, Finished, Progress, Request, Started, TokenLogprob

REPEAT_AFTER = 15.0
"""Seconds without an event after which one is repeated: some clients ignore comments, and give up."""


class ResponseEncoder(Encoder):
    """Encodes a response.

    Args:
        head: the fields of its object that are known from the start.
        summarised: whether reasoning is sent as a summary.
        sealed: whether reasoning comes with its `encrypted_content`.
        known: whether this server sent the response to compare with; None without comparison.
        explain: the explanation to send, from the request's own explanation.
        keep: called with the complete object, before it is sent.
    """

    def __init__(
        self,
        head: dict[str, Any],
        request: Request,
        reader: ReplyReader,
        tools: Tools,
        *,
        summarised: bool,
        sealed: bool,
        logprobs: bool,
        known: bool | None,
        explain: ExplanationFilter,
        keep: Callable[[dict[str, Any]], None],
    ) -> None:
        super().__init__([request], reader)
        self._head = head
        self._tools = tools
        self._logprobs = logprobs
        self._known = known
        self._explain = explain
        self._keep = keep
        self._fills = request.params.max_tokens == 0
        self._number = 0
        self._last_event = 0.0
        self._opened = False
        self._scores: list[TokenLogprob] = []
        self._output = Output(
            tools,
            lambda kind, place: item_id(kind, head["id"], f"{place:x}"),
            lambda index: reader.call_id(0, index),
            summarised=summarised,
            sealed=sealed,
        )

    # ── a stream ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, builder: ReplyBuilder) -> bytes:
        return self._opening()

    def progress(self, builder: ReplyBuilder, event: Progress, seconds: float) -> bytes:
        return self._alive(super().progress(builder, event, seconds))

    def beat(self) -> bytes:
        return self._alive(comment("waiting"))

    def more(self, builder: ReplyBuilder, deltas: Sequence[ReplyDelta], logprobs: Sequence[TokenLogprob]) -> bytes:
        return b"".join(map(self._frame, self._grow(deltas, logprobs)))

    def finish(self, builder: ReplyBuilder, summary: Summary) -> bytes:
        return b"".join(map(self._frame, self._end(builder)))

    def close(self, summary: Summary) -> bytes:
        whole = self.whole(summary)
        return self._frame({"type": f"response.{whole['status']}", "response": whole})

    def fail(self, error: Exception) -> bytes:
        code = "rate_limit_exceeded" if isinstance(error, Overloaded) else "server_error"
        code = "invalid_prompt" if isinstance(error, ContextTooLong) else code
        fault = {"code": code, "message": message_of(error)}
        opening = self._opening()
        begun = b"".join(map(self._frame, self._output.end("incomplete")))  # ends the open item
        failed = {**self._head, "status": "failed", "error": fault, "output": self._output.items}
        return opening + begun + self._frame({"type": "response.failed", "response": failed})

    # ── a whole answer ───────────────────────────────────────────────────────────────────────────────────────────────

    def take(self, number: int, event: Event) -> None:
        builder = self.builders[0]
        if isinstance(event, Delta):
            for _ in self._grow(builder.take(event), event.logprobs):
                pass
        elif isinstance(event, Started):
            builder.start(event)
        elif isinstance(event, Finished):
            for _ in (*self._grow(builder.end(event), ()), *self._end(builder)):
                pass

    def whole(self, summary: Summary) -> dict[str, Any]:
        builder = self.builders[0]
        cut = self._cut(builder)
        whole = {
            **self._head,
            "status": "incomplete" if cut else "completed",
            "completed_at": None if cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": self._output.items,
            "usage": usage(summary, builder.reasoning_tokens),
            **self.account(summary),
        }
        if self._known is not None:
            whole["prompt_cache_diagnostics"] = responses(self._explain(summary.explanation), known=self._known)
        if self._tools.ignored:
            whole["headstart"]["ignored_tools"] = list(self._tools.ignored)
        self._keep(whole)
        return whole

    # ── both ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def output(self) -> list[ResponsesItem]:
        return self._output.items

    def _cut(self, builder: ReplyBuilder) -> bool:
        return builder.finish == "length" and not self._fills

    def _grow(self, deltas: Sequence[ReplyDelta], logprobs: Sequence[TokenLogprob]) -> list[Emitted]:
        events: list[Emitted] = []
        self._scores += logprobs if self._logprobs else ()
        for delta in deltas:
            # Only text has a place for scores.
            scores = token_scores(self._scores) if isinstance(delta, TextDelta) else []
            self._scores = []
            events += self._output.take(delta, scores)
        return events

    def _end(self, builder: ReplyBuilder) -> list[Emitted]:
        return [] if self._fills else list(self._output.end("incomplete" if self._cut(builder) else "completed"))

    def _opening(self) -> bytes:
        if self._opened:
            return b""
        self._opened = True
        return self._frame({"type": "response.created", "response": self._head}) + self._going_on()

    def _going_on(self) -> bytes:
        return self._frame({"type": "response.in_progress", "response": self._head})

    def _alive(self, otherwise: bytes) -> bytes:
        if not self._opened:
            return self._opening()
        return self._going_on() if time.monotonic() - self._last_event > REPEAT_AFTER else otherwise

    def _frame(self, event: Emitted) -> bytes:
        self._last_event = time.monotonic()
        value = {**event, "sequence_number": self._number}
        self._number += 1
        return frame(value, event["type"])


def usage(summary: Summary, reasoning: int) -> dict[str, Any]:
    """`usage` of this endpoint. The input tokens include cached tokens and tokens that are new in the cache."""
    return {
        "input_tokens": summary.prompt,
        "input_tokens_details": {"cached_tokens": summary.cached, "cache_write_tokens": summary.computed},
        "output_tokens": summary.completion,
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": summary.prompt + summary.completion,
    }
