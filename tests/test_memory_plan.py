"""How memory is planned: the same context, slots and budget for the same machine."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.errors import ConfigError
from headstart.interfaces.host_memory import HostMemory
from headstart.memory_plan import Fit, budget, fit

GIB = 1 << 30


def host(available: float, kv: int = 1 << 16, weights: int = GIB, state: int = 0) -> HostMemory:
    return HostMemory(int(available), weights, 128 << 20, kv, state, ctx_step=256)


def bytes_of(given: HostMemory, found: Fit) -> int:
    """All that is planned, without buffers, when the user sets no budget."""
    return given.weights + given.live(*found) + budget(given, *found)


def test_fit_takes_what_there_is() -> None:
    for reserve in (GIB, None):
        assert fit(host(64 * GIB), trained=8192, ctx=None, slots=None, reserve=reserve) == Fit(8192, 4)
        assert fit(host(64 * GIB), trained=8192, ctx=1000, slots=2, reserve=reserve) == Fit(1024, 2)
        assert fit(host(64 * GIB), trained=0, ctx=None, slots=1, reserve=reserve) == Fit(4096, 1)
        roomy = fit(host(16 * GIB), trained=131_072, ctx=None, slots=None, reserve=reserve)
        assert roomy.ctx >= 32_768
        # State takes its room in every slot, whatever the context.
        assert host(GIB, state=GIB).live(1024, 3) == host(GIB).live(1024, 3) + 3 * GIB
        stateful = [host(size * GIB, kv=0, state=GIB) for size in (7, 16)]
        few, many = (fit(given, trained=8192, ctx=None, slots=None, reserve=reserve) for given in stateful)
        assert few.ctx == many.ctx == 8192
        assert 1 <= few.slots < many.slots == 4
    tight = fit(host(5 * GIB), trained=131_072, ctx=None, slots=None, reserve=GIB)
    assert tight.slots == 1
    assert tight.ctx % 256 == 0
    assert 512 < tight.ctx < 32_768
    assert GIB + host(5 * GIB).live(*tight) + GIB <= 0.8 * 5 * GIB


def test_the_budget_is_four_gigabytes_where_there_is_room() -> None:
    assert budget(host(64 * GIB), 8192, 4) == budget(host(64 * GIB), 4096, 1) == 4 * GIB
    assert budget(None, 8192, 4) == 4 * GIB
    assert budget(host(64 * GIB), 65_536, 1) == int(2.1 * 65_536 * (1 << 16)), "one conversation needs more"


@pytest.mark.parametrize(
    ("size", "kv", "weights", "state", "found"),
    [
        (64, 1 << 16, 1, 0, (131_072, 4, 18_038_862_643)),
        (16, 1 << 16, 1, 0, (37_376, 3, 5_143_894_425)),
        (5, 1 << 16, 1, 0, (23_552, 1, 1_543_503_872)),
        (9.5, 1 << 17, 4, 0, (14_080, 1, 1_885_759_078)),
        (7, 0, 1, 1 << 30, (131_072, 2, 2_657_511_014)),
    ],
)
def test_the_same_machine_gets_the_same_plan(
    size: float, kv: int, weights: int, state: int, found: tuple[int, int, int]
) -> None:
    """Figures of the plan before it was divided between engines and the cache."""
    given = host(size * GIB, kv, weights * GIB, state)
    chosen = fit(given, trained=131_072, ctx=None, slots=None, reserve=None)
    assert (*chosen, budget(given, *chosen)) == found


@given(size=st.floats(1.5, 400), kv=st.sampled_from([23_040, 1 << 16, 1 << 17, 1 << 19]), weights=st.integers(1, 40))
def test_fit_with_nothing_given(size: float, kv: int, weights: int) -> None:
    """It never plans for more than there is; and where there is enough, a whole conversation can come back."""
    given = host(size * GIB, kv, weights * GIB)
    try:
        found = fit(given, trained=131_072, ctx=None, slots=None, reserve=None)
    except ConfigError:
        assert given.weights + given.live(512, 1) > 0.7 * given.available - GIB
        return
    planned, whole = budget(given, *found), 2.1 * given.live(512, 1)
    assert bytes_of(given, found) <= given.available
    if found.ctx == 512:
        assert planned <= max(4 * GIB, whole)
        assert bytes_of(given, found) <= max(0.8 * given.available, given.weights + given.live(512, 1) + whole)
    if found.ctx > 512:
        assert bytes_of(given, found) <= 0.8 * given.available
        assert planned >= min(4 * GIB, 0.9 * given.live(found.ctx, 1)), "memory that is short is shared"
    if found.slots > 1:
        assert found.ctx >= 32_768
        assert planned >= 2 * given.live(found.ctx, 1)


def test_fit_leaves_agents_a_context_where_memory_is_short() -> None:
    """Eight billion parameters in four bits, 128 KiB a token; agents begin with some 17,000."""
    for size, least in ((9.5, 10_000), (12, 17_000), (16, 30_000), (24, 32_768)):
        found = fit(host(size * GIB, 1 << 17, int(4.7 * GIB)), trained=131_072, ctx=None, slots=None, reserve=None)
        assert found.ctx >= least, (size, found)


@pytest.mark.parametrize(("ctx", "slots"), [(None, None), (65_536, None), (None, 64), (65_536, 4)])
def test_fit_refuses_with_the_numbers(ctx: int | None, slots: int | None) -> None:
    with pytest.raises(ConfigError, match=r"Too little memory: 1\.0 GiB of weights, 1\.0 GiB for memory_budget="):
        fit(host(2.1 * GIB), trained=131_072, ctx=ctx, slots=slots, reserve=GIB)
    for kv_types, remedy in ((True, 'use kv_type="q8_0", or a smaller model'), (False, "or use a smaller model")):
        with pytest.raises(ConfigError, match=rf"Too little memory: 1\.0 GiB of weights, \d+\.\d GiB for.*, {remedy}"):
            fit(host(1.11 * GIB), trained=131_072, ctx=ctx, slots=slots, reserve=None, kv_types=kv_types)
