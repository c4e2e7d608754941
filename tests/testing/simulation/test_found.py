"""What the simulation has found: each history failed before its fault was mended. It was shrunk, and printed like this."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headstart.testing.simulation.history import Event, History, Setup
from headstart.testing.simulation.install import installed
from headstart.testing.simulation.run import run


@pytest.fixture(autouse=True)
def simulated() -> Iterator[None]:
    with installed():
        yield


def test_a_disk_that_hangs_does_not_count_as_fast() -> None:
    """Reads that were refused at once set the seconds of a read to 0. The next plan divided by them, and its request failed."""
    history = History(
        39,
        Setup(mode="exact", stateful=True, any_cut=True, memory=24, objects=62, explain=False, share=0.3),
        (
            Event(1.0396, "ask", who=1, talk=2, how="turn", size=1, seed=487374877, reply=12),
            Event(5.5362, "fault", how="hung_read", size=40, reply=1),
            Event(5.708, "ask", who=1, talk=2, how="edit", size=7, seed=406758576, reply=1),
            Event(7.2988, "ask", who=2, talk=1, how="turn", size=9, seed=437718295, reply=3),
            Event(7.2988, "ask", who=1, how="turn", size=1, seed=207414468, reply=3),
            Event(7.487, "ask", talk=2, how="turn", size=15, seed=433989543),
            Event(7.7223, "ask", talk=1, how="turn", size=15, seed=730562342, reply=1),
            Event(26.5018, "ask", who=1, talk=2, how="turn", size=13, seed=926493238, reply=1),
            Event(26.5439, "ask", who=1, talk=1, how="turn", size=20, seed=679558843, reply=8),
            Event(26.5762, "ask", talk=2, how="turn", size=8, seed=321393300, reply=1),
        ),
    )
    assert run(history).violation == ""
