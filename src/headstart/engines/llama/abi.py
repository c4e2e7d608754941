"""ABI: whether a library has the structures and functions that the binding declares. No model is needed.

llama.cpp's interface has no version. Its structures are passed by value: if a library has another field, every later field is
read from a wrong place. So these are looked at before anything is loaded:

    size        a function that returns default parameters writes the bytes of the declared fields, and none behind them
    defaults    each default value is possible for its type and, for some fields, known
    calls       a batch and some samplers do what their declarations say

Sizes can be measured where the address of a returned structure is the first argument (x86-64).
"""

from __future__ import annotations

import ctypes
import math
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Penalise = Callable[[int, int, float, float, float], Any]
"""Makes a sampler of penalties from the size of the vocabulary, the last tokens to look at, and three penalties."""

_MEASURABLE = platform.machine().lower() in ("x86_64", "amd64")
_BUFFER = 4096  # bytes, more than any structure has
_LARGEST = 1 << 20  # a larger default of a number is none
_SIZES = 1 << 40
_FLOATS = (1e-6, 1e9)
_COUNTS = range(1, _LARGEST)
_F16 = range(1, 2)
_KNOWN: dict[str, dict[str, Any]] = {
    "llama_model_params": {"vocab_only": (False,), "check_tensors": (False,), "use_extra_bufts": (True,)},
    "llama_context_params": {
        **dict.fromkeys(("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_threads", "n_threads_batch"), _COUNTS),
        **dict.fromkeys(("type_k", "type_v"), _F16),
        "flash_attn_type": (-1, 0, 1),
        "offload_kqv": (True,),
        "embeddings": (False,),
        "kv_unified": (False,),
    },
}
"""Values that a default has in every known version, by structure and field."""


class AbiError(Exception):
    """The library does not have what the binding declares. The message says what differs."""


@dataclass(frozen=True)
class Abi:
    """What was found out about a library that can be used.

    Attributes:
        measured: whether the sizes of structures were measured too.
        penalise: None if no known form of that function does what it should.
    """

    measured: bool
    penalise: Penalise | None


def inspect(binding: Any) -> Abi:
    """Looks at the library through its binding, the module `llama_cpp.llama_cpp`.

    Raises:
        AbiError: it is not what the binding declares.
    """
    _check_params(binding, "llama_model_params", "llama_model_default_params")
    _check_params(binding, "llama_context_params", "llama_context_default_params")
    _check_batch(binding)
    _check_samplers(binding)
    return Abi(_MEASURABLE, next(_penalties(binding), None))


# ── structures ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _check_params(binding: Any, structure: str, function: str) -> None:
    declared = getattr(binding, structure)
    if _MEASURABLE:
        _check_size(declared, _written(getattr(binding._lib, function)), structure)
    params = _padded(declared, getattr(binding._lib, function))
    for name, value, kind, raw in _fields(params):
        known = _KNOWN[structure].get(name)
        possible = _possible(value, kind, raw) if known is None else value in known and _possible(value, kind, raw)
        if not possible:
            raise AbiError(f"{structure} has the default {_shown(value)} where {name} is declared")


def _check_size(declared: Any, written: set[int], structure: str) -> None:
    """Raises AbiError unless the written bytes are those of the declared fields; padding may be among them."""
    fields = [getattr(declared, name) for name, *_ in declared._fields_]
    due = {at for field in fields for at in range(field.offset, field.offset + field.size)}
    size = ctypes.sizeof(declared)
    if not due <= written or max(written) >= size:
        found = max(written, default=-1) + 1
        raise AbiError(f"{structure} has about {found} bytes where {size} are declared")


def _written(function: Any) -> set[int]:
    """Offsets of the bytes that a function writes which returns a structure in memory. It gets the address as its argument."""
    call = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(ctypes.cast(function, ctypes.c_void_p).value or 0)
    found = []
    for fill in (0xA5, 0x5A):
        buffer = (ctypes.c_uint8 * _BUFFER)(*[fill] * _BUFFER)
        call(ctypes.addressof(buffer))
        found.append(bytes(buffer))
    return {at for at, (one, other) in enumerate(zip(*found, strict=True)) if one == other}


def _padded(declared: Any, function: Any) -> Any:
    """What the function returns, which may be larger than declared."""
    padded = type("Padded", (ctypes.Structure,), {"_fields_": [("params", declared), ("more", ctypes.c_uint8 * _BUFFER)]})
    call = ctypes.CFUNCTYPE(padded)(ctypes.cast(function, ctypes.c_void_p).value or 0)
    return call().params


def _fields(params: Any) -> Iterator[tuple[str, Any, Any, bytes]]:
    """Name, value, type and bytes of each field."""
    raw = bytes(params)
    for name, kind, *_ in params._fields_:
        place = getattr(type(params), name)
        yield name, getattr(params, name), kind, raw[place.offset : place.offset + place.size]


