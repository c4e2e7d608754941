"""Named replica: Ray's request router for calls that name their replica.

The front has chosen already (`fleet/front`). If the named replica is gone or full, the call goes to another one: its prompt is
computed there, or fetched from the shared tier.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, ClassVar

from ray import serve
from ray.serve.exceptions import BackPressureError
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from headstart.fleet.cluster.setup import APPLICATION, REPLICA

ARGUMENT = "replica"
"""The keyword argument of a call that names its replica."""
WATCH = 1.0
"""Seconds between two tries to call a replica while none runs, and between two looks at which replicas run."""
WAIT = 5.0
"""Seconds that a call waits until a replica runs. Ray would let it wait without limit."""


class NamedReplica(RequestRouter):  # type: ignore[misc]  # Ray has no types here
    """See the module.

    Attributes:
        running: the names of the replicas that Ray sends requests to. A replica that stops is not among them. The front in the
            same process chooses only among these. None before Ray has named any.
    """

    running: ClassVar[frozenset[str] | None] = None
    # Ray asks a replica for its queue before it sends a request. A busy one may be late, and is still the right one.
    queue_len_response_deadline_s = 2.0
    max_queue_len_response_deadline_s = 2.0

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Ray's replicas have changed."""
        super().update_replicas(replicas)
        self._name_running()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """A call has failed because its replica is dead, which Ray's controller may not know yet."""
        super().on_replica_actor_died(replica_id)
        self._name_running()

    def _name_running(self) -> None:
        NamedReplica.running = frozenset(one.to_full_id_str() for one in self.curr_replicas)

    async def _choose_replica_for_request(self, pending_request: PendingRequest, **options: Any) -> RunningReplica:
        """Ray's wait for a replica, with a limit. In direct mode HAProxy sends requests here, through Ray's own proxy, while no
        replica runs. The method is internal: tests/fleet/cluster/test_direct.py pins it."""
        try:
            async with asyncio.timeout(WAIT):
                return await super()._choose_replica_for_request(pending_request, **options)
        except TimeoutError:
            raise BackPressureError(self.num_pending_requests, 0, retry_after_s=WAIT) from None

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Ranks of replicas, the best first."""
        name = "" if pending_request is None else pending_request.kwargs.get(ARGUMENT, "")
        named = [one for one in candidate_replicas if one.replica_id.to_full_id_str() == name]
        others = [one for one in candidate_replicas if one.replica_id.to_full_id_str() != name]
        return [rank for rank in (named, others) if rank]


def stopping(reporting: Iterable[str]) -> set[str]:
    """Those of the replicas that report to which Ray sends no more requests: they stop, or are dead."""
    return set() if NamedReplica.running is None else {*reporting} - NamedReplica.running


async def watch() -> None:
    """Makes Ray tell this process which replicas run: it does so for whoever has called one."""
    while True:
        with suppress(Exception):
            await serve.get_deployment_handle(REPLICA, APPLICATION).figures.remote()
            return
        await asyncio.sleep(WATCH)


async def stopped(name: str, grace: float) -> None:
    """Waits until Ray stops a replica that ran, and `grace` seconds more. Ray itself tells it when its replies are over."""
    ran = math.inf
    while time.monotonic() < ran + grace:
        if NamedReplica.running and name in NamedReplica.running:
            ran = time.monotonic()
        await asyncio.sleep(min(WATCH, grace))
