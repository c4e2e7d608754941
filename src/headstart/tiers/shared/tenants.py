"""Tenants of a store: which owner, as names show it, is a tenant with a model.

An owner's name in a store is a keyed hash of the owner, which is a hash of the model's fingerprint and of the tenant. So it can
be computed from the fleet key, and not be read. The fingerprints come from the cards of servers (`servers`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headstart.prefix_cache.blocks import root_id
from headstart.prefix_cache.quota import owner_of
from headstart.tiers.shared.data_keys import DataKeys
from headstart.tiers.shared.keys import FleetKeys, OwnerKeys, TagKeys
from headstart.tiers.shared.servers import OWNER, cards
from headstart.tiers.shared.store import SharedStore


@dataclass(frozen=True, slots=True)
class FleetTenant:
    """Who an owner is. `model`: its name; "" for the records of the servers, which belong to no tenant."""

    tenant: str
    model: str

    def __str__(self) -> str:
        return f"{self.tenant}, {self.model}" if self.model else self.tenant


SERVERS = FleetTenant("the servers' records", "")


def tenants(store: SharedStore, fleet: FleetKeys, salts: Mapping[str, str]) -> dict[str, FleetTenant]:
    """The owners of tenants, as hexadecimal digits in names, with each model that a server of the last minutes serves.

    Args:
        salts: of each tenant, by what people call it (`chat/tenancy`).

    Raises StoreError.
    """
    kinds = TagKeys(fleet), DataKeys(store, fleet)  # a fleet may have changed from one to the other, and objects stay
    running = [card for keys in kinds for card in cards(store, keys)]
    found = {_owner(keys, OWNER): SERVERS for keys in kinds}
    for keys in kinds:
        for card in running:
            for tenant, salt in salts.items():
                owner = owner_of(root_id(bytes.fromhex(card.fingerprint), salt))
                found[_owner(keys, owner)] = FleetTenant(tenant, card.model)
    return found


def _owner(keys: OwnerKeys, owner: bytes) -> str:
    return keys.names.prefix(owner).split("/")[1]
