"""Model card: what the front of a fleet must know of a replica's model."""

from __future__ import annotations

from dataclasses import dataclass

from headstart.interfaces.engine import Engine


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What makes a prompt the chain of ids that a replica computes. It is small, and can be sent to other machines.

    Attributes:
        fingerprint: of the engine.
        block_size: tokens of a block.
        stateful: whether the model can continue only where there is a checkpoint.
        ctx: tokens that a conversation may hold.
    """

    fingerprint: bytes
    block_size: int
    stateful: bool
    ctx: int

    @classmethod
    def of(cls, engine: Engine) -> ModelCard:
        """The card of a loaded engine."""
        return cls(engine.fingerprint, engine.traits.block_size, not engine.traits.sliceable, engine.shape.ctx)
