"""Everywhere: what all servers of a fleet do with one chain."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from headstart.api.cache.actions import Action, ChainAnswer, ChainRequest, act
from headstart.api.service import Elsewhere
from headstart.errors import NotFound, RequestError, Unavailable
from headstart.serving.runtime import Runtime

CHANGES: frozenset[Action] = frozenset({"pin", "unpin", "delete"})
"""What is done at each server of a fleet that has the chain. The others are answered by the first that has it."""


async def act_everywhere(runtime: Runtime, elsewhere: Elsewhere, asked: ChainRequest) -> dict[str, Any]:
    """Returns the body of the answer. Raises NotFound, Conflict and Unavailable: for a change, also if one server refuses it.

    A deletion takes two passes. Only those that have the chain know what its earlier turns were. And a server that has deleted
    it may have fetched it again from the shared store, where one that was not yet asked had just written it.
    """
    found, errors = list[ChainAnswer](), list[RequestError]()
    try:
        found.append(await asyncio.to_thread(act, runtime, asked))
    except (NotFound, Unavailable) as error:
        errors.append(error)
    if asked.action in CHANGES or not found:
        for _ in range(2):
            asked = replace(asked, deleted=max((one.deleted for one in found), key=len, default=()))
            answers = await elsewhere.chain(asked)
            errors += (one.error for one in answers if one.message)
            found += (one for one in answers if one.body is not None)
            if not any(one.deleted for one in found):
                break
    refused = [error for error in errors if not isinstance(error, NotFound)] if asked.action in CHANGES else []
    if refused or not found:
        raise (refused or errors)[-1]
    return joined(asked.action, [one.body for one in found if one.body is not None])


def joined(action: Action, bodies: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One body of those of several servers, this one's first."""
    if action != "delete":
        return bodies[0]
    figure = {name: max(body[name] for body in bodies) for name in ("entries", "tokens")}
    return {**bodies[0], **figure, "disk_bytes": sum(body["disk_bytes"] for body in bodies)}
