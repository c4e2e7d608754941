"""Fake: a tiny deterministic engine without a model file, for tests of everything above the engine.

It has the one property that matters: its output depends on all KV that a slot really holds. The KV of a token has two parts:

    high   a digest of the token and of the high parts before it: it says which tokens were computed
    low    a digest of the call that computed the token and of all KV before it: it stands for the last bits of real KV,
           which depend on the kernel

Logits are drawn from all KV in the slot. No tokens are kept aside, so wrong, stale or shuffled KV changes the logits. High
parts decide the order of the logits, with gaps of `GAP`. Low parts move them by less than `NOISE`. So greedy replies depend
on the tokens only, while a test of bits can fail. The low part is canonical in whole blocks that are computed from a block
boundary on. The low part of other tokens depends on the size and position of their call, and in decoding on the batch size.

An engine that is not `sliceable` also has a state in each slot. It has a high and a low part too: digests of the state before
and of the KV of each token. New KV and the logits depend on the state. So KV beside the state of other tokens, or of another
length, changes the logits. With KV of 0 bytes the state is everything.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Literal

import numpy as np
import numpy.typing as npt

from headstart.engines.constraint import Constraint, Grammars
from headstart.errors import EngineError
from headstart.interfaces.engine import Engine, Facts, KVSegment, Logits, Shape, Span, Step
from headstart.interfaces.sampling import SEEDS, Grammar, Sampler, Sampling
from headstart.interfaces.tokenizer import Control
from headstart.interfaces.tokens import Bytes
from headstart.interfaces.traits import Traits

GAP, NOISE = 0.05, 0.001
LOW = 4
"""Bytes of the low part of a token's KV, and of a state."""
INJECTED = "injected: "
"""Messages of wanted errors begin like this."""
_LENGTH = 4
"""Bytes of a checkpoint that hold the length of its sequence."""
_LEAST_STATE = _LENGTH + LOW + 8
_DIGEST = 64
"""Bytes of a BLAKE2b digest."""

PRINTABLE = bytes(range(32, 127))
Operation = Literal["prefill", "decode", "export", "import", "export checkpoint", "import checkpoint", "rewind"]

