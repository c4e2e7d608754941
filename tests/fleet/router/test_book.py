"""Bookings end: by reports, by the caller, or in time."""

from __future__ import annotations

from headstart.fleet.router.book import ARRIVES, PREFILLED, Book, Booking


def test_seconds_count_until_the_request_arrives() -> None:
    book = Book()
    book.add(Booking("a", 0, 2.0, [1]), 0.0)
    book.add(Booking("b", 0, 3.0, [2]), 0.0)
    book.add(Booking("c", 1, 4.0, [3]), 0.0)
    assert (book.seconds(0), book.seconds(1), book.seconds(2)) == ([2.0, 3.0], [4.0], [])
    book.arrived("a", 1.0)
    book.arrived("a", 1.0)
    book.arrived("unknown", 1.0)
    assert book.seconds(0) == [3.0]
    assert [one.request for one in book.of(0)] == ["a", "b"]
    assert book.close("a") == Booking("a", 0, 2.0, [1])
    assert book.close("a") is None
    assert len(book) == 2


def test_a_booking_that_nothing_is_heard_of_ends() -> None:
    book = Book()
    book.add(Booking("a", 0, 2.0, []), 0.0)
    book.add(Booking("b", 0, 2.0, []), 0.0)
    book.arrived("b", 1.0)
    assert book.overdue(ARRIVES - 1) == []
    assert [one.request for one in book.overdue(ARRIVES)] == ["a"]
    assert [one.request for one in book.overdue(PREFILLED + 1)] == ["b"]
    assert len(book) == 0
    assert book.seconds(0) == []


def test_an_id_can_be_booked_again() -> None:
    book = Book()
    book.add(Booking("a", 0, 2.0, []), 0.0)
    book.close("a")
    book.add(Booking("a", 1, 2.0, []), 20.0)
    assert book.overdue(ARRIVES) == []
    assert [one.column for one in book.overdue(20.0 + ARRIVES)] == [1]
