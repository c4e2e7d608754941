"""Stream: a call's events, told to its caller as server-sent events."""

from __future__ import annotations

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headstart.api.call import Call, Disconnected
from headstart.api.compose import Asked
from headstart.api.service import Service
from headstart.errors import HeadstartError


class EventStream(Response):
    """The answer to a call with `stream`. What fails before its first event is an ordinary error answer."""

    media_type = "text/event-stream"

    def __init__(self, call: Call, asked: Asked, service: Service, request_id: str) -> None:
        # Response.__init__ would set a content-length.
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._call = call
        self._asked = asked
        self._service = service
        self._request_id = request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        call, teller = self._call, self._asked.teller
        try:
            async with call:
                while not call.done:
                    batch = await call.take()
                    if call.failure is not None and not started:
                        raise call.failure
                    seconds = call.seconds if batch else 0.0
                    told = [teller.tell(number, event, seconds, call.summary_of) for number, event in batch]
                    data = b"".join(told) if batch else teller.beat()
                    if not started:
                        started = True
                        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    if call.done and call.failure is None:
                        self._asked.done()  # before the caller can send it back
                    if data:
                        await send({"type": "http.response.body", "body": data, "more_body": True})
        except Disconnected:
            self._service.unfinished(self._request_id, "abort")
            return
        except HeadstartError as error:
            if not started:
                raise
            call.failure = error
        if call.failure is not None:
            self._service.unfinished(self._request_id, "error", str(call.failure))
            last = teller.fail(call.failure)
        else:
            summary = call.summary()
            self._service.finished(self._request_id, summary, call.reasons, call.seconds)
            last = teller.close(summary)
        await send({"type": "http.response.body", "body": last, "more_body": False})
