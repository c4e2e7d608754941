from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from headstart.config import Settings
from headstart.errors import ConfigError
from headstart.serving.runtime import check_shared
from headstart.tiers.shared.address import PASSWORD, PASSWORD_FILE, fleet_keys, open_store, owner_keys
from headstart.tiers.shared.keys import FleetKeys
from headstart.tiers.shared.names import ObjectNames
from stores import HOST, ValkeyServer

NAME = ObjectNames(b"n" * 32).of(b"o", "kv", b"i")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("valkey://host", "valkey://host:6379/0"),
        ("redis://host:1/2", "valkey://host:1/2"),
        ("valkeys://host", "valkeys://host:6379/0"),
        ("rediss://[::1]:7/", "valkeys://[::1]:7/0"),
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket/some/prefix/?endpoint=http://127.0.0.1:1&region=x", "s3://bucket/some/prefix"),
        ("file:///mnt/nfs/headstart", "file:///mnt/nfs/headstart"),
        ("file://localhost/a%20b", "file:///a%20b"),
    ],
)
def test_a_url_means_a_store_that_need_not_be_there(url: str, shown: str) -> None:
    store = open_store(url, environ={})
    assert store.url == shown
    store.close()


@pytest.mark.parametrize(
    "url",
    [
        "",
        "host:6379",
        "http://host",
        "valkey://",
        "valkey://host:port",
        "valkey://host/zero",
        "valkey://host?db=1",
        "s3://",
        "s3://user@bucket",
        "s3://bucket?secret=1",
        "file://host/path",
        "file:///",
        "file:relative",
        "/mnt/nfs",
        "valkey://[::1",
    ],
)
def test_other_texts_are_refused_with_a_form(url: str) -> None:
    with pytest.raises(ConfigError, match=r"valkey://|s3://|file://"):
        open_store(url, environ={})


@pytest.mark.parametrize(
    ("url", "remedy"),
    [
        ("valkey://:hush@host", PASSWORD),
        ("rediss://me:hush@host:1", PASSWORD),
        ("s3://id:hush@bucket", "AWS"),
        ("s3://bucket?endpoint=http://id:hush@host", "AWS"),
        ("ftp://id:hush@bucket", "AWS"),
    ],
)
def test_a_password_in_a_url_is_refused_and_not_shown(url: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy) as caught:
        open_store(url, environ={})
    assert "hush" not in str(caught.value)


def test_the_password_comes_from_the_environment_or_a_file(tmp_path: Path) -> None:
    server = ValkeyServer(tmp_path, password="hush")
    (path := tmp_path / "password").write_text("hush\n")
    for environ in ({PASSWORD: "hush"}, {PASSWORD_FILE: str(path)}):
        for user in ("", "default@"):
            store = open_store(f"valkey://{user}{HOST}:{server.port}", 5.0, environ)
            assert store.have([NAME]) == [False]
            assert "hush" not in store.url
            store.close()
    server.kill()


def test_a_user_needs_a_password_and_a_password_file_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=PASSWORD):
        open_store("valkey://me@host", environ={})
    with pytest.raises(ConfigError, match=PASSWORD_FILE):
        open_store("valkey://host", environ={PASSWORD_FILE: str(tmp_path / "none")})


def test_a_store_needs_a_key_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="headstart fleet keygen"):
        fleet_keys(None)
    (keys := FleetKeys.generate()).save(tmp_path / "fleet.key")
    assert fleet_keys(tmp_path / "fleet.key") == keys


@pytest.mark.parametrize(
    ("url", "encrypt", "package"),
    [("valkey://host", False, "valkey"), ("s3://bucket", False, "obstore"), ("file:///nowhere", True, "cryptography")],
)
def test_a_missing_library_names_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, encrypt: bool, package: str
) -> None:
    FleetKeys.generate().save(key_file := tmp_path / "fleet.key")
    for name in [name for name in sys.modules if name.split(".")[0] == package or name.startswith("headstart.tiers.shared.")]:
        monkeypatch.delitem(sys.modules, name)

    class Missing:
        def find_spec(self, name: str, *_: object) -> None:
            if name.split(".")[0] == package:
                raise ModuleNotFoundError(f"No module named '{name}'", name=name)

    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    with pytest.raises(ConfigError, match=rf"'{package}'.*pip install 'headstart\[shared\]'"):
        check_shared(Settings(shared=url, shared_key_file=key_file, shared_encrypt=encrypt))


@pytest.mark.parametrize(("encrypt", "cipher"), [(False, "blake3"), (True, "aes-256-gcm")])
def test_keys_of_owners_are_derived_or_kept_in_the_store(tmp_path: Path, encrypt: bool, cipher: str) -> None:
    store = open_store(tmp_path.as_uri(), 10.0)
    keys = owner_keys(store, FleetKeys.generate(), encrypt=encrypt)
    assert keys.newest(b"owner").cipher == cipher
    keys.refresh()
    assert list(keys.of(b"owner")) == [keys.newest(b"owner")]
    assert len(list(store.objects())) == encrypt
    store.close()


IMPORTS = """
import sys
from pathlib import Path
from headstart.tiers.shared.address import fleet_keys, open_store
open_store("file:///nowhere").close()
print(*sorted({name.split(".")[0] for name in sys.modules}))
"""


def test_a_folder_needs_no_client_library() -> None:
    found = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True).stdout.split()
    assert "headstart" in found
    assert not {"valkey", "libvalkey", "obstore", "cryptography"} & {*found}
