"""Identity of a loaded model: facts for people, and what the fingerprint is made of."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import re
from pathlib import Path
from typing import Any

from blake3 import blake3

from headstart.engines import proof
from headstart.engines.llama import amx
from headstart.engines.llama import devices as llama_devices
from headstart.engines.llama.binding import lib, ready
from headstart.engines.llama.half_precision import computes_in_f16
from headstart.engines.llama.library import BINDING
from headstart.engines.llama.load import BATCH
from headstart.engines.llama.padding import ALIGNED, AMX_USED, COMPUTES_IN_F16, Work
from headstart.engines.options import EngineOptions
from headstart.interfaces.engine import Facts, Shape
from headstart.model_names import model_name

_QUANTIZATION = re.compile(r"(?:I?Q|TQ)\d\w*|MXFP\d\w*|NVFP\d\w*|B?F16|F32|BF16")
_VARIABLES = ("GGML_", "LLAMA_ATTN_")
"""Beginnings of the environment variables that change how llama.cpp computes. LLAMA_ATTN_ROT_DISABLE: whether quantised KV is
rotated."""
_OF_BLAS = ("LD_PRELOAD", "OPENBLAS_", "MKL_", "BLIS_", "OMP_")
"""The same for a BLAS, which computes in the place of llama.cpp's own code."""
SOURCES = blake3(
    b"".join(path.read_bytes() for path in sorted([Path(proof.__file__), *Path(__file__).parent.glob("[!.]*.py")]))
).hexdigest()
"""Digest of the code of this package, which moves KV, and of the proof that it moves KV exactly."""


def metadata(model: Any, key: str) -> str | None:
    """A value of the GGUF's metadata, as text."""
    buffer = ctypes.create_string_buffer(1024)
    count = lib.llama_model_meta_val_str(model, key.encode(), buffer, len(buffer))
    return buffer.value.decode("utf-8", "replace") if count >= 0 else None


def suits_amx(model: Any) -> bool:
    """Whether nearly all weights of a model can be multiplied with AMX (`amx`). Those of experts cannot."""
    kind, experts = (
        quantization(describe(model)) or "",
        metadata(model, f"{metadata(model, 'general.architecture')}.expert_count"),
    )
    return kind.startswith(amx.TYPES) and experts in (None, "0")


def features(model: Any, *, uses_amx: bool) -> set[str]:
    """Features that llama.cpp does not say of its build. `uses_amx`: for this model's weights."""
    found = {AMX_USED: uses_amx and suits_amx(model), COMPUTES_IN_F16: computes_in_f16(ready()), ALIGNED: ready().aligned}
    return {feature for feature, there in found.items() if there}


def describe(model: Any) -> str:
    buffer = ctypes.create_string_buffer(256)
    lib.llama_model_desc(model, buffer, len(buffer))
    return buffer.value.decode("utf-8", "replace")


_SIZES = {"Small": "S", "Medium": "M", "Large": "L"}


def quantization(description: str) -> str | None:
    """The quantisation in llama.cpp's description of a model, as files are named: `llama 135M Q4_K - Medium` → `Q4_K_M`."""
    words = description.replace(",", " ").replace(" - ", " ").split()
    found = next((at for at, word in enumerate(words) if _QUANTIZATION.fullmatch(word)), None)
    if found is None:
        return None
    size = _SIZES.get(words[found + 1]) if found + 1 < len(words) else None
    return words[found] + (f"_{size}" if size else "")


def environment(*prefixes: str) -> dict[str, str]:
    """Environment variables with these prefixes, which change how the engine computes."""
    return {name: value for name, value in os.environ.items() if name.startswith(prefixes)}


def devices() -> list[str]:
    """Descriptions of all devices but the CPU."""
    return [device.name for device in llama_devices.devices() if device.kind != llama_devices.CPU]


def gpus() -> list[str]:
    return [device.name for device in llama_devices.devices() if device.is_gpu]


def has_blas() -> bool:
    """Whether a library for matrices computes, such as a BLAS."""
    return any(device.kind != llama_devices.CPU and not device.is_gpu for device in llama_devices.devices())


