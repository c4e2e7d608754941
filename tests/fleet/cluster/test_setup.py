"""What a fleet is told."""

from __future__ import annotations

import pickle

import pytest

from headstart.config import Settings
from headstart.errors import ConfigError
from headstart.fleet.cluster.setup import FleetSetup, Scale, stopping
from headstart.testing.fake_engine import FakeEngine


@pytest.mark.parametrize(
    ("text", "scale"), [("1", Scale(1, 1)), ("4", Scale(4, 4)), ("2..8", Scale(2, 8)), (" 3..3 ", Scale(3, 3))]
)
def test_a_scale_is_a_number_or_a_range(text: str, scale: Scale) -> None:
    assert Scale.parse(text) == scale


@pytest.mark.parametrize("text", ["", "0", "-1", "0..2", "8..2", "2...8", "two", "2..", "..3", "1.5"])
def test_anything_else_is_refused_in_the_words_of_the_option(text: str) -> None:
    with pytest.raises(ConfigError, match="--replicas"):
        Scale.parse(text)


def test_a_setup_travels_to_other_processes_and_shows_no_keys() -> None:
    setup = FleetSetup(Settings(ctx=512), Scale(2, 2), api_keys=("secret",), engine=FakeEngine)
    assert pickle.loads(pickle.dumps(setup)) == setup
    assert "secret" not in repr(setup)
    assert setup.keys().closed


def test_ray_kills_nothing_that_still_has_time() -> None:
    assert stopping(FleetSetup(Settings(drain=7.0), grace=20.0)) > 27.0
