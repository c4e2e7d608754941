"""How an engine chooses the tokens of a reply: sampling, and grammars that the whole reply must follow."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

from headstart.names import suggesting

SEEDS = 2**32 - 1
"""All seeds are less than this. llama.cpp has 32-bit seeds and uses the last value for "choose a random seed"."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to choose the next token. Defaults are llama-server's.

    Attributes:
        temperature: randomness; 0 always takes the most likely token.
        top_k: keep only this many of the most likely tokens; 0 keeps all.
        top_p: keep only the most likely tokens that together reach this probability; 1 keeps all.
        min_p: keep only tokens with at least this share of the most likely token's probability; 0 keeps all.
        repeat_penalty: divides the logits of tokens that the reply already has; 1 for no penalty.
        presence_penalty: is subtracted from the logits of tokens that the reply already has; 0 for no penalty.
        frequency_penalty: the same, once for each occurrence.
        penalty_last_n: the penalties look at this many of the latest tokens of the reply; -1 for all.
        logit_bias: is added to the logits of these tokens; minus infinity forbids a token.
        seed: of the random numbers, modulo `SEEDS`; each further choice of a request adds one. None chooses a random seed.
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
    """The form that a whole reply must have: a Lark grammar in llguidance's dialect, a JSON schema, or a regular expression.

    In Lark, a control token is written by its name: `start: <|call|> "ls"`. Free text and strings never contain one.

    Attributes:
        salt: the tenant's. Compiled grammars are kept by salt, so that no tenant can measure what others have requested.
        ready: the compiled grammar, set by `check_grammar`; None before.
    """

    kind: Literal["lark", "json_schema", "regex"]
    text: str
    salt: str = ""
    ready: object = field(default=None, compare=False, repr=False)


class Sampler(Protocol):
    """One reply's sampling state."""

    def close(self) -> None:
        """Frees what the engine holds for it. Idempotent."""
