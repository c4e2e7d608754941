"""Responses' output: the items of a growing reply, and their events.

output_item.added → (content_part.added → output_text.delta* → output_text.done → content_part.done) → output_item.done
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from headstart.api.openai_responses.items import ResponsesItem, Tools, as_text, seal
from headstart.api.openai_responses.schema import Status
from headstart.chat.partial_json import is_object
from headstart.output.parser import ReasoningDelta, ReplyDelta, TextDelta, ToolCallDelta, ToolCallStart

Emitted = dict[str, Any]
"""An event without its sequence number."""


class Growing:
    """An unfinished item of the output. `at`: its place in the output."""

    kind: str

    def __init__(self, item: ResponsesItem, at: int) -> None:
        self.item = {"type": self.kind, "status": "in_progress", **item}
        self.at = at
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def begin(self) -> Iterator[Emitted]:
        yield {"type": "response.output_item.added", "output_index": self.at, "item": dict(self.item)}

    def more(self, text: str, scores: Sequence[Any]) -> Iterator[Emitted]:
        raise NotImplementedError

    def end(self, status: Status) -> Iterator[Emitted]:
        self.item["status"] = status
        yield {"type": "response.output_item.done", "output_index": self.at, "item": self.item}

    def _event(self, what: str, **fields: Any) -> Emitted:
        return {"type": f"response.{what}", "item_id": self.item["id"], "output_index": self.at, **fields}


class MessageOutput(Growing):
    kind = "message"

    def __init__(self, item: ResponsesItem, at: int) -> None:
        super().__init__({**item, "role": "assistant", "content": []}, at)
        self._scores: list[Any] = []

    def begin(self) -> Iterator[Emitted]:
        yield from super().begin()
        yield self._event("content_part.added", content_index=0, part=self._part())

    def more(self, text: str, scores: Sequence[Any]) -> Iterator[Emitted]:
        self._texts.append(text)
        self._scores += scores
        yield self._event("output_text.delta", content_index=0, delta=text, logprobs=scores)

    def end(self, status: Status) -> Iterator[Emitted]:
        part = self._part()
        self.item = {**self.item, "content": [part]}
        yield self._event("output_text.done", content_index=0, text=part["text"], logprobs=self._scores)
        yield self._event("content_part.done", content_index=0, part=part)
        yield from super().end(status)

    def _part(self) -> Emitted:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": list(self._scores)}


class ReasoningOutput(Growing):
    """Reasoning as the item's content. `sealed`: also in `encrypted_content`."""

    kind = "reasoning"

    def __init__(self, item: ResponsesItem, at: int, *, sealed: bool) -> None:
        super().__init__({**item, "summary": []}, at)
        self._sealed = sealed

    def begin(self) -> Iterator[Emitted]:
        yield from super().begin()
        yield self._event("content_part.added", content_index=0, part={"type": "reasoning_text", "text": ""})

    def more(self, text: str, scores: Sequence[Any]) -> Iterator[Emitted]:
        self._texts.append(text)
        yield self._event("reasoning_text.delta", content_index=0, delta=text)

    def end(self, status: Status) -> Iterator[Emitted]:
        part = {"type": "reasoning_text", "text": self.text}
        yield self._event("reasoning_text.done", content_index=0, text=self.text)
        yield self._event("content_part.done", content_index=0, part=part)
        yield from self._finished(status, {"content": [part]})

    def _finished(self, status: Status, fields: ResponsesItem) -> Iterator[Emitted]:
        self.item = {**self.item, **fields, **({"encrypted_content": seal(self.text)} if self._sealed else {})}
        yield from super().end(status)


class Summarised(ReasoningOutput):
    """Reasoning as the item's summary. It is the whole reasoning, not shortened."""

    def begin(self) -> Iterator[Emitted]:
        yield from Growing.begin(self)
        part = {"type": "summary_text", "text": ""}
        yield self._event("reasoning_summary_part.added", summary_index=0, part=part)

    def more(self, text: str, scores: Sequence[Any]) -> Iterator[Emitted]:
        self._texts.append(text)
        yield self._event("reasoning_summary_text.delta", summary_index=0, delta=text)

    def end(self, status: Status) -> Iterator[Emitted]:
        part = {"type": "summary_text", "text": self.text}
        yield self._event("reasoning_summary_text.done", summary_index=0, text=self.text)
        yield self._event("reasoning_summary_part.done", summary_index=0, part=part)
        yield from self._finished(status, {"summary": [part]})


