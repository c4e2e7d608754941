"""`headstart fleet`: serves a model on several machines; the keys of a fleet, and what it stores."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from headstart.cli import fleet_demo as cli_fleet_demo
from headstart.cli import fleet_serve as cli_fleet_serve
from headstart.cli import fleet_status as cli_fleet_status
from headstart.errors import ConfigError
from headstart.units import count, show_size, show_time

if TYPE_CHECKING:
    from headstart.tiers.shared.store import SharedStore

SERVE = "serve"


class FleetGroup(TyperGroup):
    """`headstart fleet MODEL` means `headstart fleet serve MODEL`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("-h", "--help"):
            args = [SERVE, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    name="fleet",
    cls=FleetGroup,
    help="Serves a model with several replicas, on one machine or many (docs/run-a-fleet.md). `headstart fleet MODEL` is short "
    "for `headstart fleet serve MODEL`. Makes the keys of a fleet, and shows and deletes what its servers share "
    "(docs/shared.md).",
    no_args_is_help=True,
)
app.command(SERVE, epilog=cli_fleet_serve.EPILOG)(cli_fleet_serve.serve)
app.command("stop")(cli_fleet_serve.stop)
app.command("status")(cli_fleet_status.status)
app.command("demo")(cli_fleet_demo.demo)

FleetKeyFile = Annotated[Path, typer.Argument(metavar="FILE", help="The key file. Every server of the fleet needs a copy.")]
StoreUrl = Annotated[str, typer.Argument(metavar="URL", help="The store, as in `--shared`.")]
Owner = Annotated[str, typer.Argument(metavar="OWNER", help="The first digits of an owner that `fleet ls` shows, or `all`.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print data instead of a table.")]
WHOLE = re.compile(r"[0-9a-f]{32}")
"""An owner, with all digits."""
TIMEOUT = 10.0
"""Seconds: an operator would rather wait than be told that a busy store is slow."""


@app.command()
def keygen(file: FleetKeyFile) -> None:
    """Makes a key file. Whoever has it can read and forge what the fleet stores."""
    from headstart.tiers.shared.keys import FleetKeys

    if not file.parent.is_dir():
        raise ConfigError(f"The folder {file.parent} does not exist: make it first.")
    (keys := FleetKeys.generate()).save(file)
    print(f"{file}: key {keys.ids[0]}. Copy it to every server of the fleet, readable by its user only.")


@app.command()
def rotate(file: FleetKeyFile) -> None:
    """Adds a new key to a key file. New objects are sealed with it; the key before opens older ones; any older key goes.

    Copy the file to all servers and restart them one after another. A server with the old file reads nothing that a server with
    the new one writes; that is a miss, not an error.
    """
    from headstart.tiers.shared.keys import FleetKeys

    (keys := FleetKeys.load(file).rotated()).save(file, replace=True)
    print(f"{file}: new key {keys.ids[0]}; key {keys.ids[1]} still opens older objects.")


@app.command()
def ls(url: StoreUrl, data: AsJson = False) -> None:
    """Lists what a store holds, by owner: a tenant with one model, or the records of the servers. It needs no key file."""
    from headstart.tiers.shared.expiry import contents

    with _opened(url) as store:
        found = contents(store)
    if data:
        print(json.dumps([asdict(one) for one in found]))
        return
    for one in found:
        age = "" if one.oldest is None else f"   oldest {show_time(round(max(1.0, one.oldest)))}"
        print(f"{one.owner}   {count(one.objects, 'object')}   {show_size(one.size)}{age}")
    total = sum(one.size for one in found)
    print(f"{count(len(found), 'owner')}, {count(sum(one.objects for one in found), 'object')}, {show_size(total)}")


@app.command()
def rm(url: StoreUrl, owner: Owner) -> None:
    """Deletes everything that a store holds of an owner, its data key first; or everything of all owners."""
    from headstart.tiers.shared.expiry import contents, erase

    with _opened(url) as store:
        owners = [one.owner for one in contents(store) if owner == "all" or one.owner.startswith(owner)]
        if WHOLE.fullmatch(owner) and not owners:
            erase(store, f"hs1/{owner}/")  # interrupted writes may have left something that is not listed
        if owner != "all" and len(owners) != 1:
            raise ConfigError(f"{count(len(owners), 'owner')} in the store begin with '{owner}'; run: headstart fleet ls {url}")
        removed = erase(store) if owner == "all" else erase(store, f"hs1/{owners[0]}/")
    print(f"deleted {count(removed, 'object')}")


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
