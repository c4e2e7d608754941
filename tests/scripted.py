"""An engine with scripted replies, for replies that a model would give only by chance.

It only chooses tokens. Tokenising, matching, the cache and all computation are those of the wrapped engine.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headstart.interfaces.engine import Engine, KVSegment, Logits, Span, Step
from headstart.interfaces.sampling import Sampler, Sampling
from headstart.interfaces.tokens import Bytes

Reply = str | Sequence[int]
"""A text, which the tokenizer encodes, or its tokens. An end token is added."""


class Script:
    """The sampler of one reply. At its first token it takes the next script; without one it follows the model."""

    def __init__(self, inner: Sampler) -> None:
        self.inner = inner
        self.tokens: deque[int] | None = None

    def close(self) -> None:
        self.inner.close()


class Scripted(Engine):
    """Any engine, with replies of our choice.

    Args:
        replies: in the order in which replies begin; `say` adds more.
    """

    def __init__(self, engine: Engine, replies: Sequence[Reply] = ()) -> None:
        self.engine = engine
        self.tokenizer = engine.tokenizer
        self.traits = engine.traits
        self.shape = engine.shape
        self.facts = engine.facts
        self.fingerprint = engine.fingerprint
        self.close_at_exit = engine.close_at_exit
        self.replies: deque[Reply] = deque(replies)
        controls = {control.text: control.id for control in self.tokenizer.controls if control.text}
        self._controls = controls
        self._split = re.compile("(" + "|".join(map(re.escape, sorted(controls, key=len, reverse=True))) + ")")
        self._end = controls.get(self.tokenizer.names.get("eos_token", ""), min(self.tokenizer.eog))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def say(self, *replies: Reply) -> None:
        """Adds scripts for the next replies."""
        self.replies.extend(replies)

    def tokens(self, reply: Reply) -> list[int]:
        if not isinstance(reply, str):
            return list(reply)
        found: list[int] = []
        for part in filter(None, self._split.split(reply)):
            found += [self._controls[part]] if part in self._controls else self.tokenizer.tokenize(part)
        return found

    def sampler(self, sampling: Sampling, grammar: Any = None) -> Script:
        return Script(self.engine.sampler(sampling) if grammar is None else self.engine.sampler(sampling, grammar))

    def sample(self, slot: int, sampler: Sampler) -> int:
        assert isinstance(sampler, Script)
        if sampler.tokens is None and self.replies:
            sampler.tokens = deque([*self.tokens(self.replies.popleft()), self._end])
        if sampler.tokens:
            return sampler.tokens.popleft()
        return self.engine.sample(slot, sampler.inner)

    def check_grammar(self, *args: Any, **how: Any) -> Any:
        return self.engine.check_grammar(*args, **how)

    # ── as it is ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def prefill(self, slot: int, tokens: npt.NDArray[np.int32], *, logits: bool) -> None:
        self.engine.prefill(slot, tokens, logits=logits)

    def decode(self, steps: Sequence[Step]) -> None:
        self.engine.decode(steps)

    def logits(self, slot: int) -> Logits:
        return self.engine.logits(slot)

    def truncate(self, slot: int, length: int) -> None:
        self.engine.truncate(slot, length)

    def export_kv(self, slot: int, spans: Sequence[Span]) -> None:
        self.engine.export_kv(slot, spans)

    def import_kv(self, slot: int, segments: Sequence[KVSegment]) -> None:
        self.engine.import_kv(slot, segments)

    def export_checkpoint(self, slot: int, out: Bytes) -> int:
        return self.engine.export_checkpoint(slot, out)

    def import_checkpoint(self, slot: int, segments: Sequence[KVSegment], state: Bytes) -> None:
        self.engine.import_checkpoint(slot, segments, state)

    def rewind(self, slot: int, length: int, state: Bytes) -> None:
        self.engine.rewind(slot, length, state)

    def length(self, slot: int) -> int:
        return self.engine.length(slot)

    def close(self) -> None:
        self.engine.close()
