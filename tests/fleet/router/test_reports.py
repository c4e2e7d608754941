"""Reports in order, whatever happens to them on the way."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from effort import examples
from headstart.fleet.router.reports import OrderedReports, ReplicaReport, Sequencer


def report(sequence: int, *, epoch: int = 0, dump: bool = False) -> ReplicaReport:
    return ReplicaReport("a", epoch, sequence, dump=dump)


def sequences(taken: OrderedReports) -> list[int]:
    return [change.sequence for change in taken.changes]


@given(st.permutations(range(12)), st.lists(st.integers(0, 11)))
@examples(200)
def test_reordered_and_doubled_reports_are_passed_on_once_and_in_order(order: list[int], doubled: list[int]) -> None:
    reports = Sequencer()
    passed = [one for number in [*order, *doubled] for one in sequences(reports.take(report(number)))]
    assert passed == list(range(12))
    assert not reports.gap


def test_a_gap_needs_a_dump_and_what_came_behind_it_is_kept() -> None:
    reports = Sequencer()
    assert sequences(reports.take(report(0))) == [0]
    assert sequences(reports.take(report(2))) == sequences(reports.take(report(4))) == []
    assert reports.gap
    assert sequences(reports.take(report(3, dump=True))) == [3, 4]
    assert not reports.gap
    assert sequences(reports.take(report(1))) == []


def test_a_dump_that_is_older_than_what_is_known_changes_nothing() -> None:
    reports = Sequencer()
    reports.take(report(0))
    reports.take(report(1))
    assert reports.take(report(0, dump=True)) == OrderedReports()


def test_a_new_epoch_voids_the_old_one() -> None:
    reports = Sequencer()
    reports.take(report(0))
    assert reports.take(report(1, epoch=1)) == OrderedReports((), restarted=True, newest=True)
    assert reports.gap
    assert reports.take(report(1)) == OrderedReports()
    assert sequences(reports.take(report(0, epoch=1))) == [0, 1]


def test_what_was_kept_of_an_old_epoch_is_void_too() -> None:
    reports = Sequencer()
    reports.take(report(2))
    assert sequences(reports.take(report(1, epoch=1, dump=True))) == [1]
    assert not reports.gap


def test_the_load_of_the_newest_report_counts_before_the_gap_is_closed() -> None:
    reports = Sequencer()
    reports.take(report(0))
    assert reports.take(report(5)).newest
    assert not reports.take(report(3)).newest


def test_few_reports_are_kept_behind_a_gap() -> None:
    reports = Sequencer()
    for number in range(1, 1000):
        reports.take(report(number))
    assert len(reports._ahead) == 64
