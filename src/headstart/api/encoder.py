"""Encoder: writes the events of a call in the form of one endpoint, as a stream or as one answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from headstart.api.errors import OPENAI
from headstart.api.usage import headstart, timings
from headstart.chat.reply_builder import ReplyBuilder, ReplyReader
from headstart.observe.report import Summary
from headstart.output.parser import ReplyDelta
from headstart.serving.request import Delta, Event, Finished, Progress, Request, Started, TokenLogprob


def comment(text: str) -> bytes:
    """An SSE comment: keeps the line alive, and every client skips it."""
    return f": {text}\n\n".encode()


def frame(value: dict[str, Any], event: str | None = None) -> bytes:
    """An SSE message: its data, under its event's name if it has one."""
    name = f"event: {event}\n".encode() if event is not None else b""
    return name + b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


class Encoder:
    """The reply builders of an answer, and the endpoint's form of them. Each endpoint has a subclass.

    The k-th choice of the i-th prompt of n choices each has the index i · n + k.

    Args:
        reading: how replies are read; None where text is all there is.
        progress: whether the caller wants to know how far the prefill is.
        timed: whether it wants to know with each piece how long all took so far.

    Attributes:
        seconds: seconds between the call and the event that is being encoded.
        ignored: fields of the body that were passed over.
    """

    def __init__(
        self, requests: Sequence[Request], reader: ReplyReader | None = None, *, progress: bool = False, timed: bool = False
    ) -> None:
        self.width = requests[0].choices
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
        """What headstart adds to an answer."""
        told = headstart(summary)
        if self.ignored:
            told["ignored"] = list(self.ignored)
        return {"timings": timings(summary), "headstart": told}

    # ── an endpoint's own ────────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, builder: ReplyBuilder) -> bytes:
        """The prompt is prefilled (`builder.report` has the cost); the first token is next."""
        raise NotImplementedError

    def pieces(self, builder: ReplyBuilder, pieces: Sequence[ReplyDelta], logprobs: Sequence[TokenLogprob]) -> bytes:
        """More of a reply. With log-probabilities there may be no piece."""
        raise NotImplementedError

    def finish(self, builder: ReplyBuilder, summary: Summary) -> bytes:
        """A reply is complete (`builder.finish` says how it ended)."""
        raise NotImplementedError

    def close(self, summary: Summary) -> bytes:
        """The last words of a stream in which all went well."""
        raise NotImplementedError

    def whole(self, summary: Summary) -> dict[str, Any] | list[dict[str, Any]]:
        """The answer to a call without a stream."""
        raise NotImplementedError

    def fail(self, error: Exception) -> bytes:
        """The last words of a stream that failed after its beginning."""
        return frame(OPENAI.body(error, ""))

    def beat(self) -> bytes:
        """What keeps a silent line alive."""
        return comment("waiting")

    def progress(self, builder: ReplyBuilder, event: Progress, seconds: float) -> bytes:
        """How far the prefill is, `seconds` after the call came in."""
        return comment(f"prefill {event.done}/{event.total}")

    # ── common to all ────────────────────────────────────────────────────────────────────────────────────────────────

    def builder(self, number: int, choice: int) -> ReplyBuilder:
        return self.builders[number * self.width + choice]

    def take(self, number: int, event: Event) -> None:
        """Lets a whole answer grow by an event."""
        if isinstance(event, Delta):
            self.builder(number, event.choice).take(event)
        elif isinstance(event, Started):
            self.builder(number, event.choice).start(event)
        elif isinstance(event, Finished):
            self.builder(number, event.choice).end(event)

    def tell(self, number: int, event: Event, seconds: float, summary: Callable[[int, int], Summary]) -> bytes:
        """An event, told. `summary`: the account of a choice of a prompt that is finished."""
        self.seconds = seconds
        if type(event) is Delta:
            builder = self.builder(number, event.choice)
            pieces = builder.take(event)
            return self.pieces(builder, pieces, event.logprobs) if pieces or event.logprobs else b""
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
            told = self.pieces(builder, rest, ()) if rest else b""
            return told + self.finish(builder, summary(number, event.choice))
        return b""