def _possible(value: Any, kind: Any, raw: bytes) -> bool:
    """Whether a default of this type can be meant: bytes of another field mostly cannot."""
    if kind is ctypes.c_bool:
        return raw in (b"\0", b"\1")
    if isinstance(value, float):
        return value == 0 or (math.isfinite(value) and _FLOATS[0] <= abs(value) <= _FLOATS[1])
    if isinstance(value, int):
        return -1 <= value <= (_SIZES if len(raw) > 4 else _LARGEST)
    return not any(raw)  # a pointer: no default has one


def _shown(value: Any) -> str:
    return repr(value) if isinstance(value, bool | int | float) else "an address"


# ── calls ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _check_batch(binding: Any) -> None:
    tokens = (binding.llama_token * 3)(5, 6, 7)
    declared = binding.llama_batch
    padded = type("PaddedBatch", (ctypes.Structure,), {"_fields_": [("batch", declared), ("more", ctypes.c_uint8 * _BUFFER)]})
    address = ctypes.cast(binding._lib.llama_batch_get_one, ctypes.c_void_p).value or 0
    batch = ctypes.CFUNCTYPE(padded, ctypes.c_void_p, ctypes.c_int32)(address)(ctypes.addressof(tokens), len(tokens)).batch
    others = [name for name, *_ in declared._fields_ if name not in ("n_tokens", "token")]
    if batch.n_tokens != 3 or not batch.token or batch.token[2] != 7 or any(getattr(batch, name) for name in others):
        raise AbiError("llama_batch is not what is declared")


def _candidates(binding: Any) -> tuple[Any, Any]:
    """Four tokens with the logits 1, 2, 4 and 3."""
    data = (binding.llama_token_data * 4)()
    for token, logit in enumerate((1.0, 2.0, 4.0, 3.0)):
        data[token].id, data[token].logit = token, logit
    array = binding.llama_token_data_array(data=ctypes.cast(data, binding.llama_token_data_p))
    array.size, array.selected, array.sorted = len(data), -1, False
    return data, array


def _sampled(binding: Any, sampler: Any, accepted: tuple[int, ...] = ()) -> dict[int, float] | int:
    """Applies a sampler to the four tokens: the token that it selects, or the logits that it leaves. Frees the sampler."""
    data, array = _candidates(binding)
    try:
        for token in accepted:
            binding.llama_sampler_accept(sampler, token)
        binding.llama_sampler_apply(sampler, ctypes.byref(array))
        if not 0 < array.size <= len(data) or not -1 <= array.selected < array.size:
            raise AbiError("llama_token_data_array is not what is declared")
        left = [array.data[row] for row in range(array.size)]
        return int(left[array.selected].id) if array.selected >= 0 else {int(one.id): float(one.logit) for one in left}
    finally:
        binding.llama_sampler_free(sampler)


def _check_samplers(binding: Any) -> None:
    chain = binding.llama_sampler_chain_init(binding.llama_sampler_chain_default_params())
    biases = (binding.llama_logit_bias * 1)()
    biases[0].token, biases[0].bias = 1, 5.0
    binding.llama_sampler_chain_add(chain, binding.llama_sampler_init_logit_bias(4, 1, biases))
    binding.llama_sampler_chain_add(chain, binding.llama_sampler_init_greedy())
    makers = {
        "logit_bias": (chain, 1),
        "greedy": (binding.llama_sampler_init_greedy(), 2),
        "top_k": (binding.llama_sampler_init_top_k(2), {2: 4.0, 3: 3.0}),
        "top_p": (binding.llama_sampler_init_top_p(0.1, 1), {2: 4.0}),
        "min_p": (binding.llama_sampler_init_min_p(0.9, 1), {2: 4.0}),
        "temp": (binding.llama_sampler_init_temp(0.5), {0: 2.0, 1: 4.0, 2: 8.0, 3: 6.0}),
    }
    wrong = [name for name, (sampler, due) in makers.items() if _sampled(binding, sampler) != due]
    if not isinstance(_sampled(binding, binding.llama_sampler_init_dist(7)), int):
        wrong.append("dist")
    if wrong:
        raise AbiError(f"samplers do not what is declared: {', '.join(wrong)}")


def _penalties(binding: Any) -> Iterator[Penalise]:
    """The form of `llama_sampler_init_penalties` in this library. Newer versions take the size of the vocabulary first.

    The newer form is tried first: it cannot make an older function allocate without bounds.
    """
    try:
        address = ctypes.cast(binding._lib.llama_sampler_init_penalties, ctypes.c_void_p).value or 0
    except (AttributeError, ctypes.ArgumentError):
        return  # there is none
    whole, number, result = ctypes.c_int32, ctypes.c_float, binding.llama_sampler_p_ctypes
    newer = ctypes.CFUNCTYPE(result, whole, whole, number, number, number)(address)
    older = ctypes.CFUNCTYPE(result, whole, number, number, number)(address)

    def without_size(n_vocab: int, last: int, repeat: float, frequency: float, presence: float) -> Any:
        return older(last, repeat, frequency, presence)

    for penalise in (newer, without_size):
        # Of the two accepted tokens only the last is in sight.
        if _sampled(binding, penalise(4, 1, 2.0, 0.25, 0.5), accepted=(1, 3)) == {0: 1.0, 1: 2.0, 2: 4.0, 3: 0.75}:
            yield penalise
