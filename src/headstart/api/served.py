"""Served: what the outer layers of a server need to know of what it serves, be it one model or several."""

from __future__ import annotations

from typing import Protocol

from headstart.api.drain import Drain
from headstart.chat.tenancy import IsolationPolicy
from headstart.errors import HeadstartError
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
