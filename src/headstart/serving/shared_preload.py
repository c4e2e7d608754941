"""Shared preload: brings prefixes from the shared tier into memory that no request has asked for. Nothing is computed.

One prefix after the other, in the order in which they are given: so what matters most comes first, and what several of them
begin with is fetched once. Nobody waits for a single prefix, so the store may be slower than computing would be. What has
arrived is held until all is over: the last prefixes do not evict the first ones. Used from the engine thread only.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from headstart.interfaces.tier import KV
from headstart.prefix_cache.blocks import Chain
from headstart.serving.held_prefix import HeldPrefix
from headstart.serving.shared_fetch import SharedFetch
from headstart.tiers.shared_tier import Fetch

log = logging.getLogger("headstart.shared")


@dataclass(slots=True, eq=False)
class Preload:
    """Prefixes to bring.

    Attributes:
        chains: the prefixes, each with one token more.
        stopped: set on another thread: what is not there by now is not needed.
        over: nothing more is done.
        prefixes, tokens: of how many prefixes something was brought, and how many tokens.
    """

    chains: Iterator[Chain]
    stopped: bool = False
    over: threading.Event = field(init=False)
    prefixes: int = 0
    tokens: int = 0

    def __post_init__(self) -> None:
        self.over = threading.Event()


class SharedPreload:
    """Does one preload. A deletion by a user ends it: what was deleted may be among the prefixes.

    Args:
        deletion_count: `Expiry.deletion_count`.
    """

    def __init__(self, preload: Preload, shared_fetch: SharedFetch, deletion_count: Callable[[], int]) -> None:
        self._preload = preload
        self._deletion_count, self._before = deletion_count, deletion_count()
        self._shared_fetch = shared_fetch
        self._chain: Chain | None = None
        self._fetch: Fetch | None = None
        self._new = True  # nothing of the present prefix has arrived
        self._held = HeldPrefix()

    def step(self) -> bool:
        """Takes in what has arrived. False if the preload is over. It never raises."""
        try:
            while not self._preload.stopped and self._deletion_count() == self._before:
                if self._chain is not None and self._fetch is not None:
                    if not self._take(self._chain, self._fetch):
                        break
                    if not self._fetch.over:
                        return True
                self._chain = next(self._preload.chains, None)
                if self._chain is None:
                    break
                wanted, self._new = self._shared_fetch.wanted(self._chain), True
                self._fetch = None if wanted is None else self._shared_fetch.fetch(replace(wanted, prefill=0.0))
        except Exception:
            log.exception("the hot list could not be brought")
        self.end()
        return False

    def end(self) -> None:
        """Nothing more is brought."""
        if self._fetch is not None:
            self._fetch.stop()
        self._shared_fetch.free(self._held)
        self._preload.over.set()

    def _take(self, chain: Chain, fetch: Fetch) -> bool:
        """False if memory is full."""
        for arrival in fetch.take():
            before = len(self._held)
            if self._shared_fetch.crowded or not self._shared_fetch.keep(chain, self._held, arrival):
                return False
            self._shared_fetch.land(chain, self._held, wait=True)
            if len(self._held) > before:
                self._preload.prefixes += self._new
                self._preload.tokens += len(arrival.label.tokens) * (arrival.label.kind == KV)
                self._new = False
        return True