def describe_engine() -> str:
    """The engine's name, its version, and whose library it is."""
    found = ready()
    version = f" {found.version()}" if found.version() else ""
    via = f"llama.cpp{version} via {BINDING} {found.library.binding}"
    return f"{via}, {found.library}" if found.library.users else via


def identity(
    model: Any,
    options: EngineOptions,
    weights: bytes,
    adapter: bytes | None,
    *,
    gpu_layers: int,
    ctx: int,
    extra_buffers: bool,
    amx_used: bool,
) -> dict[str, Any]:
    """Everything that changes the bits of KV, except the block size. Threads and slots do not change prefill's bits."""
    architecture = metadata(model, "general.architecture")
    original = metadata(model, f"{architecture}.rope.scaling.original_context_length") or lib.llama_model_n_ctx_train(model)
    return {
        "weights": weights.hex(),
        "lora": adapter.hex() if adapter else None,
        "engine": f"{BINDING} {ready().library.binding}",
        "build": ready().library.build,
        "system": lib.llama_print_system_info().decode("utf-8", "replace"),
        # llama.cpp calls exp, tanh and others of the system's library.
        "libc": " ".join(platform.libc_ver()).strip() or platform.mac_ver()[0],
        "extra_buffers": extra_buffers,
        **({"amx": True} if amx_used else {}),  # the same build cannot use it where the kernel refuses it
        "devices": devices(),  # even with no layer on a GPU: llama.cpp may still compute large batches there
        "gpu_layers": gpu_layers,
        "kv_type": options.kv_type,
        "flash_attention": True,
        "swa_full": True,
        "batch": BATCH,
        # Some models choose their rope factors by whether a conversation may exceed the original context.
        "long_rope": ctx > int(original),
        # Left out if there are none, so that the fingerprints of most machines never change.
        **({"environment": found} if (found := environment(*_VARIABLES, *(_OF_BLAS if has_blas() else ()))) else {}),
    }


def work(model: Any) -> Work:
    """The size of one token's computation, if all layers are alike. Of experts only those that a token uses count."""
    architecture = metadata(model, "general.architecture")

    def number(name: str, default: int) -> int:
        text = metadata(model, f"{architecture}.{name}")
        return int(text) if text is not None and text.isdecimal() else default

    width, layers, heads = (int(of(model)) for of in (lib.llama_model_n_embd, lib.llama_model_n_layer, lib.llama_model_n_head))
    weights = int(lib.llama_model_n_params(model)) - width * int(lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model)))
    if experts := number("expert_count", 0):
        used = number("expert_used_count", experts)
        hidden = number("expert_feed_forward_length", number("feed_forward_length", 0))
        elsewhere = 3 * width * hidden * (experts - used) * (layers - number("leading_dense_block_count", 0))
        weights = max(weights - elsewhere, weights * used // experts)
    lengths = (number(f"attention.{part}_length", width // max(heads, 1)) for part in ("key", "value"))
    return Work(weights, layers, heads, *lengths)


def digest_of(identity: dict[str, Any]) -> bytes:
    return blake3(json.dumps(identity, sort_keys=True).encode()).digest()


def facts(model: Any, path: Path, options: EngineOptions, shape: Shape, **details: Any) -> Facts:
    """Facts that `headstart doctor` and the log show."""
    return Facts(
        name=metadata(model, "general.name") or model_name(path.name),
        description=describe(model),
        engine=describe_engine(),
        details={
            "path": str(path),
            "architecture": metadata(model, "general.architecture"),
            "parameters": int(lib.llama_model_n_params(model)),
            "quantization": quantization(describe(model)),
            "layers": int(lib.llama_model_n_layer(model)),
            "width": int(lib.llama_model_n_embd(model)),
            "weights_bytes": int(lib.llama_model_size(model)),
            "ctx": shape.ctx,
            "ctx_train": int(lib.llama_model_n_ctx_train(model)),
            "slots": shape.slots,
            "batch": shape.batch,
            "kv_type": options.kv_type,
            "row_bytes": shape.kv_bytes_per_token,
            "transfer_bytes": shape.transfer_bytes,
            "state_bytes": shape.state_bytes,
            "lora": str(options.lora) if options.lora is not None else None,
            **details,
        },
    )
