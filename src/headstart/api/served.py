"""Served: what the outer layers of a server need to know of what it serves, be it one model or several."""

from __future__ import annotations

from typing import Protocol

from headstart.api.drain import Drain
from headstart.chat.tenancy import IsolationPolicy
from headstart.errors import HeadstartError
from headstart.observe import logs
from headstart.observe.logs import Caller, Figures


class Served(Protocol):
    """What a server serves.

    Attributes:
        drain: the requests that a stopping server still has to answer.
        policy: how requests are isolated from each other.
        failure: why nothing can be served; None if nothing is wrong.
    """

    drain: Drain
    policy: IsolationPolicy
    failure: HeadstartError | None

    @property
    def loading(self) -> bool:
        """Whether nothing can be served yet."""

    @property
    def saves(self) -> bool:
        """Whether stopping takes time to save what was computed."""

    def new_id(self, prefix: str) -> str:
        """An id for something that this server keeps."""

    def keep(self) -> None:
        """Applies the expiry of all keys."""

    def unfinished(self, caller: Caller, how: str, figures: Figures, error: BaseException | None = None) -> None:
        """Records a call whose answer is incomplete. `how`: a key of `logs.UNFINISHED`."""

    def refused(self, caller: Caller, status: int, error: BaseException) -> None:
        """Records a call that was refused before anything was computed."""


class CallCounts(Protocol):
    """Metrics of calls without an answer."""

    def unfinished(self, how: str) -> None:
        """Counts a call that ended without an answer: `abort` by its caller, or `error`."""

    def refused(self, status: int) -> None:
        """Counts a call that was refused."""


class RecordsCalls:
    """The part of `Served` that records calls without an answer: in metrics, in the log, and for the end of the server.

    Attributes:
        drain: the requests that a stopping server still has to answer.
    """

    drain: Drain

    @property
    def counts(self) -> CallCounts:
        """Where they are counted."""
        raise NotImplementedError

    def unfinished(self, caller: Caller, how: str, figures: Figures, error: BaseException | None = None) -> None:
        self.counts.unfinished("abort" if how == "shutdown" else how)
        logs.unfinished(caller, how, figures, error)
        self.drain.ended += self.drain.begun

    def refused(self, caller: Caller, status: int, error: BaseException) -> None:
        self.counts.refused(status)
        self.drain.refused += self.drain.begun
        logs.refused(caller, status, error)
