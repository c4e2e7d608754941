"""The llama engine: llama.cpp through llama-cpp-python's low-level C API.

Each slot is a separate stream of one context (`kv_unified=False`). So decoding is batched, and neighbours never change the
bits of a sequence. Prefill and decode are separate calls, and llama.cpp never splits a call. A sequence of a model with
recurrent layers or sliding windows is never truncated: it goes back to a prefix by importing the state at its end. A model
whose state has an unknown layout is served too, but its KV and state are never moved.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from headstart.engines import machine, model_file
from headstart.engines.constraint import Grammars
from headstart.engines.digest import digest, digests
from headstart.engines.llama import amx, first_load, kv_transfer
from headstart.engines.llama import identity as llama_identity
from headstart.engines.llama import load as llama_load
from headstart.engines.llama import log as llama_log
from headstart.engines.llama.batch import Batch
from headstart.engines.llama.binding import lib, loaded, ready
from headstart.engines.llama.padding import NO_PADDING, TILE, Padding
from headstart.engines.llama.part import LayoutError
from headstart.engines.llama.placement import place
from headstart.engines.llama.sampler import LlamaSampler
from headstart.engines.llama.vocab import LlamaTokenizer, VocabularyTokenizer
from headstart.engines.options import EngineOptions
from headstart.engines.proof import most_tokens, ordinary_tokens
from headstart.engines.proven import Proven
from headstart.errors import EngineError, ModelError
from headstart.interfaces.engine import Engine, Facts, KVSegment, Logits, Shape, Span, Step
from headstart.interfaces.sampling import Grammar, Sampler, Sampling
from headstart.interfaces.tokens import Bytes, Tokens
from headstart.interfaces.traits import BlockSizes, EngineProof, Traits
from headstart.memory_plan import Fit, fit

BLOCK_SIZE = TILE
"""llama.cpp changes its attention kernels at 64 tokens a call, and its tiles are 64 cells."""
_READ, _LOADED = 0.2, 0.4  # progress when the files are digested, and when the weights are loaded; the rest is proofs
_LAYOUT_TOKENS = 5


class LlamaEngine(Engine):
    """A model in llama.cpp. Build one with `load`."""

    tokenizer: LlamaTokenizer
    block_sizes = BlockSizes(spanned=(BLOCK_SIZE, 2 * BLOCK_SIZE, 4 * BLOCK_SIZE), single=(512, 256, 128))

    def __init__(self, model: Any, context: Any, *, ctx: int, slots: int) -> None:
        self._model = model
        self._context = context
        self._memory = lib.llama_get_memory(context)
        self.tokenizer = LlamaTokenizer(model)
        self._grammars = Grammars(self.tokenizer)
        self._buffer = ctypes.c_float * self.tokenizer.n_vocab
        self._batch = Batch(llama_load.BATCH, slots)
        self._lengths = [0] * slots
        self._blank = [0] * slots  # a slot's windows have blank cells for so many of its first tokens
        self._outputs: dict[int, int] = {}  # slot → index in the last call's batch
        self._kv_transfer: kv_transfer.Transfer | None = None
        self._padding = NO_PADDING
        self._empty_size = kv_transfer.size(context, 0)
        self.shape = Shape(slots, ctx, min(llama_load.BATCH, ctx), kv_bytes_per_token=0, transfer_bytes=0)
        self.traits = Traits(BLOCK_SIZE, canonical=False, decode_exact=False, sliceable=False, movable=False)
        self.facts = Facts("")
        self.fingerprint = b""

    @classmethod
    def load(
        cls,
        options: EngineOptions,
        *,
        progress: Callable[[float], None] | None = None,
        block_size: int | None = None,
        anew: bool = False,
    ) -> LlamaEngine:
        """Loads a model, and proves what it can do.

        Compute on the same thread later: OpenMP keeps a team of workers for each thread that has computed, and slows all teams
        down when together they outnumber the cores. Decoding then runs at half speed.

        Args:
            progress: receives the progress, from 0 to 1.
            block_size: use this block size without a proof (for tests that show what a wrong one does).
            anew: prove everything again, also what an earlier load has proved.

        Raises:
            ModelError: the model or adapter is missing, broken or unsupported.
            ConfigError: the options cannot work here, or this build of llama.cpp cannot be used.
        """
        report = progress or (lambda _: None)
        path = model_file.locate(options.model)
        files = model_file.parts(path)
        if loaded() is not None:
            ready(options.llama_lib)  # refuses another library before that is proved
        report = first_load.prove(options, files, report, anew=anew)
        ready(options.llama_lib)
        if options.lora is not None:
            model_file.check(options.lora, "adapter")
        available = machine.memory(options.memory)
        state_dir = options.state_dir
        weights = b"".join(digests(files, state_dir, lambda part: report(_READ * part)))
        adapter = digest(options.lora, state_dir) if options.lora is not None else None
        placed = place(path, files, options)
        # What is multiplied on a GPU needs no layout for the processor.
        extra = not amx.built() if placed.layers else amx.extra_buffers(path, state_dir, anew=anew)
        uses_amx = amx.used(extra)
        model = llama_load.open_model(
            path, placed.layers, lambda part: report(_READ + (_LOADED - _READ) * part), extra_buffers=extra
        )
        with ExitStack() as undo:
            undo.callback(lib.llama_model_free, model)
            host = llama_load.measure_memory(model, options.kv_type, available)
            most = None
            if placed.plan is not None:
                host = replace(host, share=placed.plan.host_share)
                most = Fit(placed.plan.ctx, placed.plan.slots) if placed.plan.ctx and placed.plan.slots else None
            trained = int(lib.llama_model_n_ctx_train(model))
            chosen = fit(host, trained=trained, ctx=options.ctx, slots=options.slots, reserve=options.reserve, most=most)
            threads = options.threads or machine.cores()
            context = llama_load.open_context(
                model, ctx=chosen.ctx, slots=chosen.slots, kv_type=options.kv_type, threads=threads
            )
            undo.callback(lib.llama_free, context)
            if options.lora is not None:
                llama_load.open_adapter(model, context, options.lora)
            engine = cls(model, context, ctx=chosen.ctx, slots=chosen.slots)
            engine.host = host
            identity = llama_identity.identity(
                *(model, options, weights, adapter),
                gpu_layers=placed.layers,
                ctx=chosen.ctx,
                extra_buffers=extra,
                amx_used=uses_amx,
            )
            # Proofs use two slots and a part of the context; `Proven` sees to more slots. All of it depends on the free memory.
            sizes = {"ctx": min(chosen.ctx, most_tokens(engine.shape.batch)), "slots": min(chosen.slots, 2), "threads": threads}

            def proven(decode_threads: int) -> Proven:
                decoding = {"decode_threads": decode_threads, "openmp": llama_identity.environment("OMP_", "GOMP_")}
                key = llama_identity.digest_of({**identity, **sizes, **decoding, "sources": llama_identity.SOURCES})
                # A proof on a GPU takes no time.
                return Proven(state_dir, key, anew or placed.layers != 0, options.proofs)

            def proving(part: float) -> None:
                report(_LOADED + (1 - _LOADED) * part)

            began = time.perf_counter()
            try:
                decode_threads = engine._prove(block_size, proven, threads, exact=options.exact, progress=proving)
            except EngineError as error:
                raise ModelError(f"llama.cpp cannot compute with '{path}' ({error}); choose another model.") from error
            seconds = time.perf_counter() - began
            two_kernels = options.kv_type == "f16" and not engine.traits.decode_is_prefill and not identity["devices"]
            # Blocks are full tiles, so a canonical block is never padded.
            if two_kernels and engine.traits.sliceable and engine.traits.block_size % TILE == 0:
                work, found = llama_identity.work(model), llama_identity.features(model, uses_amx=uses_amx)
                engine._padding = Padding.estimated(work, identity["system"], threads, found)
            undo.pop_all()
        engine.fingerprint = llama_identity.digest_of({**identity, "grid": engine.traits.block_size})
        engine.identity = {name: str(value) for name, value in {**identity, "block_size": engine.traits.block_size}.items()}
        engine.facts = llama_identity.facts(
            model,
            path,
            options,
            engine.shape,
            gpus=llama_identity.gpus(),
            threads=threads,
            decode_threads=decode_threads,
            gpu_layers=placed.layers,
            gpu_plan=list(placed.table) or None,
            live_bytes=chosen.slots * host.size(chosen.ctx),
            proof_seconds=round(seconds, 3),
            amx=uses_amx if amx.built() else None,
        )
        report(1.0)
        return engine

    @classmethod
    def load_tokenizer(cls, options: EngineOptions) -> VocabularyTokenizer:
        """Loads a model's tokenizer and chat template alone. Close it.

        Raises:
            ModelError: the model is missing or broken.
            ConfigError: this build of llama.cpp cannot be used.
        """
        path = model_file.locate(options.model)
        first_load.prove(options, model_file.parts(path), whole=False)
        ready(options.llama_lib)
        return VocabularyTokenizer(path)

    # ── computing ────────────────────────────────────────────────────────────────────────────────────────────────────

    def prefill(self, slot: int, tokens: npt.NDArray[np.int32], *, logits: bool) -> None:
        start, n = self._lengths[slot], len(tokens)
        if not 0 < n <= self.shape.batch or start + n > self.shape.ctx:
            raise EngineError(f"{n} tokens do not fit behind {start} of {self.shape.ctx} in calls of {self.shape.batch}")
        padding = self._padding_of(start, n)
        self._outputs = {}
        self._run(self._batch.prompt(slot, tokens, start, logits=logits, padding=padding), (slot,))
        if padding:
            self._cut(slot, start + n)
        self._lengths[slot] = start + n
        if logits:
            self._outputs = {slot: n - 1}

    def fills_block(self, start: int, count: int) -> bool:
        traits = self.traits
        return traits.block_size == TILE and traits.chunking and (count == TILE or self._padding_of(start, count) > 0)

    def _padding_of(self, start: int, n: int) -> int:
        """Number of tokens to add to a call. Behind whole blocks, the rest of it is padded as if it were a call of its own."""
        rest = n % TILE
        whole = n - rest
        alone = bool(start % TILE) or self.traits.block_size != TILE
        if not rest or (whole and alone) or start + whole + TILE > self.shape.ctx:
            return 0
        return self._padding.of(start + whole, rest)

    def decode(self, steps: Sequence[Step]) -> None:
        lengths = self._lengths
        # llama.cpp computes only neighbouring streams together: it would split an unordered batch into several.
        steps = sorted(steps, key=lambda step: step.slot)
        slots = [step.slot for step in steps]
        if not steps or len(set(slots)) != len(slots):
            raise EngineError("a decode needs one token each of different slots")
        for slot in slots:
            if lengths[slot] >= self.shape.ctx:
                raise EngineError(f"slot {slot} is full: {self.shape.ctx} tokens")
        self._outputs = {}
        self._run(self._batch.steps(steps, lengths), slots)
        for row, slot in enumerate(slots):
            lengths[slot] += 1
            self._outputs[slot] = row

    def _run(self, batch: Any, slots: Sequence[int]) -> None:
        result = lib.llama_decode(self._context, batch)
        if result != 0:
            for slot in slots:
                self._lengths[slot] = self._count(slot)
            raise EngineError(f"llama_decode returned {result}: {llama_log.cause()}")

    def sampler(self, sampling: Sampling, grammar: Grammar | None = None) -> LlamaSampler:
        constraint = self._grammars.start(grammar) if grammar else None
        return LlamaSampler(sampling, constraint, n_vocab=self.tokenizer.n_vocab, ctx=self.shape.ctx)

    def check_grammar(self, grammar: Grammar, param: str | None = None) -> Grammar:
        return self._grammars.check(grammar, param)

    def forget_grammars(self) -> None:
        self._grammars.clear()

    def sample(self, slot: int, sampler: Sampler) -> int:
        assert isinstance(sampler, LlamaSampler)
        if sampler.constraint is not None:
            return sampler.draw(sampler.constraint, self._logits(slot))
        return int(lib.llama_sampler_sample(sampler.chain, self._context, self._output(slot)))

    def logits(self, slot: int) -> Logits:
        return np.array(self._logits(slot))

    def _logits(self, slot: int) -> Logits:
        """A view of llama.cpp's own logits, valid until the next call."""
        pointer = lib.llama_get_logits_ith(self._context, self._output(slot))
        buffer: Any = self._buffer.from_address(ctypes.addressof(pointer.contents))
        return np.frombuffer(buffer, np.float32)

    def _output(self, slot: int) -> int:
        output = self._outputs.get(slot)
        if output is None:
            raise EngineError(f"slot {slot} has no logits: the last call computed none for it")
        return output

    # ── KV ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def truncate(self, slot: int, length: int) -> None:
        held = self._lengths[slot]
        if length == 0:
            self._clear(slot)
            return
        if length == held:
            return
        if not 0 < length < held or not self.traits.sliceable:
            raise EngineError(f"slot {slot} cannot be cut from {held} to {length} tokens")
        self._outputs.pop(slot, None)
        self._cut(slot, length)

    def _cut(self, slot: int, length: int) -> None:
        removed = lib.llama_memory_seq_rm(self._memory, slot, length, -1)
        self._lengths[slot] = self._count(slot)
        if not removed or self._lengths[slot] != length:
            raise EngineError(f"llama.cpp could not cut slot {slot} to {length} tokens")

    def export_kv(self, slot: int, spans: Sequence[Span]) -> None:
        transfer, held = self._transfer(), self._lengths[slot]
        for span in spans:
            if not 0 <= span.start < span.stop <= held:
                raise EngineError(f"slot {slot} holds {held} tokens, not [{span.start}, {span.stop})")
            if len(span.data) < (span.stop - span.start) * self.shape.kv_bytes_per_token:
                raise EngineError(f"{len(span.data)} bytes are too few for [{span.start}, {span.stop})")
        if spans:
            transfer.export(slot, held, spans)

    def import_kv(self, slot: int, segments: Sequence[KVSegment]) -> None:
        if not self.traits.sliceable:
            self._clear(slot)
            raise EngineError("KV of this model cannot be put into a slot without its checkpoint")
        self._import(slot, segments, None)

    def export_checkpoint(self, slot: int, out: Bytes) -> int:
        transfer, held = self._stateful(), self._lengths[slot]
        if not held or len(out) < self.shape.state_bytes:
            raise EngineError(f"no checkpoint of {held} tokens, or no room for it in {len(out)} bytes")
        return transfer.checkpoint(slot, held, out)

    def import_checkpoint(self, slot: int, segments: Sequence[KVSegment], state: Bytes) -> None:
        self._import(slot, segments, state)

    def _import(self, slot: int, segments: Sequence[KVSegment], state: Bytes | None) -> None:
        tokens = sum(segment.take for segment in segments)
        self._clear(slot)
        transfer = self._transfer() if state is None else self._stateful()
        for segment in segments:
            if not 0 < segment.take <= segment.tokens or len(segment.data) < segment.tokens * self.shape.kv_bytes_per_token:
                raise EngineError(f"{len(segment.data)} bytes do not hold {segment.take} of {segment.tokens} tokens")
        if tokens > self.shape.ctx:
            raise EngineError(f"{tokens} tokens do not fit into {self.shape.ctx}")
        if state is not None:
            transfer.check(state, tokens)
        elif not tokens:
            return
        with self._emptied_on_failure(slot):
            transfer.restore(slot, tokens, segments, state)
            self._blank[slot] = transfer.blank(state) if state is not None else 0
            self._lengths[slot] = self._count(slot)
            if self._lengths[slot] != tokens:
                raise EngineError(f"slot {slot} holds {self._lengths[slot]} tokens after an import of {tokens}")

    def rewind(self, slot: int, length: int, state: Bytes) -> None:
        held = self._lengths[slot]
        with self._emptied_on_failure(slot):
            transfer = self._stateful()
            if not 0 < length <= held:
                raise EngineError(f"slot {slot} cannot go back from {held} to {length} tokens")
            transfer.check(state, length)
            # The cells of the windows still hold what was visible at that length, unless that lies before the imported content.
            if not transfer.only_windows or self._blank[slot] > transfer.blank(state):
                transfer.restore(slot, length, None, state)
                self._blank[slot] = transfer.blank(state)
            # Until here the slot has the KV of later tokens beside the earlier state.
            removed = lib.llama_memory_seq_rm(self._memory, slot, length, -1)
            self._lengths[slot] = self._count(slot)
            if not removed or self._lengths[slot] != length:
                raise EngineError(f"llama.cpp could not take slot {slot} back from {held} to {length} tokens")
        self._outputs.pop(slot, None)

    def release(self) -> None:
        if self._kv_transfer is not None:
            self._kv_transfer.release()

    def length(self, slot: int) -> int:
        counted = self._count(slot)
        if counted != self._lengths[slot]:
            raise EngineError(f"slot {slot} holds {counted} tokens where {self._lengths[slot]} are expected")
        return counted

    def close(self) -> None:
        if self._context is not None:
            lib.llama_free(self._context)
            lib.llama_model_free(self._model)
            self._context = self._model = self._kv_transfer = None

    def _count(self, slot: int) -> int:
        return int(lib.llama_memory_seq_pos_max(self._memory, slot)) + 1

    def _clear(self, slot: int) -> None:
        self._outputs.pop(slot, None)
        lib.llama_memory_seq_rm(self._memory, slot, -1, -1)
        self._lengths[slot] = self._blank[slot] = 0

    @contextmanager
    def _emptied_on_failure(self, slot: int) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._clear(slot)
            # A failed write into llama.cpp leaves some of what it changed: KV, or a state.
            if kv_transfer.size(self._context, slot) != self._empty_size:
                raise EngineError(f"slot {slot} cannot be emptied") from None
            raise

    def _transfer(self) -> kv_transfer.Transfer:
        if self._kv_transfer is None or not self.traits.movable:
            raise EngineError("KV of this model cannot be moved")
        return self._kv_transfer

    def _stateful(self) -> kv_transfer.Transfer:
        if not self.traits.stateful:
            raise EngineError("this model has no checkpoints")
        return self._transfer()

    # ── load ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _prove(
        self,
        block_size: int | None,
        proven: Callable[[int], Proven],
        threads: int,
        *,
        exact: bool,
        progress: Callable[[float], None],
    ) -> int:
        """Finds out the traits; returns the number of threads that decoding uses.

        Args:
            proven: for each number of decoding threads.
            exact: decode with one thread if only that is exact.
        """
        self.traits, window = self._learn(), int(lib.llama_model_n_swa(self._model))
        if not self.traits.movable:
            return threads
        if block_size is not None:
            self.traits = replace(
                self.traits, block_size=block_size, notes=(f"the block size of {block_size} was given, not proved",)
            )
            return threads
        given, tokens = self.traits, ordinary_tokens(self.tokenizer, most_tokens(self.shape.batch))
        self.traits = self._proved(proven(threads), tokens, window, progress)
        if self.traits.exact or not self.traits.canonical or threads == 1 or not exact:
            return threads
        lib.llama_set_n_threads(self._context, 1, threads)
        self.traits = given
        traits = self._proved(proven(1), tokens, window, progress)
        self.traits = replace(traits, notes=(*traits.notes, f"decoding with 1 thread: with {threads} it is not exact"))
        return 1

    def _proved(self, proven: Proven, tokens: Tokens, window: int, progress: Callable[[float], None]) -> Traits:
        traits = proven.traits(self, tokens, window=window, progress=progress)
        if traits.canonical:
            self.proofs = (*self.proofs, EngineProof(proven.identity.hex(), traits, self.shape.slots))
        return traits

    def _learn(self) -> Traits:
        """Finds out how KV and state are moved; returns the traits that follow from that."""
        tokens = ordinary_tokens(self.tokenizer, _LAYOUT_TOKENS)
        recurrent = lib.llama_model_is_hybrid(self._model) or lib.llama_model_is_recurrent(self._model)
        window = int(lib.llama_model_n_swa(self._model))
        sliceable = not recurrent and not window
        self.prefill(0, tokens[: _LAYOUT_TOKENS - 1], logits=False)
        sizes = (kv_transfer.size(self._context, 0), kv_transfer.size(self._context, 0, kv_transfer.PARTIAL))
        self.prefill(0, tokens[_LAYOUT_TOKENS - 1 : _LAYOUT_TOKENS], logits=False)
        try:
            form = kv_transfer.learn(self._context, 0, _LAYOUT_TOKENS, sizes, sliceable=sliceable)
        except (LayoutError, EngineError) as error:
            note = f"nothing can be moved, so only live slots are reused: the layout of its KV is not known ({error})"
            return Traits(BLOCK_SIZE, canonical=False, decode_exact=False, sliceable=False, movable=False, notes=(note,))
        finally:
            self._clear(0)
        cells = min(window or self.shape.ctx, self.shape.ctx)
        self._kv_transfer = kv_transfer.Transfer(self._context, form, self.shape.ctx, cells)
        self.shape = replace(
            self.shape,
            kv_bytes_per_token=form.kv_bytes_per_token,
            transfer_bytes=self._kv_transfer.bytes,
            state_bytes=0 if sliceable else form.checkpoint_size(cells),
        )
        return Traits(BLOCK_SIZE, sliceable=sliceable)
