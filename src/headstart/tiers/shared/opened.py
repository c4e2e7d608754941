"""The shared tier that settings ask for."""

from __future__ import annotations

import math
import platform
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from headstart.interfaces.engine import Engine
from headstart.prefix_cache.expiry import Terms
from headstart.tiers.shared.address import fleet_keys, open_store, owner_keys
from headstart.tiers.shared.envelope import WRITER
from headstart.tiers.shared.keys import OwnerKeys
from headstart.tiers.shared.servers import ServerCard
from headstart.tiers.shared.store import SharedStore
from headstart.tiers.shared.terms import SharedTerms
from headstart.tiers.shared.tier import StoreTier
from headstart.tiers.shared_tier import SharedListener


def open_keyed(url: str, key_file: Path | None, *, encrypt: bool) -> tuple[SharedStore, OwnerKeys]:
    """The store at `url`, and the keys of its owners. Raises ConfigError."""
    fleet = fleet_keys(key_file)
    store = open_store(url)
    return store, owner_keys(store, fleet, encrypt=encrypt)


def check(url: str, key_file: Path | None, *, encrypt: bool) -> None:
    """Raises ConfigError if there can be no store at `url`. Nothing is sent."""
    store, _ = open_keyed(url, key_file, encrypt=encrypt)
    store.close()


def opened(
    url: str,
    key_file: Path | None,
    *,
    encrypt: bool,
    writes: bool,
    expire: float | None,
    engine: Engine,
    room: int,
    terms: Terms,
    wall: Callable[[], float],
    listener: SharedListener,
) -> StoreTier:
    """The tier over the store at `url`. The store need not be there yet.

    Args:
        encrypt, writes, expire: the settings `shared_encrypt`, `shared_mode` and `shared_expire`.
        engine: whose KV is shared.
        room: most bytes that wait to be written.
        terms: of all owners, by the clock `wall`. They hold in the shared store too.
        listener: hears what is in the store.

    Raises:
        ConfigError: the address, the key file or a missing library.
    """
    store, keys = open_keyed(url, key_file, encrypt=encrypt)
    lives = SharedTerms(terms, math.inf if expire is None else expire, keys.names)
    name, writer = engine.facts.name, secrets.token_hex(WRITER)
    card = ServerCard(writer, platform.node(), name, engine.fingerprint.hex(), engine.identity)
    clocks = {"wall": wall, "clock": time.monotonic}
    return StoreTier(store, keys, card=card, room=room, writes=writes, terms=lives, listener=listener, **clocks)
