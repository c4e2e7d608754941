"""Stream: a call's events, told to its caller as server-sent events."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headstart.api.call import Call, Disconnected
from headstart.api.faults import form
from headstart.api.service import Service
from headstart.api.wire import DONE, Choice, Dialect, comment, frame
from headstart.errors import HeadstartError
from headstart.runtime.request import Delta, Event, Finished, Progress, Request, Started, TokenLogprob


class Script:
    """The choices of an answer: the k-th choice of the i-th prompt of n choices each has the index i · n + k."""

    def __init__(self, dialect: Dialect, requests: Sequence[Request], piece: Callable[[int], bytes], *, echo: bool) -> None:
        self.dialect = dialect
        self.width = requests[0].choices
        self.choices: list[Choice] = []
        for request in requests:
            for _ in range(self.width):
                choice = Choice(len(self.choices), prompt=request.prompt.text if echo else "")
                if echo and request.prompt_logprobs is not None:
                    token = int(request.prompt.tokens[0])
                    choice.first = TokenLogprob(token, piece(token), 0.0)
                self.choices.append(choice)

    def choice(self, number: int, event: Started | Delta | Finished) -> Choice:
        return self.choices[number * self.width + event.choice]

    def take(self, number: int, event: Event) -> None:
        """Lets a whole answer grow by an event."""
        if isinstance(event, Delta):
            choice = self.choice(number, event)
            choice.text.append(event.text)
            choice.logprobs.extend(event.logprobs)
        elif isinstance(event, Started):
            self.choice(number, event).prompt_logprobs = event.prompt_logprobs
        elif isinstance(event, Finished):
            self.choice(number, event).finish = event.reason


class EventStream(Response):
    """The answer to a call with `stream`. What fails before its first event is an ordinary error answer."""

    media_type = "text/event-stream"

    def __init__(self, call: Call, script: Script, service: Service, request_id: str, *, progress: bool) -> None:
        # Response.__init__ would set a content-length.
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._call = call
        self._script = script
        self._dialect = script.dialect
        self._service = service
        self._request_id = request_id
        self._progress = progress

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        call = self._call
        try:
            async with call:
                while not call.done:
                    batch = await call.take()
                    if call.failure is not None and not started:
                        raise call.failure
                    data = b"".join([self._tell(number, event) for number, event in batch]) if batch else comment("waiting")
                    if not started:
                        started = True
                        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
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
            last = frame(form(call.failure))
        else:
            summary = call.summary()
            self._service.finished(self._request_id, summary, call.reasons, call.seconds)
            last = self._dialect.totals(summary) + DONE
        await send({"type": "http.response.body", "body": last, "more_body": False})

    def _tell(self, number: int, event: Event) -> bytes:
        if type(event) is Delta:
            return self._dialect.delta(self._script.choice(number, event), event.text, event.logprobs)
        if isinstance(event, Progress):
            told = comment(f"prefill {event.done}/{event.total}")
            if self._progress:
                told += self._dialect.progress(number * self._script.width, event, self._call.seconds)
            return told
        self._script.take(number, event)
        if isinstance(event, Started):
            return self._dialect.opening(self._script.choice(number, event))
        if isinstance(event, Finished):
            return self._dialect.ending(self._script.choice(number, event), self._call.summary_of(number, event.choice))
        return b""
