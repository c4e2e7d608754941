"""`headstart doctor --report`: what an issue needs, without what its author may not show."""

from __future__ import annotations

from pathlib import Path

import pytest

from headstart.cli.report import _without_paths, report
from headstart.config import Settings
from headstart.tiers.shared.keys import FleetKeys
from headstart.version import __version__
from process import Here

SMALL = ("--ctx", "512", "--slots", "1", "--threads", "1", "--memory-budget", "16MiB")


def lines_of(text: str) -> dict[str, str]:
    return dict(line.split(": ", 1) for line in text.splitlines())


def test_it_has_versions_facts_and_settings(tiny_model: Path, here: Here) -> None:
    result = here("doctor", str(tiny_model), *SMALL, "--report", HEADSTART_REUSE="exact")
    assert result.returncode == 0, result.stderr
    found = lines_of(result.stdout)
    assert found["headstart"] == __version__
    assert {"Python", "llama-cpp-python", "machine", "instructions", "model", "engine", "proof"} <= found.keys()
    assert (found["ctx"], found["memory_budget"], found["HEADSTART_REUSE"]) == ("512", str(16 << 20), "exact")
    assert found["file"] == tiny_model.name


def test_it_has_no_keys_and_no_folders(tiny_model: Path, here: Here) -> None:
    secret = {
        "HEADSTART_API_KEY": "sk-secret",
        "HEADSTART_ALIAS": "acme-secret",
        "HEADSTART_API_KEY_FILE": "/home/jo/secret.keys",
    }
    result = here("doctor", str(tiny_model), *SMALL, "--report", **secret)
    assert result.returncode == 0, result.stderr
    found = lines_of(result.stdout)
    assert [found[name] for name in secret] == ["(set)"] * 3
    assert "secret" not in result.stdout
    assert str(tiny_model.parent) not in result.stdout


def test_of_an_address_it_has_the_scheme_only(tiny_model: Path, here: Here) -> None:
    """Fault: it showed the password of the shared store, and hosts and buckets."""
    addresses = (
        ("valkey://:hunter2@db.secret:6379", "valkey://…"),
        ("s3://secret?endpoint=http://jo:hunter2@s3.secret", "s3://…"),
        ("secret-hunter2", "(set)"),
    )
    for address, shown in addresses:
        result = here("doctor", str(tiny_model), *SMALL, "--report", HEADSTART_SHARED=address)
        found = lines_of(result.stdout)
        assert (found["HEADSTART_SHARED"], found["shared"]) == (shown, shown)
        assert "secret" not in result.stdout + result.stderr
        assert "hunter2" not in result.stdout + result.stderr


def test_the_store_that_a_loaded_model_uses_is_named_by_its_scheme(tmp_path: Path, tiny_model: Path, here: Here) -> None:
    FleetKeys.generate().save(keys := tmp_path / "keys")
    (folder := tmp_path / "secret").mkdir()
    result = here("doctor", str(tiny_model), *SMALL, "--report", "--shared", folder.as_uri(), "--shared-key-file", str(keys))
    assert result.returncode == 0, result.stderr
    assert lines_of(result.stdout)["shared store"].startswith("file://…, ")
    assert "secret" not in result.stdout


@pytest.mark.parametrize("folder", ["jane/models", "jane doe/my models", "jane's, or: (other) models/.here"])
@pytest.mark.parametrize("relative", [False, True])
def test_no_folder_of_a_model_is_named(folder: str, relative: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: of a folder with blanks in its name the words behind the first one were shown."""
    model = tmp_path / folder / "bad.gguf"
    model.parent.mkdir(parents=True)
    model.write_bytes(b"GGUF, but nothing else")
    if relative:
        monkeypatch.chdir(tmp_path)
    for name in ("bad.gguf", "none.gguf", "bad-00002-of-00003.gguf"):
        given = model.relative_to(tmp_path if relative else "/").with_name(name)
        path = str(given if relative else "/" / given)
        lines, good = report(Settings(model=path, state_dir=tmp_path / "state of jane"))
        said = dict(lines)["model"]
        assert not good
        assert name in said
        assert not [word for word in ("jane", "models", "other", "here'", tmp_path.name) if word in str(lines)], said


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("'/home/jane doe/my models/a.gguf' is bad", "'…/a.gguf' is bad"),
        ("Cannot read ~/my models/a.gguf: use b/c", "Cannot read …/a.gguf: use b/c"),
        ("/a/b.so or /c d/e.so", "…/b.so or …/e.so"),
        ("64 / 512 tokens/s", "64 / 512 tokens/s"),
    ],
)
def test_other_folders_are_left_out_too(text: str, shown: str) -> None:
    assert _without_paths(text, []) == shown


def test_a_model_that_cannot_be_loaded_is_part_of_the_report(tmp_path: Path, here: Here) -> None:
    model = tmp_path / "broken.gguf"
    model.write_bytes(b"GGUF, but nothing else")
    result = here("doctor", str(model), *SMALL, "--report")
    assert result.returncode == 2
    found = lines_of(result.stdout)
    assert found["headstart"] == __version__
    assert found["model"].startswith("broken.gguf cannot be loaded: ")
    assert str(tmp_path) not in result.stdout
