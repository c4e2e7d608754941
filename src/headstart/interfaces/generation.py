"""Generation parameters: how replies are generated, from the body of a request to the engine's thread."""

from __future__ import annotations

from dataclasses import dataclass, field

from headstart.interfaces.sampling import Sampling


@dataclass(frozen=True, slots=True)
class GenerationParams:
    """How the replies to one prompt are generated.

    Attributes:
        max_tokens: most tokens of a reply; None for as many as the context holds; 0 only fills the cache.
        stop: texts that end a reply and are not part of it.
        choices: replies to draw; the prompt is computed once.
        reuse: whether cached KV may be used.
        ignore_eos: the model's end tokens are never drawn (benchmarks).
    """

    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    choices: int = 1
    reuse: bool = True
    ignore_eos: bool = False
