from __future__ import annotations

import pytest

from headstart.units import parse_time


@pytest.mark.parametrize(
    ("text", "seconds"), [("10m", 600), ("90min", 5400), ("1.5 h", 5400), ("7d", 604_800), ("30s", 30), ("2w", 1_209_600)]
)
def test_times(text: str, seconds: float) -> None:
    assert parse_time(text) == seconds


@pytest.mark.parametrize("text", ["10", "0s", "-1h", "1mo", "", "h", "1e9w"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a time; write it like 7d, 12h or 90min"):
        parse_time(text)
