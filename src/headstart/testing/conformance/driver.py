"""How the checks drive an engine, and how a check says that a promise is broken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from unittest import SkipTest

import numpy as np

from headstart.errors import EngineError
from headstart.interfaces.engine import Engine, KVSegment, Logits, Span, Step
from headstart.interfaces.tokens import Bytes, Tokens, as_tokens

TAIL = 5
"""Tokens of a prompt that follow its full blocks, in a call of their own."""
DECODED = 4
"""Tokens that a check decodes after the tail."""
_LEAST_DEPTH = 8
"""Tokens that checks compute at least, where blocks are very small."""
_GUARD = 7
"""Bytes that an export must leave alone have this value."""


class BrokenPromise(AssertionError):
    """The engine does not do what the contract says, or not what its traits claim."""


def expect(kept: bool, otherwise: str) -> None:
    """Raises BrokenPromise with the text `otherwise`, unless `kept`."""
    if not kept:
        raise BrokenPromise(otherwise)


def expect_same(found: Logits, due: Logits, what: str) -> None:
    """Raises BrokenPromise unless both have the same bits. `what`: what the logits come from."""
    if found.tobytes() != due.tobytes():
        raise BrokenPromise(f"{what} gives other logits; they differ by up to {np.abs(found - due).max():.3g}")


@contextmanager
def refused(what: str) -> Iterator[None]:
    """Expects an EngineError."""
    try:
        yield
    except EngineError:
        return
    raise BrokenPromise(f"{what} does not raise EngineError")


@dataclass(frozen=True)
class Snapshot:
    """The first `tokens` tokens of a slot: their KV, and the checkpoint at their end (no bytes in a model without state)."""

    tokens: int
    segments: tuple[KVSegment, ...]
    state: Bytes

    def same(self, other: Snapshot) -> bool:
        """Whether both have the same bytes; they must be cut at the same places."""
        return [self.state.tobytes(), *(one.data.tobytes() for one in self.segments)] == [
            other.state.tobytes(),
            *(one.data.tobytes() for one in other.segments),
        ]


class EngineUnderTest:
    """An engine that is loaded at the first check and kept for the others, and short ways to drive it.

    Args:
        make: loads the engine.
        another: loads an engine with the same fingerprint, which may have other slots and another context; `make` if None.
        blocks: full blocks that checks compute, if the context has room. More of them show faults deeper in a context.
        prompts: random prompts that are computed with the cache and without it. More of them show rarer faults.
        cycles: how often the slots are filled and emptied in each round of the search for leaks.
        name: of the engine, as `named_engine` takes it, for checks in a process of their own; "" leaves them out.
    """

    def __init__(
        self,
        make: Callable[[], Engine],
        another: Callable[[], Engine] | None = None,
        *,
        blocks: int = 3,
        prompts: int = 20,
        cycles: int = 10,
        name: str = "",
    ) -> None:
        self._make = make
        self._blocks = blocks
        self.another = another or make
        self.prompts = prompts
        self.cycles = cycles
        self.name = name

    @cached_property
    def engine(self) -> Engine:
        return self._make()

    def close(self) -> None:
        """Closes the engine, if one was loaded."""
        if "engine" in self.__dict__:
            self.__dict__.pop("engine").close()

    @property
    def depth(self) -> int:
        """Tokens of the full blocks that checks compute."""
        shape, block = self.engine.shape, self.engine.traits.block_size
        blocks = min(max(self._blocks, -(-_LEAST_DEPTH // block)), (shape.ctx - TAIL - DECODED) // block)
        expect(blocks > 0, f"a context of {shape.ctx} tokens has no room for a block of {block} and a reply")
        return blocks * block

    @property
    def boundaries(self) -> range:
        """Block boundaries within `depth`, which is the last of them."""
        block = self.engine.traits.block_size
        return range(block, self.depth + 1, block)

    @property
    def other_slot(self) -> int:
        """A slot that is not the first one, if there is more than one."""
        return min(1, self.engine.shape.slots - 1)

    def tokens(self, count: int, seed: int = 1) -> Tokens:
        """Fixed, random tokens of plain text."""
        tokenizer = self.engine.tokenizer
        special = {control.id for control in tokenizer.controls} | tokenizer.eog
        plain = [token for token in range(tokenizer.n_vocab) if token not in special]
        return as_tokens(np.random.default_rng(seed).choice(plain, count))

    def empty(self) -> None:
        """Empties all slots."""
        for slot in range(self.engine.shape.slots):
            self.engine.truncate(slot, 0)

    def feed(self, slot: int, tokens: Tokens, *sizes: int) -> None:
        """Appends tokens in calls of these sizes. Without sizes: full blocks, in calls as large as the traits allow."""
        largest = self.engine.shape.batch if self.engine.traits.chunking else self.engine.traits.block_size
        at = 0
        for size in sizes or [largest] * -(-len(tokens) // largest):
            self.engine.prefill(slot, tokens[at : at + size], logits=False)
            at += size

    def after(self, slot: int, tail: Tokens) -> Logits:
        """Appends `tail` in one call; returns the logits after it."""
        self.engine.prefill(slot, tail, logits=True)
        return self.engine.logits(slot)

    def cold(self, slot: int, tokens: Tokens, tail: Tokens) -> Logits:
        """Computes full blocks and a tail in an empty slot; returns the logits after them."""
        self.engine.truncate(slot, 0)
        self.feed(slot, tokens)
        return self.after(slot, tail)

    def reply(self, slot: int, tail: Tokens) -> Logits:
        """Appends `tail`, then decodes its first `DECODED` tokens again; returns the logits after each of them."""
        found = [self.after(slot, tail)]
        for token in tail[:DECODED]:
            self.engine.decode([Step(slot, int(token))])
            found.append(self.engine.logits(slot))
        return np.stack(found)

    def save(self, slot: int, *cuts: int) -> Snapshot:
        """Exports what a slot holds, as one segment or in several that begin at these positions."""
        length, width = self.engine.length(slot), self.engine.shape.kv_bytes_per_token
        places = list(pairwise((0, *cuts, length)))
        buffers = [np.full((stop - start) * width + 3, _GUARD, np.uint8) for start, stop in places]
        self.engine.export_kv(slot, [Span(start, stop, out) for (start, stop), out in zip(places, buffers, strict=True)])
        for (start, stop), out in zip(places, buffers, strict=True):
            expect(bool((out[-3:] == _GUARD).all()), f"export_kv of [{start}, {stop}) writes behind the KV of these tokens")
        segments = [KVSegment(out[:-3], stop - start, stop - start) for (start, stop), out in zip(places, buffers, strict=True)]
        state = self.checkpoint(slot) if self.engine.traits.stateful else np.empty(0, np.uint8)
        return Snapshot(length, tuple(segments), state)

    def snapshots(self) -> dict[int, Snapshot]:
        """What the first slot holds at each block boundary of `tokens(depth)`. It then holds all of these."""
        tokens, found = self.tokens(self.depth), {}
        self.engine.truncate(0, 0)
        for start, stop in pairwise((0, *self.boundaries)):
            self.feed(0, tokens[start:stop])
            found[stop] = self.save(0)
        return found

    def checkpoint(self, slot: int) -> Bytes:
        """Exports the checkpoint of what a slot holds."""
        most = self.engine.shape.state_bytes
        out = np.full(most + 3, _GUARD, np.uint8)
        size = self.engine.export_checkpoint(slot, out)
        expect(0 < size <= most, f"a checkpoint has {size} bytes, but shape.state_bytes says {most}")
        expect(bool((out[size:] == _GUARD).all()), f"export_checkpoint writes behind the {size} bytes that it returns")
        return out[:size].copy()

    def restore(self, slot: int, saved: Snapshot, engine: Engine | None = None) -> None:
        """Imports what was saved, into a slot of this engine or of another one."""
        engine = engine or self.engine
        if engine.traits.stateful:
            engine.import_checkpoint(slot, saved.segments, saved.state)
        else:
            engine.import_kv(slot, saved.segments)

    def go_back(self, slot: int, length: int, state: Bytes) -> None:
        """Forgets the tokens from `length` on, with the checkpoint there if the model has a state."""
        if self.engine.traits.stateful:
            self.engine.rewind(slot, length, state)
        else:
            self.engine.truncate(slot, length)


@dataclass(frozen=True)
class ConformanceCheck:
    """One promise of the contract. Call it with an engine.

    Attributes:
        promise: raises BrokenPromise, or what the engine raises, if the promise is not kept.
        traits: attributes of `Traits` that the promise belongs to; an engine that does not have all of them never made it.
        slots: the least number of slots that show it.
        long: whether it takes seconds with a small model.
    """

    promise: Callable[[EngineUnderTest], None]
    traits: tuple[str, ...] = ()
    slots: int = 1
    long: bool = False

    def __str__(self) -> str:
        return self.promise.__name__

    def __call__(self, subject: EngineUnderTest) -> None:
        """Empties all slots, then looks whether the promise is kept.

        Raises:
            BrokenPromise: it is not; the message names the traits that claim it.
            unittest.SkipTest: the engine does not claim it, or has too few slots to show it. pytest takes that as skipped.
        """
        if missing := self.not_applicable(subject.engine):
            raise SkipTest(missing)
        claim = f"traits claim {' and '.join(self.traits)}, but " if self.traits else "the contract is broken: "
        try:
            subject.empty()
            self.promise(subject)
        except SkipTest:
            raise
        except BrokenPromise as broken:
            raise BrokenPromise(f"{self}: {claim}{broken}") from None
        except Exception as error:
            raise BrokenPromise(f"{self}: {claim}{type(error).__name__} was raised: {error}") from error

    def not_applicable(self, engine: Engine) -> str:
        """Why the engine does not make this promise; "" if it does."""
        for name in self.traits:
            if not getattr(engine.traits, name):
                return f"the engine does not claim the trait {name}"
        return f"needs {self.slots} slots" if engine.shape.slots < self.slots else ""
