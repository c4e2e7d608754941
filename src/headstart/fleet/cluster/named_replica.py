"""Named replica: Ray's request router for calls that name their replica.

The front has chosen already (`fleet/front`). If the named replica is gone or full, the call goes to another one: its prompt is
computed there, or fetched from the shared tier.
"""

from __future__ import annotations

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from headstart.fleet.cluster.running import Running

ARGUMENT = "replica"
"""The keyword argument of a call that names its replica."""


class NamedReplica(RequestRouter):  # type: ignore[misc]  # Ray has no types here
    """See the module, of which Ray makes a copy in each process."""

    # Ray asks a replica for its queue before it sends a request. A busy one may be late, and is still the right one.
    queue_len_response_deadline_s = 2.0
    max_queue_len_response_deadline_s = 2.0

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Ray's replicas have changed."""
        super().update_replicas(replicas)
        Running.names = frozenset(one.replica_id.to_full_id_str() for one in replicas)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Ranks of replicas, the best first."""
        name = "" if pending_request is None else pending_request.kwargs.get(ARGUMENT, "")
        named = [one for one in candidate_replicas if one.replica_id.to_full_id_str() == name]
        others = [one for one in candidate_replicas if one.replica_id.to_full_id_str() != name]
        return [rank for rank in (named, others) if rank]
