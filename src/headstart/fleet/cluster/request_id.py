"""Request id: Ray Serve adds the header `x-request-id` to every answer, with the request's own id or one that it has made."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class WithoutRequestId:
    """ASGI middleware: leaves this header out, because two of them are read as one id with a comma."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [one for one in message["headers"] if one[0] != b"x-request-id"]
            await send(message)

        await self._app(scope, receive, sent)
