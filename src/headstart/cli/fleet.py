"""`headstart fleet`: serves a model on several machines; the keys of a fleet, and what it stores."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from headstart.cli import fleet_demo as cli_fleet_demo
from headstart.cli import fleet_serve as cli_fleet_serve
from headstart.cli import fleet_status as cli_fleet_status
from headstart.cli import fleet_store as cli_fleet_store
from headstart.errors import ConfigError
from headstart.paths import is_folder

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
    rich_markup_mode="markdown",
    add_completion=False,
)
app.command(SERVE, epilog=cli_fleet_serve.EPILOG)(cli_fleet_serve.serve)
app.command("stop")(cli_fleet_serve.stop)
app.command("status")(cli_fleet_status.status)
app.command("demo")(cli_fleet_demo.demo)

FleetKeyFile = Annotated[Path, typer.Argument(metavar="FILE", help="The key file. Every server of the fleet needs a copy.")]


@app.command()
def keygen(file: FleetKeyFile) -> None:
    """Makes a key file. Whoever has it can read and forge what the fleet stores."""
    from headstart.tiers.shared.keys import FleetKeys

    if not is_folder(file.parent):
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


app.command()(cli_fleet_store.ls)
app.command()(cli_fleet_store.rm)
