"""Routing: what of a body must be known before a model has read it, in a server of several."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headstart.api.framing import Framing


@dataclass(frozen=True, slots=True)
class BodyRouting:
    """What a body says about its answer and its model.

    Attributes:
        framing: the form of the stream that answers it; None if it is not answered by a stream of a reply.
        keep: for how many seconds without a request the model is to be kept afterwards; None if the body does not say so.
        unloaded: if it asks for nothing but to unload the model: the answer, from the name of the model.
    """

    framing: Framing | None = None
    keep: float | None = None
    unloaded: Callable[[str], dict[str, Any]] | None = None
