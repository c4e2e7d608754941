"""Understood: a parsed body, and what the routes share in handling it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from starlette.requests import Request as HttpRequest

from headstart.api.body import Body, parse
from headstart.api.encoder import Encoder
from headstart.api.generation import TemplateRequest
from headstart.api.service import Service, service_of
from headstart.chat import tenancy
from headstart.chat.messages import conversation_of
from headstart.explain.explain import Explanation
from headstart.explain.record import Record
from headstart.interfaces.conversation import Conversation
from headstart.serving.request import Request
from headstart.serving.runtime import Runtime


@dataclass(frozen=True, slots=True)
class Understood:
    """A parsed body: one request for each prompt, and how to answer.

    Attributes:
        done: what else to do when the answer is complete.
    """

    body: Body
    requests: list[Request]
    encoder: Encoder
    stream: bool = False
    done: Callable[[], None] = lambda: None

    def complete(self, service: Service) -> None:
        """Keeps what later requests want to know of the answer, before its caller can send it back. Takes milliseconds."""
        service.chat.remember(self.encoder.builders)
        self.done()


ExplanationFilter = Callable[[Explanation | None], Explanation | None]
"""The explanation to send to the caller, from the request's own explanation."""


def compared(runtime: Runtime, request: HttpRequest, built: Request, named: str | None) -> ExplanationFilter:
    """How to explain a request that the caller wants compared with an earlier one. `named`: the id of that one's answer.

    If the later prompt continues the earlier one, only causes without a difference in text remain. If the earlier request is
    forgotten, the request's own explanation is sent, which compares it with the most similar one.
    """
    tenant = tenancy.viewer_of(request.scope.get("tenant", tenancy.OPEN), built.prompt.salt)

    def seen(record: Record) -> bool:
        return (record.alias, record.salt, record.tenant) == (named, built.prompt.salt, tenant)

    record = runtime.scheduler.history.last(seen) if named else None
    if record is None:
        return lambda own: own
    found = runtime.compare(built.prompt, record)
    return lambda own: found or (own if own is not None and own.where is None else None)


async def posted(request: HttpRequest) -> tuple[Service, Callable[[], Conversation]]:
    """A function that parses the conversation in a body of OpenAI's dialect. Raises Unavailable."""
    service = service_of(request)
    service.ready()
    data = await service.body(request)
    return service, lambda: conversation_of(parse(TemplateRequest, data), service.salt(request))
