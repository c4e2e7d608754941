"""Wire: events → the bytes and objects of OpenAI's two endpoints.

Chunks are put together by hand: a chunk costs one string format and one JSON string.
"""

from __future__ import annotations

import codecs
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from headstart.observe.report import Summary, headstart, timings, usage
from headstart.runtime.request import Progress, TokenLogprob

DONE = b"data: [DONE]\n\n"
FLOOR = -9999.0
"""Written for a log-probability of minus infinity, which JSON cannot say."""


@dataclass(frozen=True, slots=True)
class Head:
    """What all chunks of an answer share."""

    id: str
    created: int
    model: str
    fingerprint: str

    def fields(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


@dataclass(slots=True)
class Choice:
    """One reply as it grows. `index`: its place in the answer."""

    index: int
    prompt: str = ""
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    first: TokenLogprob | None = None
    finish: str | None = None
    offset: int = 0
    decoder: codecs.IncrementalDecoder = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")(errors="replace"))


def comment(text: str) -> bytes:
    """An SSE comment: keeps the line alive, and every client skips it."""
    return f": {text}\n\n".encode()


def frame(value: dict[str, Any]) -> bytes:
    """An SSE data line."""
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


def account(summary: Summary) -> dict[str, Any]:
    """What headstart adds to an answer."""
    return {"timings": timings(summary), "headstart": headstart(summary)}


class Dialect:
    """How one endpoint says it. `usage`: the caller wants a usage chunk at the end."""

    whole: str
    part: str

    def __init__(self, head: Head, *, usage: bool = False, logprobs: bool = False) -> None:
        self.head = head
        self.logprobs = logprobs
        self._usage = usage
        start = json.dumps(head.fields(self.part), separators=(",", ":"))[:-1]
        self._front = f'data: {start},"choices":[{{"index":'
        self._end = ',"usage":null}\n\n' if usage else "}\n\n"

    # one endpoint's own

    def opening(self, choice: Choice) -> bytes:
        """The chunk that a reply begins with."""
        raise NotImplementedError

    def body(self, text: str) -> str:
        """The part of a choice that carries text."""
        raise NotImplementedError

    def empty(self) -> str:
        """The same in a choice without text."""
        raise NotImplementedError

    def scores(self, choice: Choice, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        """The `logprobs` object of some tokens."""
        raise NotImplementedError

    def message(self, choice: Choice) -> dict[str, Any]:
        """The part of a whole answer's choice that carries text."""
        raise NotImplementedError

    # common to both

    def delta(self, choice: Choice, text: str, logprobs: Sequence[TokenLogprob]) -> bytes:
        """A chunk with more text."""
        scores = json.dumps(self.scores(choice, logprobs), separators=(",", ":")) if self.logprobs else "null"
        return self._chunk(choice.index, self.body(text), scores)

    def ending(self, choice: Choice, summary: Summary) -> bytes:
        """The last chunk of a reply: how it ended, and what it cost."""
        extra = json.dumps(account(summary), separators=(",", ":"))[1:-1]
        return self._chunk(choice.index, self.empty(), "null", f'"{choice.finish}"', f",{extra}")

    def totals(self, summary: Summary) -> bytes:
        """The last chunk of all, for those who asked for usage."""
        if not self._usage:
            return b""
        return frame({**self.head.fields(self.part), "choices": [], "usage": usage(summary), **account(summary)})

    def progress(self, index: int, event: Progress, seconds: float) -> bytes:
        """llama-server's `prompt_progress`."""
        state = {
            "total": event.total,
            "cache": event.cached,
            "processed": event.done,
            "time_ms": round(1e3 * seconds),
        }
        extra = ',"prompt_progress":' + json.dumps(state, separators=(",", ":"))
        return self._chunk(index, self.empty(), extra=extra)

    def answer(self, choices: Iterable[Choice], summary: Summary) -> dict[str, Any]:
        """A whole answer."""
        return {
            **self.head.fields(self.whole),
            "choices": [
                {
                    "index": choice.index,
                    **self.message(choice),
                    "logprobs": self.scores(choice, choice.logprobs) if self.logprobs else None,
                    "finish_reason": choice.finish,
                }
                for choice in choices
            ],
            "usage": usage(summary),
            **account(summary),
        }

    def _chunk(self, index: int, body: str, logprobs: str = "null", finish: str = "null", extra: str = "") -> bytes:
        return (f'{self._front}{index},{body},"logprobs":{logprobs},"finish_reason":{finish}}}]{extra}{self._end}').encode()


class Chat(Dialect):
    """/v1/chat/completions."""

    whole = "chat.completion"
    part = "chat.completion.chunk"

    def opening(self, choice: Choice) -> bytes:
        return self._chunk(choice.index, '"delta":{"role":"assistant","content":""}')

    def body(self, text: str) -> str:
        return f'"delta":{{"content":{json.dumps(text)}}}'

    def empty(self) -> str:
        return '"delta":{}'

    def scores(self, choice: Choice, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        def score(text: bytes, logprob: float) -> dict[str, Any]:
            return {"token": _shown(text), "logprob": _finite(logprob), "bytes": list(text)}

        return {
            "content": [
                {
                    **score(item.text, item.logprob),
                    "top_logprobs": [score(text, logprob) for _, text, logprob in item.top],
                }
                for item in logprobs
            ],
            "refusal": None,
        }

    def message(self, choice: Choice) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": "".join(choice.text), "refusal": None}}


class Text(Dialect):
    """/v1/completions."""

    whole = part = "text_completion"

    def opening(self, choice: Choice) -> bytes:
        if not choice.prompt:
            return b""
        scores = "null"
        if choice.first is not None:
            scores = json.dumps(self._prompt_scores(choice), separators=(",", ":"))
        return self._chunk(choice.index, self.body(choice.prompt), scores)

    def body(self, text: str) -> str:
        return f'"text":{json.dumps(text)}'

    def empty(self) -> str:
        return '"text":""'

    def scores(self, choice: Choice, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        return _columns(choice, [(item, True) for item in logprobs])

    def message(self, choice: Choice) -> dict[str, Any]:
        return {"text": choice.prompt + "".join(choice.text)}

    def answer(self, choices: Iterable[Choice], summary: Summary) -> dict[str, Any]:
        listed = list(choices)
        before = [self._prompt_scores(choice) if choice.first is not None else None for choice in listed]
        made = super().answer(listed, summary)
        for columns, choice in zip(before, made["choices"], strict=True):
            if columns is not None and choice["logprobs"] is not None:
                choice["logprobs"] = {name: columns[name] + choice["logprobs"][name] for name in columns}
        return made

    @staticmethod
    def _prompt_scores(choice: Choice) -> dict[str, Any]:
        # Nothing precedes the first token, so it has no probability.
        assert choice.first is not None
        return _columns(choice, [(choice.first, False), *((item, True) for item in choice.prompt_logprobs)])


def _columns(choice: Choice, items: Sequence[tuple[TokenLogprob, bool]]) -> dict[str, Any]:
    columns: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for item, known in items:
        token = _shown(item.text)
        columns["tokens"].append(token)
        columns["token_logprobs"].append(_finite(item.logprob) if known else None)
        top = {_shown(text): _finite(logprob) for _, text, logprob in reversed(item.top)}
        columns["top_logprobs"].append({**top, token: _finite(item.logprob)} if known else None)
        columns["text_offset"].append(choice.offset)
        choice.offset += len(choice.decoder.decode(item.text))
    return columns


def _shown(text: bytes) -> str:
    return text.decode("utf-8", "replace")


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else FLOOR
