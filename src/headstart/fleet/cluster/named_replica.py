"""Named replica: Ray's request router for calls that name their replica.

The front has chosen already (`fleet/front`). If the named replica is gone or full, the call goes to another one: its prompt is
computed there, or fetched from the shared tier.
"""

from __future__ import annotations

import asyncio
from typing import Any

from ray.serve.exceptions import BackPressureError
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from headstart.fleet.cluster.running import Running

ARGUMENT = "replica"
"""The keyword argument of a call that names its replica."""
WAIT = 5.0
"""Seconds that a call waits until a replica runs. Ray would let it wait without limit."""


class NamedReplica(RequestRouter):  # type: ignore[misc]  # Ray has no types here
    """See the module, of which Ray makes a copy in each process."""

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
        Running.names = frozenset(one.to_full_id_str() for one in self.curr_replicas)

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
