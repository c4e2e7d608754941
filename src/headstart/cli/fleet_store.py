"""`headstart fleet ls` and `rm`: what the servers of a fleet share, by owner, and its deletion."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headstart.errors import ConfigError
from headstart.paths import expanded
from headstart.units import count, show_size, show_time

if TYPE_CHECKING:
    from headstart.tiers.shared.store import SharedStore
    from headstart.tiers.shared.tenants import FleetTenant

StoreUrl = Annotated[str, typer.Argument(metavar="URL", help="The store, as in `--shared`.")]
Owner = Annotated[str, typer.Argument(metavar="OWNER", help="The first digits of an owner that `fleet ls` shows, or `all`.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print data instead of a table.")]
SharedKeys = Annotated[
    Path | None,
    typer.Option(
        "--shared-key-file",
        metavar="FILE",
        help="Keys of the fleet. Only they say which owner is which tenant.",
    ),
]
TenantName = Annotated[
    str | None,
    typer.Option(
        "--tenant",
        metavar="NAME",
        help="Only what this tenant has: the name of its keys. With `--isolate user` that is what it has for no user.",
    ),
]
UserName = Annotated[
    str | None, typer.Option("--user", metavar="USER", help="Only this user of the tenant, where `--isolate user` is used.")
]
TenantKeys = Annotated[
    Path | None,
    typer.Option(
        "--api-key-file",
        metavar="FILE",
        help="API keys of the fleet: with `--shared-key-file`, the tenants in it have names.",
    ),
]
WHOLE = re.compile(r"[0-9a-f]{32}")
"""An owner, with all digits."""
TIMEOUT = 10.0
"""Seconds: an operator would rather wait than be told that a busy store is slow."""


def ls(
    url: StoreUrl,
    key_file: SharedKeys = None,
    tenant: TenantName = None,
    user: UserName = None,
    api_key_file: TenantKeys = None,
    data: AsJson = False,
) -> None:
    """Lists what a store holds, by owner: a tenant with one model, or the records of the servers.

    It shows hashes, and needs no key file for that. With the key file of the fleet it shows the names of tenants too: those of
    `--tenant` or `--api-key-file`, with the models that ran in the last 15 minutes.
    """
    from headstart.tiers.shared.expiry import contents

    with _opened(url) as store:
        named = _tenants(store, key_file, tenant, user, api_key_file)
        found = [one for one in contents(store) if tenant is None or one.owner in named]
    if data:
        print(json.dumps([asdict(one) | (asdict(named[one.owner]) if one.owner in named else {}) for one in found]))
        return
    for one in found:
        age = "" if one.oldest is None else f"   oldest {show_time(round(max(1.0, one.oldest)))}"
        who = f"   {named[one.owner]}" if one.owner in named else ""
        print(f"{one.owner}   {count(one.objects, 'object')}   {show_size(one.size)}{age}{who}")
    total = sum(one.size for one in found)
    print(f"{count(len(found), 'owner')}, {count(sum(one.objects for one in found), 'object')}, {show_size(total)}")


def rm(
    url: StoreUrl,
    owner: Owner = "",
    key_file: SharedKeys = None,
    tenant: TenantName = None,
    user: UserName = None,
) -> None:
    """Deletes everything that a store holds of an owner, its data key first; or of a tenant, with `--tenant`; or of all owners.

    `--tenant` needs the key file of the fleet, and reaches the models that ran in the last 15 minutes.
    """
    from headstart.tiers.shared.expiry import contents, erase

    if bool(owner) == (tenant is not None or user is not None):
        raise ConfigError(f"Give either --tenant, or an owner; this lists them: headstart fleet ls {url}")
    with _opened(url) as store:
        if not owner:
            named = _tenants(store, key_file, tenant, user, None)
            models = ", ".join(sorted({one.model for one in named.values()})) or "none"
            removed = sum(erase(store, _prefix(one)) for one in named)
            if not removed:
                who = tenant if user is None else f"{tenant}, user {user}"
                ran = f"with the models that ran in the last 15 minutes ({models})"
                raise ConfigError(f"The store has nothing of '{who}' {ran}; `headstart fleet ls {url}` shows all owners.")
            print(f"models that ran in the last 15 minutes: {models}")
        else:
            owners = [one.owner for one in contents(store) if owner == "all" or one.owner.startswith(owner)]
            if WHOLE.fullmatch(owner) and not owners:
                erase(store, _prefix(owner))  # interrupted writes may have left something that is not listed
            if owner != "all" and len(owners) != 1:
                raise ConfigError(
                    f"{count(len(owners), 'owner')} in the store begin with '{owner}'; run: headstart fleet ls {url}"
                )
            removed = erase(store) if owner == "all" else erase(store, _prefix(owners[0]))
    print(f"deleted {count(removed, 'object')}")


def _prefix(owner: str) -> str:
    from headstart.tiers.shared.names import VERSION

    return f"{VERSION}/{owner}/"


def _tenants(
    store: SharedStore, key_file: Path | None, tenant: str | None, user: str | None, api_key_file: Path | None
) -> dict[str, FleetTenant]:
    """Whose owners are, as far as the options say; with a tenant, only its own."""
    from headstart.tiers.shared.keys import FleetKeys
    from headstart.tiers.shared.tenants import SERVERS, tenants

    if "" in (tenant, user):
        raise ConfigError("--tenant and --user must not be empty; is the variable that it comes from set?")
    if user is not None and tenant is None:
        raise ConfigError("--user needs --tenant: whose user it is.")
    if key_file is None:
        if tenant is not None or api_key_file is not None:
            raise ConfigError("Only the keys of the fleet say which owner a tenant is: give --shared-key-file.")
        return {}
    salts = _everybody(api_key_file) if tenant is None else _one(tenant, user)
    found = tenants(store, FleetKeys.load(expanded(key_file)), salts)
    return found if tenant is None else {owner: one for owner, one in found.items() if one != SERVERS}


def _one(tenant: str, user: str | None) -> dict[str, str]:
    """The salt of a tenant, or of one of its users, by what people call it. Isolation by key or by user gives the same."""
    from headstart.chat.tenancy import POLICIES, salt, tenant_of

    label = tenant if user is None else f"{tenant}, user {user}"
    return {label: salt(POLICIES["user"], tenant_of("name", tenant), user, None)}


def _everybody(file: Path | None) -> dict[str, str]:
    """The salts of the tenants in a file of API keys, and of a fleet without isolation."""
    from headstart.api.auth import read
    from headstart.chat.tenancy import OPEN, POLICIES, salt, tenant_of

    lines = read(expanded(file))[0] if file is not None else []
    unnamed = [tenant_of("key", line.key) for line in lines if not line.name]
    who = {f"(unnamed key {number})": tenant for number, tenant in enumerate(unnamed, 1)}
    who |= {line.name: tenant_of("name", line.name) for line in lines if line.name}
    salts = {label: salt(POLICIES["key"], tenant, None, None) for label, tenant in who.items()}
    return {"(everybody)": salt(POLICIES["none"], OPEN, None, None), **salts}


@contextmanager
def _opened(url: str) -> Iterator[SharedStore]:
    """A store. Its errors become ConfigError."""
    from headstart.tiers.shared.address import open_store
    from headstart.tiers.shared.store import StoreError

    store = open_store(url, TIMEOUT)
    try:
        yield store
    except StoreError as error:
        raise ConfigError(f"The store failed: {error}.") from None
    finally:
        store.close()
