"""Tenancy: which requests may share KV.

A tenant is a digest of its key or of the key's name. With isolation on, the tenant (and the user) becomes the *owner* in a
request's salt (`prefix_cache/blocks`), before the `cache_salt` of its body. Quotas count by owner, and no `cache_salt` can
imitate another owner.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from blake3 import blake3

from headstart.errors import ConfigError
from headstart.prefix_cache.blocks import OWNER_END

Salting = Callable[[str | None, str | None], str]
"""The salt of a request, from the user and the `cache_salt` in its body."""

OPEN = ""
"""The tenant of all callers of a server without keys."""


@dataclass(frozen=True, slots=True)
class IsolationPolicy:
    """How requests are isolated, beside their `cache_salt`.

    Attributes:
        key: whether tenants are isolated from each other.
        user: whether the users that bodies name are too.
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
    """A policy by its name. Without a name: `key` if there are or may be `several` keys, else `none`.

    Raises:
        ConfigError: there is no such policy.
    """
    name = name or ("key" if several else "none")
    if name not in POLICIES:
        raise ConfigError(f"--isolate must be {' or '.join(POLICIES)}, not {name!r}.")
    return POLICIES[name]


def tenant_of(kind: str, identity: str) -> str:
    """The tenant of a key's name, or of a key without a name; `kind` says which of the two `identity` is."""
    return _digest("tenant", [kind, identity])


def salt(policy: IsolationPolicy, tenant: str, user: str | None, cache_salt: str | None) -> str:
    """The salt of a request. It differs between requests that `policy` isolates, and for each `cache_salt`.

    Without isolation it is the `cache_salt` itself, or "" without one. Salts of different policies never collide: an owner is
    64 hexadecimal digits, followed by a NUL.
    """
    given = cache_salt or ""
    who = [tenant if policy.key else "", (user or "") if policy.user else ""]
    if any(who):
        return _digest("owner", who) + OWNER_END + given
    return OWNER_END + given if OWNER_END in given else given


def viewer_of(tenant: str, salt: str) -> str:
    """Who may read about a request: with isolation its owner, else its tenant."""
    owner, end, _ = salt.partition(OWNER_END)
    return owner if end and owner else tenant


def _digest(kind: str, parts: list[str]) -> str:
    return blake3(json.dumps([f"headstart.{kind}.1", *parts]).encode()).hexdigest()