CHATML = (
    "{% if tools %}{{ '<|im_start|>tools\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + (' ' + message['name'] if message['name'] else '') + '\n' }}"
    "{{ message['content'] or '' }}"
    "{% for call in message['tool_calls'] or [] %}{{ '\n' + (call['function'] | tojson) }}{% endfor %}"
    "{{ '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
START, END, STOP = Control("<|im_start|>", 256), Control("<|im_end|>", 257), Control("<|endoftext|>", 258)


class FakeTokenizer:
    """A token for each byte, three control tokens, and a token for each of `words`.

    The tokenizer prefers words, the longest first. Without words a text has only one form as tokens. With words the model can
    write a text with other tokens than the tokenizer chooses.
    """

    def __init__(self, words: Sequence[str] = (), *, bos: Control | None = None, chat_template: str | None = CHATML) -> None:
        self.bos = bos
        self.controls: tuple[Control, ...] = (START, END, STOP)
        self.eog = frozenset({END.id, STOP.id})
        self.chat_template = chat_template
        self.names = {"bos_token": bos.text if bos else "", "eos_token": END.text}
        longer = [control.text.encode() for control in self.controls] + [word.encode() for word in words]
        self._bytes = [bytes([value]) for value in range(256)] + longer
        self._words = {word: 256 + number for number, word in enumerate(longer) if number >= len(self.controls)}
        longest = sorted(self._words, key=len, reverse=True)
        self._split = re.compile(b"|".join([*map(re.escape, longest), b"."]), re.DOTALL)

    @property
    def n_vocab(self) -> int:
        return len(self._bytes)

    def tokenize(self, text: str) -> list[int]:
        data = text.encode("utf-8", "surrogatepass")
        if not self._words:
            return list(data)
        return [self._words.get(found, found[0]) for found in self._split.findall(data)]

    def token_bytes(self, token: int) -> bytes:
        return self._bytes[token]

    def close(self) -> None:
        return


class FakeSampler:
    """Temperature, top-k, top-p, min-p, presence and frequency penalties, logit bias, seed."""

    def __init__(self, sampling: Sampling, constraint: Constraint | None = None) -> None:
        self.sampling = sampling
        self._constraint = constraint
        self._seen: dict[int, int] = {}

    def draw(self, logits: Logits) -> int:
        """Chooses a token and remembers it."""
        options, scores = self.sampling, logits.astype(np.float64)
        for token, bias in options.logit_bias:
            scores[token] += bias
        if options.presence_penalty or options.frequency_penalty:
            for token, times in self._seen.items():
                scores[token] -= options.presence_penalty + options.frequency_penalty * times
        if self._constraint is not None:
            self._constraint.mask(scores)
        token = int(scores.argmax()) if options.temperature <= 0 else self._random_choice(scores)
        if self._constraint is not None:
            self._constraint.take(token)
        self._seen[token] = self._seen.get(token, 0) + 1
        return token

    @cached_property
    def _random(self) -> np.random.Generator:
        seed = self.sampling.seed
        return np.random.default_rng(None if seed is None else seed % SEEDS)

    def _random_choice(self, scores: npt.NDArray[np.float64]) -> int:
        options = self.sampling
        order = (-scores).argsort(kind="stable")[: options.top_k or None]
        with np.errstate(over="ignore"):  # at the lowest temperatures
            odds = np.exp((scores[order] - scores[order[0]]) / options.temperature)
        odds /= odds.sum()
        keep = (odds.cumsum() - odds < options.top_p) & (odds >= options.min_p * odds[0])
        keep[0] = True
        odds = odds[keep] / odds[keep].sum()
        below = odds.cumsum()  # `Generator.choice` does the same, and checks first what is known here
        return int(order[keep][(below / below[-1]).searchsorted(self._random.random(), side="right")])

    def close(self) -> None:
        return


@dataclass(slots=True)
class _Slot:
    high: npt.NDArray[np.uint8]
    low: npt.NDArray[np.uint8]
    length: int = 0
    state_high: bytes = b""
    state_low: bytes = b""

    def clear(self) -> None:
        self.length, self.state_high, self.state_low = 0, b"", b""


class _Alone:
    """Raises RuntimeError if two threads use the engine at once."""

    def __init__(self) -> None:
        self._busy = threading.Lock()

    def __enter__(self) -> None:
        if not self._busy.acquire(blocking=False):
            raise RuntimeError("two threads use the engine at once")

    def __exit__(self, *_: object) -> None:
        self._busy.release()


class FakeEngine(Engine):
    """The whole contract, with the traits that a test chooses.

    Args:
        kv_bytes_per_token: 0 (which needs a state), or at least `2 * LOW`.
        state_bytes: most bytes of a checkpoint, if the engine is not `sliceable`. Checkpoints of short sequences are smaller.
        least_filling: from how many tokens on, at a block boundary, a call is computed as a whole block; 0 for never.
        seed: stands for the weights.
        delay: seconds that each prefill and decode call takes.
        alphabet: bytes that replies are made of; the end token can follow each of them.

    Attributes:
        prefilled: tokens that were prefilled.
        decoded: tokens that were decoded.
        calls: prefill calls.
        decodes: decode calls.
        largest: most tokens of one prefill call.
        exported, imported: tokens whose KV was exported or imported.
        checkpoints: checkpoints that were exported.
        rewinds: calls of `rewind` that succeeded.
    """

    def __init__(
        self,
        *,
        slots: int = 4,
        ctx: int = 1024,
        block_size: int = 8,
        batch: int = 64,
        kv_bytes_per_token: int = 16,
        transfer_bytes: int = 0,
        seed: int = 0,
        delay: float = 0.0,
        chunking: bool = True,
        canonical: bool = True,
        decode_is_prefill: bool = False,
        sliceable: bool = True,
        movable: bool = True,
        state_bytes: int = 48,
        least_filling: int = 0,
        alphabet: bytes = PRINTABLE,
        tokenizer: FakeTokenizer | None = None,
    ) -> None:
        if (
            batch % block_size
            or (kv_bytes_per_token < 2 * LOW and (kv_bytes_per_token or sliceable))
            or state_bytes < _LEAST_STATE
        ):
            raise ValueError(
                f"batch must be a multiple of block_size, kv_bytes_per_token at least {2 * LOW} (or 0, with a state), "
                f"state_bytes at least {_LEAST_STATE}"
            )
        self.tokenizer: FakeTokenizer = tokenizer or FakeTokenizer()
        self.traits = Traits(
            block_size,
            chunking=chunking,
            canonical=canonical,
            decode_is_prefill=decode_is_prefill,
            sliceable=sliceable,
            movable=movable,
        )
        self.shape = Shape(slots, ctx, batch, kv_bytes_per_token, transfer_bytes, state_bytes if self.traits.stateful else 0)
        self.facts = Facts("fake", "deterministic digests", "fake", {"seed": seed})
        parts = (seed, self.traits, kv_bytes_per_token, state_bytes, alphabet)
        self.fingerprint = blake2b(repr(parts).encode(), digest_size=32).digest()
        self.identity = dict(zip(("seed", "traits", "kv_bytes", "state_bytes", "alphabet"), map(str, parts), strict=True))
        self.delay = delay
        self.prefilled = self.decoded = self.calls = self.decodes = self.largest = self.exported = self.imported = 0
        self.checkpoints = self.rewinds = 0
        self._width = max(0, kv_bytes_per_token - LOW)  # bytes of the high part of a token's KV
        self._most_state = state_bytes - _LENGTH - LOW
        self._least_filling = least_filling
        self._key = blake2b(repr(seed).encode()).digest()
        self._likes = np.zeros(self.tokenizer.n_vocab, np.float32)
        self._likes[[*alphabet, END.id, *range(259, self.tokenizer.n_vocab)]] = 1000 * GAP
        low = min(kv_bytes_per_token, LOW)
        self._slots = [_Slot(np.zeros((ctx, self._width), np.uint8), np.zeros((ctx, low), np.uint8)) for _ in range(slots)]
        self._logits: dict[int, Logits] = {}
        self._grammars = Grammars(self.tokenizer)
        self._failures: list[Operation] = []
        self._alone = _Alone()

    @classmethod
    def load_tokenizer(cls, options: object) -> FakeTokenizer:
        """The tokenizer of an engine with default arguments."""
        return FakeTokenizer()

    def fail_next(self, operation: Operation, times: int = 1) -> None:
        """Makes the next `times` calls of `operation` raise EngineError, and leave what the contract allows then."""
        self._failures += [operation] * times

    def prefill(self, slot: int, tokens: npt.NDArray[np.int32], *, logits: bool) -> None:
        with self._alone:
            held, count = self._slots[slot], len(tokens)
            self._logits.clear()
            if not 1 <= count <= self.shape.batch or held.length + count > self.shape.ctx:
                raise EngineError(f"{count} tokens do not fit: {held.length} of {self.shape.ctx} held")
            self._pass_time()
            self._fail("prefill", held)
            self.calls += 1
            self.prefilled += count
            self.largest = max(self.largest, count)
            self._append(held, tokens.tolist(), self._kernels(held.length, count))
            if logits:
                self._logits[slot] = self._predict(held)

    def decode(self, steps: Sequence[Step]) -> None:
        with self._alone:
            self._logits.clear()
            held = [self._slots[step.slot] for step in steps]
            if len({step.slot for step in steps}) != len(steps) or any(s.length >= self.shape.ctx for s in held):
                raise EngineError("a slot is named twice, or full")
            self._pass_time()
            self._fail("decode", *held)
            self.decodes += 1
            self.decoded += len(steps)
            kernel = b"" if self.traits.decode_is_prefill else b"decode %d" % len(steps)
            for step, slot in zip(steps, held, strict=True):
                self._append(slot, [step.token], [kernel])
                self._logits[step.slot] = self._predict(slot)

    def sampler(self, sampling: Sampling, grammar: Grammar | None = None) -> FakeSampler:
        return FakeSampler(sampling, self._grammars.start(grammar) if grammar else None)

    def check_grammar(self, grammar: Grammar, param: str | None = None) -> Grammar:
        return self._grammars.check(grammar, param)

    def forget_grammars(self) -> None:
        self._grammars.clear()

    def sample(self, slot: int, sampler: Sampler) -> int:
        assert isinstance(sampler, FakeSampler)
        return sampler.draw(self.logits(slot))

    def logits(self, slot: int) -> Logits:
        if slot not in self._logits:
            raise EngineError(f"slot {slot} has no current logits")
        return self._logits[slot].copy()

    def truncate(self, slot: int, length: int) -> None:
        with self._alone:
            held = self._slots[slot]
            if length and (length > held.length or (length < held.length and not self.traits.sliceable)):
                raise EngineError(f"cannot cut slot {slot} of {held.length} tokens at {length}")
            if length:
                held.length = length
            else:
                held.clear()
            self._logits.pop(slot, None)

    def export_kv(self, slot: int, spans: Sequence[Span]) -> None:
        with self._alone:
            held, width = self._slots[slot], self._width
            self._check_movable()
            for span in spans:
                count = span.stop - span.start
                if not 0 <= span.start < span.stop <= held.length or len(span.data) < count * self.shape.kv_bytes_per_token:
                    raise EngineError(f"cannot export [{span.start}, {span.stop}) of {held.length} tokens")
            if self._failing("export"):
                for span in spans:
                    span.data[:] = 0xAA
                raise EngineError(f"{INJECTED}export")
            for span in spans:
                count = span.stop - span.start
                span.data[: count * width] = held.high[span.start : span.stop].reshape(-1)
                span.data[count * width : count * self.shape.kv_bytes_per_token] = held.low[span.start : span.stop].reshape(-1)
                self.exported += count

    def import_kv(self, slot: int, segments: Sequence[KVSegment]) -> None:
        with self._alone:
            held = self._emptied(slot)
            if not self.traits.sliceable:
                raise EngineError("KV of this model cannot be used without a checkpoint")
            self._check_movable()
            total = self._check_segments(segments)
            self._fail("import")
            self._put(held, segments)
            held.length = total

    def export_checkpoint(self, slot: int, out: Bytes) -> int:
        with self._alone:
            held = self._slots[slot]
            self._check_stateful()
            data = held.length.to_bytes(_LENGTH, "little") + held.state_low + held.state_high
            if not held.length or len(out) < self.shape.state_bytes:
                raise EngineError(f"no checkpoint of {held.length} tokens, or no room for it")
            if self._failing("export checkpoint"):
                out[:] = 0xAA
                raise EngineError(f"{INJECTED}export checkpoint")
            out[: len(data)] = np.frombuffer(data, np.uint8)
            self.checkpoints += 1
            return len(data)

    def import_checkpoint(self, slot: int, segments: Sequence[KVSegment], state: Bytes) -> None:
        with self._alone:
            held = self._emptied(slot)
            self._check_stateful()
            total = self._check_segments(segments)
            self._check_state(state, total)
            self._fail("import checkpoint")
            self._put(held, segments)
            self._set_state(held, state)

    def rewind(self, slot: int, length: int, state: Bytes) -> None:
        with self._alone:
            kept = self._slots[slot].length
            held = self._emptied(slot)
            self._check_stateful()
            if not 0 < length <= kept:
                raise EngineError(f"cannot go back to {length} of {kept} tokens")
            self._check_state(state, length)
            self._fail("rewind")
            self._set_state(held, state)
            self.rewinds += 1

    def length(self, slot: int) -> int:
        return self._slots[slot].length

    # ── numerics ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def fills_block(self, start: int, count: int) -> bool:
        return self._fills(count)

    def _fills(self, count: int) -> bool:
        return self.traits.chunking and 0 < self._least_filling <= count

    def _kernels(self, start: int, count: int) -> list[bytes]:
        """For each token of a prefill call, the name of the kernel that computes it; empty for canonical KV."""
        traits = self.traits
        whole = count // traits.block_size * traits.block_size if start % traits.block_size == 0 else 0
        if not traits.chunking and count != traits.block_size:
            whole = 0
        if traits.decode_is_prefill:
            whole = count
        rest = count - whole
        alone = (start + whole, rest) if self._fills(rest) else (start, count)
        return [b""] * whole + [b"call %d %d" % alone] * rest

    def _append(self, slot: _Slot, tokens: Sequence[int], kernels: Sequence[bytes]) -> None:
        start, stop = slot.length, slot.length + len(tokens)
        high = blake2b(slot.high[:start].tobytes(), key=self._key)
        low = blake2b(slot.low[:start].tobytes(), key=self._key)
        highs, lows = bytearray(), bytearray()
        sliceable, width, low_width = self.traits.sliceable, self._width, slot.low.shape[1]
        for at, token, kernel in zip(range(start, stop), tokens, kernels, strict=True):
            known, call = high.copy(), low.copy()
            known.update(token.to_bytes(4, "little") + slot.state_high)
            digest = known.digest()
            call.update(digest + kernel + slot.state_low)
            of_call = call.digest()
            if not sliceable:
                self._advance(slot, at, digest, of_call)
            tokens_part, kernel_part = digest[:width], of_call[:low_width]
            high.update(tokens_part)
            low.update(kernel_part)
            highs += tokens_part
            lows += kernel_part
        slot.high[start:stop] = np.frombuffer(highs, np.uint8).reshape(slot.high[start:stop].shape)
        slot.low[start:stop] = np.frombuffer(lows, np.uint8).reshape(slot.low[start:stop].shape)
        slot.length = stop

    def _advance(self, slot: _Slot, at: int, high: bytes, low: bytes) -> None:
        size = self._state_high(at + 1)
        digest = blake2b(slot.state_high + high, key=self._key).digest()
        slot.state_high = (digest * (size // _DIGEST + 1))[:size]
        slot.state_low = blake2b(slot.state_low + low, key=self._key, digest_size=LOW).digest()

    def _state_high(self, length: int) -> int:
        """Bytes of a state's high part. It grows up to a limit, as the state of a sliding window does."""
        return min(self._most_state, 8 + length)

    def _predict(self, slot: _Slot) -> Logits:
        def seen(kv: npt.NDArray[np.uint8], state: bytes) -> int:
            digest = blake2b(kv[: slot.length].tobytes() + state, key=self._key, digest_size=16).digest()
            return int.from_bytes(digest, "little")

        size = self.tokenizer.n_vocab
        order, noise = self._order(seen(slot.high, slot.state_high), size), self._noise(seen(slot.low, slot.state_low), size)
        return order + self._likes + noise

    def _order(self, seen: int, size: int) -> Logits:
        """An order of the tokens, as a digest of all high parts decides it, with gaps."""
        return np.random.default_rng(seen).permutation(size).astype(np.float32) * np.float32(GAP)

    def _noise(self, seen: int, size: int) -> Logits:
        """The last bits of the logits, as a digest of all low parts decides them."""
        return np.random.default_rng(seen).random(size, np.float32) * np.float32(NOISE)

    def _pass_time(self) -> None:
        """The time of a call. Other threads run meanwhile, also if it takes none."""
        time.sleep(self.delay)

    # ── contract ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _emptied(self, slot: int) -> _Slot:
        held = self._slots[slot]
        held.clear()
        self._logits.pop(slot, None)
        return held

    def _check_movable(self) -> None:
        if not self.traits.movable:
            raise EngineError("nothing of this model can be moved")

    def _check_stateful(self) -> None:
        if not self.traits.stateful:
            raise EngineError("this model has no checkpoints")

    def _check_segments(self, segments: Sequence[KVSegment]) -> int:
        """Tokens of the segments."""
        total = sum(segment.take for segment in segments)
        fits = all(0 < p.take <= p.tokens and len(p.data) >= p.tokens * self.shape.kv_bytes_per_token for p in segments)
        if not fits or total > self.shape.ctx:
            raise EngineError(f"these {len(segments)} segments of {total} tokens cannot be imported")
        return total

    def _check_state(self, state: Bytes, length: int) -> None:
        says, size = int.from_bytes(state[:_LENGTH].tobytes(), "little"), _LENGTH + LOW + self._state_high(length)
        if not length or says != length or len(state) != size:
            raise EngineError(f"a checkpoint of {says} tokens, {len(state)} bytes, where one of {length}, {size} was due")

    def _put(self, held: _Slot, segments: Sequence[KVSegment]) -> None:
        at, width, low = 0, self._width, held.low.shape[1]
        for segment in segments:
            held.high[at : at + segment.take] = segment.data[: segment.take * width].reshape(segment.take, width)
            held.low[at : at + segment.take] = segment.data[segment.tokens * width :][: segment.take * low].reshape(
                segment.take, low
            )
            at += segment.take
        self.imported += at

    def _set_state(self, held: _Slot, state: Bytes) -> None:
        data = state.tobytes()
        held.length = int.from_bytes(data[:_LENGTH], "little")
        held.state_low, held.state_high = data[_LENGTH : _LENGTH + LOW], data[_LENGTH + LOW :]

    def _failing(self, operation: Operation) -> bool:
        if operation not in self._failures:
            return False
        self._failures.remove(operation)
        return True

    def _fail(self, operation: Operation, *slots: _Slot) -> None:
        if self._failing(operation):
            for slot in slots:
                slot.high[:] = 0xAA
                slot.state_high = b"\xaa" * len(slot.state_high)
                slot.length = min(slot.length + 1, self.shape.ctx)
            raise EngineError(f"{INJECTED}{operation}")
