"""Whether a build computes with F16 values in F16, which its own numbers show."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from headstart.cli import doctor
from headstart.engines.llama import amx, half_precision
from headstart.engines.llama import identity as llama_identity
from headstart.engines.llama.binding import LoadedLibrary, ready
from headstart.engines.llama.ggml import Array, Ggml, Tensor
from headstart.engines.llama.half_precision import FLAG, STEP, computes_in_f16
from headstart.engines.llama.library import TESTED, LlamaLibrary
from headstart.engines.llama.padding import ALIGNED, AMX_USED, COMPUTES_IN_F16


def attention(query: Array, keys: Array, values: Array, kind: Any) -> Array:
    """As the formula says; each cell is multiplied and added in this type, and the sum is kept in F16."""
    scores = np.exp(query.astype(np.float64) @ keys.T.astype(np.float64) * half_precision._SCALE)[0]
    total = np.zeros(values.shape[1], np.float16)
    for score, value in zip(scores, values, strict=True):
        total = (total.astype(kind) + value.astype(np.float16).astype(kind) * kind(score)).astype(np.float16)
    return (total / scores.sum()).astype(np.float32)


def says(system: bytes) -> LoadedLibrary:
    """A tested build, which says this of itself."""
    library = replace(ready().library, users=False, binding=TESTED[-1])
    return replace(ready(), library=library, module=SimpleNamespace(llama_print_system_info=lambda: system))  # type: ignore[arg-type]


@pytest.mark.parametrize("elements", [STEP // 2, STEP])
def test_the_trial_computes_attention(elements: int) -> None:
    dice = np.random.default_rng(1)
    parts = [dice.standard_normal((rows, elements), np.float32) for rows in (1, 32, 32)]
    with Ggml(ready()) as ggml:
        found = half_precision._attention(ggml, *parts)
    assert found is not None
    np.testing.assert_allclose(found, attention(*parts, np.float32), atol=0.01)


def test_what_the_numbers_of_this_build_show_is_in_its_machine_code() -> None:
    library = next(ready().library.folder.glob("libggml-cpu.so"), None)
    if not ready().library.tested or library is None or (objdump := shutil.which("objdump")) is None:
        pytest.skip("another version, no library of ggml for the processor, or no disassembler")
    code = subprocess.run([objdump, "-d", library], capture_output=True, text=True, check=True).stdout
    assert computes_in_f16(ready()) == bool(re.search(r"\bvfmadd\d+ph\b", code))


@pytest.mark.parametrize(("kind", "seen"), [(np.float16, True), (np.float32, False)])
def test_elements_that_fill_a_step_have_other_bits_in_f16(monkeypatch: pytest.MonkeyPatch, kind: Any, seen: bool) -> None:
    """Those that do not are computed in F32, also there."""

    def computed(ggml: Ggml, query: Array, keys: Array, values: Array) -> Array:
        return attention(query, keys, values, kind if values.shape[1] % STEP == 0 else np.float32)

    monkeypatch.setattr(half_precision, "_attention", computed)
    assert computes_in_f16(says(b"AVX512 = 1 | ")) is seen
    assert not computes_in_f16(says(b"AVX2 = 1 | SVE = 1 | "))
    monkeypatch.setattr(half_precision, "_attention", lambda *_: None)
    assert not computes_in_f16(says(b"AVX512 = 1 | "))


@pytest.mark.parametrize(("system", "assumed"), [(b"AVX512 = 1 | AMX_INT8 = 1 | ", True), (b"AVX512 = 1 | ", False)])
def test_functions_of_other_versions_are_not_called(monkeypatch: pytest.MonkeyPatch, system: bytes, assumed: bool) -> None:
    monkeypatch.setattr(half_precision, "Ggml", lambda *_: pytest.fail("ggml was called"))
    library = says(system)
    assert computes_in_f16(replace(library, library=replace(library.library, users=True))) is assumed


def test_it_is_a_feature_of_every_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_identity, "suits_amx", lambda model: True)
    for computes, uses in ((True, True), (True, False), (False, True), (False, False)):
        monkeypatch.setattr(llama_identity, "computes_in_f16", lambda library, computes=computes: computes)
        found = llama_identity.features(None, uses_amx=uses)
        assert found - {ALIGNED} == {*([AMX_USED] if uses else []), *([COMPUTES_IN_F16] if computes else [])}


def test_doctor_says_how_to_build_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a flag that the compiler knows: one that does not know it makes no such build."""
    ready()
    monkeypatch.setattr(LlamaLibrary, "tested", True)
    monkeypatch.setattr(half_precision, "computes_in_f16", lambda library: True)
    assert f"'{amx.FLAGS} {FLAG}'" in dict(doctor.engine_build(None))["half precision"]
    monkeypatch.setattr(half_precision, "computes_in_f16", lambda library: False)
    assert "half precision" not in dict(doctor.engine_build(None))
    assert f"'{amx.FLAGS}'" in doctor._amx(None, tested=True, works=False, version="0.3.36")


def test_memory_that_is_refused_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(Ggml):
        def call(self, name: str, returns: Any, *arguments: Any) -> Any:
            return None if name == "ggml_backend_alloc_ctx_tensors" else super().call(name, returns, *arguments)

    fill: list[Tensor] = []
    monkeypatch.setattr(Full, "fill", lambda self, tensor, data: fill.append(tensor))
    rows = np.ones((1, STEP), np.float32)
    with Full(ready()) as ggml:
        assert half_precision._attention(ggml, rows, rows, rows) is None
    assert not fill
