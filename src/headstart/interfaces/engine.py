"""What headstart asks of an engine.

An engine holds `shape.slots` live sequences of at most `shape.ctx` tokens each and computes on them. It knows tokens,
logits and rows; it knows no requests, users or files. It is used from one thread; only the tokenizer may be called from
several at once. (`examples/own_engine.py` implements the required part in about 100 lines.)

Required: `tokenizer`, `traits`, `shape`, `fingerprint`, `prefill`, `decode`, `sampler`, `sample`, `logits`, `truncate`,
`export_rows`, `import_rows`. Optional abilities are *traits*: data that the planner asks for, never a type that it tests;
and `check_grammar`, for replies that follow a grammar.

Rows are opaque bytes: the rows of `n` consecutive tokens are one buffer of `n * shape.row_bytes` bytes whose inner order
is the engine's own. What one engine exported, an engine with the same `fingerprint` can import, at the same positions.

A model may also have *state* that cannot be cut: recurrent layers, sliding windows. Its state at one length of a sequence
is a *checkpoint*, opaque bytes too. It can be had only while the sequence is that long, and it fits only rows of the same
tokens, up to that very length.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from headstart.errors import EngineError, InvalidRequest
from headstart.names import suggesting

Bytes = npt.NDArray[np.uint8]
Logits = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Control:
    """A control token: its spelling in rendered text is the token, never plain text.

    `lstrip` / `rstrip`: the tokenizer swallows white space on that side of it.
    """

    text: str
    id: int
    lstrip: bool = False
    rstrip: bool = False


class Tokenizer(Protocol):
    """Text ↔ tokens. Thread-safe."""

    @property
    def n_vocab(self) -> int: ...
    @property
    def bos(self) -> Control | None:
        """The token that every prompt must begin with; None if the model wants none."""

    @property
    def controls(self) -> tuple[Control, ...]: ...
    @property
    def eog(self) -> frozenset[int]:
        """Tokens that end a reply."""

    @property
    def chat_template(self) -> str | None:
        """The model's own Jinja chat template."""

    @property
    def names(self) -> dict[str, str]:
        """`bos_token`, `eos_token`, … as templates want them."""

    def tokenize(self, text: str) -> list[int]:
        """Tokens of plain text: spellings of control tokens stay text; nothing is added at either end.

        The text is tokenised as it would be right after a control token.
        """

    def piece(self, token: int) -> bytes:
        """The bytes that a token stands for; of a control token, its spelling."""


@dataclass(frozen=True, slots=True)
class Traits:
    """What this engine, with this model and these settings, was proved able to do.

    Attributes:
        grid: tokens between two points at which canonical prefill may stop and go on without changing bits.
        chunking: whether one prefill call may span several grid blocks without changing bits.
        canonical: whether prefill from a grid point, after import or after compute, gives the same bits every time.
        decode_exact: whether decoding gives the same bits however the tokens before came into the slot: computed there,
            restored, or left by a rewind.
        decode_is_prefill: whether rows born in decoding have the bits that prefill would give them.
        sliceable: whether rows are all there is of a sequence, so that it can be cut at any token (full attention).
            Without it a live sequence can only grow, or go back to a checkpoint.
        movable: whether rows and checkpoints can be exported and imported. Without it only a slot that goes on is reused.
        notes: what the proofs found, one line each, for `headstart doctor` and the log.
    """

    grid: int
    chunking: bool = True
    canonical: bool = True
    decode_exact: bool = True
    decode_is_prefill: bool = False
    sliceable: bool = True
    movable: bool = True
    notes: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        """Whether warm answers can have the bits of cold ones. Without it `--reuse exact` refuses to start."""
        return self.canonical and self.decode_exact

    @property
    def stateful(self) -> bool:
        """Whether rows are worth something only together with a checkpoint at their end."""
        return self.movable and not self.sliceable


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes, in tokens and bytes.

    Attributes:
        slots: live sequences.
        ctx: tokens a sequence can hold.
        batch: most tokens of one prefill call; a multiple of the grid.
        row_bytes: bytes of one token's rows, all layers, K and V; 0 in a model that has state only.
        transfer_bytes: host bytes that the engine itself holds to move `ctx` tokens of rows in or out, with their state.
        state_bytes: most bytes of a checkpoint; 0 where rows are all there is.
        memory: host bytes that there are for what no slot holds, unless the user says how many.
    """

    slots: int
    ctx: int
    batch: int
    row_bytes: int
    transfer_bytes: int
    state_bytes: int = 0
    memory: int = 4 << 30


@dataclass(frozen=True, slots=True)
class Rows:
    """The first `take` of the `tokens` tokens whose rows lie in `data`.

    `data`: uint8, at least `tokens * row_bytes` long; what lies behind is ignored.
    """

    data: Bytes
    tokens: int
    take: int


@dataclass(frozen=True, slots=True)
class Span:
    """Where to put the rows of tokens [start, stop) of a sequence: `data` is at least that long, and is overwritten."""

    start: int
    stop: int
    data: Bytes


SEEDS = 2**32 - 1
"""Seeds are below it. llama.cpp's have 32 bits, and it takes the last value as "draw one"."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to choose the next token. Defaults are llama-server's.

    Attributes:
        temperature: how much chance there is; 0 always takes the likeliest token.
        top_k: only so many of the likeliest tokens; 0 for all.
        top_p: only the likeliest tokens that make up this share of probability together; 1 for all.
        min_p: only tokens that are at least so likely, as a share of the likeliest; 0 for all.
        repeat_penalty: divides the logits of tokens that were said; 1 for none.
        presence_penalty: is taken from the logits of tokens that were said; 0 for none.
        frequency_penalty: the same, once for each time that they were said.
        penalty_last_n: how many of the latest tokens of the reply the penalties look at; -1 for all.
        logit_bias: is added to the logits of these tokens; minus infinity forbids one.
        seed: of the chances, modulo `SEEDS`; it grows by one with each choice of a request. None draws one.
        logprobs: how many alternatives to report with every token; None reports nothing.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_last_n: int = -1
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    logprobs: int | None = None


