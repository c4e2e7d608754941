"""Which library of llama.cpp is used."""

from __future__ import annotations

from pathlib import Path

import pytest

from headstart.engines.llama import library
from headstart.engines.llama.library import choose
from headstart.errors import ConfigError
from libraries import ENDING


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HEADSTART_LLAMA_LIB", "LLAMA_CPP_LIB_PATH"):
        monkeypatch.delenv(name, raising=False)


def folder_of(path: Path) -> Path:
    path.mkdir()
    (path / f"libllama{ENDING}").write_bytes(path.name.encode())
    return path


def test_without_a_name_it_is_the_one_of_the_package() -> None:
    found = choose()
    assert not found.users
    assert found.file.parent.parent.name == "llama_cpp"


def test_the_option_comes_before_the_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given, variable, bindings = (folder_of(tmp_path / name) for name in "abc")
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(bindings))
    assert choose().folder == bindings
    monkeypatch.setenv("HEADSTART_LLAMA_LIB", str(variable))
    assert choose().folder == variable
    assert choose(given).folder == given
    assert choose(given / f"libllama{ENDING}") == choose(given)
    assert choose().users


@pytest.mark.parametrize("source", ["HEADSTART_LLAMA_LIB", "LLAMA_CPP_LIB_PATH"])
def test_a_wrong_path_is_named_with_its_source(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(source, str(tmp_path))
    with pytest.raises(ConfigError) as caught:
        choose()
    assert str(tmp_path) in caught.value.with_flags
    assert ("--llama-lib" if source.startswith("HEADSTART") else source) in caught.value.with_flags


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"There is no library '/nowhere/libllama\.so'"):
        choose(Path("/nowhere/libllama.so"))


def test_a_build_is_told_by_all_its_libraries(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "a")
    before = choose(folder).build
    (folder / "other.txt").write_bytes(b"not of llama.cpp")
    assert choose(folder).build == before
    (folder / f"libggml-cpu{ENDING}").write_bytes(b"code")
    assert choose(folder).build != before


def test_only_the_packages_own_library_is_tested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "binding_version", lambda: library.TESTED[0])
    assert choose().tested
    assert not choose(folder_of(tmp_path / "a")).tested
    monkeypatch.setattr(library, "binding_version", lambda: "99.0")
    assert not choose().tested


@pytest.mark.parametrize("backend", ["cuda", "blas"])
def test_a_build_with_another_library_is_not_tested(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: one with a BLAS was, though the system may change that library at any time."""
    monkeypatch.setattr(library, "binding_version", lambda: library.TESTED[0])
    monkeypatch.setattr(library, "package_folder", lambda: tmp_path)
    folder = folder_of(tmp_path / "lib")
    (folder / f"libggml-cpu{ENDING}").write_bytes(b"code")
    assert choose().tested
    other = folder / f"libggml-{backend}{ENDING}"
    other.write_bytes(b"code")
    assert not choose().tested
