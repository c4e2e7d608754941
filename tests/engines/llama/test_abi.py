"""What is looked at in a library before it is used, on the real one and on its declarations changed."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from headstart.engines.llama import abi
from headstart.engines.llama.abi import AbiError, inspect
from headstart.engines.llama.binding import ready


def binding(**changed: Any) -> Any:
    """The real binding with other declarations."""
    module = ready().module
    return SimpleNamespace(**{**vars(module), **changed})


def declared(structure: str, change: Any) -> Any:
    """A structure whose list of fields was changed."""
    fields = list(getattr(ready().module, structure)._fields_)
    change(fields)
    return type(structure, (ctypes.Structure,), {"_fields_": fields})


def test_the_real_library_passes() -> None:
    found = inspect(binding())
    assert found.measured == abi._MEASURABLE
    assert found.penalise is not None


CHANGES = {
    "a field more at the end": lambda fields: fields.append(("more", ctypes.c_uint64)),
    "fields less at the end": lambda fields: fields.__delitem__(slice(-9, None)),
    "a field less in front": lambda fields: fields.pop(0),
    "a field more in front": lambda fields: fields.insert(0, ("more", ctypes.c_int32)),
    "two more in front": lambda fields: fields.__setitem__(slice(0, 0), [("a", ctypes.c_int32), ("b", ctypes.c_int32)]),
}


@pytest.mark.skipif(not abi._MEASURABLE, reason="sizes cannot be measured here")
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
@pytest.mark.parametrize("structure", ["llama_context_params", "llama_model_params"])
def test_another_size_is_found(structure: str, change: Any) -> None:
    with pytest.raises(AbiError, match=structure):
        inspect(binding(**{structure: declared(structure, change)}))


@pytest.mark.parametrize("measurable", [True, False])
def test_fields_in_another_order_are_found_by_their_defaults(measurable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(abi, "_MEASURABLE", measurable and abi._MEASURABLE)

    def turn(fields: list[Any]) -> None:
        names = [name for name, _ in fields]
        one, other = names.index("yarn_ext_factor"), names.index("n_batch")
        fields[one], fields[other] = fields[other], fields[one]

    with pytest.raises(AbiError, match=r"llama_context_params has the default .* where yarn_ext_factor is declared"):
        inspect(binding(llama_context_params=declared("llama_context_params", turn)))


def test_a_larger_structure_does_no_harm_where_it_cannot_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(abi, "_MEASURABLE", False)
    with pytest.raises(AbiError):
        inspect(binding(llama_model_params=declared("llama_model_params", lambda fields: fields.pop(2))))


def test_another_batch_is_found() -> None:
    def turn(fields: list[Any]) -> None:
        fields.insert(0, fields.pop(1))

    with pytest.raises(AbiError, match="llama_batch"):
        inspect(binding(llama_batch=declared("llama_batch", turn)))


def test_samplers_that_do_something_else_are_found() -> None:
    module = ready().module
    with pytest.raises(AbiError, match="top_k"):
        inspect(binding(llama_sampler_init_top_k=lambda k: module.llama_sampler_init_top_k(k + 1)))


def test_penalties_look_at_the_last_tokens_only() -> None:
    module, penalise = ready().module, ready().abi.penalise
    assert penalise is not None
    assert abi._sampled(module, penalise(4, 2, 2.0, 0.0, 0.0), accepted=(1, 3)) == {0: 1.0, 1: 1.0, 2: 4.0, 3: 1.5}
