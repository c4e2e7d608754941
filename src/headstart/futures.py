"""Futures of `concurrent.futures` that end as others do."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TypeVar

R = TypeVar("R")


def pass_on(done: Future[R], result: Future[R]) -> None:
    """Ends `result` as `done` has ended."""
    if (error := done.exception()) is not None:
        result.set_exception(error)
    else:
        result.set_result(done.result())
