"""Warm check: computes prompts with the cache and again without it, and compares every bit."""

from __future__ import annotations

import queue
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from headstart.errors import HeadstartError
from headstart.interfaces.generation import GenerationParams
from headstart.interfaces.sampling import GREEDY
from headstart.prompt.builder import Prompt
from headstart.serving.request import Event, Failed, Finished, Report, Request, Started
from headstart.serving.runtime import Runtime

_KEPT = 8
"""Earlier prompts that a new one may continue."""


@dataclass(frozen=True, slots=True)
class ComputedPrompt:
    """A prompt's result. `logits`: bytes of the logits at its end, float32. `reply`: the tokens that followed."""

    logits: bytes
    reply: tuple[int, ...]
    report: Report

    def same(self, other: ComputedPrompt) -> bool:
        """Whether both have the same bits and the same reply."""
        return (self.logits, self.reply) == (other.logits, other.reply)


def compute(runtime: Runtime, prompt: Prompt, *, reuse: bool = True, reply: int = 0) -> ComputedPrompt:
    """Computes a prompt, and `reply` tokens after it, each the most likely one. Without `reuse` it ignores the cache.

    Raises:
        HeadstartError: the request failed.
    """
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    runtime.submit(Request(prompt, GenerationParams(GREEDY, max_tokens=reply, reuse=reuse), keep_logits=True), events.put)
    logits = b""
    while True:
        match events.get():
            case Started(logits=found) if found is not None:
                logits = found.tobytes()
            case Finished(report=report, tokens=tokens):
                return ComputedPrompt(logits, tokens, report)
            case Failed(error=error):
                raise error


@dataclass
class WarmWalk:
    """Prompts that continue, branch off, shorten and repeat earlier ones, each computed warm and cold. For exact mode.

    Attributes:
        longest: most tokens of a prompt.
        reply: most tokens of a reply; some prompts have none.
        cold: computes a prompt, with so many tokens of a reply, without the cache; None for the runtime itself.
        compared: prompts that were compared.
        prompted, cached, restored: tokens of these prompts, how many of them were not computed, and how many of those had left
            their slot.
        wrong: prompts whose warm result has other bits.
        failed: warm requests that failed.
    """

    runtime: Runtime
    longest: int
    reply: int = 0
    cold: Callable[[Prompt, int], ComputedPrompt] | None = None
    seed: int = 0
    compared: int = 0
    prompted: int = 0
    cached: int = 0
    restored: int = 0
    wrong: int = 0
    failed: int = 0
    _texts: list[list[int]] = field(default_factory=lambda: [[]])

    def __post_init__(self) -> None:
        tokenizer = self.runtime.engine.tokenizer
        special = {control.id for control in tokenizer.controls} | tokenizer.eog
        self._words = [token for token in range(tokenizer.n_vocab) if token not in special]
        self._dice = random.Random(self.seed)

    def step(self) -> None:
        """Computes one more prompt, and compares. Raises what the cold run raises."""
        dice, block_size = self._dice, self.runtime.engine.traits.block_size
        known = dice.choice(self._texts)
        kept = known[: dice.choice([len(known), len(known), dice.randint(0, len(known))])][: self.longest - 1]
        tokens = kept + dice.choices(self._words, k=dice.randint(1, min(self.longest - len(kept), 3 * block_size)))
        reply = dice.choice((0, self.reply))
        prompt = self.runtime.text_prompt(tokens)
        self._texts = [*self._texts[1 - _KEPT :], tokens]
        try:
            warm = compute(self.runtime, prompt, reply=reply)
        except HeadstartError:
            self.failed += 1
            return
        cold = self.cold(prompt, reply) if self.cold else compute(self.runtime, prompt, reuse=False, reply=reply)
        self.compared += 1
        self.prompted += warm.report.prompt
        self.cached += warm.report.cached
        self.restored += warm.report.restored
        self.wrong += not warm.same(cold)
        self._texts[-1] = tokens + list(warm.reply[: max(0, self.longest - len(tokens))])
