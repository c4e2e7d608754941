from __future__ import annotations

import stat
from pathlib import Path

import pytest

from headstart.errors import ConfigError
from headstart.tiers.shared.keys import FleetKeys, TagKeys
from tiers_shared import OTHER, OWNER


def test_a_key_file_comes_back_and_only_its_owner_can_read_it(tmp_path: Path) -> None:
    keys = FleetKeys.generate()
    keys.save(path := tmp_path / "fleet.key")
    assert FleetKeys.load(path) == keys
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [one.name for one in tmp_path.iterdir()] == ["fleet.key"]
    assert FleetKeys.generate() != keys


def test_an_existing_key_file_is_never_replaced_by_chance(tmp_path: Path) -> None:
    (keys := FleetKeys.generate()).save(path := tmp_path / "fleet.key")
    with pytest.raises(ConfigError, match="fleet rotate"):
        FleetKeys.generate().save(path)
    assert FleetKeys.load(path) == keys
    keys.rotated().save(path, replace=True)
    assert FleetKeys.load(path).secrets[1:] == keys.secrets
    assert [one.name for one in tmp_path.iterdir()] == ["fleet.key"]


def test_rotation_keeps_names_and_the_last_key(tmp_path: Path) -> None:
    first = FleetKeys.generate()
    third = (second := first.rotated()).rotated()
    assert first.name_key == second.name_key == third.name_key
    assert (second.secrets[1], third.secrets[1:]) == (first.secrets[0], second.secrets[:1])
    assert TagKeys(second).of(OWNER)[1] == TagKeys(first).newest(OWNER)
    assert TagKeys(second).newest(OWNER) not in TagKeys(first).of(OWNER)
    assert TagKeys(first).names.of(OWNER, "kv", b"i") == TagKeys(second).names.of(OWNER, "kv", b"i")


def test_owners_and_purposes_have_keys_of_their_own() -> None:
    fleet = FleetKeys.generate()
    found = [fleet.derived(purpose, owner, "blake3")[0] for purpose in ("tag", "wrap") for owner in (OWNER, OTHER, b"")]
    assert len({key.secret for key in found}) == len({key.id for key in found}) == 6


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o622])
def test_a_key_file_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    FleetKeys.generate().save(path := tmp_path / "fleet.key")
    path.chmod(mode)
    with pytest.raises(ConfigError, match=f"chmod 600 {path}"):
        FleetKeys.load(path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hello",
        "names 00",
        f"names {'00' * 32}\n",
        f"key {'00' * 32}\n",
        f"names {'00' * 32}\nkey {'00' * 31}\n",
        f"names {'00' * 32}\n" + f"key {'11' * 32}\n" * 3,
        f"names {'00' * 32}\nkey {'zz' * 32}\n",
        f"names {'00' * 32}\nlock {'11' * 32}\n",
    ],
)
def test_what_is_no_key_file_is_refused_without_showing_it(tmp_path: Path, text: str) -> None:
    (path := tmp_path / "fleet.key").write_text(text)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="is no key file") as caught:
        FleetKeys.load(path)
    assert "00" not in str(caught.value).replace(str(path), "")


def test_a_missing_key_file_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="headstart fleet keygen"):
        FleetKeys.load(tmp_path / "none")


def test_no_text_shows_a_secret() -> None:
    fleet = FleetKeys.generate()
    shown = f"{fleet!r} {fleet} {TagKeys(fleet).of(OWNER)!r} {fleet.ids}"
    for secret in (fleet.name_key, *fleet.secrets, TagKeys(fleet).newest(OWNER).secret):
        assert secret.hex() not in shown
        assert repr(secret) not in shown
