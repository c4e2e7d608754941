"""Passing: what of a request goes to the process of a model, and what of its answer to the client. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any
from urllib.parse import quote

from headstart.api.errors import ANTHROPIC, OLLAMA, OPENAI, message_of
from headstart.api.framing import NDJSON, Framing, frame
from headstart.api.openai_chat.encode import DONE
from headstart.errors import RequestError
from headstart.models.upstream import AnswerHead, HeaderPair

_HOP = frozenset({b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade"})
"""Headers of one connection (RFC 9110, 7.6.1)."""
_OWN = _HOP | {
    *(b"host", b"authorization", b"x-api-key", b"content-length", b"expect", b"x-request-id", b"cookie"),
    *(b"origin", b"referer", b"sec-fetch-site", b"sec-fetch-mode", b"sec-fetch-dest"),
    *(b"forwarded", b"x-forwarded-for", b"x-forwarded-proto", b"x-forwarded-host"),
}
"""Headers of requests that the front has read, or writes itself."""
_STAMPED = _HOP | {b"x-request-id", b"request-id", b"date", b"server"}
"""Headers of answers that the front writes itself."""


def passed_headers(
    given: Iterable[HeaderPair], *, caller: bytes, request_id: str, client: str, body: bytes | None
) -> list[HeaderPair]:
    """The headers of a request on its way to the process.

    Args:
        caller: who asks, in place of a key (`passed.PassedKey`).
        client: the client's address; "" if it has none.
        body: None if the request has none.
    """
    kept = [(name, value) for name, value in given if name not in _OWN]
    kept += [(b"host", b"localhost"), (b"authorization", b"Bearer " + caller), (b"x-request-id", request_id.encode())]
    if client:
        kept.append((b"x-forwarded-for", client.encode()))
    if body is not None:
        kept.append((b"content-length", str(len(body)).encode()))
    return kept


def answered_headers(head: AnswerHead) -> list[HeaderPair]:
    """The headers of an answer on its way to the client."""
    return [(name, value) for name, value in head.headers if name not in _STAMPED]


def target(path: str, query: bytes) -> bytes:
    """A canonical path and its query, as a request has them."""
    escaped = quote(path, safe="/:@!$&'()*+,;=~-._%").encode("ascii")
    return escaped + (b"?" + query if query else b"")


def stream_headers(framing: Framing) -> list[HeaderPair]:
    """Headers of a stream that begins before the model is ready."""
    kind = framing.media_type + ("; charset=utf-8" if framing.media_type.startswith("text/") else "")
    return [(b"content-type", kind.encode()), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]


_DATA = b"\ndata: "
"""Between the name of an event and its data. The data has no line breaks, so there is one in each event with a name."""


class PassedEvents:
    """Counts the events with names in a stream that is passed on in parts, of any size."""

    def __init__(self) -> None:
        self.count = 0
        self._end = b""

    def add(self, part: bytes) -> None:
        data = self._end + part
        self.count += data.count(_DATA)
        self._end = data[1 - len(_DATA) :]


def stream_error(path: str, framing: Framing, error: Exception, request_id: str, events: int = 0) -> bytes:
    """The end of a stream that has begun, in the dialect of its path. `events`: how many it had, if they have numbers."""
    if framing is NDJSON:
        return framing.frame(OLLAMA.body(error, request_id))
    if path == "/v1/messages":
        return frame(ANTHROPIC.body(error, request_id), "error")
    if path == "/v1/responses":
        fields = {"code": getattr(error, "code", None) or "server_error", "message": message_of(error), "param": None}
        return frame({"type": "error", **fields, "sequence_number": events}, "error")
    last = DONE if path in ("/v1/chat/completions", "/v1/completions") else b""
    return frame(OPENAI.body(error, request_id)) + last


class PassedError(RequestError):
    """An error that the process of a model has answered with."""

    def __init__(self, status: int, fields: dict[str, Any]) -> None:
        message = fields.get("message")
        super().__init__(message if isinstance(message, str) else f"The model's process answered with status {status}.")
        self.status = status
        self.type, self.param = str(fields.get("type") or self.type), fields.get("param")
        self.code = fields.get("code")

    @classmethod
    def of(cls, status: int, body: bytes) -> PassedError:
        """The error in an answer of any dialect."""
        try:
            fields = json.loads(body)["error"]
        except (ValueError, KeyError, TypeError):
            fields = {}
        if isinstance(fields, str):  # Ollama's
            fields = {"message": fields}
        return cls(status, fields if isinstance(fields, dict) else {})
