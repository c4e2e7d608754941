"""What an engine was proved to do, and what a proof may choose from. The planner reads it as data.

`engines/proof` finds it out by experiment, at the load of a model.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Traits:
    """What this engine was proved to do, with this model and these settings.

    Attributes:
        block_size: canonical prefill may stop and continue at multiples of this many tokens without changing any bit.
        chunking: whether one prefill call may span several blocks without changing any bit.
        canonical: whether prefill that starts at a block boundary gives the same bits every time, whether the KV before it was
            imported or computed.
        decode_exact: whether decoding gives the same bits, whether the KV before was computed in the slot, restored, or left by
            a rewind.
        decode_is_prefill: whether KV from decoding has the same bits as KV from prefill.
        sliceable: whether a sequence consists of KV only (full attention), so that it can be truncated at any token. Otherwise
            a live sequence can only grow, or go back to a checkpoint.
        movable: whether KV and checkpoints can be exported and imported. Otherwise only a live slot can be reused.
        random_access: whether exporting some blocks costs what they cost alone, not a pass over the whole slot. The engine says
            so; it is not proved.
        notes: results of the proofs, one line each, for `headstart doctor` and the log.
    """

    block_size: int
    chunking: bool = True
    canonical: bool = True
    decode_exact: bool = True
    decode_is_prefill: bool = False
    sliceable: bool = True
    movable: bool = True
    random_access: bool = False
    notes: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        """Whether warm answers can be bit-identical to cold ones. Otherwise `--reuse exact` refuses to start."""
        return self.canonical and self.decode_exact

    @property
    def stateful(self) -> bool:
        """Whether KV is usable only together with a checkpoint at its end."""
        return self.movable and not self.sliceable


@dataclass(frozen=True, slots=True)
class EngineProof:
    """The result of a proof, for a later process of the same server that loads the same model in the same way.

    Attributes:
        key: hexadecimal digest of everything that the proof depends on.
        slots: slots of the engine that was proved.
    """

    key: str
    traits: Traits
    slots: int


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """Block sizes in tokens that an engine can have. A proof chooses from them, in this order.

    Sizes that do not divide `Shape.batch`, or for which the context is too short, are left out.

    Attributes:
        spanned: they need prefill calls of any number of blocks to give the same bits (the trait `chunking`).
        single: they need only that the same call gives the same bits twice. Each prefill call then computes one block.
    """

    spanned: tuple[int, ...] = (64, 128, 256)
    single: tuple[int, ...] = (256, 128, 512)
