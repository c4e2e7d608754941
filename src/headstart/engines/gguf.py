"""GGUF: what the beginning of a model's file says of the model, and whether it fits into memory. No weight is read."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from headstart.errors import ConfigError
from headstart.interfaces.host_memory import HostMemory
from headstart.memory_plan import fit

_FILE_TYPES = dict(
    enumerate(
        (
            *("F32", "F16", "Q4_0", "Q4_1", "", "", "", "Q8_0", "Q5_0", "Q5_1", "Q2_K", "Q3_K_S", "Q3_K_M", "Q3_K_L"),
            *("Q4_K_S", "Q4_K_M", "Q5_K_S", "Q5_K_M", "Q6_K", "IQ2_XXS", "IQ2_XS", "Q2_K_S", "IQ3_XS", "IQ3_XXS", "IQ1_S"),
            *("IQ4_NL", "IQ3_S", "IQ3_M", "IQ2_S", "IQ2_M", "IQ4_XS", "IQ1_M", "BF16", "", "", "", "TQ1_0", "TQ2_0", "MXFP4"),
        )
    )
)
"""`general.file_type`: llama.cpp's numbers of quantisations."""
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MOST_TEXT, _MOST_ITEMS, _MOST_KEYS = 1 << 20, 1 << 24, 1 << 16
_BUFFERS = 128 << 20  # for computing, as the engine plans it
_STEP = 256  # the context of a slot is a multiple
KV_BYTES = 2  # of a number in f16


class _Malformed(Exception):
    quotes = False


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a file says of its model. 0 and "" are unknown.

    Attributes:
        architecture: llama.cpp's name for it.
        ctx: tokens that the model was trained on.
        quantization: the form of most weights.
        kv: bytes of one token in memory, with keys and values in f16. It is an upper bound for some models with state.
        layers: that repeat.
    """

    architecture: str = ""
    ctx: int = 0
    quantization: str = ""
    kv: int = 0
    layers: int = 0


def read_facts(path: Path) -> ModelFacts:
    """The facts in the header of a file. Those of a file that is broken or of an unknown version are unknown."""
    try:
        with path.open("rb") as file:
            return _facts(_header(file))
    except (OSError, _Malformed, struct.error, MemoryError):
        return ModelFacts()


def most_tokens(facts: ModelFacts, size: int, available: int) -> int:
    """Tokens of the longest conversation that fits, if the model is loaded with the defaults; 0 if the model does not fit.

    Args:
        size: bytes of the model's files.
        available: bytes of free memory.
    """
    host = HostMemory(available, size, _BUFFERS, facts.kv, 0, _STEP)
    try:
        return fit(host, trained=facts.ctx, ctx=None, slots=None, reserve=None).ctx
    except ConfigError:
        return 0


def _facts(known: Mapping[str, Any]) -> ModelFacts:
    architecture = known.get("general.architecture")
    if not isinstance(architecture, str):
        return ModelFacts()

    def number(name: str) -> int:
        found = known.get(f"{architecture}.{name}", 0)
        return found if isinstance(found, int) else 0

    layers, heads = number("block_count"), known.get(f"{architecture}.attention.head_count", 0)
    if isinstance(heads, list):  # one of each layer
        heads = next((one for one in heads if isinstance(one, int) and one), 0)
    heads = heads if isinstance(heads, int) else 0
    head = number("embedding_length") // heads if heads else 0
    width = (number("attention.key_length") or head) + (number("attention.value_length") or head)
    per_layer = known.get(f"{architecture}.attention.head_count_kv", heads)
    if isinstance(per_layer, list):  # one of each layer
        total = sum(one for one in per_layer if isinstance(one, int))
    else:
        attending = layers // (number("full_attention_interval") or 1)
        total = attending * per_layer if isinstance(per_layer, int) else 0
    file_type = known.get("general.file_type")
    named = _FILE_TYPES.get(file_type, "") if isinstance(file_type, int) else ""
    return ModelFacts(architecture, number("context_length"), named, max(0, total * width * KV_BYTES), layers)


def _header(file: BinaryIO) -> dict[str, Any]:
    """The keys and their values. Those of the tokenizer are left out, and so is what follows them if enough is known."""
    if file.read(4) != b"GGUF" or _number(file, "I") not in (2, 3):
        raise _Malformed
    _number(file, "Q")  # tensors
    found: dict[str, Any] = {}
    for _ in range(_bounded(_number(file, "Q"), _MOST_KEYS)):
        key = _text(file).decode("utf-8", "replace")
        known = "general.file_type" in found and f"{found.get('general.architecture')}.block_count" in found
        if key.startswith("tokenizer.") and known:
            break
        found[key] = _value(file, _number(file, "I"), keep=not key.startswith("tokenizer."))
    return found


def _value(file: BinaryIO, kind: int, *, keep: bool = True) -> Any:
    if kind == _STRING and not keep:
        file.seek(_number(file, "Q"), 1)
        return None
    if kind == _STRING:
        return _text(file).decode("utf-8", "replace")
    if kind != _ARRAY:
        return _number(file, _scalar(kind))
    kind, count = _number(file, "I"), _bounded(_number(file, "Q"), _MOST_ITEMS)
    if kind in _SCALARS and not keep:
        file.seek(count * struct.calcsize(f"<{_SCALARS[kind]}"), 1)
        return None
    read: Callable[[], Any] = (lambda: _text(file)) if kind == _STRING else (lambda: _number(file, _scalar(kind)))
    if keep and count <= 4096:
        return [read() for _ in range(count)]
    for _ in range(count):
        read()
    return None


def _scalar(kind: int) -> str:
    if kind not in _SCALARS:
        raise _Malformed
    return _SCALARS[kind]


def _text(file: BinaryIO) -> bytes:
    return _bytes(file, _bounded(_number(file, "Q"), _MOST_TEXT))


def _number(file: BinaryIO, form: str) -> Any:
    return struct.unpack(f"<{form}", _bytes(file, struct.calcsize(f"<{form}")))[0]


def _bytes(file: BinaryIO, count: int) -> bytes:
    found = file.read(count)
    if len(found) < count:
        raise _Malformed
    return found


def _bounded(number: int, most: int) -> int:
    if number > most:
        raise _Malformed
    return number
