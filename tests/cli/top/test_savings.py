"""What reuse has saved, from the server's sums."""

from __future__ import annotations

from headstart.cli.top.savings import Savings, of_sums


def test_the_server_s_own_sums() -> None:
    stats = {
        "requests": 7,
        "prompt": 100,
        "tiers": {"live": 60, "disk": 20},
        "computed": 20,
        "saved_seconds": 3.5,
        "ttft": {"warm": {"requests": 6, "median": 0.1}, "cold": {"requests": 1, "median": None}},
        "decode": 50.0,
    }
    assert of_sums(stats) == Savings(7, 100, {"live": 60, "disk": 20}, 20, 3.5, 0.1, None, 50.0)
