"""Understood: a body that was read, and what the routes share that comes of it."""

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
    """A body that was read: one request for each prompt, and how to answer.

    Attributes:
        done: called when all is well and complete.
    """

    form: Body
    requests: list[Request]
    encoder: Encoder
    stream: bool = False
    done: Callable[[], None] = lambda: None


ExplanationFilter = Callable[[Explanation | None], Explanation | None]
"""What is to be told of a request, by why it computed what it computed."""


def compared(runtime: Runtime, request: HttpRequest, made: Request, named: str | None) -> ExplanationFilter:
    """How to explain a request whose caller wants it compared with the one whose answer it has `named`.

    Where both go on alike, only what was not kept is told; where that request is forgotten, what differs from the nearest.
    """
    tenant = tenancy.told(request.scope.get("tenant", tenancy.OPEN), made.prompt.salt)

    def seen(record: Record) -> bool:
        return (record.alias, record.salt, record.tenant) == (named, made.prompt.salt, tenant)

    record = runtime.scheduler.history.last(seen) if named else None
    if record is None:
        return lambda own: own
    found = runtime.compare(made.prompt, record)
    return lambda own: found or (own if own is not None and own.where is None else None)


def remember(service: Service, encoder: Encoder) -> None:
    """Keeps what the caller may not send back of the replies."""
    if encoder.reader is not None:
        service.chat.remember(encoder.reader, [builder.message for builder in encoder.builders])


async def posted(request: HttpRequest) -> tuple[Service, Callable[[], Conversation]]:
    """The conversation of a body in OpenAI's form; it is read where the function is called. Raises Unavailable."""
    service = service_of(request)
    service.ready()
    data = await service.body(request)
    return service, lambda: conversation_of(parse(TemplateRequest, data), service.salt(request))
