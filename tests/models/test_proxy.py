"""What the proxy does with a request and its answer, without processes."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, MutableMapping
from types import SimpleNamespace
from typing import Any

import pytest

from headstart.api import body
from headstart.api.framing import SSE, frame
from headstart.api.openai_chat import routes as openai
from headstart.api.routing import BodyRouting
from headstart.models.choice import ModelChoice
from headstart.models.naming import ModelNames, NamedModel
from headstart.models.proxy import PassedCall, PassedRoutes, Proxy
from headstart.models.upstream import AnswerHead, UpstreamGone

MODEL = NamedModel("a", "a.gguf", 1)
ROUTES = PassedRoutes([openai.router], frozenset())


class DyingProcess:
    """A process that ends after the first events of an answer. It is its only connection too."""

    ended, cause = True, "it was killed"

    def __init__(self, *parts: bytes) -> None:
        self._parts = parts

    async def connection(self) -> DyingProcess:
        return self

    def put_back(self, connection: DyingProcess) -> None:
        pass

    def close(self) -> None:
        pass

    async def ask(self, head: bytes, body: bytes) -> AnswerHead:
        return AnswerHead(200, ((b"content-type", b"text/event-stream"),))

    async def parts(self) -> AsyncIterator[bytes]:
        for part in self._parts:
            yield part
        raise UpstreamGone("The process ended.")


async def receive() -> MutableMapping[str, Any]:
    await asyncio.Event().wait()
    raise AssertionError


def scope_of(path: str) -> dict[str, Any]:
    state = {"tenant": "", "operator": True, "expire": None, "request_id": "req_1", "headers": []}
    return {"type": "http", "method": "POST", "path": path, "query_string": b"", **state}


def test_a_stream_of_responses_ends_with_the_next_number_when_its_process_dies() -> None:
    async def test() -> bytes:
        sent: list[bytes] = []

        async def send(message: MutableMapping[str, Any]) -> None:
            sent.append(message.get("body", b""))

        first = b"".join(frame({"type": "x", "sequence_number": number}, "x") for number in range(3))
        granted = asyncio.get_running_loop().create_future()
        granted.set_result(DyingProcess(first[:20], first[20:]))
        lease: Any = SimpleNamespace(granted=granted, running=True)
        front: Any = SimpleNamespace(keep_alive=5.0, unfinished=lambda *_: None)
        choice = ModelChoice(MODEL, False, BodyRouting(SSE))
        await PassedCall(front, scope_of("/v1/responses"), send, choice, lease, b"{}", 0.0).run(receive)
        return b"".join(sent)

    end = json.loads(asyncio.run(test()).rsplit(b"data: ", 1)[1])
    assert (end["type"], end["sequence_number"]) == ("error", 3)


@pytest.mark.parametrize("large", [False, True])
def test_only_a_large_body_is_parsed_in_a_thread(monkeypatch: pytest.MonkeyPatch, large: bool) -> None:
    data = json.dumps({"model": "unknown", "prompt": "x" * (body.LARGE if large else 1)}).encode()
    places: list[threading.Thread] = []
    plain = body.load
    monkeypatch.setattr(body, "load", lambda data: places.append(threading.current_thread()) or plain(data))

    async def read(request: Any) -> bytes:
        return data

    async def test() -> None:
        front: Any = SimpleNamespace(names=ModelNames([MODEL]), body=read, refused=lambda *_: None)
        sent: list[Any] = []

        async def send(message: MutableMapping[str, Any]) -> None:
            sent.append(message)

        await Proxy(send, front, ROUTES)(scope_of("/v1/completions"), receive, send)  # type: ignore[arg-type]
        assert sent[0]["status"] == 404

    asyncio.run(test())
    assert [place is threading.current_thread() for place in places] == [not large]
