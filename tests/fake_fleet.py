"""Runs a fleet of fake engines until it is stopped. Its argument is JSON: see `fleets.running`."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from headstart.config import Settings
from headstart.fleet.cluster import launch
from headstart.fleet.cluster.setup import FleetSetup, Scale
from headstart.fleet.model_card import ModelCard
from headstart.testing.fake_engine import FakeEngine


def engine(options: dict[str, Any], lost: str, loading: str) -> FakeEngine:
    """A replica's engine.

    Args:
        lost: while this file has the number of the replica's process, its reports do not arrive.
        loading: while this file exists, the engine is not ready.
    """
    from headstart.fleet.cluster.replica import RayFleet

    send = RayFleet.send

    async def send_unless_lost(fleet: RayFleet, report: bytes, card: ModelCard) -> Sequence[bool]:
        while Path(lost).exists() and str(os.getpid()) in Path(lost).read_text().split():
            await asyncio.sleep(0.1)  # as in a network that loses everything: no error, and no answer
        return await send(fleet, report, card)

    RayFleet.send = send_unless_lost  # type: ignore[method-assign]
    while Path(loading).exists():
        time.sleep(0.1)
    return FakeEngine(**options)


@contextmanager
def cluster(nodes: int, port: int) -> Iterator[str]:
    """The address of a cluster of Ray: a head without room for replicas, and so many nodes with room for one each."""
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    small = {"object_store_memory": 100 << 20, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, **small})
    try:
        for _ in range(nodes):
            made.add_node(num_cpus=2, **small)
        # All nodes are on one machine. So there must be one proxy; a second start of Serve changes nothing.
        ray.init(made.address, namespace="headstart", logging_level="ERROR")
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        ray.shutdown()
        yield made.address
    finally:
        made.shutdown()


def main() -> None:
    what = json.loads(sys.argv[1])
    nodes = what["nodes"]
    setup = FleetSetup(
        Settings(**{"memory_budget": 8 << 20, **what["settings"]}),
        replace(Scale.parse(str(what["replicas"])), **what["scale"]),
        fronts=what["fronts"],
        cpus=1.5 if nodes else 0.1,
        spread=bool(nodes),
        grace=what["grace"],
        api_keys=tuple(what["keys"]),
        engine=partial(engine, what["engine"], what["lost"], what["loading"]),
        tokenizer=FakeEngine.load_tokenizer,
    )
    serves = partial(launch.fleet, setup, "127.0.0.1", what["port"], direct=what["direct"])
    if not nodes:
        with serves():
            launch.until_signal()
        return
    os.environ.update({**launch.LOCAL, **(launch.DIRECT if what["direct"] else {})})  # before Ray is imported
    with cluster(nodes, what["port"]) as address, serves(address=address):
        launch.until_signal()


if __name__ == "__main__":
    main()
