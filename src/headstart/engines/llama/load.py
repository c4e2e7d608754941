"""Loading: model file, context and adapter in llama.cpp's own terms. An error becomes one clear line."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from headstart.engines.llama import log as llama_log
from headstart.engines.llama.binding import lib, ready
from headstart.engines.llama.features import ADAPTERS, DIFFUSION
from headstart.errors import ConfigError, ModelError
from headstart.interfaces.host_memory import HostMemory
from headstart.names import option

BATCH = 512
"""Most tokens of one call; llama.cpp's n_batch and n_ubatch, so that it never splits a call."""
_KV_TYPES = {"f16": 1, "bf16": 30, "q8_0": 8}
"""Numbers of ggml's types. Files have them too, so they never change."""

CTX_STEP = 256
"""llama.cpp rounds a sequence's context up to a multiple of this."""
_BUFFERS = 128 << 20  # for computing, and the interpreter

LoadProgress = Callable[[float], None]


@cache
def _backend() -> None:
    lib.llama_backend_init()


def open_model(path: Path, gpu_layers: int, progress: LoadProgress, *, extra_buffers: bool = False) -> Any:
    """Loads the weights.

    Args:
        progress: receives the progress, from 0 to 1.
        extra_buffers: whether they may be laid out for the processor's instructions (`amx.extra_buffers`).

    Raises:
        ConfigError: this build cannot use a GPU, but `gpu_layers` is not 0.
        ModelError: llama.cpp cannot load the file, or it is not a decoder-only language model.
    """
    llama_log.capture()
    _backend()
    if gpu_layers and not lib.llama_supports_gpu_offload():
        raise ConfigError(
            f"This build of llama-cpp-python has no GPU support: leave out {option('gpu_layers')}, or reinstall it with a GPU "
            "backend."
        )

    def report(fraction: float, _: object) -> bool:
        progress(fraction)
        return True

    callback = lib.llama_progress_callback(report)
    params = lib.llama_model_default_params()
    params.n_gpu_layers = gpu_layers
    params.use_extra_bufts = extra_buffers
    params.progress_callback = callback
    model = lib.llama_model_load_from_file(os.fsencode(path), params)
    if not model:
        cause = llama_log.cause()
        raise ModelError(f"llama.cpp cannot load '{path}': {cause}. The file may be broken or too new: download it again.")
    if lib.llama_model_has_encoder(model) or (ready().has(DIFFUSION) and lib.llama_model_is_diffusion(model)):
        lib.llama_model_free(model)
        raise ModelError(f"'{path}' is not a decoder-only language model; choose another one.")
    return model


def open_vocabulary(path: Path) -> Any:
    """A model without its weights, for its vocabulary alone. Raises ModelError."""
    llama_log.capture()
    _backend()
    params = lib.llama_model_default_params()
    params.vocab_only = True
    model = lib.llama_model_load_from_file(os.fsencode(path), params)
    if not model:
        raise ModelError(f"llama.cpp cannot read the vocabulary of '{path}': {llama_log.cause()}.")
    return model


def open_context(model: Any, *, ctx: int, slots: int, kv_type: str, threads: int, batch: int = BATCH) -> Any:
    """A context of `slots` separate streams of `ctx` tokens.

    Raises:
        ModelError: llama.cpp refuses, mostly because memory is short.
    """
    llama_log.capture()
    params = lib.llama_context_default_params()
    params.n_ctx = ctx * slots
    params.n_seq_max = slots
    params.n_batch = params.n_ubatch = batch
    params.n_outputs_max = slots  # a call has logits for one token of a slot: do not reserve 512 × vocabulary
    params.n_threads = params.n_threads_batch = threads
    params.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_ENABLED
    params.type_k = params.type_v = _KV_TYPES[kv_type]
    params.kv_unified = False
    params.swa_full = True
    params.no_perf = True
    context = lib.llama_init_from_model(model, params)
    if not context:
        cause = llama_log.cause()
        raise ModelError(
            f"llama.cpp cannot hold {slots} × {ctx} tokens: {cause}. Lower {option('ctx')} or {option('slots')}, or change "
            f"{option('kv_type')}."
        )
    return context


def open_adapter(model: Any, context: Any, path: Path) -> None:
    """Puts a LoRA adapter on the model (which then owns it).

    Raises:
        ModelError: the file is no adapter for this model, or this build has no adapters.
    """
    if ADAPTERS in ready().lacking:
        raise ModelError(f"This build of llama.cpp has no {ADAPTERS.name}: leave out {option('lora')}, or use another build.")
    llama_log.capture()
    adapter = lib.llama_adapter_lora_init(model, os.fsencode(path))
    if not adapter:
        cause = llama_log.cause()
        raise ModelError(
            f"llama.cpp cannot use the adapter '{path}': {cause}. Give one made for this model, or leave out {option('lora')}."
        )
    adapters = (lib.llama_adapter_lora_p_ctypes * 1)(adapter)
    if lib.llama_set_adapters_lora(context, adapters, 1, (ctypes.c_float * 1)(1.0)) != 0:
        raise ModelError(
            f"llama.cpp cannot apply the adapter '{path}'. Give one made for this model, or leave out {option('lora')}."
        )


def measure_memory(model: Any, kv_type: str, available: int) -> HostMemory:
    """The memory that the model and its slots take, measured in a very small context.

    Args:
        available: bytes that were free before the model was loaded.

    Raises:
        ModelError: the model cannot compute.
    """
    context = open_context(model, ctx=256, slots=1, kv_type=kv_type, threads=1, batch=32)
    try:
        sizes = []
        for _ in range(2):
            token = (lib.llama_token * 1)(0)
            if lib.llama_decode(context, lib.llama_batch_get_one(token, 1)) != 0:
                raise ModelError(f"llama.cpp cannot compute with this model: {llama_log.cause()}.")
            sizes.append(int(lib.llama_state_seq_get_size(context, 0)))
    finally:
        lib.llama_free(context)
    kv = max(0, sizes[1] - sizes[0] - 12)  # without the token's cell
    return HostMemory(available, int(lib.llama_model_size(model)), _BUFFERS, kv, sizes[0] - kv, CTX_STEP)
