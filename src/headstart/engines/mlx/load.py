"""Loading with mlx-lm: the model, its sizes, and what its numbers depend on."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import mlx.core as mx
from blake3 import blake3
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.rope_utils import DynamicNTKScalingRoPE
from mlx_lm.utils import get_total_parameters, load_model

from headstart.engines import model_folder, proof
from headstart.engines.digest import digest
from headstart.engines.mlx.layers import STEP, Form
from headstart.engines.mlx.padded import MOST_BYTES
from headstart.errors import ConfigError, ModelError
from headstart.interfaces.engine import Facts, Shape
from headstart.interfaces.host_memory import HostMemory
from headstart.model_names import model_name

BATCH = 512
"""Most tokens of one call."""
_KEPT = 1 << 30  # bytes of freed arrays that mlx may keep for later ones, on a Mac
_BUFFERS = 128 << 20  # for computing, and the interpreter
SOURCES = blake3(
    b"".join(path.read_bytes() for path in sorted([Path(proof.__file__), *Path(__file__).parent.glob("[!.]*.py")]))
).hexdigest()
"""Digest of the code of this package, which moves KV, and of the proof that it moves KV exactly."""


def prepare() -> None:
    """Sets mlx up for this process, before anything is loaded.

    On a CPU, mlx would compile parts of a model with the system's g++, and load them from a folder that all users of the
    machine share, `/tmp/mlx`. Whoever makes it first can put other code there, and the bits would depend on the compiler.
    Nothing is gained by it: decoding is as fast without. On a Mac, the GPU's share of the memory stays in memory, and mlx
    keeps less of what is freed.
    """
    if mx.default_device().type == mx.DeviceType.cpu:
        mx.disable_compile()
    if most := _gpu_memory():
        mx.set_wired_limit(most)
        mx.set_cache_limit(_KEPT)


def check(folder: Path, files: Sequence[Path], available: int) -> dict[str, Any]:
    """Refuses what cannot be loaded, before anything is read. Returns the model's config.

    Args:
        files: with its weights.
        available: bytes of memory.

    Raises:
        ModelError: mlx-lm has no code for models of this kind.
        ConfigError: the weights are larger than the memory.
    """
    config = model_folder.config(folder)
    model_folder.check_kind(config, f"'{folder}'")
    size = sum(file.stat().st_size for file in files)
    if size > available:
        raise ConfigError(
            f"The weights in '{folder}' take {size / (1 << 30):.1f} GiB, and {available / (1 << 30):.1f} GiB of memory are "
            "available. Choose a smaller model, or one with fewer bits."
        )
    return config


def open_model(folder: Path) -> Any:
    """The model with its weights in memory.

    Raises:
        ModelError: mlx-lm cannot load it.
    """
    try:
        model, _ = load_model(folder)
        mx.eval(model.parameters())
    except Exception as error:  # mlx-lm raises many kinds
        raise ModelError(
            f"mlx-lm {version('mlx-lm')} cannot load '{folder}' ({type(error).__name__}: {error}). It may be too new, or "
            "incomplete: download it again, or choose another model."
        ) from error
    return model


def empty_caches(model: Any) -> list[Any]:
    caches: list[Any] = make_prompt_cache(model)
    return caches


def steady_ctx(model: Any) -> int | None:
    """Most tokens for which the positions of a model do not depend on where a call ends. None if they never do.

    Behind the length it was trained on, `dynamic` scaling turns all keys of a call by an angle that depends on its end.
    """
    return min((one.max_position_embeddings for one in model.modules() if isinstance(one, DynamicNTKScalingRoPE)), default=None)


def weight_bytes(model: Any) -> int:
    from mlx.utils import tree_flatten

    return sum(int(array.nbytes) for _, array in tree_flatten(model.parameters()))


def host_memory(available: int, weights: int, form: Form | None) -> HostMemory:
    """What a model takes. On a Mac, GPU and CPU share the memory."""
    kv, state = (form.kv_bytes_per_token, form.live_bytes(BATCH)) if form else (0, 0)
    buffers = _BUFFERS + (MOST_BYTES if kv else 0) + (_KEPT if _gpu_memory() else 0)
    return HostMemory(available, weights, buffers, kv, state, STEP)


def device_memory(available: int) -> int:
    """Bytes that a model may use of those that are free: on a Mac no more than the GPU may address well."""
    return min(available, _gpu_memory() or available)


def _gpu_memory() -> int:
    """Bytes of the shared memory that a Mac's GPU may address well; 0 elsewhere."""
    return int(mx.device_info().get("max_recommended_working_set_size", 0))


def identity(config: dict[str, Any], weights: Sequence[bytes], memo: Path | None) -> dict[str, Any]:
    """Everything that changes the bits of KV, except the block size. `memo`: folder that remembers digests of files."""
    library = [path for path in Path(mx.__file__).parent.rglob("*") if path.suffix in {".metallib", ".so", ".dylib"}]
    info = {name: value for name, value in mx.device_info().items() if "free" not in name}
    return {
        "engine": "mlx",
        "mlx": _version("mlx"),
        "mlx_lm": _version("mlx-lm"),
        "libraries": [digest(path, memo).hex() for path in sorted(library)],
        "preloaded": os.environ.get("LD_PRELOAD", "") + os.environ.get("DYLD_INSERT_LIBRARIES", ""),
        "device": str(mx.default_device()),
        "libc": " ".join(platform.libc_ver()),
        "device_info": json.dumps(info, sort_keys=True, default=str),
        "config": blake3(json.dumps(config, sort_keys=True).encode()).hexdigest(),
        "weights": [one.hex() for one in weights],
        "environment": {name: value for name, value in os.environ.items() if name.startswith(("MLX_", "OPENBLAS_", "OMP_"))},
        "batch": BATCH,
    }


def facts(model: Any, config: dict[str, Any], folder: Path, shape: Shape, engine: str, **details: Any) -> Facts:
    """Facts that `headstart doctor`, the log and lists of models show."""
    text, kind, form = model_folder.text_config(config), str(config["model_type"]), model_folder.quantization(config)
    return Facts(
        name=model_name(str(folder.resolve())),
        description=f"{kind} {form}".rstrip(),
        engine=engine,
        details={
            "path": str(folder),
            "format": "safetensors",
            "architecture": kind,
            "parameters": int(get_total_parameters(model)),
            "quantization": form or None,
            "layers": len(model.layers),
            "width": text.get("hidden_size"),
            "ctx": shape.ctx,
            "ctx_train": model_folder.trained_ctx(config) or None,
            "slots": shape.slots,
            "batch": shape.batch,
            "transfer_bytes": shape.transfer_bytes,
            "state_bytes": shape.state_bytes,
            **details,
        },
    )


def digest_of(parts: dict[str, Any]) -> bytes:
    return blake3(json.dumps(parts, sort_keys=True).encode()).digest()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
