"""Who may fetch models over HTTP."""

from __future__ import annotations

from typing import Any

import pytest

from headstart.api.auth import Keys
from headstart.api.errors import Forbidden
from headstart.api.pulls import Pullers, Pulls
from headstart.errors import Overloaded

HERE, THERE = ("127.0.0.1", 5), ("192.0.2.7", 5)


def scope(client: tuple[str, int] | None, *headers: bytes, operator: bool = True) -> dict[str, Any]:
    return {"operator": operator, "client": client, "headers": [(name, b"127.0.0.1") for name in headers]}


@pytest.mark.parametrize(
    ("client", "headers", "local"),
    [
        (HERE, (), True),
        (("::1", 5), (), True),
        (("::ffff:127.0.0.9", 5), (), True),
        (None, (), True),
        (("", 0), (), True),
        (THERE, (), False),
        (("::ffff:192.0.2.7", 5), (), False),
        (("testclient", 5), (), False),
        (HERE, (b"x-forwarded-for",), False),
        (HERE, (b"via",), False),
        (None, (b"forwarded",), False),
    ],
)
def test_without_keys_only_this_machine_may_fetch(client: Any, headers: tuple[bytes, ...], local: bool) -> None:
    for pullers, allowed in (("local", local), ("all", True), ("operator", False)):
        pulls = Pulls(Keys(), pullers)  # type: ignore[arg-type]
        if allowed:
            pulls.check(scope(client, *headers))
        else:
            with pytest.raises(Forbidden, match="needs a key"):
                pulls.check(scope(client, *headers))


@pytest.mark.parametrize("pullers", ["operator", "local", "all"])
def test_with_keys_the_operator_may_from_everywhere_and_nobody_else(pullers: Pullers) -> None:
    pulls = Pulls(Keys(["secret"]), pullers)
    pulls.check(scope(THERE))
    with pytest.raises(Forbidden, match="the key named 'operator'"):
        pulls.check(scope(HERE, operator=False))


def test_no_more_run_than_allowed() -> None:
    pulls = Pulls(Keys(), most=1)
    with pulls.one():
        with pytest.raises(Overloaded):
            pulls.check(scope(HERE))
        with pytest.raises(Overloaded):
            pulls.one().__enter__()
    with pytest.raises(ZeroDivisionError), pulls.one():
        raise ZeroDivisionError
    pulls.check(scope(HERE))
