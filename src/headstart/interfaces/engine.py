"""The contract of an engine: what headstart calls, and what an engine must promise.

An engine computes on `shape.slots` live sequences of at most `shape.ctx` tokens each. It knows tokens, logits and KV, and no
requests, users or files. One thread makes the engine, makes all calls, and closes it. Only the tokenizer, `check_grammar` and
`forget_grammars` are called from other threads, several at once.
`examples/own_engine.py` implements the required part in about 100 lines. `headstart/testing/conformance` checks any engine.

Required: `tokenizer`, `traits`, `shape`, `facts`, `fingerprint`, `prefill`, `decode`, `sampler`, `sample`, `logits`,
`truncate`, `length`, `export_kv`, `import_kv`. To be chosen by a model's name, an engine also has the class method `load`
(docs/engines.md). Optional abilities are *traits* (`traits.py`): the planner reads them as data and never tests the engine's
type.
`check_grammar` is optional too; it is needed for replies that follow a grammar.

*KV* (keys and values) is opaque bytes. The KV of `n` consecutive tokens is one buffer of `n * shape.kv_bytes_per_token` bytes,
in an order that only the engine knows. Engines with the same `fingerprint` can import each other's KV, at the same positions.

A model may also have *state* that cannot be truncated: recurrent layers, sliding windows. A copy of that state at one length of
a sequence is a *checkpoint*, also opaque bytes. It can be exported only while the sequence has exactly that length. It can be
imported only with the KV of the same tokens, up to the same length.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from headstart.errors import EngineError, InvalidRequest
from headstart.interfaces.host_memory import HostMemory
from headstart.interfaces.sampling import Grammar, Sampler, Sampling
from headstart.interfaces.tokenizer import Tokenizer
from headstart.interfaces.tokens import Bytes
from headstart.interfaces.traits import BlockSizes, EngineProof, Traits

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes, in tokens and bytes.

    Attributes:
        slots: live sequences.
        ctx: tokens a sequence can hold.
        batch: most tokens of one prefill call; a multiple of the block size.
        kv_bytes_per_token: bytes of one token's KV in all layers; 0 in a model that has state only.
        transfer_bytes: host bytes that the engine allocates to export or import `ctx` tokens of KV with their state.
        state_bytes: most bytes of a checkpoint; 0 in a model without state.
    """

    slots: int
    ctx: int
    batch: int
    kv_bytes_per_token: int
    transfer_bytes: int
    state_bytes: int = 0


@dataclass(frozen=True, slots=True)
class KVSegment:
    """KV of consecutive tokens, to be imported.

    Attributes:
        data: uint8, at least `tokens * kv_bytes_per_token` bytes; further bytes are ignored.
        tokens: tokens whose KV is in `data`.
        take: how many of them are imported, from the first on.
    """

    data: Bytes
    tokens: int
    take: int


@dataclass(frozen=True, slots=True)
class Span:
    """A destination for the KV of the tokens [start, stop) of a sequence. `data` is large enough, and is overwritten."""

    start: int
    stop: int
    data: Bytes


