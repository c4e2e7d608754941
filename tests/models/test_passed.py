from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headstart.models.passed import PassedKey, PassedKeys


@given(st.text("0123456789abcdef", max_size=64), st.booleans(), st.none() | st.floats(0, 1e12))
def test_a_caller_arrives_as_it_was_passed(tenant: str, operator: bool, expire: float | None) -> None:
    passed = PassedKey(tenant, operator, expire)
    assert PassedKey.parse(bytes(passed)) == passed
    key = PassedKeys().find([b"nonsense", bytes(passed)])
    assert key is not None
    assert (key.tenant, key.operator, key.expire) == (tenant, operator, expire)


def test_a_request_that_says_nobody_is_refused() -> None:
    assert PassedKeys().find([b"", b"secret", b"a:b:c", b"::"]) is None


def test_limits_are_known_before_the_first_request() -> None:
    assert [key.expire for key in PassedKeys([PassedKey("t", expire=60.0)]).all()] == [60.0]
