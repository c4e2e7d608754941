"""`headstart fleet`: key files, and what a store holds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from socket import socket

import numpy as np
import pytest

from harness import ask
from headstart.api.auth import Keys
from headstart.chat import tenancy
from headstart.cli.fleet_serve import divided
from headstart.cli.main import main
from headstart.config import Settings
from headstart.engines import machine
from headstart.serving.runtime import Runtime
from headstart.tiers.shared.address import open_store
from headstart.tiers.shared.folder import FolderStore
from headstart.tiers.shared.keys import FleetKeys, TagKeys
from headstart.tiers.shared.names import ObjectNames
from headstart.tiers.shared.servers import OWNER
from live import serving, wait_until
from sharing import chat, start, stored

Run = Callable[..., str]
NAMES = ObjectNames(b"n" * 32)


@pytest.fixture
def fleet(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: str, code: int = 0) -> str:
        capsys.readouterr()  # the log of a server in this process
        with pytest.raises(SystemExit) as end:
            main(["fleet", *arguments])
        captured = capsys.readouterr()
        assert end.value.code == code, captured
        return captured.out + captured.err

    return run


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    """Two owners with 3 objects and 1."""
    store = FolderStore(tmp_path, 10.0)
    for number in range(4):
        name = NAMES.of(b"first" if number else b"second", "kv", bytes([number]))
        store.put(name, np.zeros(1000, np.uint8).data, age=3600.0 * number)
    return store


def test_a_key_file_is_made_and_rotated_and_no_output_shows_a_key(fleet: Run, tmp_path: Path) -> None:
    path = tmp_path / "fleet.key"
    said = fleet("keygen", str(path))
    first = FleetKeys.load(path)
    assert first.ids[0] in said
    said += fleet("keygen", str(path), code=2)
    assert FleetKeys.load(path) == first
    said += fleet("rotate", str(path))
    second = FleetKeys.load(path)
    assert second.secrets[1:] == first.secrets
    assert not [secret for secret in (first.name_key, *second.secrets) if secret.hex() in said]
    assert "keygen" in fleet("rotate", str(tmp_path / "none"), code=2)


def test_owners_are_listed(fleet: Run, store: FolderStore) -> None:
    lines = fleet("ls", store.url).splitlines()
    assert [line.split("   ")[1:3] for line in lines[:2]] == [["3 objects", "2.93 KiB"], ["1 object", "1,000 B"]]
    assert all("   oldest " in line for line in lines[:2])
    assert lines[2] == "2 owners, 4 objects, 3.91 KiB"
    found = json.loads(fleet("ls", store.url, "--json"))
    assert [one["objects"] for one in found] == [3, 1]
    assert found[0]["owner"] == NAMES.prefix(b"first").split("/")[1]


def test_one_owner_or_all_are_deleted(fleet: Run, store: FolderStore) -> None:
    first, second = (NAMES.prefix(owner).split("/")[1] for owner in (b"first", b"second"))
    assert "headstart fleet ls" in fleet("rm", store.url, "0" * 32, code=2)
    assert "headstart fleet ls" in fleet("rm", store.url, "", code=2)
    assert fleet("rm", store.url, first[:8]) == "deleted 3 objects\n"
    assert [stored.name.split("/")[1] for stored in store.objects()] == [second]
    assert fleet("rm", store.url, "all") == "deleted 1 object\n"
    assert list(store.objects()) == []


def test_what_an_interrupted_write_has_left_of_an_owner_is_deleted_too(fleet: Run, store: FolderStore, tmp_path: Path) -> None:
    """Though it is not listed, and nothing else is there any more."""
    first, second = (NAMES.prefix(owner).split("/")[1] for owner in (b"first", b"second"))
    assert fleet("rm", store.url, first) == "deleted 3 objects\n"
    left = [tmp_path / "hs1" / owner / "kv" / ".tmp-left" for owner in (first, second)]
    for path in left:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"text")
    assert "0 owners" in fleet("rm", store.url, first, code=2)
    assert [path.exists() for path in left] == [False, True]


def test_a_store_that_is_not_there_is_an_error_in_one_line(fleet: Run, tmp_path: Path) -> None:
    said = fleet("ls", "valkey://127.0.0.1:1", code=2)
    assert said.startswith("headstart: The store failed: refused: valkey://127.0.0.1:1/0: nobody answers there")
    assert said.count("\n") == 1
    assert "HEADSTART_SHARED_PASSWORD" in fleet("ls", "valkey://:hush@127.0.0.1:1", code=2)


@pytest.mark.parametrize("command", [("ls",), ("rm", "all"), ("rm", "0")])
def test_a_folder_that_is_not_there_is_no_empty_store(fleet: Run, tmp_path: Path, command: tuple[str, ...]) -> None:
    name, *rest = command
    missing = tmp_path / "no ne"
    said = fleet(name, missing.as_uri(), *rest, code=2)
    assert said == f"headstart: The store failed: refused: {missing.as_uri()} is not a folder; create it, or mount it.\n"


def test_an_empty_folder_is_an_empty_store(fleet: Run, tmp_path: Path) -> None:
    assert fleet("ls", tmp_path.as_uri()) == "0 owners, 0 objects, 0 B\n"
    assert fleet("rm", tmp_path.as_uri(), "all") == "deleted 0 objects\n"


def test_a_key_file_needs_its_folder(fleet: Run, tmp_path: Path) -> None:
    said = fleet("keygen", str(tmp_path / "none" / "fleet.key"), code=2)
    assert said == f"headstart: The folder {tmp_path / 'none'} does not exist: make it first.\n"


@pytest.mark.parametrize("command", [("stop", "foo"), ("serve", "demo", "--address", "foo")])
def test_an_address_that_is_none_is_said_before_ray_is_asked(fleet: Run, command: tuple[str, ...]) -> None:
    said = fleet(*command, code=2)
    assert said == "headstart: 'foo' is no address of a cluster of Ray: write it like ray://HOST:10001, or auto.\n"


def test_without_a_fleet_its_status_names_the_command_that_starts_one(fleet: Run) -> None:
    with socket() as unused:
        unused.bind(("127.0.0.1", 0))
        said = fleet("status", "--port", str(unused.getsockname()[1]), code=2)
    assert "start one with `headstart fleet MODEL`" in said


def on_show(runtime: Runtime, url: str, servers: int = 1) -> None:
    """Waits until the store has all that was offered, and the cards of so many servers."""
    stored(runtime)
    wait_until(lambda: sum("/note/" in one.name for one in open_store(url, 30.0).objects()) >= servers, 30)


@pytest.mark.parametrize("encrypt", [False, True], ids=["readable", "encrypted"])
@pytest.mark.usefixtures("patient")
def test_a_tenant_is_listed_and_deleted_by_its_name(fleet: Run, tmp_path: Path, key_file: Path, encrypt: bool) -> None:
    (keys := tmp_path / "keys.txt").write_text("anna = sk-1\nberta = sk-2\nsk-3\n")
    keys.chmod(0o600)
    (folder := tmp_path / "store").mkdir()
    url, secret = folder.as_uri(), ["--shared-key-file", str(key_file)]
    runtime = start(url, key_file, shared_encrypt=encrypt)
    with serving(runtime, api_keys=Keys(file=keys)) as server:
        for key in ("sk-1", "sk-2", "sk-2", "sk-3"):
            body = {"messages": chat(f"I am the one with {key}"), "max_tokens": 2}
            server.post("/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"}).raise_for_status()
        on_show(runtime, url)

        def owners(*options: str) -> dict[str, int]:
            return {
                one["tenant"]: one["objects"] for one in json.loads(fleet("ls", url, "--json", *options)) if "tenant" in one
            }

        assert owners() == {}
        assert owners(*secret).keys() == {"the servers' records"}
        every = owners(*secret, "--api-key-file", str(keys))
        assert every.keys() == {"the servers' records", "anna", "berta", "(unnamed key 1)"}
        assert owners(*secret, "--tenant", "anna") == {"anna": every["anna"]}
        assert f"   anna, {runtime.engine.facts.name}\n" in fleet("ls", url, *secret, "--tenant", "anna")

        model = runtime.engine.facts.name
        said = f"models that ran in the last 15 minutes: {model}\ndeleted {every['anna']} objects\n"
        assert fleet("rm", url, *secret, "--tenant", "anna") == said
        del every["anna"]
        assert owners(*secret, "--api-key-file", str(keys)) == every
        assert "nothing of 'anna'" in fleet("rm", url, *secret, "--tenant", "anna", code=2)
        assert "nothing of 'berta, user bo'" in fleet("rm", url, *secret, "--tenant", "berta", "--user", "bo", code=2)
        assert owners(*secret, "--api-key-file", str(keys)) == every


@pytest.mark.usefixtures("patient")
def test_what_a_fleet_stored_before_it_encrypted_is_deleted_too(fleet: Run, tmp_path: Path, key_file: Path) -> None:
    (folder := tmp_path / "store").mkdir()
    url, salt = folder.as_uri(), tenancy.salt(tenancy.POLICIES["key"], tenancy.tenant_of("name", "anna"), None, None)
    for number, encrypt in enumerate((False, True), 1):
        with start(url, key_file, shared_encrypt=encrypt) as runtime:
            ask(runtime, chat("I am anna."), salt=salt, max_tokens=2)
            on_show(runtime, url, number)
    store = open_store(url)
    store.delete([one.name for one in store.objects(TagKeys(FleetKeys.load(key_file)).names.prefix(OWNER))])  # after 15 minutes
    assert sum("/kv/" in one.name for one in store.objects()) > 2
    fleet("rm", url, "--shared-key-file", str(key_file), "--tenant", "anna")
    assert [one.name for one in store.objects() if "/kv/" in one.name] == []


@pytest.mark.usefixtures("patient")
def test_a_user_of_a_tenant_is_deleted_alone(fleet: Run, tmp_path: Path, key_file: Path) -> None:
    (folder := tmp_path / "store").mkdir()
    url, secret = folder.as_uri(), ["--shared-key-file", str(key_file)]
    (keys := tmp_path / "keys.txt").write_text("anna = sk-1\n")
    keys.chmod(0o600)
    runtime = start(url, key_file)
    with serving(runtime, api_keys=Keys(file=keys), isolate="user") as server:
        for user in ({"user": "bo"}, {"user": "cy"}, {}):
            body = {"messages": chat("Who am I?"), "max_tokens": 2, **user}
            server.post("/v1/chat/completions", json=body, headers={"authorization": "Bearer sk-1"}).raise_for_status()
        on_show(runtime, url)

        def left() -> int:
            return sum("/kv/" in one.name for one in open_store(url).objects())

        before = left()
        assert fleet("rm", url, *secret, "--tenant", "anna", "--user", "bo").endswith(f"deleted {before // 3} objects\n")
        assert left() == before * 2 // 3
        assert fleet("rm", url, *secret, "--tenant", "anna").endswith(f"deleted {before // 3} objects\n")
        assert left() == before // 3


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--tenant", "anna"), "--shared-key-file"),
        (("all", "--tenant", "anna"), "headstart fleet ls"),
        ((), "headstart fleet ls"),
        (("all", "--user", "bo"), "headstart fleet ls"),
        (("--user", "bo"), "--user needs --tenant"),
        (("all", "--tenant", ""), "headstart fleet ls"),
        (("--tenant", ""), "must not be empty"),
        (("--tenant", "anna", "--user", ""), "must not be empty"),
    ],
)
def test_what_is_missing_to_delete_a_tenant_is_said(
    fleet: Run, store: FolderStore, options: tuple[str, ...], said: str
) -> None:
    assert said in fleet("rm", store.url, *options, code=2)
    assert len(list(store.objects())) == 4


def test_replicas_divide_their_machine(monkeypatch: pytest.MonkeyPatch, tiny_model: Path) -> None:
    """Fault: each planned with all of the memory, and with processors that the process may not use."""
    monkeypatch.setattr(machine, "memory", lambda *given: 1 << 30)
    monkeypatch.setattr(machine, "cores", lambda: 6)
    weights = tiny_model.stat().st_size
    found = divided(Settings(model=str(tiny_model)), 2, 4)
    assert (found.threads, found.memory) == (3, weights + ((1 << 30) - weights) // 4)
    assert divided(Settings(model="/nowhere.gguf"), 8, 8).memory == (1 << 30) // 8
    given = Settings(model=str(tiny_model), threads=5, memory=6)
    assert divided(given, 2, 4) == given
