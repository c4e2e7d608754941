"""The benchmark of growth runs, and draws what it has measured."""

from __future__ import annotations

import pytest
from benchmarks import growth, growth_against, growth_disk, growth_eviction, growth_holds
from benchmarks.plots import growth_curves

LONG = ("memory", "eviction", "entries")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in LONG else []) for n in growth.MEASUREMENTS])
def test_each_measurement_has_figures(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = (growth, "CALLS"), (growth_eviction, "CALLS"), (growth_disk, "ROUNDS"), (growth_holds, "REQUESTS")
    for module, number in made:
        monkeypatch.setattr(module, number, 20)
    rows = list(growth.MEASUREMENTS[name](200))
    assert rows
    assert len({row.operation for row in rows}) == len(rows)
    # Beside so few entries the collector may have nothing to do, and nothing may be held for long.
    assert all(row.median > 0 or (row.unit != "B" and name in ("entries", "holds")) for row in rows)


@pytest.mark.slow
def test_another_version_makes_the_same_calls() -> None:
    """Here it is this one."""
    shown = growth_against.table(growth_against.HERE, 200, 2)
    operations = list(shown.columns[0].cells)
    assert len({*operations}) == len(operations) == 10


def test_the_plot_has_a_panel_an_operation() -> None:
    svg = growth_curves({"match": [1.0, 2.0], "add": [3.0, None]}, [1000, 10_000])
    assert "median: 1, 2" in svg
    assert "median: 3, –" in svg
    assert "10^4" in svg
