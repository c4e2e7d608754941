"""Event stream: sends the events of a call to its caller, as its encoder frames them."""

from __future__ import annotations

import asyncio
import math

import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headstart.api.connection import Disconnected, EngineCall
from headstart.api.encoder import Encoder
from headstart.api.errors import answer
from headstart.api.service import Service
from headstart.api.understood import Understood
from headstart.errors import HeadstartError
from headstart.observe.logs import Caller


class EventStream(Response):
    """The answer to a call with `stream`.

    Status 200 is sent with the first event, or with the first heartbeat (`Encoder.beat`) if that comes earlier. An error before
    that is an ordinary error answer. A later one is the last event of the stream.
    """

    def __init__(self, call: EngineCall, understood: Understood, service: Service, caller: Caller) -> None:
        # Response.__init__ would set a content-length.
        self.status_code = 200
        self.background = None
        self.media_type = understood.encoder.framing.media_type
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._call = call
        self._understood = understood
        self._service = service
        self._caller = caller

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        call, encoder = self._call, self._understood.encoder
        clock, sent = asyncio.get_running_loop().time, -math.inf
        try:
            async with call:
                while not call.done:
                    batch = await call.take()
                    if call.failure is not None and not started:
                        raise call.failure
                    seconds = call.seconds if batch else 0.0
                    frames = [encoder.encode(number, event, seconds, call.summary_of) for number, event in batch]
                    data = b"".join(frames)
                    # The parser may hold back a whole argument, and an encoder a whole call.
                    if not (data or call.done) and (not batch or clock() >= sent + self._service.keep_alive / 2):
                        data = encoder.beat()
                    if not started:
                        started = True
                        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    if call.done and call.failure is None:
                        await asyncio.to_thread(self._understood.complete, self._service)
                    if data:
                        await send({"type": "http.response.body", "body": data, "more_body": True})
                        sent = clock()
            if call.failure is not None:
                raise call.failure
            summary = call.summary()
            last = encoder.close(summary)
        except Disconnected:
            self._service.unfinished(self._caller, "abort", call.so_far())
            return
        except Exception as error:
            if not started:
                await failed(self._service, self._caller, call, error, scope)(scope, receive, send)
                return
            record_failure(self._service, self._caller, call, error)
            last = self._last(error)
        else:
            self._service.finished(self._caller, summary, call.reasons, call.seconds)
        await send({"type": "http.response.body", "body": last, "more_body": False})

    def _last(self, error: Exception) -> bytes:
        try:
            return self._understood.encoder.fail(error)
        except Exception:  # the encoder itself may have failed
            return Encoder.fail(self._understood.encoder, error)


def failed(service: Service, caller: Caller, call: EngineCall, error: Exception, scope: Scope) -> Response:
    """Records a failed call of which nothing has been sent, and returns the error answer."""
    record_failure(service, caller, call, error)
    response = answer(error, scope)
    service.metrics.refused(response.status_code)
    return response


def record_failure(service: Service, caller: Caller, call: EngineCall, error: Exception) -> None:
    """Records a failed call."""
    if not isinstance(error, HeadstartError):
        structlog.get_logger("headstart.api").error("internal error", id=caller.id, exc_info=error)
    service.unfinished(caller, "shutdown" if call.stopped else "error", call.so_far(), error)
