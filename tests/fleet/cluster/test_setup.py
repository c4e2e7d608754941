"""What a fleet is told."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

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


def test_a_relative_path_is_refused() -> None:
    FleetSetup(Settings()).check_paths()  # the model is `demo`
    whole = Settings(model="/m.gguf", lora="/l.gguf", shared_key_file="/k", chat_template="chatml", cache_dir="/c")
    FleetSetup(whole, api_key_file=Path("/keys")).check_paths()
    for name in ("model", "lora", "shared_key_file", "cache_dir", "chat_template"):
        with pytest.raises(ConfigError, match=f"relative path: give .* like {Path.cwd()}/there"):
            FleetSetup(replace(whole, **{name: "there"})).check_paths()
    with pytest.raises(ConfigError, match="api_key_file= keys is a relative path"):
        FleetSetup(whole, api_key_file=Path("keys")).check_paths()


def test_the_usual_disk_is_that_of_the_replicas_own_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    setup = pickle.dumps(FleetSetup(Settings(), usual_disk=True))
    monkeypatch.setenv("HEADSTART_CACHE_DIR", str(tmp_path))  # on the replica's machine
    assert pickle.loads(setup).of_replica().cache_dir == tmp_path
    assert FleetSetup(Settings()).of_replica().cache_dir is None


def test_ray_kills_nothing_that_still_has_time() -> None:
    assert stopping(FleetSetup(Settings(drain=7.0), grace=20.0)) > 27.0
