"""Actions: what one server does with a chain that it has, for its own routes and for other servers of a fleet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from headstart.errors import Conflict, NotFound, RequestError, Unavailable
from headstart.interfaces.tokens import BlockId
from headstart.serving.runtime import Runtime
from headstart.serving.stored import CachedChain, DeletedStretch

Action = Literal["show", "text", "pin", "unpin", "delete"]


@dataclass(frozen=True, slots=True)
class ChainRequest:
    """What is asked for.

    Attributes:
        caller: the caller as an owner.
        operator: whether it reaches the chains of all. It reads the text of none but its own.
        start: the first token of the text.
        tokens: most tokens of it; None for all.
        deleted: what others have deleted of it. A server that has not the whole chain deletes its earlier turns.
    """

    action: Action
    key: BlockId
    caller: bytes
    operator: bool
    start: int = 0
    tokens: int | None = None
    deleted: tuple[DeletedStretch, ...] = ()


@dataclass(frozen=True, slots=True)
class ChainAnswer:
    """What a server did.

    Attributes:
        body: of its answer; None if it has no such chain.
        message: why it refused; "" if it did not.
        code: of a conflict.
        deleted: what it has deleted.
    """

    body: dict[str, Any] | None = None
    message: str = ""
    code: str | None = None
    deleted: tuple[DeletedStretch, ...] = ()

    @property
    def error(self) -> RequestError:
        if self.code is None:
            return Unavailable(self.message)
        return Conflict(f"Another server of the fleet refused: {self.message} Others may have done it.", code=self.code)


def answer(runtime: Runtime, asked: ChainRequest) -> ChainAnswer:
    """`act` for another server."""
    try:
        return act(runtime, asked)
    except NotFound:
        return ChainAnswer()
    except RequestError as error:
        return ChainAnswer(message=error.with_flags, code=error.code if isinstance(error, Conflict) else None)


def act(runtime: Runtime, asked: ChainRequest) -> ChainAnswer:
    """Does it here. Raises NotFound, Conflict and Unavailable."""
    stored, key = runtime.stored, asked.key
    owner = None if asked.operator else asked.caller
    match asked.action:
        case "show":
            return ChainAnswer(_entries(stored.get(key, owner), asked.caller))
        case "text":
            text = _text(runtime, stored.get(key, asked.caller), asked)
            return ChainAnswer({"id": key.hex(), "start": asked.start, "text": text})
        case "pin":
            return ChainAnswer(figures(stored.pin(key, owner), asked.caller))
        case "unpin":
            return ChainAnswer(figures(stored.unpin(key, owner), asked.caller))
        case "delete":
            gone = stored.delete(key, owner, asked.deleted)
            figure = {"entries": gone.entries, "tokens": gone.tokens, "disk_bytes": gone.disk_bytes}
            return ChainAnswer({"id": key.hex(), "deleted": True, **figure}, deleted=gone.stretches)


def figures(chain: CachedChain, caller: bytes) -> dict[str, Any]:
    """A chain without its entries."""
    return {
        "id": chain.id.hex(),
        "tokens": chain.tokens,
        "blocks": len(chain.entries),
        "checkpoints": len(chain.checkpoints),
        "tiers": dict(chain.tiers),
        "pinned": chain.pinned,
        "complete": not chain.entries[0].start,
        "seconds_ago": None if chain.used is None else round(chain.used, 1),
        "uses": chain.uses,
        "saves_seconds": None if chain.saves is None else round(chain.saves, 3),
        "yours": chain.owner == caller,
    }


def _entries(chain: CachedChain, caller: bytes) -> dict[str, Any]:
    ends = {state.parent: state for state in chain.checkpoints}
    entries = [
        {
            "id": entry.id.hex(),
            "start": entry.start,
            "tokens": entry.length,
            "tiers": dict(entry.copies),
            "checkpoint": dict(ends[entry.id].copies) if entry.id in ends else None,
        }
        for entry in chain.entries
    ]
    return {**figures(chain, caller), "entries": entries}


def _text(runtime: Runtime, chain: CachedChain, asked: ChainRequest) -> str:
    every = [token for entry in chain.entries for token in entry.tokens.tolist()]
    wanted = every[asked.start :] if asked.tokens is None else every[asked.start : asked.start + asked.tokens]
    with runtime.prompts.tokenizer_open() as tokenizer:
        return b"".join(map(tokenizer.token_bytes, wanted)).decode("utf-8", "replace")
