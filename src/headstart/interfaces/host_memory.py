"""Host memory that a model finds and takes, from which the cache's budget is planned (`memory_plan`)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Host memory that was free when a model was loaded, and what the model takes of it, in bytes.

    Attributes:
        available: free before the load, without swapping.
        weights: of the model.
        buffers: for computing.
        kv: of one live token.
        state: of one slot, whatever it holds.
        ctx_step: a slot's context is a multiple of this many tokens.
        share: of the weights and the slots that is in host memory; the rest is in a device's own.
    """

    available: int
    weights: int
    buffers: int
    kv: int
    state: int = 0
    ctx_step: int = 1
    share: float = 1.0

    @property
    def fixed(self) -> int:
        """In host memory, without the slots."""
        return int(self.share * self.weights) + self.buffers

    def live(self, ctx: int, slots: int) -> int:
        """In host memory, of `slots` slots of `ctx` tokens."""
        return int(self.share * slots * self.size(ctx))

    def size(self, ctx: int) -> int:
        """Of a conversation of `ctx` tokens, wherever it is."""
        return self.state + ctx * self.kv
