"""How fast the store answers, as measured."""

from __future__ import annotations

from headstart.tiers.shared.pace import StorePace


def test_the_bandwidth_is_what_was_measured_less_the_round_trip() -> None:
    pace = StorePace()
    for _ in range(50):
        pace.asked(0.01)
        pace.got(0.11, 10_000_000)
    assert 0.99e8 < pace.bandwidth < 1.01e8
    assert 0.109 < pace.seconds(10_000_000) < 0.111


def test_a_round_trip_that_looks_longer_than_a_batch_makes_no_bandwidth_of_terabytes() -> None:
    """Fault: on a busy machine a question took 0.1 s and then a batch 0.05 s, which was taken for no time at all."""
    pace = StorePace()
    pace.asked(1.0)
    for _ in range(50):
        pace.got(0.05, 10_000_000)
    assert pace.bandwidth <= 2.01 * 10_000_000 / 0.05


def test_small_answers_say_nothing_about_the_bandwidth() -> None:
    pace = StorePace()
    before = pace.bandwidth
    pace.got(1.0, 1000)
    assert pace.bandwidth == before


def test_a_store_that_is_fast_is_found() -> None:
    """Before the first fetch a bandwidth was assumed: where it was too low, nothing was ever fetched, nor measured."""
    pace = StorePace()
    assert pace.pays(1 << 40, 0.001)
    pace.got(1.0, 500_000_000)
    assert 0.49e9 < pace.bandwidth < 0.51e9, "what was measured, and nothing of what was assumed"
    for _ in range(20):
        pace.got(1.0, 1_000_000)
    tries = 0
    while not pace.pays(100_000_000, 1.0):
        tries += 1
    assert 20 < tries < 120, "the store was slow; sometimes one has to look whether it still is"
