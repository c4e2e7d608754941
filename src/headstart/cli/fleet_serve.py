"""`headstart fleet serve` and `headstart fleet stop`: a fleet on Ray Serve."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Annotated

import typer

from headstart.cli.network import AccessOptions, ApiKeys, HostOptions, OperationOptions, PortOption
from headstart.cli.options import NETWORK, SERVED, again, takes, takes_settings
from headstart.config import Settings
from headstart.errors import ConfigError, ModelError
from headstart.paths import expanded

FLEET = "Fleet"
EPILOG = """
**Examples**

`headstart fleet model.gguf --replicas 2` — two replicas on this machine, without a shared cache

`headstart fleet model.gguf --replicas 2 --shared valkey://127.0.0.1 --shared-key-file fleet.key`

`headstart fleet model.gguf --replicas 2..8 --address ray://head:10001 --shared valkey://store --shared-key-file /etc/fleet.key`

`headstart fleet demo` — a store, two replicas, and a conversation that moves when its replica is killed
"""

Replicas = Annotated[
    str,
    typer.Option(
        envvar="HEADSTART_REPLICAS",
        metavar="N|N..M",
        rich_help_panel=FLEET,
        help="Replicas. With a range, there are more when prompts wait for seconds, and fewer when none wait.",
    ),
]
Address = Annotated[
    str | None,
    typer.Option(
        envvar="HEADSTART_ADDRESS",
        metavar="ray://HOST:PORT|auto",
        rich_help_panel=FLEET,
        help="Cluster of Ray that runs the fleet. The command ends when the fleet serves, and the fleet goes on.",
        show_default="a new cluster on this machine, until the command is stopped",
    ),
]
Direct = Annotated[
    bool,
    typer.Option(
        "--direct",
        envvar="HEADSTART_DIRECT",
        rich_help_panel=FLEET,
        help="Let HAProxy stream from the replicas' own ports: less delay, but these ports are open to the network.",
    ),
]
Fronts = Annotated[
    int,
    typer.Option(min=1, envvar="HEADSTART_FRONTS", metavar="N", rich_help_panel=FLEET, help="Processes that choose replicas."),
]
ReplicaCpus = Annotated[
    float | None,
    typer.Option(
        min=0.01,
        envvar="HEADSTART_REPLICA_CPUS",
        metavar="N",
        rich_help_panel=FLEET,
        help="Processors that Ray reserves for a replica.",
        show_default="--threads on a cluster",
    ),
]


FleetPort = Annotated[int | None, again(PortOption, NETWORK, "Port. Unlike a server, a fleet does not take 0.")]
FleetApiKeys = Annotated[
    list[str] | None,
    again(
        ApiKeys,
        NETWORK,
        "Key that requests must send; give the option again for more keys (in the environment: separated by spaces). Only for "
        "a fleet on this machine: with --address give --api-key-file.",
    ),
]


@dataclass(frozen=True, slots=True)
class FleetHostOptions(HostOptions):
    """Where a fleet listens. None for the default."""

    port: FleetPort = None


@dataclass(frozen=True, slots=True)
class FleetAccessOptions(AccessOptions):
    """Who may enter a fleet."""

    api_key: FleetApiKeys = None


@dataclass(frozen=True, slots=True)
class FleetSizeOptions:
    """How many processes a fleet has, and where."""

    replicas: Replicas = "2"
    address: Address = None
    direct: Direct = False
    fronts: Fronts = 1
    replica_cpus: ReplicaCpus = None


@takes("operation", OperationOptions)
@takes_settings(*SERVED)
@takes("access", FleetAccessOptions)
@takes("at", FleetHostOptions)
@takes("fleet", FleetSizeOptions)
def serve(
    context: typer.Context,
    *,
    fleet: FleetSizeOptions,
    at: FleetHostOptions,
    access: FleetAccessOptions,
    settings: Settings,
    operation: OperationOptions,
) -> None:
    """Serves a model with several replicas. Each request goes to the replica that has most of its prompt and least to do.

    With --shared, no replica computes what another one has computed. All files that the options name must be on every machine
    of the cluster. docs/run-a-fleet.md explains how to run a fleet.
    """
    from headstart.fleet.cluster import launch
    from headstart.fleet.cluster.setup import FleetSetup, Scale
    from headstart.observe.logs import configure

    log_format, address = operation.checked_format(), fleet.address
    scale = Scale.parse(fleet.replicas)
    if at.port == 0:
        raise ConfigError("A fleet needs a port of its own: give --port a number that is not 0.")
    if address is not None:
        _check_address(address)
        if access.api_key:
            raise ConfigError(
                "With --address give --api-key-file: Ray would store keys of --api-key where its users read them."
            )
    launch.check()
    usual_disk = False
    if operation.no_disk:
        settings = replace(settings, cache_dir=None)
    elif address is not None:  # the folder for caches of this machine's user may not be that of the replicas'
        usual_disk = getattr(context.get_parameter_source("cache_dir"), "name", "") == "DEFAULT"
    if address is None:
        settings = divided(settings, scale.least, scale.most)
    setup = FleetSetup(
        settings,
        scale,
        fronts=fleet.fronts,
        cpus=fleet.replica_cpus or (0.1 if address is None else float(settings.threads or 1)),
        spread=address is not None,
        usual_disk=usual_disk,
        api_keys=tuple(access.api_key or ()),
        api_key_file=access.api_key_file and expanded(access.api_key_file),
        isolate=access.isolate,
        keep_noise=tuple(access.keep_noise or ()),
        alias=tuple(access.alias or ()),
        allow_host=(*([at.host] if at.host else ()), *(access.allow_host or ())),
        cors=tuple(access.cors or ()),
        log_format=log_format,
    )
    if address is not None:
        setup.check_paths()
    setup.check()  # raises before anything is started
    configure(setup.log_format)
    typer.echo(f"starting {fleet.replicas} replicas of {settings.model}", err=True)
    with launch.fleet(setup, at.host, at.port, address=address, direct=fleet.direct) as (place, number):
        typer.echo(f"serving at http://{place}:{number}/v1; headstart fleet status --port {number}", err=True)
        if address is None:
            launch.until_signal()
            typer.echo("stopping", err=True)


def divided(settings: Settings, least: int, most: int) -> Settings:
    """The settings of each of `least` to `most` replicas that share this machine, if nothing else is said: its part of the
    processors, and of the memory that is free.

    The weights of a GGUF count once, because all replicas map the same file.
    """
    from headstart.engines import machine
    from headstart.hub.names import find

    weights = 0
    with suppress(ModelError):  # each replica will say so
        model = find(settings.model)
        weights = model.size if model.form == "gguf" else 0
    memory = weights + max(0, machine.memory() - weights) // most
    threads = max(1, machine.cores() // least)
    return replace(settings, threads=settings.threads or threads, memory=settings.memory or memory)


def stop(
    address: Annotated[str, typer.Argument(metavar="ADDRESS", help="The cluster of Ray: ray://HOST:PORT or auto.")],
) -> None:
    """Stops a fleet that runs on a cluster. Running replies are finished, and replicas store what only they have."""
    from headstart.fleet.cluster import launch

    _check_address(address)
    launch.stop(address)


def _check_address(address: str) -> None:
    """Raises ConfigError if this is no address of a cluster. Ray also takes HOST:PORT."""
    if address != "auto" and not re.fullmatch(r"ray://\S+|[^\s/]+:\d+", address):
        raise ConfigError(f"'{address}' is no address of a cluster of Ray: write it like ray://HOST:10001, or auto.")
