"""Pull: fetches a model from a hub for a caller, who sees how far it is.

download thread ──progress──▶ queue ──▶ event loop ──▶ lines of JSON
caller gone or server stopping ──▶ the next report ends the download; what is here is kept
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import structlog
from starlette.types import Receive

from headstart.api.errors import OLLAMA
from headstart.api.framing import NDJSON
from headstart.api.incoming import disconnected
from headstart.api.pulls import Pulls
from headstart.api.service import Service
from headstart.errors import Cancelled, HeadstartError, HubError, InvalidRequest, ModelError, RequestError, Unavailable
from headstart.hub.local_model import LocalModel
from headstart.hub.progress import PullProgress
from headstart.hub.pull import pull
from headstart.hub.reference import parse
from headstart.model_names import model_names

SUCCESS = {"status": "success"}
_KEPT = "What is here is kept: pull again to go on."
_SHOWN = 12
"""Digits of a digest in a line for people."""


class HubFailed(RequestError):
    """The hub refuses or cannot be reached, or the disk is too small."""

    quotes = False
    status = 424
    code = "hub_failed"


class Download:
    """One download.

    Args:
        pulls: of the server.
        name: a served model, for which nothing is fetched, or `OWNER/NAME[:QUANTISATION]`. A served model is not updated: its
            process may be reading the file, and the next requests would be answered by another model.

    Raises:
        InvalidRequest: the name is neither.
    """

    def __init__(self, service: Service, pulls: Pulls, name: str) -> None:
        self._service = service
        self._pulls = pulls
        self._name = name
        self._served = service.models.named(name) is not None
        self._why = ""
        if not self._served and parse(name) is None:
            raise InvalidRequest(f"'{name[:200]}' names no model of a hub; give OWNER/NAME or OWNER/NAME:QUANTISATION.")
        self._lines: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._gone = False

    async def run(self) -> None:
        """Fetches the model. Raises InvalidRequest, HubFailed, Overloaded, Unavailable if the server stops, or Cancelled if the
        caller is gone."""
        if self._served:
            return
        try:
            model = await asyncio.to_thread(self._fetch)
        except HubError as error:
            raise HubFailed(error.with_flags) from None
        except ModelError as error:
            raise InvalidRequest(error.with_flags, param="model") from None
        structlog.get_logger("headstart.api").info("model fetched", model=model.name)
        if model.pulled:  # otherwise a server that starts later would not know it
            names = (*model.names, self._name, *model_names(str(model.path)))
            self._why = self._service.models.fetched(names, str(model.path), model.size)
        else:
            self._why = "another program has fetched it"

    async def whole(self, receive: Receive) -> None:
        """As `run`, which a caller that leaves ends."""
        task, gone = asyncio.ensure_future(self.run()), asyncio.ensure_future(disconnected(receive))
        try:
            await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
            self._gone = gone.done()
            await task
        finally:
            self._gone = True
            gone.cancel()

    async def lines(self) -> AsyncIterator[bytes]:
        """The lines of the answer while the download runs. An error is the last line."""
        task = asyncio.create_task(self.run())
        task.add_done_callback(lambda _: self._lines.put_nowait(None))
        try:
            yield NDJSON.frame({"status": "pulling manifest"})
            while True:
                try:
                    line = await asyncio.wait_for(self._lines.get(), self._service.keep_alive / 2)
                except TimeoutError:
                    yield NDJSON.silence("waiting")
                    continue
                if line is None:
                    break
                yield NDJSON.frame(line)
            if (error := task.exception()) is None:
                if self._why:
                    serves = f"`headstart serve {self._name}` serves it"
                    yield NDJSON.frame({"status": f"{self._name} is here; {serves}; {self._why}"})
                yield NDJSON.frame(SUCCESS)
            elif isinstance(error, Exception):
                if not isinstance(error, HeadstartError):
                    structlog.get_logger("headstart.api").error("internal error", exc_info=error)
                yield NDJSON.frame(OLLAMA.body(error, ""))
        finally:
            self._gone = True
            task.add_done_callback(lambda done: done.cancelled() or done.exception())

    def _fetch(self) -> LocalModel:
        with self._pulls.one():
            return pull(self._name, self._report)

    def _report(self, progress: PullProgress) -> None:
        """Called in the thread of the download."""
        if self._service.drain.begun:
            raise Unavailable(f"The server is stopping. {_KEPT}")
        if self._gone:
            raise Cancelled(f"The download was stopped. {_KEPT}")
        line = {
            "status": f"pulling {progress.digest[:_SHOWN] or progress.file}",
            "digest": f"sha256:{progress.digest}",
            "total": progress.total,
            "completed": progress.done,
        }
        self._loop.call_soon_threadsafe(self._lines.put_nowait, line)