Sampling.__init__ = suggesting(Sampling.__init__)  # type: ignore[method-assign]

GREEDY = Sampling(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a whole reply must be: a Lark grammar in llguidance's form, a JSON schema, or a regular expression.

    In Lark, control tokens are named as they are spelled: `start: <|call|> "ls"`. Free text and strings never hold one.

    Attributes:
        salt: whose it is. Nobody can tell by the time it takes what others have asked for.
        ready: what `check_grammar` made of it; None before.
    """

    kind: Literal["lark", "json_schema", "regex"]
    text: str
    salt: str = ""
    ready: object = field(default=None, compare=False, repr=False)


class Sampler(Protocol):
    """One reply's sampling state."""

    def close(self) -> None:
        """Frees what the engine holds for it. Idempotent."""


@dataclass(frozen=True, slots=True)
class Step:
    """One token to append to one slot."""

    slot: int
    token: int


@dataclass(frozen=True, slots=True)
class Facts:
    """What a person wants to know of a loaded model: name, parameters, sizes. Decides nothing."""

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
    """Digest of all that makes numbers comparable: weights, engine and build, device, KV types, settings, grid."""

    @abstractmethod
    def prefill(self, slot: int, tokens: npt.NDArray[np.int32], *, logits: bool) -> None:
        """Appends `tokens` (1 … `shape.batch`) to `slot` in one call of the model.

        With `logits`, `sample` and `logits` of this slot answer for the last token until the next `prefill` or `decode`.
        Raises EngineError; the slot's content is then undefined until `truncate(slot, 0)`.
        """

    @abstractmethod
    def decode(self, steps: Sequence[Step]) -> None:
        """Appends one token to each of several slots, in one call; logits as in `prefill` for all of them."""

    @abstractmethod
    def sampler(self, sampling: Sampling, grammar: Grammar | None = None) -> Sampler:
        """A fresh sampler, which draws only what `grammar` lets it. The caller closes it.

        `grammar`: one that `check_grammar` returned: then nothing is left to be compiled.
        """

    @abstractmethod
    def sample(self, slot: int, sampler: Sampler) -> int:
        """Draws the next token from the slot's current logits, which stay as they are, and lets the sampler remember it.

        Raises EngineError if the sampler's grammar became too costly to follow; what the slot holds is still right.
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
    def export_rows(self, slot: int, spans: Sequence[Span]) -> None:
        """Copies rows out of `slot`. Cost: one pass over the whole slot, so ask for many spans at once.

        Raises EngineError; the spans' data is then undefined.
        """

    @abstractmethod
    def import_rows(self, slot: int, pieces: Sequence[Rows]) -> None:
        """Replaces the content of `slot` by the pieces, end to end from position 0. Needs the `sliceable` trait.

        Raises EngineError; the slot is then empty.
        """

    @abstractmethod
    def length(self, slot: int) -> int:
        """Tokens that `slot` holds, as the engine itself counts them."""

    # For models with the trait `stateful`, in place of `truncate` and `import_rows`.

    def export_checkpoint(self, slot: int, out: Bytes) -> int:
        """Copies the checkpoint of `slot`, at the length that it has now, to the front of `out`; returns its bytes.

        `out`: at least `shape.state_bytes` long. Raises EngineError; `out` is then undefined.
        """
        raise EngineError("this engine has no state beside its rows")

    def import_checkpoint(self, slot: int, pieces: Sequence[Rows], state: Bytes) -> None:
        """Replaces the content of `slot` by the pieces, end to end from position 0, and the checkpoint at their end.

        `pieces`: they say how long the content is, also where rows have no bytes. `state`: exactly the bytes exported.
        Raises EngineError, also if `state` is a checkpoint of another length; the slot is then empty.
        """
        raise EngineError("this engine has no state beside its rows")

    def rewind(self, slot: int, length: int, state: Bytes) -> None:
        """Goes back to the first `length` tokens of `slot`, whose checkpoint is `state`; their rows stay where they are.

        There are no logits afterwards. `state`: exactly the bytes exported.
        Raises EngineError, also if `state` is a checkpoint of another length; the slot is then empty.
        """
        raise EngineError("this engine has no state beside its rows")

    def release(self) -> None:
        """Gives the host memory back that moving rows takes (`Shape.transfer_bytes`), until they are moved again."""
        return

    def check_grammar(self, grammar: Grammar, param: str | None = None) -> Grammar:
        """The grammar, ready for `sampler`; takes up to some seconds. May be called from several threads at once.

        `engines.constraint` does it from the tokenizer alone. Raises InvalidRequest, about `param`, if it cannot be followed;
        Overloaded if too many are in use.
        """
        raise InvalidRequest("This engine cannot follow a grammar.", param=param)

    def forget_grammars(self) -> None:
        """Forgets what `check_grammar` has made. Those that are ready stay so. May be called while others call that."""
        return

    def close(self) -> None:
        """Frees the model. Idempotent."""
        return
