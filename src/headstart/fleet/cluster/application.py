"""Application: the deployments of a fleet, for Ray Serve."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.schema import LoggingConfig

from headstart.config import Settings
from headstart.errors import ConfigError
from headstart.fleet.cluster.direct import DirectFront
from headstart.fleet.cluster.gateway import Gateway
from headstart.fleet.cluster.named_replica import NamedReplica
from headstart.fleet.cluster.replica import RayReplica
from headstart.fleet.cluster.setup import FRONT, REPLICA, FleetSetup, Scale, stopping

UNLIMITED = 10_000
"""Requests at a front or a replica at a time. A replica has a queue of its own, with a limit of its own."""
HOOK = "_with_ingress_request_router"

QUIET = LoggingConfig(enable_access_log=False, log_level="WARNING")
"""headstart logs its requests itself, and a report is a call too."""


def application(setup: FleetSetup, *, direct: bool = False) -> Application:
    """The application of a fleet.

    Args:
        direct: HAProxy sends requests to the replicas' own ports. All of Ray's processes need `launch.DIRECT`.
    """
    named = RequestRouterConfig(request_router_class=f"{NamedReplica.__module__}:{NamedReplica.__name__}")
    replica = serve.deployment(serve.ingress()(RayReplica) if direct else RayReplica, name=REPLICA).options(
        **replica_options(setup), request_router_config=named
    )
    front = serve.deployment(serve.ingress()(DirectFront if direct else Gateway), name=FRONT).options(**front_options(setup))
    if direct:
        bound = replica.bind(setup)
        # The hook for direct streaming is internal to Ray Serve: tests/fleet/cluster/test_direct.py pins it.
        if not hasattr(bound, HOOK):
            raise ConfigError("This version of Ray Serve has no direct mode: leave out --direct.")
        routed: Application = getattr(bound, HOOK)(front.bind(setup))
        return routed
    return front.bind(setup, replica.bind(setup))


def replica_options(setup: FleetSetup) -> dict[str, Any]:
    """Ray Serve's options for a deployment of replicas, without its router."""
    return {
        **_common(setup),
        **_count(setup),
        "ray_actor_options": {"num_cpus": setup.cpus},
        "max_replicas_per_node": 1 if setup.spread else None,
    }


def front_options(setup: FleetSetup) -> dict[str, Any]:
    """Ray Serve's options for a deployment of fronts. The streams of all replicas run through them, so they stop as late."""
    return {**_common(setup), "num_replicas": setup.fronts, "ray_actor_options": {"num_cpus": 0.1}}


def _common(setup: FleetSetup) -> dict[str, Any]:
    return {
        "max_ongoing_requests": UNLIMITED,
        "graceful_shutdown_timeout_s": stopping(setup),
        "graceful_shutdown_wait_loop_s": 0.5,
        "health_check_period_s": 1.0,
        "health_check_timeout_s": 10.0,
        "logging_config": QUIET,
    }


def _count(setup: FleetSetup) -> dict[str, Any]:
    scale = setup.scale
    if scale.least == scale.most:
        return {"num_replicas": scale.least}
    policy = AutoscalingPolicy(policy_function="headstart.fleet.cluster.scaling:by_waiting_seconds")
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=scale.least,
            max_replicas=scale.most,
            upscale_delay_s=scale.up,
            downscale_delay_s=scale.down,
            policy=policy,
        )
    }


def build(options: dict[str, Any]) -> Application:
    """The application of a Serve configuration file, as KubeRay uses it: `headstart.fleet.cluster.application:build`.

    Args:
        options: `replicas`, `fronts`, `replica_cpus`, `direct`, `api_key_file`, `isolate`, `alias`, `allow_host`, `cors`,
            `keep_noise`, `log_format`, as the options of `headstart fleet serve`; and the fields of `Settings`.

    Raises:
        ConfigError: an option is unknown, or its value cannot work.
    """
    given = dict(options)

    def texts(name: str) -> tuple[str, ...]:
        found = given.pop(name, ())
        return (found,) if isinstance(found, str) else tuple(found)

    direct, key_file = bool(given.pop("direct", False)), given.pop("api_key_file", None)
    known, lists = {one.name for one in fields(Settings)}, ("alias", "allow_host", "cors", "keep_noise")
    rest = given.keys() - known - {"replicas", "fronts", "replica_cpus", "isolate", "log_format", *lists}
    if rest:
        raise ConfigError(f"A fleet has no option {min(rest)!r}; docs/run-a-fleet.md lists them.")
    setup = FleetSetup(
        scale=Scale.parse(str(given.pop("replicas", 2))),
        fronts=int(given.pop("fronts", 1)),
        cpus=float(given.pop("replica_cpus", 1.0)),
        spread=True,
        api_key_file=None if key_file is None else Path(key_file),
        isolate=given.pop("isolate", None),
        log_format=given.pop("log_format", "console"),
        alias=texts("alias"),
        allow_host=texts("allow_host"),
        cors=texts("cors"),
        keep_noise=texts("keep_noise"),
        usual_disk="cache_dir" not in given,
        settings=Settings(**given),  # last: it takes what is left
    )
    setup.check_paths()
    setup.check()
    return application(setup, direct=direct)
