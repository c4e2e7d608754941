"""Whether a build adds values up in F16, which its own numbers show."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headstart.cli import doctor
from headstart.engines.llama import half_precision
from headstart.engines.llama import identity as llama_identity
from headstart.engines.llama.binding import ready
from headstart.engines.llama.ggml import Array, Ggml
from headstart.engines.llama.half_precision import FLAG, STEP, adds_in_f16
from headstart.engines.llama.padding import ADDS_IN_F16, AMX_USED


def attention(query: Array, keys: Array, values: Array, kind: Any = np.float64) -> Array:
    """As the formula says; the sum over the cells in this type."""
    scores = np.exp(query.astype(np.float64) @ keys.T.astype(np.float64) * half_precision._SCALE)[0]
    total = np.zeros(values.shape[1], kind)
    for score, value in zip(scores, values, strict=True):
        total = (total + value.astype(kind) * kind(score)).astype(kind)
    return (total / scores.sum()).astype(np.float32)


@pytest.mark.parametrize("elements", [STEP // 2, STEP])
def test_the_trial_computes_attention(elements: int) -> None:
    dice = np.random.default_rng(1)
    parts = [dice.standard_normal((rows, elements), np.float32) for rows in (1, 32, 32)]
    with Ggml(ready()) as ggml:
        found = half_precision._attention(ggml, *parts)
    assert found is not None
    np.testing.assert_allclose(found, attention(*parts), atol=0.01)


def test_this_build_says_always_the_same() -> None:
    found = {adds_in_f16(ready()) for _ in range(5)}
    assert len(found) == 1
    flags = Path("/proc/cpuinfo")
    if flags.exists() and "avx512_fp16" not in flags.read_text():
        assert found == {False}


def test_sums_in_f16_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elements that fill a step are added up in F16 there, and others are not."""

    def in_f16(ggml: Ggml, query: Array, keys: Array, values: Array) -> Array:
        return attention(query, keys, values, np.float16 if values.shape[1] % STEP == 0 else np.float32)

    def in_f32(ggml: Ggml, query: Array, keys: Array, values: Array) -> Array:
        return attention(query, keys, values, np.float32)

    monkeypatch.setattr(half_precision, "_attention", in_f16)
    assert adds_in_f16(ready())
    monkeypatch.setattr(half_precision, "_attention", in_f32)
    assert not adds_in_f16(ready())
    monkeypatch.setattr(half_precision, "_attention", lambda *_: None)
    assert not adds_in_f16(ready())


def test_functions_of_other_versions_are_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    library = replace(ready(), library=replace(ready().library, users=True))
    monkeypatch.setattr(half_precision, "Ggml", lambda *_: pytest.fail("ggml was called"))
    assert not adds_in_f16(library)


def test_it_is_a_feature_of_every_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_identity, "suits_amx", lambda model: True)
    for adds, uses in ((True, True), (True, False), (False, True), (False, False)):
        monkeypatch.setattr(llama_identity, "adds_in_f16", lambda library, adds=adds: adds)
        found = llama_identity.features(None, uses_amx=uses)
        assert found == {*([AMX_USED] if uses else []), *([ADDS_IN_F16] if adds else [])}


def test_doctor_says_how_to_build_another(monkeypatch: pytest.MonkeyPatch) -> None:
    ready()
    monkeypatch.setattr(half_precision, "adds_in_f16", lambda library: True)
    assert FLAG in dict(doctor.engine_build(None))["half precision"]
    monkeypatch.setattr(half_precision, "adds_in_f16", lambda library: False)
    assert "half precision" not in dict(doctor.engine_build(None))
