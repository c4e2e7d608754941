"""Stage: a server whose replies are scripted by a part. It records its calls and their costs."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from harness import Oracle
from headstart.config import Settings
from headstart.interfaces.sampling import Sampling
from headstart.prompt.builder import Prompt
from headstart.serving.request import Event, Finished, Request, Sink
from headstart.serving.runtime import Handle, Runtime
from scripted import Script, Scripted

Part = Callable[[Prompt], str]
"""Returns the reply to a prompt."""


@dataclass
class Record:
    """One call.

    Attributes:
        prompt, computed: tokens.
        cost: its optimum O.
        head: tokens of its tools and system message.
        added: tokens of the messages that the call before it did not have.
        reported: the cached tokens in its answer.
    """

    path: str
    body: Any = None
    status: int = 0
    answer: str = ""
    prompt: int = 0
    computed: int = 0
    cost: int = 0
    head: int = 0
    added: int = 0
    reply: str = ""
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: int = 0

    @property
    def reported(self) -> int:
        found = re.findall(r'"(?:cached_tokens|cache_read_input_tokens)":\s*(\d+)', self.answer)
        return max(map(int, found), default=0)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "reported": self.reported}


CURRENT: ContextVar[Record | None] = ContextVar("record", default=None)


class Recorder:
    """ASGI middleware: records the bodies of calls and answers."""

    def __init__(self, app: ASGIApp, records: list[Record]) -> None:
        self._app = app
        self._records = records

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        query = scope["query_string"].decode()
        record = Record(f"{scope['method']} {scope['path']}" + (f"?{query}" if query else ""))
        self._records.append(record)
        CURRENT.set(record)
        asked, answered = bytearray(), bytearray()

        async def listening() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                asked.extend(message.get("body", b""))
                if asked and not message.get("more_body"):
                    record.body = json.loads(asked)
            return message

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
            answered.extend(message.get("body", b""))
            record.answer = answered.decode("utf-8", "replace")
            await send(message)

        await self._app(scope, listening, sending)


@dataclass(frozen=True, slots=True)
class Told(Sampling):
    """The sampling of a scripted reply."""

    reply: str = ""


class Cast(Scripted):
    """An engine whose replies come from its sampling."""

    def sampler(self, sampling: Sampling, grammar: Any = None) -> Script:
        script = super().sampler(sampling, grammar)
        if isinstance(sampling, Told):
            script.tokens = deque([*self.tokens(sampling.reply), self._end])
        return script


class Directed(Runtime):
    """A runtime on a `Cast`, whose replies are those of `part`."""

    def __init__(self, make: Callable[[], Cast], settings: Settings, part: Part) -> None:
        super().__init__(make, settings)
        self.part = part
        self.oracle = Oracle()
        self._sent: dict[int, list[Any]] = {}

    def submit(self, request: Request, sink: Sink) -> Handle:
        record = CURRENT.get() or Record("")
        prompt = request.prompt
        record.prompt, record.cost = len(prompt), self.oracle.cost(prompt.tokens)
        record.head = prompt.landmarks.anchor
        if prompt.source is not None:
            record.messages = [dict(message) for message in prompt.source.messages]
            record.tools = len(prompt.source.tools or ())
        record.added = self._added(record)
        record.reply = self.part(prompt)
        given = {name: getattr(request.params.sampling, name) for name in Sampling.__dataclass_fields__}
        params = replace(request.params, sampling=Told(**given, reply=record.reply))
        request = replace(request, params=params)

        def noting(event: Event) -> None:
            if isinstance(event, Finished):
                record.computed = event.report.computed
                self.oracle.learn_tokens([*prompt.tokens.tolist(), *event.tokens])
            sink(event)

        return super().submit(request, noting)

    def _added(self, record: Record) -> int:
        sent = (record.body or {}).get("messages") or (record.body or {}).get("input") or []
        # Calls without tools (for titles) come in between.
        before = self._sent.get(record.tools, [])
        self._sent[record.tools] = sent
        return sum(len(self.engine.tokenizer.tokenize(json.dumps(message))) for message in sent[len(before) :])
