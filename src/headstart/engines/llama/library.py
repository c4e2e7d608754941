"""Library: which shared library of llama.cpp is used, and what its build is.

It is the user's own (`llama_lib`, or a folder in LLAMA_CPP_LIB_PATH), or the one that llama-cpp-python brings. llama-cpp-python
declares the functions and structures in every case: that is the *binding*.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from blake3 import blake3

from headstart.engines.digest import digest
from headstart.errors import ConfigError
from headstart.names import as_variable, option
from headstart.paths import expanded, is_file, is_folder

BINDING = "llama-cpp-python"
OLDEST = "0.3.26"
"""The oldest version of llama-cpp-python that is taken."""
TESTED = ("0.3.26", "0.3.36")
"""Versions whose own library has passed all tests. The first load with any other library is proved in a process of its own."""
_FOLDER = "LLAMA_CPP_LIB_PATH"  # llama-cpp-python's own variable
_NAMES = ("libllama.dylib", "libllama.so") if sys.platform == "darwin" else ("libllama.so", "llama.dll", "libllama.dll")
_BACKENDS = {"base", "cpu"}  # parts of ggml that compute without another library
_PARTS = ("libggml", "libllama", "ggml", "llama")


@dataclass(frozen=True)
class LlamaLibrary:
    """A library of llama.cpp that exists as a file. Nothing of it has been loaded.

    Attributes:
        file: the shared library. Those of ggml are beside it, unless it contains them.
        users: whether the user named it.
        binding: version of llama-cpp-python, which declares what is in the library.
    """

    file: Path
    users: bool
    binding: str

    @property
    def folder(self) -> Path:
        return self.file.parent

    @property
    def tested(self) -> bool:
        """Whether all tests passed with it. None were done with a GPU or a BLAS."""
        backends = {path.name.split(".")[0].removeprefix("libggml-") for path in self.folder.glob("libggml-*")}
        return not self.users and self.binding in TESTED and backends <= _BACKENDS

    @cached_property
    def build(self) -> str:
        """Digest of the library and of ggml's beside it: another compiler may round differently.

        Raises:
            OSError: a file cannot be read.
        """
        files = {path.resolve() for path in self.folder.iterdir() if path.name.startswith(_PARTS) and path.is_file()}
        hasher = blake3()
        for path in sorted(files | {self.file.resolve()}):
            hasher.update(digest(path))
        return hasher.hexdigest()

    def __str__(self) -> str:
        return f"library '{self.file}'" if self.users else f"library of {BINDING} {self.binding}"


def choose(named: Path | None = None) -> LlamaLibrary:
    """The library to use.

    Args:
        named: the user's: a file, or the folder that has it. None for the one that the environment names, or
            llama-cpp-python's.

    Raises:
        ConfigError: there is no such file, or no llama-cpp-python.
    """
    binding = binding_version()
    if named is None and (value := os.environ.get(as_variable("llama_lib"))):
        named = Path(value)
    if named is not None:
        return LlamaLibrary(_find(expanded(named), option("llama_lib")), True, binding)
    if folder := os.environ.get(_FOLDER):
        return LlamaLibrary(_find(Path(folder), _FOLDER), True, binding)
    package = package_folder() / "lib"
    for name in _NAMES:
        if (file := package / name).is_file():
            return LlamaLibrary(file, False, binding)
    raise ConfigError(
        f"llama.cpp cannot be loaded (there is no library in '{package}'): install {BINDING} again, or name a library in "
        f"{option('llama_lib')} or its folder in {_FOLDER}."
    )


def binding_version() -> str:
    """The version of llama-cpp-python. Raises ConfigError if it is not installed."""
    try:
        return version(BINDING)
    except PackageNotFoundError:
        raise ConfigError(f"{BINDING} is not installed: pip install '{BINDING}>={OLDEST}'.") from None


def package_folder() -> Path:
    """The folder of llama-cpp-python. Raises ConfigError if it is not installed."""
    spec = importlib.util.find_spec("llama_cpp")
    folders = spec.submodule_search_locations if spec is not None else None
    if not folders:
        raise ConfigError(f"{BINDING} is not installed: pip install '{BINDING}>={OLDEST}'.")
    return Path(next(iter(folders)))


def child_environment() -> dict[str, str]:
    """The environment of a Python process that shall find the same packages as this one."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def _find(path: Path, source: str) -> Path:
    """The library that a path of the user means. `source` names where the path comes from."""
    if is_folder(path):
        for name in _NAMES:
            if (file := path / name).is_file():
                return file.absolute()
        raise ConfigError(f"There is no {_NAMES[0]} in the folder '{path}': correct {source}, or leave it out.")
    if not is_file(path):
        raise ConfigError(f"There is no library '{path}': correct {source}, or leave it out.")
    return path.absolute()