class CallOutput(Growing):
    """A tool call; `incomplete` if it breaks off, or if its arguments are not a JSON object."""

    def end(self, status: Status) -> Iterator[Emitted]:
        yield from super().end(status if is_object(self.text) else "incomplete")


class FunctionCallOutput(CallOutput):
    kind = "function_call"

    def __init__(self, item: ResponsesItem, at: int) -> None:
        super().__init__({**item, "arguments": ""}, at)

    def more(self, text: str, scores: Sequence[Any]) -> Iterator[Emitted]:
        self._texts.append(text)
        yield self._event("function_call_arguments.delta", delta=text)

    def end(self, status: Status) -> Iterator[Emitted]:
        self.item = {**self.item, "arguments": self.text}
        yield self._event("function_call_arguments.done", name=self.item["name"], arguments=self.text)
        yield from super().end(status)


class CustomCallOutput(CallOutput):
    """A custom tool's call. The model writes its text as JSON arguments, so it is sent when they are complete."""

    kind = "custom_tool_call"

    def __init__(self, item: ResponsesItem, at: int) -> None:
        super().__init__({**item, "input": ""}, at)

    def more(self, text: str, scores: Sequence[Any]) -> Iterator[Emitted]:
        self._texts.append(text)
        return iter(())

    def end(self, status: Status) -> Iterator[Emitted]:
        text = as_text(self.text)
        self.item = {**self.item, "input": text}
        yield self._event("custom_tool_call_input.delta", delta=text)
        yield self._event("custom_tool_call_input.done", input=text)
        yield from super().end(status)


class Output:
    """The items of one reply.

    Args:
        name: the id of an item, by its type and place.
        call_id: the id of the n-th call.
        summarised: whether reasoning is sent as a summary.
        sealed: whether reasoning comes with its `encrypted_content`.
    """

    def __init__(
        self,
        tools: Tools,
        name: Callable[[str, int], str],
        call_id: Callable[[int], str],
        *,
        summarised: bool,
        sealed: bool,
    ) -> None:
        self.complete: list[ResponsesItem] = []
        self._tools = tools
        self._name = name
        self._call_id = call_id
        self._summarised = summarised
        self._sealed = sealed
        self._open: Growing | None = None

    @property
    def items(self) -> list[ResponsesItem]:
        return [*self.complete, *([self._open.item] if self._open is not None else [])]

    def take(self, delta: ReplyDelta, scores: Sequence[Any] = ()) -> Iterator[Emitted]:
        """The events of one delta."""
        if isinstance(delta, TextDelta):
            yield from self._in(MessageOutput, self._message)
            yield from self._more(delta.text, scores)
        elif isinstance(delta, ReasoningDelta):
            yield from self._in(ReasoningOutput, self._reasoning)
            yield from self._more(delta.text, ())
        elif isinstance(delta, ToolCallStart):
            yield from self._begin(self._called(delta))
        elif isinstance(delta, ToolCallDelta):
            yield from self._more(delta.text, ())

    def end(self, status: Status) -> Iterator[Emitted]:
        """The events at the end of the reply. An empty reply becomes a message without text."""
        if not self.items and status == "completed":
            yield from self._begin(self._message())
        yield from self._close(status)

    def _in(self, kind: type[Growing], make: Callable[[], Growing]) -> Iterator[Emitted]:
        if not isinstance(self._open, kind):
            yield from self._begin(make())

    def _begin(self, item: Growing) -> Iterator[Emitted]:
        yield from self._close("completed")
        self._open = item
        yield from item.begin()

    def _more(self, text: str, scores: Sequence[Any]) -> Iterator[Emitted]:
        if self._open is not None:
            yield from self._open.more(text, scores)

    def _close(self, status: Status) -> Iterator[Emitted]:
        if self._open is not None:
            yield from self._open.end(status)
            self.complete.append(self._open.item)
            self._open = None

    @property
    def _next(self) -> int:
        return len(self.items)

    def _message(self) -> Growing:
        return MessageOutput({"id": self._name("message", self._next)}, self._next)

    def _reasoning(self) -> Growing:
        kind = Summarised if self._summarised else ReasoningOutput
        return kind({"id": self._name("reasoning", self._next)}, self._next, sealed=self._sealed)

    def _called(self, delta: ToolCallStart) -> Growing:
        called = self._tools.called(delta.name)
        kind = CustomCallOutput if called.custom else FunctionCallOutput
        item = {
            "id": self._name(kind.kind, self._next),
            "call_id": self._call_id(delta.index),
            "name": called.name,
            **({"namespace": called.namespace} if called.namespace is not None else {}),
        }
        return kind(item, self._next)
