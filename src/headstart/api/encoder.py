"""Encoder: writes the events of a call in the format of one endpoint, as a stream or as one answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from headstart.api.errors import OPENAI, ErrorFormat
from headstart.api.framing import SSE, Framing
from headstart.api.usage import headstart, timings
from headstart.chat.reply_builder import ReplyBuilder, ReplyReader
from headstart.observe.report import Summary
from headstart.output.parser import ReplyDelta
from headstart.serving.request import Delta, Event, Finished, Progress, Request, Started, TokenLogprob


class Encoder:
    """The reply builders of an answer, and how the endpoint writes them. Each endpoint has a subclass.

    With n choices a prompt, choice k of prompt i has the index i · n + k.

    Args:
        reader: how replies are parsed; None for raw text.
        progress: whether the caller wants the progress of the prefill.
        timed: whether the caller wants timings with each delta.

    Attributes:
        framing: the form of its streams.
        errors: the form of its errors.
        seconds: from the arrival of the call to the event that is being encoded.
        ignored: fields of the body that were ignored.
    """

    framing: ClassVar[Framing] = SSE
    errors: ClassVar[ErrorFormat] = OPENAI

    def __init__(
        self, requests: Sequence[Request], reader: ReplyReader | None = None, *, progress: bool = False, timed: bool = False
    ) -> None:
        self.width = requests[0].params.choices
        self.reader = reader
        self.builders = [
            ReplyBuilder(number * self.width + choice, choice, reader)
            for number in range(len(requests))
            for choice in range(self.width)
        ]
        self.wants_progress = progress
        self.timed = timed
        self.seconds = 0.0
        self.ignored: tuple[str, ...] = ()

    def account(self, summary: Summary) -> dict[str, Any]:
        """The fields that headstart adds to an answer."""
        costs = headstart(summary)
        if self.ignored:
            costs["ignored"] = list(self.ignored)
        return {"timings": timings(summary), "headstart": costs}

    # ── an endpoint's own ────────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, builder: ReplyBuilder) -> bytes:
        """The prompt is prefilled (`builder.report` has the cost); the first token comes next."""
        raise NotImplementedError

    def more(self, builder: ReplyBuilder, deltas: Sequence[ReplyDelta], logprobs: Sequence[TokenLogprob]) -> bytes:
        """More of a reply. With log-probabilities `deltas` may be empty."""
        raise NotImplementedError

    def finish(self, builder: ReplyBuilder, summary: Summary) -> bytes:
        """A reply is complete (`builder.finish` has the reason)."""
        raise NotImplementedError

    def close(self, summary: Summary) -> bytes:
        """The end of a successful stream."""
        raise NotImplementedError

    def whole(self, summary: Summary) -> dict[str, Any] | list[dict[str, Any]]:
        """The answer to a call without `stream`."""
        raise NotImplementedError

    def fail(self, error: Exception) -> bytes:
        """The end of a stream that failed after its first event."""
        return self.framing.frame(self.errors.body(error, ""))

    def beat(self) -> bytes:
        """Sent after silence, to keep the connection alive."""
        return self.framing.silence("waiting")

    def progress(self, builder: ReplyBuilder, event: Progress, seconds: float) -> bytes:
        """The progress of the prefill, `seconds` after the call arrived."""
        return self.framing.silence(f"prefill {event.done}/{event.total}")

    # ── common to all ────────────────────────────────────────────────────────────────────────────────────────────────

    def builder(self, number: int, choice: int) -> ReplyBuilder:
        return self.builders[number * self.width + choice]

    def take(self, number: int, event: Event) -> None:
        """Adds an event to an answer without `stream`."""
        if isinstance(event, Delta):
            self.builder(number, event.choice).take(event)
        elif isinstance(event, Started):
            self.builder(number, event.choice).start(event)
        elif isinstance(event, Finished):
            self.builder(number, event.choice).end(event)

    def encode(self, number: int, event: Event, seconds: float, summary: Callable[[int, int], Summary]) -> bytes:
        """The bytes of an event. `summary` returns the summary of a finished choice of a prompt."""
        self.seconds = seconds
        if type(event) is Delta:
            builder = self.builder(number, event.choice)
            deltas = builder.take(event)
            return self.more(builder, deltas, event.logprobs) if deltas or event.logprobs else b""
        if isinstance(event, Progress):
            return self.progress(self.builder(number, 0), event, seconds)
        if isinstance(event, Started):
            builder = self.builder(number, event.choice)
            builder.start(event)
            builder.began = seconds
            return self.begin(builder)
        if isinstance(event, Finished):
            builder = self.builder(number, event.choice)
            rest = builder.end(event)
            data = self.more(builder, rest, ()) if rest else b""
            return data + self.finish(builder, summary(number, event.choice))
        return b""
