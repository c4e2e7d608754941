"""Proven: what an earlier load has proved of an engine, and still holds.

To prove takes as long as to read 2,000 to 3,000 tokens: minutes, where a large model runs on a processor. So what was proved
is remembered, together with a control answer: what the engine said then. A later load for which all is the same that a proof
depends on, the answer too, need not be proved again. That holds for exact mode as well.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from blake3 import blake3

from headstart.engines.memo import recall, remember
from headstart.engines.proof import Tell, answer, prove
from headstart.interfaces.engine import Engine, Traits
from headstart.interfaces.tokens import Tokens

MEMO = "proofs.json"
log = logging.getLogger("headstart.proof")

_MOST = 64
"""Proofs that are remembered; the oldest goes first."""
STILL = "proved by an earlier load, and the same bits again"


@dataclass(frozen=True)
class Proven:
    """Of one engine.

    Attributes:
        folder: where it is remembered; None to prove at every load, and to remember nothing.
        identity: digest of everything that a proof depends on.
        anew: prove whatever is remembered, and remember that.
    """

    folder: Path | None
    identity: bytes
    anew: bool = False

    def traits(self, engine: Engine, tokens: Tokens, *, block: int, window: int, tell: Tell = lambda _: None) -> Traits:
        """As `prove`, or what that said before."""
        if self.folder is None:
            return prove(engine, tokens, block=block, window=window, tell=tell)
        said = answer(engine, tokens, block=block)
        key = self.identity.hex()
        entry = recall(self.folder, MEMO).get(key)
        found = _traits(entry, said)
        if found is not None and not self.anew:
            return replace(found, notes=(*found.notes, STILL))
        if entry is not None and found is None:
            log.warning("what was proved of the engine does not hold (another answer, or a damaged memo): it is proved anew")
        log.info("proving that cached answers of this model are exact; that is remembered for later starts")
        traits = prove(engine, tokens, block=block, window=window, tell=tell)
        proved = {key: {"traits": asdict(traits), "check": _check(said, asdict(traits))}} if said and traits.canonical else {}
        if proved or entry is not None:
            known = {other: one for other, one in recall(self.folder, MEMO).items() if other != key} | proved
            remember(self.folder, MEMO, dict(list(known.items())[-_MOST:]))
        return traits


def _traits(entry: Any, said: bytes | None) -> Traits | None:
    """The traits in an entry of the memo, if it is whole and of the same answer."""
    try:
        if said is None or entry["check"] != _check(said, entry["traits"]):
            return None
        return Traits(**{**entry["traits"], "notes": tuple(entry["traits"]["notes"])})
    except (TypeError, KeyError):
        return None


def _check(said: bytes, traits: dict[str, Any]) -> str:
    return blake3(said + json.dumps(traits, sort_keys=True).encode()).hexdigest()
