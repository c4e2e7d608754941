"""What the tests of the shared tier share."""

from __future__ import annotations

import math
import secrets
import time
from typing import Any

import numpy as np

from headstart.interfaces.tokens import Bytes
from headstart.prefix_cache.blocks import Chain, root_id
from headstart.prefix_cache.expiry import Terms
from headstart.prefix_cache.quota import owner_of
from headstart.tiers.shared.keys import OwnerKeys
from headstart.tiers.shared.servers import ServerCard
from headstart.tiers.shared.store import SharedStore
from headstart.tiers.shared.terms import SharedTerms
from headstart.tiers.shared.tier import StoreTier
from headstart.tiers.shared_tier import Arrival, FetchRequest

OWNER, OTHER = b"owner  1", b"owner  2"

FINGERPRINT = b"f" * 32


def prompt(blocks: int, seed: int = 0) -> Chain:
    """A chain of so many blocks of 8 tokens, and a token after it."""
    tokens = np.random.default_rng(seed).integers(0, 1000, 8 * blocks + 1, np.int32)
    return Chain(root_id(FINGERPRINT, ""), 8, tokens)


def request(chain: Chain, size: int, **options: Any) -> FetchRequest:
    """A fetch of all blocks of a chain; the KV of each has `size` bytes."""
    given: dict[str, Any] = {"here": frozenset(), "stateful": False, "state_bytes": 0, "prefill": 0.0, "restore": 0.0}
    given |= options
    blocks = range(len(chain) // chain.block_size)
    return FetchRequest(chain, blocks, fingerprint=FINGERPRINT, owner=owner_of(chain.root), kv_bytes=size, **given)


def payload_of(number: int, size: int) -> Bytes:
    return np.random.default_rng(number).integers(0, 256, size, np.uint8)


def tier_of(store: SharedStore, keys: OwnerKeys, *, room: int = 1 << 30, expire: float = math.inf, **options: Any) -> StoreTier:
    """A tier of a server that is named by its random id."""
    card = ServerCard(secrets.token_hex(8), "", "", "", {})
    terms = SharedTerms(Terms(), expire, keys.names)
    return StoreTier(store, keys, card=card, room=room, terms=terms, **{"writes": True, **options})


def answered(tier: StoreTier, count: int) -> list[bytes]:
    """Waits for so many answers to offers."""
    found, until = list[bytes](), time.monotonic() + 30
    while len(found) < count:
        assert time.monotonic() < until, (len(found), tier.counters)
        found += tier.answered()
        time.sleep(0.005)
    return found


def fetched(tier: StoreTier, wanted: FetchRequest) -> list[Arrival]:
    """Everything that a fetch brings; nothing if it is not begun."""
    fetch, found, until = tier.fetch(wanted, lambda: None), list[Arrival](), time.monotonic() + 30
    while fetch is not None and not fetch.over:
        assert time.monotonic() < until, tier.counters
        found += fetch.take()
        time.sleep(0.002)
    return found
