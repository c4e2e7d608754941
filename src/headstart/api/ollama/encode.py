"""Ollama's encoders: events → the lines and objects of /api/chat and /api/generate.

Each line has what is new. A tool call is sent as a whole. The last line, with `done`, has the costs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import groupby
from typing import Any, ClassVar

from headstart.api.encoder import Encoder
from headstart.api.errors import OLLAMA, ErrorFormat
from headstart.api.framing import NDJSON, Framing
from headstart.api.scores import token_scores
from headstart.chat.partial_json import input_of
from headstart.chat.reply_builder import ReplyBuilder, ReplyReader
from headstart.observe.report import Summary
from headstart.output.parser import ReasoningDelta, ReplyDelta, TextDelta, ToolCallStart
from headstart.serving.request import Request, TokenLogprob


def now() -> str:
    """The current time, as Ollama writes times."""
    return timestamp(datetime.now(UTC))


def timestamp(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def costs(summary: Summary) -> dict[str, int]:
    """Ollama's counts and durations, in nanoseconds. No duration is 0: clients divide by them.

    `prompt_eval_count` is the whole prompt, with what was cached, as in Ollama. `load_duration` is the time in the queue.
    """
    return {
        "total_duration": _nanoseconds(summary.queued + summary.prefill + summary.decode),
        "load_duration": _nanoseconds(summary.queued),
        "prompt_eval_count": summary.prompt,
        "prompt_eval_duration": _nanoseconds(summary.prefill),
        "eval_count": summary.completion,
        "eval_duration": _nanoseconds(summary.decode),
    }


def _nanoseconds(seconds: float) -> int:
    return max(1, round(1e9 * seconds))


class OllamaEncoder(Encoder):
    """What both routes share.

    Args:
        model: the name to answer with.
        scored: whether the caller wants log-probabilities.
    """

    framing: ClassVar[Framing] = NDJSON
    errors: ClassVar[ErrorFormat] = OLLAMA

    def __init__(self, model: str, request: Request, reader: ReplyReader | None, *, scored: bool = False) -> None:
        super().__init__([request], reader)
        self._model = model
        self._scored = scored
        self._sent = 0

    # a route's own

    def said(self, text: str = "", thinking: str = "", calls: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
        """The fields of a line with more of the reply."""
        raise NotImplementedError

    # common to both

    def begin(self, builder: ReplyBuilder) -> bytes:
        return b""

    def more(self, builder: ReplyBuilder, deltas: Sequence[ReplyDelta], logprobs: Sequence[TokenLogprob]) -> bytes:
        lines: list[dict[str, Any]] = []
        started = len(builder.calls) - sum(isinstance(delta, ToolCallStart) for delta in deltas)
        for kind, group in groupby(deltas, key=type):
            alike = list(group)
            text = "".join(delta.text for delta in alike if isinstance(delta, TextDelta | ReasoningDelta))
            if kind is TextDelta:
                lines += self._calls(builder, started)
                lines.append(self.said(text))
            elif kind is ReasoningDelta:
                lines.append(self.said(thinking=text))
            elif kind is ToolCallStart:
                started += len(alike)
                lines += self._calls(builder, started - 1)  # the arguments of the last one follow
        if logprobs and self._scored:
            lines = lines or [self.said()]
            lines[-1] = {**lines[-1], "logprobs": token_scores(logprobs)}
        return b"".join(self.framing.frame(self._line(fields)) for fields in lines)

    def finish(self, builder: ReplyBuilder, summary: Summary) -> bytes:
        calls = [self._line(fields) for fields in self._calls(builder, len(builder.calls))]
        last = {**self._line(self.said(), done=True), **self._end(builder, summary)}
        return b"".join(map(self.framing.frame, (*calls, last)))

    def close(self, summary: Summary) -> bytes:
        return b""

    def whole(self, summary: Summary) -> dict[str, Any]:
        (builder,) = self.builders
        fields = self.said(builder.text, builder.reasoning, list(self._written(builder, range(len(builder.calls)))))
        scores = {"logprobs": token_scores(builder.logprobs)} if self._scored else {}
        return {**self._line(fields, done=True), **scores, **self._end(builder, summary)}

    def _line(self, fields: Mapping[str, Any], *, done: bool = False) -> dict[str, Any]:
        return {"model": self._model, "created_at": now(), **fields, "done": done}

    def _end(self, builder: ReplyBuilder, summary: Summary) -> dict[str, Any]:
        # Ollama has no reason of its own for calls.
        reason = "length" if builder.finish == "length" else "stop"
        return {"done_reason": reason, **costs(summary), **self.account(summary)}

    def _calls(self, builder: ReplyBuilder, until: int) -> list[dict[str, Any]]:
        """Lines with the first `until` calls, which are complete, without those that were sent."""
        ready = range(self._sent, max(self._sent, until))
        self._sent = ready.stop
        return [self.said(calls=[call]) for call in self._written(builder, ready)]

    def _written(self, builder: ReplyBuilder, numbers: Iterable[int]) -> Iterable[dict[str, Any]]:
        for number in numbers:
            call = builder.calls[number]
            yield {
                "id": call.id,
                "function": {"index": number, "name": call.name, "arguments": input_of(call.arguments)},
            }


class OllamaChatEncoder(OllamaEncoder):
    """/api/chat."""

    def said(self, text: str = "", thinking: str = "", calls: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if thinking:
            message["thinking"] = thinking
        if calls:
            message["tool_calls"] = list(calls)
        return {"message": message}


class OllamaGenerateEncoder(OllamaEncoder):
    """/api/generate. Its replies have no calls, because its bodies have no tools."""

    def said(self, text: str = "", thinking: str = "", calls: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
        return {"response": text, **({"thinking": thinking} if thinking else {})}


def nothing_said(name: str, *, chat: bool, unload: bool) -> dict[str, Any]:
    """The answer to a body without messages or prompt, which only loads or unloads a model. It is never streamed.

    Args:
        name: of the model, as the caller wrote it.
        chat: whether the body is one of /api/chat.
    """
    said: dict[str, Any] = {"message": {"role": "assistant", "content": ""}} if chat else {"response": ""}
    return {"model": name, "created_at": now(), **said, "done": True, "done_reason": "unload" if unload else "load"}
