"""Servers: each server of a fleet leaves a card in the store, which says what its fingerprint is made of. Servers with other
fingerprints cannot use each other's KV. `headstart doctor` compares the cards, and says in words what differs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final

from headstart.names import option
from headstart.tiers.shared.envelope import SealError, open_bytes, seal_bytes
from headstart.tiers.shared.keys import OwnerKeys
from headstart.tiers.shared.store import SharedStore

OWNER: Final = b"servers of the fleet"
"""Under which the cards are stored. No tenant has this name, because owners of tenants are digests."""
EVERY, LIFE = 300.0, 900.0
"""Seconds between two cards of a server, and for which one is true."""

WORDS: Final[Mapping[str, str]] = {
    "weights": "other model files",
    "lora": "another LoRA adapter",
    "engine": "another version of the engine",
    "build": "another build of the engine: use the same wheel everywhere",
    "system": "another processor, or a build for another one",
    "libc": "another C library",
    "extra_buffers": "weights are laid out in another way on one of the two",
    "amx": "AMX is used on one of the two only",
    "devices": "other devices",
    "gpu_layers": f"another {option('gpu_layers')}",
    "kv_type": f"another {option('kv_type')}",
    "batch": "another size of batches",
    "long_rope": f"{option('ctx')} is beyond the model's original context on one of the two only",
    "environment": "other variables of llama.cpp",
    "block_size": "another size of blocks",
}
"""What a difference means, by the name of the part."""


@dataclass(frozen=True, slots=True)
class ServerCard:
    """A server of the fleet.

    Attributes:
        writer: its random id, as in the objects that it seals; hexadecimal digits.
        host: its machine's name.
        model: its model's name.
        fingerprint: hexadecimal digits.
        identity: what the fingerprint is made of, as texts.
    """

    writer: str
    host: str
    model: str
    fingerprint: str
    identity: Mapping[str, str]


def publish(store: SharedStore, keys: OwnerKeys, card: ServerCard) -> None:
    """Stores a server's card for `LIFE`. Raises StoreError."""
    name = keys.names.of(OWNER, "note", bytes.fromhex(card.writer))
    content = json.dumps(asdict(card)).encode()
    store.put(name, seal_bytes(name, content, keys.newest(OWNER), bytes.fromhex(card.writer)), life=LIFE)


def cards(store: SharedStore, keys: OwnerKeys) -> list[ServerCard]:
    """The cards of all servers, by host. Bad and old ones are left out. Raises StoreError."""
    found = []
    for stored in store.objects(keys.names.prefix(OWNER) + "note/"):
        blob = store.get([stored.name])[0] if stored.age is None or stored.age < LIFE else None
        try:
            if blob is not None:
                found.append(ServerCard(**json.loads(open_bytes(stored.name, blob, keys.of(OWNER)))))
        except (SealError, ValueError, TypeError):
            continue
    return sorted(found, key=lambda card: (card.host, card.writer))


def differences(here: Mapping[str, str], there: Mapping[str, str]) -> list[str]:
    """Why two servers cannot use each other's KV, in words; empty if they can."""
    said = []
    for part in sorted({*here, *there}, key=lambda part: [*WORDS].index(part) if part in WORDS else math.inf):
        one, other = here.get(part, "none"), there.get(part, "none")
        if one != other:
            said.append(f"{WORDS.get(part, f'another {part}')} ({_shown(one, other)})")
    return said


def _shown(here: str, there: str) -> str:
    """Two values that differ: long ones by the words that only one of them has."""
    if len(here) + len(there) < 100:
        return f"{here} here, {there} there"
    mine, other = ([part.strip() for part in text.replace("|", ",").split(",")] for text in (here, there))
    only = [", ".join(part for part in one if part and part not in two)[:200] for one, two in ((mine, other), (other, mine))]
    return f"only here: {only[0] or 'nothing'}; only there: {only[1] or 'nothing'}"
