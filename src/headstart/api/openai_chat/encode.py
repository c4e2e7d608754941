"""OpenAI's encoders: events → the bytes and objects of chat completions and completions.

Chunks are not built as dicts: a chunk costs one string format and one JSON string.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headstart.api.encoder import Encoder
from headstart.api.framing import frame
from headstart.api.scores import finite, shown, token_scores
from headstart.api.usage import timings_so_far, usage
from headstart.chat.reply_builder import ReplyBuilder, ReplyReader
from headstart.observe.report import Summary
from headstart.output.parser import ReasoningDelta, ReplyDelta, TextDelta, ToolCallStart
from headstart.serving.request import Progress, Request, TokenLogprob

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Head:
    """The fields that all chunks of an answer share."""

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


class OpenAIEncoder(Encoder):
    """What both endpoints share. `usage`: whether the caller wants a usage chunk at the end."""

    kind: str
    part: str

    def __init__(
        self,
        head: Head,
        requests: Sequence[Request],
        reader: ReplyReader | None = None,
        *,
        usage: bool = False,
        logprobs: bool = False,
        progress: bool = False,
        timed: bool = False,
    ) -> None:
        super().__init__(requests, reader, progress=progress, timed=timed)
        self.head = head
        self.logprobs = logprobs
        self._usage = usage
        start = json.dumps(head.fields(self.part), separators=(",", ":"))[:-1]
        self._front = f'data: {start},"choices":[{{"index":'
        self._end = ',"usage":null}\n\n' if usage else "}\n\n"

    # an endpoint's own

    def empty(self) -> str:
        """The text field of a chunk's choice without text."""
        raise NotImplementedError

    def scores(self, builder: ReplyBuilder, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        """The `logprobs` object of these tokens."""
        raise NotImplementedError

    def choice(self, builder: ReplyBuilder) -> dict[str, Any]:
        """The fields of a complete choice beside `index` and `finish_reason`."""
        raise NotImplementedError

    # common to both

    def finish(self, builder: ReplyBuilder, summary: Summary) -> bytes:
        extra = json.dumps(self.account(summary), separators=(",", ":"))[1:-1]
        return self._chunk(builder.index, self.empty(), "null", f'"{builder.finish}"', f",{extra}")

    def fail(self, error: Exception) -> bytes:
        return super().fail(error) + DONE

    def close(self, summary: Summary) -> bytes:
        if not self._usage:
            return DONE
        return frame({**self.head.fields(self.part), "choices": [], **self._account(summary)}) + DONE

    def progress(self, builder: ReplyBuilder, event: Progress, seconds: float) -> bytes:
        """llama-server's `prompt_progress`."""
        data = super().progress(builder, event, seconds)
        if not self.wants_progress:
            return data
        state = {
            "total": event.total,
            "cache": event.cached,
            "processed": event.done,
            "time_ms": round(1e3 * seconds),
        }
        extra = ',"prompt_progress":' + json.dumps(state, separators=(",", ":"))
        return data + self._chunk(builder.index, self.empty(), extra=extra)

    def whole(self, summary: Summary) -> dict[str, Any]:
        return {
            **self.head.fields(self.kind),
            "choices": [
                {"index": builder.index, **self.choice(builder), "finish_reason": builder.finish} for builder in self.builders
            ],
            **self._account(summary),
        }

    def _account(self, summary: Summary) -> dict[str, Any]:
        used = usage(summary)
        if self.reader is not None:
            used["completion_tokens_details"] = {"reasoning_tokens": sum(builder.reasoning_tokens for builder in self.builders)}
        return {"usage": used, **self.account(summary)}

    def _chunk(self, index: int, body: str, logprobs: str = "null", finish: str = "null", extra: str = "") -> bytes:
        return (f'{self._front}{index},{body},"logprobs":{logprobs},"finish_reason":{finish}}}]{extra}{self._end}').encode()

    def _timings(self, builder: ReplyBuilder) -> str:
        data = json.dumps(timings_so_far(builder, self.seconds), separators=(",", ":")) if self.timed else ""
        return f',"timings":{data}' if data else ""

    def _scores(self, builder: ReplyBuilder, logprobs: Sequence[TokenLogprob]) -> str:
        return json.dumps(self.scores(builder, logprobs), separators=(",", ":")) if self.logprobs else "null"


class ChatEncoder(OpenAIEncoder):
    """/v1/chat/completions."""

    kind = "chat.completion"
    part = "chat.completion.chunk"

    def begin(self, builder: ReplyBuilder) -> bytes:
        return self._chunk(builder.index, '"delta":{"role":"assistant","content":""}')

    def more(self, builder: ReplyBuilder, deltas: Sequence[ReplyDelta], logprobs: Sequence[TokenLogprob]) -> bytes:
        scores = self._scores(builder, logprobs)
        data = b""
        for delta in deltas:
            data += self._chunk(builder.index, f'"delta":{self._delta(builder, delta)}', scores, extra=self._timings(builder))
            scores = "null"
        return data or self._chunk(builder.index, '"delta":{"content":""}', scores, extra=self._timings(builder))

    def _delta(self, builder: ReplyBuilder, delta: ReplyDelta) -> str:
        if isinstance(delta, TextDelta):
            return f'{{"content":{json.dumps(delta.text)}}}'
        if isinstance(delta, ReasoningDelta):
            return f'{{"reasoning_content":{json.dumps(delta.text)}}}'
        call: dict[str, Any] = {"index": delta.index}
        if isinstance(delta, ToolCallStart):
            call |= {"id": builder.calls[delta.index].id, "type": "function"}
            call["function"] = {"name": delta.name, "arguments": ""}
        else:
            call["function"] = {"arguments": delta.text}
        return json.dumps({"tool_calls": [call]}, separators=(",", ":"))

    def empty(self) -> str:
        return '"delta":{}'

    def scores(self, builder: ReplyBuilder, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        return {"content": token_scores(logprobs), "refusal": None}

    def choice(self, builder: ReplyBuilder) -> dict[str, Any]:
        message = {"role": "assistant", "content": builder.text, "refusal": None}
        if builder.thoughts:
            message["reasoning_content"] = builder.reasoning
        if builder.calls:
            message["content"] = builder.text or None
            message["tool_calls"] = builder.message["tool_calls"]
        return {"message": message, "logprobs": self.scores(builder, builder.logprobs) if self.logprobs else None}


class CompletionEncoder(OpenAIEncoder):
    """/v1/completions. `echoed`: the prompts, if the answer repeats them; `firsts`: their first tokens, if scored."""

    kind = part = "text_completion"

    def __init__(
        self,
        head: Head,
        requests: Sequence[Request],
        *,
        echoed: Sequence[str] = (),
        firsts: Sequence[TokenLogprob] = (),
        **how: bool,
    ) -> None:
        super().__init__(head, requests, None, **how)
        self._columns = {builder.index: _Columns() for builder in self.builders}
        self._echoed = [text for text in echoed for _ in range(self.width)]
        self._firsts = [first for first in firsts for _ in range(self.width)]

    def begin(self, builder: ReplyBuilder) -> bytes:
        if not self._echoed:
            return b""
        scores = json.dumps(self._prompt_scores(builder), separators=(",", ":")) if self._firsts else "null"
        return self._chunk(builder.index, f'"text":{json.dumps(self._echoed[builder.index])}', scores)

    def more(self, builder: ReplyBuilder, deltas: Sequence[ReplyDelta], logprobs: Sequence[TokenLogprob]) -> bytes:
        text = "".join(delta.text for delta in deltas if isinstance(delta, TextDelta))
        scores = self._scores(builder, logprobs)
        return self._chunk(builder.index, f'"text":{json.dumps(text)}', scores, extra=self._timings(builder))

    def empty(self) -> str:
        return '"text":""'

    def scores(self, builder: ReplyBuilder, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        return self._columns[builder.index].of([(item, True) for item in logprobs])

    def choice(self, builder: ReplyBuilder) -> dict[str, Any]:
        before = self._prompt_scores(builder) if self._firsts else None
        scores = self.scores(builder, builder.logprobs) if self.logprobs else None
        if before is not None and scores is not None:
            scores = {name: before[name] + scores[name] for name in scores}
        echoed = self._echoed[builder.index] if self._echoed else ""
        return {"text": echoed + builder.text, "logprobs": scores}

    def _prompt_scores(self, builder: ReplyBuilder) -> dict[str, Any]:
        # The first token has no probability, because nothing precedes it.
        items = [(self._firsts[builder.index], False), *((item, True) for item in builder.prompt_logprobs)]
        return self._columns[builder.index].of(items)


class _Columns:
    """Log-probabilities in columns. Each token's offset follows from those before it."""

    def __init__(self) -> None:
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def of(self, items: Sequence[tuple[TokenLogprob, bool]]) -> dict[str, Any]:
        columns: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for item, known in items:
            token = shown(item.text)
            columns["tokens"].append(token)
            columns["token_logprobs"].append(finite(item.logprob) if known else None)
            top = {shown(text): finite(logprob) for _, text, logprob in reversed(item.top)}
            columns["top_logprobs"].append({**top, token: finite(item.logprob)} if known else None)
            columns["text_offset"].append(self._offset)
            self._offset += len(self._decoder.decode(item.text))
        return columns
