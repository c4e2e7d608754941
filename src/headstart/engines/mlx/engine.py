"""The MLX engine: mlx-lm's models with caches of headstart's.

A slot is a list of mlx-lm caches, one a layer. Prefill computes one slot, so neighbours never change its bits. Several slots
are decoded in one call, and the next call is built meanwhile. KV goes in and out through numpy: no buffer for
transfers is needed, and one block costs one block.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.models.cache import KVCache

from headstart.engines import machine, model_folder
from headstart.engines.constraint import Grammars
from headstart.engines.digest import digests
from headstart.engines.hf_tokenizer import HFTokenizer
from headstart.engines.mlx import ahead, batch, padded
from headstart.engines.mlx import load as mlx_load
from headstart.engines.mlx.ahead import Graph, StepAhead
from headstart.engines.mlx.head import only_last
from headstart.engines.mlx.layers import (
    STEP,
    Form,
    UnknownCache,
    compact,
    contents,
    emptied,
    leaves,
    reserve,
    set_length,
)
from headstart.engines.mlx.padded import PaddedKV
from headstart.engines.numpy_sampler import NumpySampler
from headstart.engines.options import EngineOptions
from headstart.engines.proof import most_tokens, ordinary_tokens
from headstart.engines.proven import Proven
from headstart.errors import EngineError, ModelError
from headstart.interfaces.engine import Engine, Facts, KVSegment, Logits, Shape, Span, Step
from headstart.interfaces.sampling import Grammar, Sampler, Sampling
from headstart.interfaces.tokens import Bytes
from headstart.interfaces.traits import BlockSizes, EngineProof, Traits
from headstart.memory_plan import fit
from headstart.paths import expanded

BLOCK_SIZE = 64
_READ, _LOADED = 0.2, 0.4  # progress when the files are digested, and when the weights are loaded; the rest is proofs
_PROBE = 3  # tokens that show how the caches are laid out


@dataclass(slots=True)
class _Sequence:
    """A live sequence.

    Attributes:
        caches: of all layers.
        length: tokens that they hold.
        logits: of the last token, if the last call computed them.
    """

    caches: list[Any]
    length: int = 0
    logits: Logits | None = None


@dataclass(frozen=True, slots=True)
class _Probed:
    """What a model does with its caches.

    Attributes:
        form: how they are laid out; None if that is not known.
        unmovable: why it is not.
        alone: why slots cannot be decoded in batches; "" if they can.
        ragged: why batches cannot be padded; "" if they can.
        late: why no step can be built ahead; "" if it can.
        steady: most tokens of a slot whose KV does not depend on where calls end; None if it never does.
    """

    form: Form | None
    unmovable: str
    alone: str
    ragged: str
    late: str
    steady: int | None

    @classmethod
    def of(cls, model: Any, folder: Path) -> _Probed:
        """Raises ModelError if mlx cannot compute."""

        def fresh() -> list[Any]:
            return mlx_load.empty_caches(model)

        try:
            only_last(model, fresh)
            caches = fresh()
            model(mx.array([[0] * _PROBE]), cache=caches)
            mx.eval(contents(caches))
            form, unmovable = Form.of(caches), ""
        except UnknownCache as error:
            form, unmovable = None, str(error)
        except Exception as error:  # mlx raises many kinds
            raise ModelError(f"mlx cannot compute with '{folder}' ({error}); choose another model.") from error
        batch.open_attention()
        steady = mlx_load.steady_ctx(model)
        if form is None:
            return cls(form, unmovable, batch.trial(model, fresh), unmovable, unmovable, steady)
        return cls(form, "", batch.trial(model, fresh), padded.trial(model, fresh, form), ahead.trial(model, fresh), steady)


class MlxEngine(Engine):
    """A model in MLX. Build one with `load`, and use it on the same thread only: mlx's streams belong to threads."""

    tokenizer: HFTokenizer
    # Blocks of one call each: short ones find more of a short chat, and on a CPU short calls are hardly slower.
    block_sizes = BlockSizes(spanned=(64, 128, 256), single=(128, 256, 512))
    close_at_exit = True  # mlx keeps compiled functions by thread, and frees them with Python's lock while the thread ends

    def __init__(self, model: Any, tokenizer: HFTokenizer, probed: _Probed, *, ctx: int, slots: int) -> None:
        form = probed.form
        self._model = model
        self._form = form
        self._together = not probed.alone
        self._builds_ahead = not probed.late
        self._pads = False  # while the proof looks at decoding
        self._stacks = batch.Stacks()
        self._padded: dict[tuple[int, ...], PaddedKV] = {}  # by slots; a slot is in one at most
        self._ahead: dict[tuple[int, ...], StepAhead] = {}  # by slots; a slot is in one at most
        self.tokenizer = tokenizer
        self._grammars = Grammars(tokenizer)
        self._slots = [_Sequence(mlx_load.empty_caches(model)) for _ in range(slots)]
        sliceable = form is not None and not form.stateful
        self.shape = Shape(
            slots,
            ctx,
            min(mlx_load.BATCH, ctx),
            kv_bytes_per_token=form.kv_bytes_per_token if form else 0,
            transfer_bytes=0,
            state_bytes=form.state_bytes(ctx) if form else 0,
        )
        self._notes: tuple[str, ...] = ()
        if probed.alone and slots > 1:
            self._notes += (f"replies are decoded one by one, not in batches: {probed.alone}",)
        if probed.ragged and not probed.alone and form is not None and slots > 1:
            self._notes += (f"batches are not padded: {probed.ragged}",)
        if probed.late and form is not None:
            self._notes += (f"no step is built while the last one is computed: {probed.late}",)
        if form is None:
            self._notes += (f"nothing can be moved, so only live slots are reused: {probed.unmovable}",)
        canonical = form is not None
        if probed.steady is not None and ctx > probed.steady:
            canonical = False
            self._notes += (
                f"behind {probed.steady} tokens, KV depends on where a call ends (`dynamic` in the model's `rope_scaling`): "
                f"exact mode needs a context of at most {probed.steady // STEP * STEP} tokens",
            )
        self.traits = Traits(
            BLOCK_SIZE,
            canonical=canonical,
            sliceable=sliceable,
            movable=form is not None,
            random_access=True,
            notes=self._notes,
        )
        self.facts = Facts("")
        self.fingerprint = b""
        self._opened: BinaryIO | None = None  # a file of the model, so that others see who uses it: mlx closes them

    @classmethod
    def load(
        cls,
        options: EngineOptions,
        *,
        progress: Callable[[float], None] | None = None,
        block_size: int | None = None,
        anew: bool = False,
    ) -> MlxEngine:
        """Loads a model, and proves what it can do.

        Args:
            progress: receives the progress, from 0 to 1.
            block_size: use this block size without a proof (for tests that show what a wrong one does).
            anew: prove everything again, also what an earlier load has proved.

        Raises:
            ModelError: the model is missing, broken or unsupported.
            ConfigError: the options cannot work here.
        """
        report = progress or (lambda _: None)
        folder = expanded(options.model)
        mlx_load.prepare()
        available = mlx_load.device_memory(machine.memory(options.memory))
        files = model_folder.weights(folder)
        config = mlx_load.check(folder, files, available)
        weights = digests(files, options.state_dir, lambda part: report(_READ * part))
        tokenizer = HFTokenizer(folder)
        model = mlx_load.open_model(folder)
        report(_LOADED)
        probed = _Probed.of(model, folder)
        host = mlx_load.host_memory(available, mlx_load.weight_bytes(model), probed.form)
        trained = model_folder.trained_ctx(config)
        chosen = fit(host, trained=trained, ctx=options.ctx, slots=options.slots, reserve=options.reserve, kv_types=False)
        engine = cls(model, tokenizer, probed, ctx=chosen.ctx, slots=chosen.slots)
        engine.host = host
        engine._opened = files[0].open("rb")
        identity = mlx_load.identity(config, weights, options.state_dir)
        began = time.perf_counter()
        if block_size is not None:
            engine.traits = Traits(
                block_size,
                sliceable=engine.traits.sliceable,
                movable=engine.traits.movable,
                random_access=engine.traits.random_access,
                notes=(*engine.traits.notes, f"the block size of {block_size} was given, not proved"),
            )
        elif engine.traits.movable:
            most = most_tokens(engine.shape.batch)
            sizes = {"ctx": min(chosen.ctx, most), "slots": min(chosen.slots, 2), "sources": mlx_load.SOURCES}
            proven = Proven(options.state_dir, mlx_load.digest_of({**identity, **sizes}), anew, options.proofs)
            try:
                traits = proven.traits(
                    engine,
                    ordinary_tokens(tokenizer, most),
                    window=probed.form.window if probed.form else 0,
                    progress=lambda part: report(_LOADED + (1 - _LOADED) * part),
                )
                if traits.canonical:
                    engine.proofs = (EngineProof(proven.identity.hex(), traits, engine.shape.slots),)
                engine.traits = replace(
                    traits,
                    # The proof ends before the tokens whose bits depend on where a call ends.
                    canonical=traits.canonical and engine.traits.canonical,
                    decode_is_prefill=traits.decode_is_prefill and engine.traits.canonical,
                    notes=(*traits.notes, *engine._notes),
                )
            except EngineError as error:
                raise ModelError(f"mlx cannot compute with '{folder}' ({error}); choose another model.") from error
        engine._pads = not probed.alone and not probed.ragged and not engine.traits.decode_is_prefill
        seconds = time.perf_counter() - began
        identity["block_size"] = engine.traits.block_size
        if probed.steady is not None and engine.shape.ctx > probed.steady:  # else the same blocks have other bits
            identity["long_rope"] = True
        engine.fingerprint = mlx_load.digest_of(identity)
        engine.identity = {name: str(value) for name, value in identity.items()}
        engine.facts = mlx_load.facts(
            model,
            config,
            folder,
            engine.shape,
            f"mlx {identity['mlx']}, mlx-lm {identity['mlx_lm']}",
            device=identity["device"],
            weights_bytes=host.weights,
            live_bytes=host.live(chosen.ctx, chosen.slots),
            proof_seconds=round(seconds, 3),
        )
        report(1.0)
        return engine

    # ── computing ────────────────────────────────────────────────────────────────────────────────────────────────────

    def prefill(self, slot: int, tokens: npt.NDArray[np.int32], *, logits: bool) -> None:
        held, count = self._settled(slot), len(tokens)
        self._forget_logits()
        if not 0 < count <= self.shape.batch or held.length + count > self.shape.ctx:
            raise EngineError(f"{count} tokens do not fit behind {held.length} of {self.shape.ctx}")
        with self._computing(slot):
            self._reserve(held, count)
            out = self._model(mx.array(np.asarray(tokens, np.int32))[None], cache=held.caches)
            last = out[0, -1].astype(mx.float32)
            if self._form is not None:
                compact(held.caches)
            mx.eval(*contents(held.caches), *([last] if logits else []))
            held.length += count
            held.logits = self._scores(np.array(last)) if logits else None

    def decode(self, steps: Sequence[Step]) -> None:
        if not steps or len({step.slot for step in steps}) != len(steps):
            raise EngineError("a decode needs one token each of different slots")
        self._forget_logits()
        for step in steps:
            if self._slots[step.slot].length >= self.shape.ctx:
                raise EngineError(f"slot {step.slot} is full: {self.shape.ctx} tokens")
        together = len(steps) > 1 and self._together and all(self._slots[step.slot].length for step in steps)
        groups = [steps] if together else [[step] for step in steps]
        with self._computing(*(step.slot for step in steps)):
            # A group is computed while the next one's graph is built, and then those of the next steps.
            rows = [self._start(group) for group in groups]
            for group in groups:
                self._build_ahead(tuple(step.slot for step in group))
            mx.eval(rows)  # other threads run meanwhile
            for group, logits in zip(groups, rows, strict=True):
                for step, row in zip(group, np.array(logits), strict=True):
                    self._slots[step.slot].logits = self._scores(row)

    def _start(self, steps: Sequence[Step]) -> Any:
        """Lets mlx compute the next token of these slots as one batch. Returns their logits, which are not there yet."""
        numbers, tokens = tuple(step.slot for step in steps), [step.token for step in steps]
        if (built := self._ahead.pop(numbers, None)) is not None:
            rows = built.start(tokens)
        else:
            if not self._joined(numbers):
                for held in [self._settled(number) for number in numbers]:
                    self._reserve(held, 1)
            rows, rest = self._graph(numbers, mx.array(tokens, mx.int32)[:, None])
            mx.async_eval(rows, *rest)  # type: ignore[no-untyped-call]
        for number in numbers:
            self._slots[number].length += 1
        return rows

    def _joined(self, numbers: tuple[int, ...]) -> bool:
        """Whether these slots are decoded as a padded batch. Makes it, or ends it."""
        if not self._worth_padding(numbers):
            self._part(numbers)
        elif numbers not in self._padded:
            slots = [self._settled(number) for number in numbers]
            self._padded[numbers] = PaddedKV([held.caches for held in slots], [held.length for held in slots])
        return numbers in self._padded

    def _worth_padding(self, numbers: tuple[int, ...]) -> bool:
        lengths = [self._slots[number].length for number in numbers]
        return self._pads and padded.worthwhile(lengths, self.shape.kv_bytes_per_token)

    def _part(self, numbers: tuple[int, ...]) -> None:
        """Ends the padded batch of these slots, if there is one. They have their tokens then. If it fails, the batch stays."""
        if self._form is not None and numbers in self._padded:
            try:
                self._padded[numbers].give_back(self.shape.ctx, self._form)
            except Exception as error:
                raise _failed(error) from error
            del self._padded[numbers]

    def _graph(self, numbers: tuple[int, ...], tokens: Any) -> Graph:
        """A step of these slots, which have their tokens in an array, (slots, 1)."""
        caches = [self._slots[number].caches for number in numbers]
        if len(caches) == 1:
            rows, rest = self._model(tokens, cache=caches[0])[:, -1], contents(caches[0])
        else:  # with the logits all KV is computed
            lengths = [self._slots[number].length for number in numbers]
            layers = self._padded[numbers].layers if numbers in self._padded else ()
            rows, rest = batch.decode(self._model, caches, lengths, tokens, self._stacks, layers)
        return rows.astype(mx.float32), rest

    def _build_ahead(self, numbers: tuple[int, ...]) -> None:
        """Builds the step that probably follows. Not if a slot needs more room, for which mlx would have to be waited for."""
        lengths = [self._slots[number].length for number in numbers]
        if not self._builds_ahead or max(lengths) >= self.shape.ctx:
            return
        caches = [leaf for number in numbers for leaf in leaves(self._slots[number].caches)]
        if numbers in self._padded:
            if not self._worth_padding(numbers):
                return
            caches = [*self._padded[numbers].layers, *(leaf for leaf in caches if not isinstance(leaf, KVCache))]
        elif not all(length % STEP for length in lengths):
            return
        self._ahead[numbers] = StepAhead(partial(self._graph, numbers), caches, len(numbers))

    def _settled(self, slot: int) -> _Sequence:
        """A slot of which no step is built ahead, and that has all its tokens."""
        self._undo_ahead(slot)
        for numbers in [numbers for numbers in self._padded if slot in numbers]:
            self._part(numbers)
        return self._slots[slot]

    def _emptied(self, slot: int) -> _Sequence:
        """A slot without tokens. It needs none of a padded batch, which stays for the others if it cannot be ended now."""
        held = self._slots[slot]
        try:
            self._empty(self._settled(slot))
        except EngineError:  # later the batch gives its tokens back to the room of the slot, so that is used no more
            held.caches, held.length, held.logits = mlx_load.empty_caches(self._model), 0, None
        return held

    def _undo_ahead(self, slot: int) -> None:
        for numbers in [numbers for numbers in self._ahead if slot in numbers]:
            self._ahead.pop(numbers).undo()

    def _reserve(self, held: _Sequence, count: int) -> None:
        if self._form is not None:
            reserve(held.caches, held.length + count, self.shape.ctx, self._form)

    @contextmanager
    def _computing(self, *slots: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # mlx raises many kinds
            for slot in slots:
                self._undo_ahead(slot)
                self._empty(self._slots[slot])  # what a padded batch has for it is lost
            raise _failed(error) from error

    def _scores(self, row: Any) -> Logits:
        """Logits of the tokens that the tokenizer knows. A model may have more outputs, or fewer. `row`: float32."""
        found, count = np.asarray(row), self.tokenizer.n_vocab
        if len(found) >= count:
            return found[:count]
        return np.concatenate([found, np.full(count - len(found), -np.inf, np.float32)])

    def _forget_logits(self) -> None:
        for held in self._slots:
            held.logits = None

    def sampler(self, sampling: Sampling, grammar: Grammar | None = None) -> NumpySampler:
        return NumpySampler(sampling, self._grammars.start(grammar) if grammar else None)

    def check_grammar(self, grammar: Grammar, param: str | None = None) -> Grammar:
        return self._grammars.check(grammar, param)

    def forget_grammars(self) -> None:
        self._grammars.clear()

    def sample(self, slot: int, sampler: Sampler) -> int:
        assert isinstance(sampler, NumpySampler)
        return sampler.draw(self._logits(slot))

    def logits(self, slot: int) -> Logits:
        return self._logits(slot).copy()

    def _logits(self, slot: int) -> Logits:
        found = self._slots[slot].logits
        if found is None:
            raise EngineError(f"slot {slot} has no logits: the last call computed none for it")
        return found

    # ── KV ───────────────────────────────────────────────────────────────────────────────────────────────────────────

    def truncate(self, slot: int, length: int) -> None:
        if length == 0:
            self._emptied(slot)
            return
        held = self._settled(slot)
        if length == held.length:
            return
        if not 0 < length < held.length or not self.traits.sliceable:
            raise EngineError(f"slot {slot} cannot be cut from {held.length} to {length} tokens")
        held.logits = None
        set_length(held.caches, length)
        held.length = length

    def export_kv(self, slot: int, spans: Sequence[Span]) -> None:
        form, held = self._movable(), self._settled(slot)
        for span in spans:
            if not 0 <= span.start < span.stop <= held.length:
                raise EngineError(f"slot {slot} holds {held.length} tokens, not [{span.start}, {span.stop})")
            if len(span.data) < (span.stop - span.start) * self.shape.kv_bytes_per_token:
                raise EngineError(f"{len(span.data)} bytes are too few for [{span.start}, {span.stop})")
        for span in spans:
            form.export_kv(held.caches, span.start, span.stop, span.data)

    def import_kv(self, slot: int, segments: Sequence[KVSegment]) -> None:
        if not self.traits.sliceable:
            self._emptied(slot)
            raise EngineError("KV of this model cannot be put into a slot without its checkpoint")
        self._import(slot, segments, None)

    def export_checkpoint(self, slot: int, out: Bytes) -> int:
        form, held = self._stateful(), self._settled(slot)
        if not held.length or len(out) < form.state_bytes(held.length):
            raise EngineError(f"no checkpoint of {held.length} tokens, or no room for it in {len(out)} bytes")
        return form.export_state(held.caches, held.length, out)

    def import_checkpoint(self, slot: int, segments: Sequence[KVSegment], state: Bytes) -> None:
        self._import(slot, segments, state)

    def _import(self, slot: int, segments: Sequence[KVSegment], state: Bytes | None) -> None:
        held = self._emptied(slot)
        form, size = self._movable() if state is None else self._stateful(), self.shape.kv_bytes_per_token
        for segment in segments:
            if not 0 < segment.take <= segment.tokens or len(segment.data) < segment.tokens * size:
                raise EngineError(f"{len(segment.data)} bytes do not hold {segment.take} of {segment.tokens} tokens")
        tokens = sum(segment.take for segment in segments)
        if tokens > self.shape.ctx:
            raise EngineError(f"{tokens} tokens do not fit into {self.shape.ctx}")
        if state is not None:
            form.check_state(state, tokens)
        elif not tokens:
            return
        with self._computing(slot):
            form.import_kv(held.caches, segments, self.shape.ctx)
            if state is not None:
                form.import_state(held.caches, tokens, state)
            mx.eval(*contents(held.caches))
            held.length = tokens

    def rewind(self, slot: int, length: int, state: Bytes) -> None:
        held, form = self._settled(slot), self._stateful()
        try:
            if not 0 < length <= held.length:
                raise EngineError(f"slot {slot} cannot go back from {held.length} to {length} tokens")
            form.check_state(state, length)
        except EngineError:
            self._empty(held)
            raise
        with self._computing(slot):
            set_length(held.caches, length)
            form.import_state(held.caches, length, state)
            mx.eval(*contents(held.caches))
        held.length, held.logits = length, None

    def length(self, slot: int) -> int:
        held = self._settled(slot)
        counted = next((leaf.offset for leaf in held.caches if hasattr(leaf, "offset")), held.length)
        if counted != held.length:
            raise EngineError(f"slot {slot} holds {counted} tokens where {held.length} are expected")
        return held.length

    def close(self) -> None:
        self._slots, self._model, self._stacks = [], None, batch.Stacks()
        self._ahead.clear()
        self._padded.clear()
        if self._opened is not None:
            self._opened.close()
        mx.clear_cache()

    def _empty(self, held: _Sequence) -> None:
        fresh = mlx_load.empty_caches(self._model)
        held.caches = fresh if self._form is None else emptied(held.caches, fresh)
        held.length, held.logits = 0, None

    def _movable(self) -> Form:
        if self._form is None or not self.traits.movable:
            raise EngineError("KV of this model cannot be moved")
        return self._form

    def _stateful(self) -> Form:
        if not self.traits.stateful:
            raise EngineError("this model has no checkpoints")
        return self._movable()


def _failed(error: Exception) -> EngineError:
    """What of mlx's errors, which are of many kinds, a caller learns."""
    return EngineError(f"mlx could not compute: {type(error).__name__}: {error}")
