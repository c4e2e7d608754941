"""Bookings: which one a request has that reaches the engine."""

from __future__ import annotations

from headstart.fleet.replica.bookings import Bookings


def test_requests_with_one_id_have_their_own_bookings() -> None:
    bookings = Bookings()
    with bookings.coming("mine", "1"), bookings.coming("mine", "2"), bookings.coming("other", "3"):
        assert [bookings.take(id) for id in ("mine", "mine", "mine", "other")] == ["1", "2", None, "3"]


def test_a_call_that_does_not_reach_the_engine_leaves_no_booking() -> None:
    bookings = Bookings()
    with bookings.coming("mine", "1"):
        with bookings.coming("mine", "2"):
            pass
        assert bookings.take("mine") == "1"
    assert bookings.take("mine") is None
    assert not bookings._coming
