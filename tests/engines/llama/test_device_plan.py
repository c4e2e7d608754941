"""What goes to a GPU: the plan keeps within its memory, uses it, and obeys what the user chose."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from headstart.engines.llama.device_plan import (
    ALL,
    BUFFERS,
    GOOD_CTX,
    MARGIN,
    DeviceMemory,
    DevicePlan,
    ModelNeeds,
    alternatives,
    part,
    plan,
)

GIB = 1 << 30
SEVEN_B = ModelNeeds(weights=4 * GIB, layers=32, kv=128 << 10, trained=131_072)

needs = st.builds(
    ModelNeeds,
    weights=st.integers(1 << 20, 200 * GIB),
    layers=st.integers(1, 128),
    kv=st.integers(0, 1 << 20),
    trained=st.integers(256, 1 << 20),
)
discrete = st.builds(DeviceMemory, name=st.just("card"), free=st.integers(0, 200 * GIB), unified=st.just(False))
contexts, counts = st.none() | st.integers(1, 1 << 18), st.none() | st.integers(1, 8)


def card(gib: float, *, unified: bool = False) -> DeviceMemory:
    return DeviceMemory("card", int(gib * GIB), unified)


def bytes_of(model: ModelNeeds, found: DevicePlan) -> float:
    count = model.layers + 1 if found.layers == ALL else found.layers
    live = model.kv * (found.ctx or 0) * (found.slots or 0)
    return model.weights * count / (model.layers + 1) + live * min(count, model.layers) / model.layers


def test_where_all_fits_all_is_on_the_device() -> None:
    found = plan(SEVEN_B, card(24))
    assert (found.layers, found.slots, found.host_share) == (ALL, 4, 0.0)
    assert found.ctx is not None
    assert found.ctx >= GOOD_CTX
    assert plan(SEVEN_B, card(12)).slots == 1


@given(st.integers(1 << 30, 100 * GIB), st.lists(st.integers(1, 60 * GIB), min_size=2, max_size=5), st.data())
def test_models_that_are_loaded_together_get_no_more_than_there_is(total: int, weights: list[int], data: st.DataObject) -> None:
    keep = data.draw(st.integers(2, len(weights)))
    together = sorted(weights, reverse=True)[:keep]
    loaded = data.draw(st.permutations(weights))[:keep]
    parts = [part(total, size, together) for size in loaded]
    assert sum(parts) <= total + keep
    if sum(together) + keep * BUFFERS <= int(MARGIN * total):
        assert all(DeviceMemory("", found, False).usable >= size - 1 for found, size in zip(parts, loaded, strict=True))
    assert part(total, weights[0], ()) == total


def test_where_less_fits_tokens_go_first_then_layers() -> None:
    found = [plan(SEVEN_B, card(size)) for size in (80, 24, 12, 8, 6, 4, 2, 0.5)]
    tokens = [(one.slots or 0) * (one.ctx or 0) for one in found]
    assert tokens == sorted(tokens, reverse=True)
    assert [one.layers for one in found][:3] == [ALL] * 3
    rest = [one.layers for one in found if one.layers != ALL]
    assert rest == sorted(rest, reverse=True)
    assert rest[-1] == 0


@given(needs, discrete, contexts, counts)
def test_a_plan_stays_within_the_memory(model: ModelNeeds, device: DeviceMemory, ctx: int | None, slots: int | None) -> None:
    found = plan(model, device, ctx=ctx, slots=slots)
    assert bytes_of(model, found) <= device.usable + 1 or found.layers == 0
    assert abs(found.bytes - bytes_of(model, found)) <= 2
    assert found.layers == ALL or 0 <= found.layers <= model.layers
    assert 0 <= found.host_share <= 1
    if found.layers:
        assert found.slots == (slots or found.slots)
        assert found.ctx is not None
        assert found.ctx % model.step == 0
        assert ctx is None or found.ctx >= ctx


@given(needs, discrete, st.integers(0, 100 * GIB), contexts, counts)
def test_more_memory_never_takes_layers_away(
    model: ModelNeeds, device: DeviceMemory, more: int, ctx: int | None, slots: int | None
) -> None:
    small, large = (plan(model, one, ctx=ctx, slots=slots) for one in (device, replace(device, free=device.free + more)))
    assert small.share <= large.share


@given(needs, discrete, st.integers(-1, 200), contexts, counts)
def test_chosen_layers_are_obeyed(
    model: ModelNeeds, device: DeviceMemory, layers: int, ctx: int | None, slots: int | None
) -> None:
    found = plan(model, device, ctx=ctx, slots=slots, layers=layers)
    assert found.layers == (ALL if layers < 0 or layers > model.layers else layers)


@given(needs, st.integers(0, 200 * GIB), contexts, counts)
def test_unified_memory_stays_the_hosts(model: ModelNeeds, free: int, ctx: int | None, slots: int | None) -> None:
    found = plan(model, DeviceMemory("chip", free, True), ctx=ctx, slots=slots)
    assert (found.ctx, found.slots, found.host_share) == (None, None, 1.0)
    assert found.bytes <= max(0, found.device.usable) + 1


def test_what_would_change_it_is_named() -> None:
    found = alternatives(SEVEN_B, card(8), ctx=None, slots=None, kv_type="f16")
    assert "KV of type q8_0" in found
    assert "KV of type q8_0" not in alternatives(SEVEN_B, card(8), ctx=None, slots=None, kv_type="q8_0")
    assert not alternatives(replace(SEVEN_B, trained=4096), card(0.5), ctx=4096, slots=1, kv_type="q8_0")
