"""Proven: proofs of earlier loads that still hold.

A proof takes as long as the prefill of 2,000 to 3,000 tokens, which is minutes for a large model on a CPU. So its result is
stored, together with a *sample*: a digest of a few results that the engine computed. A later load computes the sample again.
If it is the same, and everything else that the proof depends on too, the stored result is used, in exact mode as well.

A server of several models loads one again and again. Each process hands its proofs to the next one, which takes them over
without a sample if everything that they depend on is the same.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from blake3 import blake3

from headstart.engines.memo import recall, remember
from headstart.engines.proof import ProofProgress, answer, prove
from headstart.interfaces.engine import Engine
from headstart.interfaces.tokens import Tokens
from headstart.interfaces.traits import EngineProof, Traits

MEMO = "proofs.json"
log = logging.getLogger("headstart.proof")

_MOST = 64
"""Proofs that are stored; the oldest is dropped first."""
STILL = "proved by an earlier load, and the same bits again"


@dataclass(frozen=True)
class Proven:
    """The stored proof of one engine.

    Attributes:
        folder: of the store; None proves at every load and stores nothing.
        identity: digest of everything that the proof depends on.
        anew: prove even if a proof is stored, and replace it.
        handed: proofs of the last process of this server that had the model loaded.
    """

    folder: Path | None
    identity: bytes
    anew: bool = False
    handed: Sequence[EngineProof] = ()

    def traits(self, engine: Engine, tokens: Tokens, *, window: int, progress: ProofProgress = lambda _: None) -> Traits:
        """The result of `prove`, or the stored one."""
        for proof in self.handed:
            if proof.key == self.identity.hex() and _holds(proof.traits, proof.slots, engine) and not self.anew:
                return proof.traits
        if self.folder is None:
            return prove(engine, tokens, window=window, progress=progress)
        sample = answer(engine, tokens)
        key = self.identity.hex()
        entry = recall(self.folder, MEMO).get(key)
        found = _traits(entry, sample, engine)
        if found is not None and not self.anew:
            return replace(found, notes=(*found.notes, STILL))
        if entry is not None and found is None:
            log.warning("the stored proof of the engine does not hold (another result, or a damaged file): it is proved again")
        log.info("proving that cached answers of this model are exact; the result is stored for later starts")
        traits = prove(engine, tokens, window=window, progress=progress)
        proved = {key: _entry(sample, traits, engine.shape.slots)} if sample and traits.canonical else {}
        if proved or entry is not None:
            known = {other: entry for other, entry in recall(self.folder, MEMO).items() if other != key} | proved
            remember(self.folder, MEMO, dict(list(known.items())[-_MOST:]))
        return traits


def _entry(sample: bytes, traits: Traits, slots: int) -> dict[str, Any]:
    """What is stored. `slots`: slots of the engine that was proved."""
    found = {"traits": asdict(traits), "slots": slots}
    return {**found, "check": _check(sample, found)}


def _holds(traits: Traits, slots: int, engine: Engine) -> bool:
    """Whether what was proved with so many slots holds for an engine.

    Only `decode_is_prefill` speaks of several slots: of all that are decoded in one call.
    """
    return slots >= engine.shape.slots or not traits.decode_is_prefill


def _traits(entry: Any, sample: bytes | None, engine: Engine) -> Traits | None:
    """The traits in a stored entry, if it is undamaged, has the same sample, and holds for this engine."""
    try:
        if sample is None or entry["check"] != _check(sample, {"traits": entry["traits"], "slots": entry["slots"]}):
            return None
        traits = Traits(**{**entry["traits"], "notes": tuple(entry["traits"]["notes"])})
        return traits if _holds(traits, entry["slots"], engine) else None
    except (TypeError, KeyError):
        return None


def _check(sample: bytes, found: dict[str, Any]) -> str:
    return blake3(sample + json.dumps(found, sort_keys=True).encode()).hexdigest()
