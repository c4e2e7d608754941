"""An engine of one's own gets caching: a model of one attention layer in numpy, with real keys and values.

It predicts the byte that followed the last `ORDER` bytes earlier on: each value is a byte's embedding, and each key the
embeddings of the `ORDER` bytes before it. Run it: `python examples/own_engine.py`

`headstart.testing.conformance` checks that an engine keeps its promises, in three lines of pytest (`tests/test_examples.py`).
"""

from __future__ import annotations

import queue
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from headstart.config import Settings
from headstart.engines.constraint import Constraint, Grammars
from headstart.errors import EngineError
from headstart.interfaces.conversation import Conversation
from headstart.interfaces.engine import Engine, Facts, KVSegment, Logits, Shape, Span, Step
from headstart.interfaces.generation import GenerationParams
from headstart.interfaces.sampling import GREEDY, Grammar, Sampler, Sampling
from headstart.interfaces.tokenizer import Control
from headstart.interfaces.traits import Traits
from headstart.serving.request import Delta, Event, Failed, Finished, Request
from headstart.serving.runtime import Runtime

ORDER, WIDTH, BLOCK_SIZE, CTX, SLOTS = 4, 64, 32, 4096, 2
END = Control("<|end|>", 256)


class Bytes:
    """The tokenizer: a token is a byte."""

    n_vocab = 257
    bos = None
    controls = (END,)
    eog = frozenset({END.id})
    chat_template = "{% for message in messages %}{{ message['content'] + ' ' }}{% endfor %}"
    names = {"eos_token": END.text}  # noqa: RUF012

    def tokenize(self, text: str) -> list[int]:
        return list(text.encode("utf-8", "surrogatepass"))

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < END.id else END.text.encode()


class Choice:
    """A sampler: temperature, seed and grammar are all that this engine knows."""

    def __init__(self, sampling: Sampling, constraint: Constraint | None) -> None:
        self.temperature, self.random = sampling.temperature, np.random.default_rng(sampling.seed)
        self.constraint = constraint

    def close(self) -> None:
        return


class Attention(Engine):
    """One layer of attention over the bytes so far."""

    def __init__(self) -> None:
        random = np.random.default_rng(1)
        self.tokenizer = Bytes()
        self.grammars = Grammars(self.tokenizer)
        # Every token is computed alone, so it matters neither how a prompt is cut into calls nor who computes a row.
        self.traits = Traits(block_size=BLOCK_SIZE, decode_is_prefill=True)
        self.shape = Shape(SLOTS, CTX, 8 * BLOCK_SIZE, kv_bytes_per_token=4 * WIDTH * (ORDER + 1), transfer_bytes=0)
        self.facts = Facts("own", "one attention layer in numpy")
        self.embedding = random.standard_normal((Bytes.n_vocab, WIDTH), np.float32) / np.float32(WIDTH**0.5)
        self.fingerprint = blake2b(b"own engine 1" + self.embedding.tobytes()).digest()
        self.keys = np.zeros((SLOTS, CTX, ORDER * WIDTH), np.float32)
        self.values = np.zeros((SLOTS, CTX, WIDTH), np.float32)
        self.lengths = [0] * SLOTS
        self.current: dict[int, Logits] = {}

    def _append(self, slot: int, token: int) -> None:
        """The query is the last `ORDER` values: it finds the places whose key holds the same bytes."""
        at, values, keys = self.lengths[slot], self.values[slot], self.keys[slot]
        if at == CTX:
            raise EngineError(f"slot {slot} is full")
        before = values[max(0, at - ORDER) : at].reshape(-1)
        keys[at] = np.pad(before, (ORDER * WIDTH - len(before), 0))
        values[at] = self.embedding[token]
        self.lengths[slot] = at + 1

    def _predict(self, slot: int) -> None:
        length = self.lengths[slot]
        values = self.values[slot, :length]
        query = values[-ORDER:].reshape(-1)
        scores = self.keys[slot, :length, -len(query) :] @ query
        weights = np.exp(8 * (scores - scores.max()))
        self.current[slot] = 16 * self.embedding @ (weights / weights.sum() @ values)

    def prefill(self, slot: int, tokens: npt.NDArray[np.int32], *, logits: bool) -> None:
        if not 0 < len(tokens) <= self.shape.batch:
            raise EngineError(f"{len(tokens)} tokens do not fit into a call")
        for token in tokens:
            self._append(slot, int(token))
        if logits:
            self._predict(slot)

    def decode(self, steps: Sequence[Step]) -> None:
        for step in steps:
            self._append(step.slot, step.token)
            self._predict(step.slot)

    def sampler(self, sampling: Sampling, grammar: Grammar | None = None) -> Choice:
        return Choice(sampling, self.grammars.start(grammar) if grammar else None)

    def check_grammar(self, grammar: Grammar, param: str | None = None) -> Grammar:
        return self.grammars.check(grammar, param)

    def sample(self, slot: int, sampler: Sampler) -> int:
        assert isinstance(sampler, Choice)
        logits = self.current[slot].astype(np.float64)
        if sampler.constraint is not None:
            sampler.constraint.mask(logits)
        odds = np.exp((logits - logits.max()) / max(sampler.temperature, 1e-6))
        token = int(sampler.random.choice(len(odds), p=odds / odds.sum()))
        if sampler.constraint is not None:
            sampler.constraint.take(token)
        return token

    def logits(self, slot: int) -> Logits:
        return self.current[slot].copy()

    def truncate(self, slot: int, length: int) -> None:
        self.lengths[slot] = length

    def export_kv(self, slot: int, spans: Sequence[Span]) -> None:
        for span in spans:
            rows = np.concatenate([part[slot, span.start : span.stop] for part in (self.keys, self.values)], axis=1)
            span.data[: rows.nbytes] = rows.reshape(-1).view(np.uint8)

    def import_kv(self, slot: int, pieces: Sequence[KVSegment]) -> None:
        self.lengths[slot] = 0
        for piece in pieces:
            rows = piece.data[: piece.take * self.shape.kv_bytes_per_token].view(np.float32).reshape(piece.take, -1)
            at = self.lengths[slot]
            self.keys[slot, at : at + piece.take], self.values[slot, at : at + piece.take] = np.split(
                rows, [ORDER * WIDTH], axis=1
            )
            self.lengths[slot] += piece.take

    def length(self, slot: int) -> int:
        return self.lengths[slot]


def ask(runtime: Runtime, messages: list[dict[str, str]]) -> str:
    """Sends a conversation, prints what it cost, and returns the reply."""
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    prompt = runtime.chat_prompt(Conversation(tuple(messages)))
    runtime.submit(Request(prompt, GenerationParams(GREEDY, max_tokens=40)), events.put)
    reply = ""
    while True:
        match events.get():
            case Delta(text=text):
                reply += text
            case Finished(report=report, turn=turn):
                runtime.remember(turn)  # the next request sends this reply back
                print(f"prompt {report.prompt:4}  cached {report.cached:4}  computed {report.computed:4}  {reply!r}")
                return reply
            case Failed(error=error):
                raise error


def main() -> None:
    runtime = Runtime(Attention, Settings())
    try:
        system = "The quick brown fox jumps over the lazy dog. Every good boy does fine. " * 8
        chat = [{"role": "system", "content": system.strip()}, {"role": "user", "content": "The quick brown"}]
        reply = ask(runtime, chat)
        chat += [{"role": "assistant", "content": reply}, {"role": "user", "content": "Every good"}]
        ask(runtime, chat)
    finally:
        runtime.close()


if __name__ == "__main__":
    main()
