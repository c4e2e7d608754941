"""Feed: reads the events of a server, for as long as somebody looks. It connects again when the server goes away."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.client import HTTPException, IncompleteRead
from urllib.parse import urlencode

from headstart.cli.server import ServerAddress, ServerRefusal
from headstart.cli.top.savings import Savings, of_sums
from headstart.cli.top.state import TopState
from headstart.cli.top.stream import Decoder
from headstart.errors import HeadstartError

SILENCE = 30.0
"""Seconds without a byte after which a connection is given up. A server that works sends a comment every few seconds."""
FIRST_WAIT, LONGEST_WAIT = 0.5, 8.0
"""Seconds before another attempt: after the first failure, and at most."""
SELDOM = 2.0
"""Least seconds between two questions for the sums since the server's start."""
USUAL = 60.0
"""Seconds after which it is no trouble that a stream ends without a reason: a fleet and many proxies end long ones."""
PART = 1 << 16

WORDS = {
    401: "The key is missing or wrong. Give --api-key-file FILE, or set HEADSTART_API_KEY",
    403: "This key may not read the events, or the server does not know the name in the address (--allow-host)",
    404: "The server there has no events: it is another program, or an older headstart",
    503: "The server is loading its model, or stopping",
}
"""What an HTTP status means here."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """The server does not answer, or refuses. `text`: one sentence for people, without its full stop."""

    text: str


Update = TopState | Trouble | Savings
"""What is known now; that nothing is heard; the sums since the server's start."""


class Feed:
    """The events of one server.

    Args:
        owner: `cache_salt` and `user`, which name the owner where the key does not.
    """

    def __init__(self, server: ServerAddress, owner: Mapping[str, str] | None = None) -> None:
        self.server = server
        self._query = urlencode({name: value for name, value in (owner or {}).items() if value})
        self._state = TopState()
        self._last_id = ""
        self._sums_due = 0.0  # by time.monotonic

    def run(self, emit: Callable[[Update], None], stopped: threading.Event) -> None:
        """Sends updates until it is stopped. For a thread of its own, because it waits for the server."""
        wait = FIRST_WAIT
        while not stopped.is_set():
            try:
                text = self._read(emit, stopped)
                wait = FIRST_WAIT
                if not text:
                    continue
            except ServerRefusal as error:
                text = WORDS.get(error.status, str(error).removesuffix("."))
            except HeadstartError as error:
                text = error.with_flags.removesuffix(".")
            except TimeoutError:
                text = f"The server at {self.server.place} has been silent for {SILENCE:.0f} s"
            except IncompleteRead:
                text = self._gone
            except (OSError, HTTPException) as error:
                text = f"No server answers at {self.server.place} ({getattr(error, 'reason', error)})"
            except (ValueError, KeyError, TypeError):
                text = f"The server at {self.server.place} sends other events than this headstart knows"
                self._last_id = ""
            if stopped.is_set():
                return
            emit(Trouble(text))
            stopped.wait(wait)
            wait = min(2 * wait, LONGEST_WAIT)

    def _read(self, emit: Callable[[Update], None], stopped: threading.Event) -> str:
        """Reads one stream to its end. Returns why it has ended; "" if that is no trouble."""
        decoder, begun, why = Decoder(), time.monotonic(), ""
        no_trouble = False
        self._sums_due = 0.0
        path = f"/headstart/events?{self._query}"
        with self.server.open(path, timeout=SILENCE, last_event_id=self._last_id) as response:
            if not response.headers.get("content-type", "").startswith("text/event-stream"):
                raise ServerRefusal(404, "")
            news = False
            while (data := response.read1(PART)) and not stopped.is_set():
                for batch in decoder.feed(data):
                    self._state = self._state.then(batch)
                    emit(self._state)
                    self._last_id = batch.id or self._last_id
                    news = True
                    if batch.events and batch.events[0][0] == "end":
                        why = "The server is stopping"
                    elif batch.events and batch.events[0][0] == "dropped":
                        why = f"The server has dropped this reader: {batch.events[0][1]['reason']}"
                        no_trouble = bool(batch.events[0][1].get("usual"))
                if news and time.monotonic() >= self._sums_due:
                    news = False
                    self._ask_for_sums(emit)
        no_trouble |= not why and time.monotonic() >= begun + USUAL
        return "" if no_trouble else why or self._gone

    @property
    def _gone(self) -> str:
        return f"The server at {self.server.place} has gone away"

    def _ask_for_sums(self, emit: Callable[[Update], None]) -> None:
        self._sums_due = time.monotonic() + SELDOM
        try:
            with self.server.open("/headstart/stats", timeout=SILENCE) as response:
                emit(of_sums(json.load(response)))
        except ServerRefusal:  # of an older version they are the operator's
            self._sums_due = float("inf")
