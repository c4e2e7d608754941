"""Front process: a front with its prompt reader, fed with reports in their encoded form."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from headstart.fleet.cluster.setup import FleetSetup
from headstart.fleet.front.front import Front
from headstart.fleet.front.hot import HotPrompts, HotStretch
from headstart.fleet.front.prompts import PromptReader
from headstart.fleet.model_card import ModelCard
from headstart.fleet.replica.wire import decode
from headstart.observe import logs, redaction
from headstart.tiers.shared.address import secrets

LOOK = 60.0
"""Most seconds between two looks at how long data may be kept: the file of keys can change it."""


class FrontProcess:
    """What the fronts of both modes share. Raises what loading the model's vocabulary raises."""

    def __init__(self, setup: FleetSetup) -> None:
        logs.configure(setup.log_format)
        redaction.hide(secrets())
        self.reader = PromptReader(
            setup.settings, keys=setup.keys(), isolate=setup.isolate, keep_noise=setup.keep_noise, load=setup.tokenizer
        )
        self.front = Front(self.reader, hot=None if setup.settings.shared is None else HotPrompts())

    async def forget(self) -> None:
        """Drops all prompts as often as data expires. It runs until it is cancelled."""
        forgot = time.monotonic()
        while True:
            await asyncio.sleep(min(max(0.0, forgot + self.reader.expire - time.monotonic()), LOOK))
            if time.monotonic() >= forgot + self.reader.expire:
                forgot = time.monotonic()
                await asyncio.to_thread(self.reader.forget)
                self.front.forget()

    async def report(self, report: bytes, card: ModelCard) -> bool:
        """Takes a report. True if the replica must send a dump."""
        return self.front.report(await asyncio.to_thread(decode, report), card)

    async def hottest(self, fingerprint: bytes, tokens: int) -> Sequence[HotStretch]:
        """For a new replica: what it should fetch."""
        return await asyncio.to_thread(self.front.hottest, fingerprint, tokens)

    def status(self) -> list[dict[str, Any]]:
        """What is known of each replica, for JSON."""
        return [asdict(one) for one in self.front.status()]