@dataclass(frozen=True, slots=True)
class Step:
    """One token to append to one slot."""

    slot: int
    token: int


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about a loaded model for people: name, parameters, sizes. Nothing depends on them."""

    name: str
    description: str = ""
    engine: str = ""
    details: dict[str, Any] = field(default_factory=dict)


class Engine(ABC):
    """The required contract. Positions are implied: every call appends at the end of its slot."""

    tokenizer: Tokenizer
    traits: Traits
    shape: Shape
    facts: Facts
    fingerprint: bytes
    """Digest of everything that changes the numbers: weights, engine and build, device, KV types, settings, block size."""
    identity: Mapping[str, str] = {}
    """What the fingerprint is made of, by name, as texts for people. May be empty."""
    block_sizes: BlockSizes = BlockSizes()
    """What a proof may choose `traits.block_size` from."""
    close_at_exit: bool = False
    """Whether the process must close the engine before it ends, because native code of its thread cannot be left as it is."""
    proofs: tuple[EngineProof, ...] = ()
    """What was proved at the load, or by an earlier one and sampled again."""
    host: HostMemory | None = None
    """Host memory at the load, from which the cache's budget is planned; None if the engine does not know."""

    @abstractmethod
    def prefill(self, slot: int, tokens: npt.NDArray[np.int32], *, logits: bool) -> None:
        """Appends `tokens` (1 … `shape.batch`) to `slot` in one call of the model.

        With `logits`, `sample` and `logits` of this slot answer for the last token until the next `prefill` or `decode`.
        Raises EngineError, also for more tokens than a call or the slot can take, and for none. The slot's content is then
        undefined until `truncate(slot, 0)`.
        """

    @abstractmethod
    def decode(self, steps: Sequence[Step]) -> None:
        """Appends one token to each of several slots, in one call; logits as in `prefill` for all of them.

        Raises EngineError, also if a slot is full. The content of these slots is then undefined until `truncate(slot, 0)`.
        """

    @abstractmethod
    def sampler(self, sampling: Sampling, grammar: Grammar | None = None) -> Sampler:
        """A new sampler, which draws only tokens that `grammar` allows. The caller closes it.

        Args:
            grammar: a result of `check_grammar`, so that nothing has to be compiled here.
        """

    @abstractmethod
    def sample(self, slot: int, sampler: Sampler) -> int:
        """Draws the next token from the slot's current logits, which do not change. The sampler remembers the token.

        Raises EngineError if the sampler's grammar became too expensive to follow; the slot's content is still valid.
        """

    @abstractmethod
    def logits(self, slot: int) -> Logits:
        """A copy of the slot's current logits: float32, (n_vocab,)."""

    @abstractmethod
    def truncate(self, slot: int, length: int) -> None:
        """Forgets the tokens from `length` on. `length` 0 always works; others need the `sliceable` trait.

        Raises EngineError; the slot's content is then undefined until `truncate(slot, 0)`.
        """

    @abstractmethod
    def export_kv(self, slot: int, spans: Sequence[Span]) -> None:
        """Copies KV out of `slot`. Without the trait `random_access` a call reads the whole slot once, so request many spans.

        Raises EngineError; the spans' data is then undefined.
        """

    @abstractmethod
    def import_kv(self, slot: int, segments: Sequence[KVSegment]) -> None:
        """Replaces the content of `slot` by the segments, one after the other from position 0. Needs the `sliceable` trait.

        Raises EngineError; the slot is then empty.
        """

    @abstractmethod
    def length(self, slot: int) -> int:
        """Tokens in `slot`, as the engine itself counts them."""

    def fills_block(self, start: int, count: int) -> bool:
        """Whether a call of `count` tokens (at most a block) that begins at the block boundary `start` is computed as a block.

        Then a call of the blocks before `start` may go on with these tokens. It gives the bits of two calls (the trait
        `chunking`), in less time.
        """
        return False

    # For models with the trait `stateful`, instead of `truncate` and `import_kv`.

    def export_checkpoint(self, slot: int, out: Bytes) -> int:
        """Copies the checkpoint of `slot`, at its present length, to the front of `out`; returns the number of bytes.

        `out`: at least `shape.state_bytes` long. Raises EngineError; `out` is then undefined.
        """
        raise EngineError("this engine has no state beside its KV")

    def import_checkpoint(self, slot: int, segments: Sequence[KVSegment], state: Bytes) -> None:
        """Replaces the content of `slot` by the segments, one after the other from position 0, and the checkpoint at their end.

        Args:
            segments: they give the length of the content, also in a model whose KV has no bytes.
            state: exactly the exported bytes.

        Raises EngineError, also if `state` is a checkpoint of another length; the slot is then empty.
        """
        raise EngineError("this engine has no state beside its KV")

    def rewind(self, slot: int, length: int, state: Bytes) -> None:
        """Goes back to the first `length` tokens of `slot`, whose checkpoint is `state`. Their KV stays in place.

        There are no logits afterwards. `state`: exactly the exported bytes.
        Raises EngineError, also if `state` is a checkpoint of another length; the slot is then empty.
        """
        raise EngineError("this engine has no state beside its KV")

    def release(self) -> None:
        """Frees the host memory for moving KV (`Shape.transfer_bytes`) until the next export or import."""
        return

    def check_grammar(self, grammar: Grammar, param: str | None = None) -> Grammar:
        """Compiles a grammar for `sampler`. Takes up to some seconds. May be called from several threads at once.

        `engines.constraint` implements this with the tokenizer alone. Raises InvalidRequest, naming `param`, if the grammar
        cannot be followed; Overloaded if too many grammars are in use.
        """
        raise InvalidRequest("This engine cannot follow a grammar.", param=param)

    def forget_grammars(self) -> None:
        """Drops the compiled grammars. Those in use stay valid. May be called while other threads call `check_grammar`."""
        return

    def close(self) -> None:
        """Frees the model. Idempotent."""
        return
