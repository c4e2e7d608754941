"""Tenants: who asks, and so with whom a request may share what was computed.

A tenant is known by a digest, never by its key. What isolates becomes the *owner* in a request's salt
(`prefix_cache/blocks`), beside the `cache_salt` of its body: owners are what quotas are about, and a client cannot become
another one by choosing a salt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from blake3 import blake3

from headstart.errors import ConfigError
from headstart.prefix_cache.blocks import OWNER_END

OPEN = ""
"""The tenant of whoever asks a server without keys."""


@dataclass(frozen=True, slots=True)
class IsolationPolicy:
    """What keeps requests apart, beside their `cache_salt`.

    Attributes:
        key: whether tenants are.
        user: whether the users are that a body names.
    """

    key: bool
    user: bool

    @property
    def isolates(self) -> bool:
        return self.key or self.user


POLICIES: Mapping[str, IsolationPolicy] = MappingProxyType(
    {
        "none": IsolationPolicy(key=False, user=False),
        "key": IsolationPolicy(key=True, user=False),
        "user": IsolationPolicy(key=True, user=True),
    }
)


def policy_of(name: str | None, *, several: bool) -> IsolationPolicy:
    """A row of `POLICIES`; without a name `key` if there are or may be `several` keys, else `none`.

    Raises:
        ConfigError: there is no such row.
    """
    name = name or ("key" if several else "none")
    if name not in POLICIES:
        raise ConfigError(f"--isolate must be {' or '.join(POLICIES)}, not {name!r}.")
    return POLICIES[name]


def tenant_of(kind: str, identity: str) -> str:
    """The tenant of a key's name, or of a key without one; `kind` says which."""
    return _digest("tenant", [kind, identity])


def salt(policy: IsolationPolicy, tenant: str, user: str | None, cache_salt: str | None) -> str:
    """The salt of a request: different for whatever `policy` keeps apart and for each `cache_salt`.

    Where nobody is kept apart it is the `cache_salt` itself, and "" without one. No two different requests have the same
    salt under one policy or another: an owner's is 64 hexadecimal digits, and then there is the NUL that ends it.
    """
    given = cache_salt or ""
    who = [tenant if policy.key else "", (user or "") if policy.user else ""]
    if any(who):
        return _digest("owner", who) + OWNER_END + given
    return OWNER_END + given if OWNER_END in given else given


def told(tenant: str, salt: str) -> str:
    """Who may be told of a request: its owner, where owners are kept apart; else its tenant."""
    owner, end, _ = salt.partition(OWNER_END)
    return owner if end and owner else tenant


def _digest(kind: str, parts: list[str]) -> str:
    return blake3(json.dumps([f"headstart.{kind}.1", *parts]).encode()).hexdigest()
