"""A member of a fleet that stops."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from headstart.config import Settings
from headstart.fleet.cluster import bridge
from headstart.fleet.cluster.member import Member
from headstart.fleet.cluster.setup import FleetSetup
from headstart.fleet.model_card import ModelCard
from headstart.testing.fake_engine import FakeEngine


class Nobody:
    """The other processes of a fleet: there are none."""

    async def send(self, report: bytes, card: ModelCard) -> Sequence[bool]:
        return [False]

    async def status(self) -> dict[str, Any]:
        return {}

    async def metrics(self) -> dict[str, bytes]:
        return {}

    async def explain(self, tenant: str, salt: str, request_id: str | None) -> Sequence[dict[str, Any] | None]:
        return ()


def stored(folder: Path) -> int:
    return sum(1 for _ in folder.rglob("*.rows"))


def test_a_reply_that_takes_too_long_ends_properly_and_what_it_computed_is_stored(tmp_path: Path) -> None:
    """Fault: Ray killed a replica whose reply took longer than the grace, and nothing was stored."""
    engine = partial(FakeEngine, slots=1, ctx=4096, block_size=8, delay=0.01)
    setup = FleetSetup(Settings(memory_budget=8 << 20, cache_dir=tmp_path, settle="off"), engine=engine)
    content = {"messages": [{"role": "user", "content": "Begin. " * 9}], "max_tokens": 4000, "ignore_eos": True, "stream": True}
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "query_string": b"", "headers": []}

    async def run() -> tuple[str, int]:
        member = Member(setup, "a")
        await member.start(Nobody())
        sent, ended = b"", False
        async for messages in bridge.call(member.app, scope, json.dumps(content).encode()):
            sent += b"".join(message.get("body", b"") for message in messages)
            if sent.count(b"data: ") > 5 and not ended:
                ended = True
                member.end_replies()
        before = stored(tmp_path)
        await member.close()
        return sent.decode(), stored(tmp_path) - before

    sent, more = asyncio.run(run())
    assert "this reply is not complete" in sent
    assert sent.endswith("data: [DONE]\n\n")
    assert more > 0
