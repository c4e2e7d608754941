"""Binding: llama.cpp's functions and structures as llama-cpp-python declares them, over the chosen library.

`lib` stands for the module `llama_cpp.llama_cpp`. That module is imported when something of it is first used, so that the
user's library can be named before. A process has one library. A function that the library lacks raises an error when called.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from headstart.engines.llama import work_buffer
from headstart.engines.llama.abi import Abi, AbiError, inspect
from headstart.engines.llama.features import PENALTIES, Feature, lacking
from headstart.engines.llama.library import BINDING, LlamaLibrary, choose, package_folder
from headstart.errors import ConfigError, EngineError
from headstart.names import option

_PACKAGE, _MODULE, _LOADER = "llama_cpp", "llama_cpp.llama_cpp", "llama_cpp._ctypes_extensions"
_GGML = ("libggml-base", "libggml-cpu", "libggml")
_lock = threading.RLock()


@dataclass(frozen=True)
class LoadedLibrary:
    """A library that was loaded and has what its binding declares.

    Attributes:
        module: `llama_cpp.llama_cpp`.
        lacking: features that this build does not have.
        aligned: whether ggml's work buffer begins at a page (`work_buffer`).
    """

    library: LlamaLibrary
    module: ModuleType
    shared: Any
    abi: Abi
    lacking: tuple[Feature, ...]
    aligned: bool = False

    def version(self) -> str:
        """llama.cpp's own version; "" if this build does not say it."""
        found = self.module.llama_version() if hasattr(self.module, "llama_version") and self.has("llama_version") else b""
        return found.decode("utf-8", "replace")

    def has(self, name: str) -> bool:
        """Whether the library has this function."""
        return _has(self.shared, name)

    def function(self, name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
        """A function that llama-cpp-python does not declare, such as one of ggml's. Raises EngineError if there is none."""
        if not self.has(name):
            raise EngineError(f"this build of llama.cpp has no {name}")
        found: Callable[..., Any] = ctypes.CFUNCTYPE(result, *arguments)((name, self.shared))
        return found


class _Shared(ctypes.CDLL):
    """A shared library. An unknown function is one that raises EngineError when it is called."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__"):
                raise
            absent = _Absent(name)
            setattr(self, name, absent)
            return absent


class _Absent:
    """A function that the library does not have. The binding sets its argument types and its documentation."""

    def __init__(self, name: str) -> None:
        self._absent = name

    def __call__(self, *_: Any) -> Any:
        raise EngineError(f"this build of llama.cpp has no {self._absent}")


class _Lib:
    """The module of the binding. What was used once is an ordinary attribute."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = getattr(ready().module, name)
        setattr(self, name, value)
        return value


lib: Any = _Lib()
"""The module `llama_cpp.llama_cpp`, over the chosen library. The first use may raise ConfigError, as `ready` does."""
_loaded: LoadedLibrary | None = None


def ready(named: Path | None = None) -> LoadedLibrary:
    """The library, which is loaded and checked if it was not before.

    Args:
        named: the user's library or its folder; None for the one that is loaded, or that `library.choose` finds.

    Raises:
        ConfigError: there is no usable library, or this process has already loaded another one.
    """
    global _loaded
    with _lock:
        if _loaded is None:
            _loaded = _load(choose(named))
        elif named is not None and (wanted := choose(named)).file.resolve() != _loaded.library.file.resolve():
            raise ConfigError(
                f"This process uses the {_loaded.library}, and cannot load '{wanted.file}' too: start another process for it, "
                f"or give {option('llama_lib')} to the first model."
            )
        return _loaded


def ready_if_tested() -> None:
    """Loads the library that `ready` would choose, if it was tested: any other is first proved in a process of its own.

    Raises:
        ConfigError: as `ready` does.
    """
    if choose().tested:
        ready()


def loaded() -> LoadedLibrary | None:
    """The library, if this process has loaded one."""
    return _loaded


def _load(library: LlamaLibrary) -> LoadedLibrary:
    try:
        module = _import(library)
        shared = module._lib
    except OSError as error:
        remedy = f"name llama.cpp's libllama in {option('llama_lib')}, or leave it out" if library.users else _remedy(library)
        raise ConfigError(f"llama.cpp cannot be loaded from the {library} ({error}): {remedy}.") from error
    except (ImportError, RuntimeError, AttributeError, EngineError) as error:
        raise ConfigError(f"llama.cpp cannot be loaded from the {library} ({error}): {_remedy(library)}.") from error
    if Path(shared._name).resolve() != library.file.resolve():
        raise ConfigError(f"This process has loaded llama.cpp from '{shared._name}' before: import headstart first.")
    without = tuple(lacking(lambda name: _has(shared, name) and (not name.startswith("llama_") or hasattr(module, name))))
    if needed := [feature for feature in without if not feature.without]:
        functions = [name for feature in needed for name in feature.functions if not _has(shared, name)]
        names = ", ".join(feature.name for feature in needed)
        raise ConfigError(
            f"The {library} lacks {names} ({', '.join(functions[:3]) or 'not declared by the binding'}): {_remedy(library)}."
        )
    try:
        abi = inspect(module)
    except AbiError as error:
        raise ConfigError(
            f"The {library} differs from what {BINDING} {library.binding} declares: {error}; {_remedy(library)}."
        ) from error
    if abi.penalise is None:
        without = (*without, *({PENALTIES} - {*without}))
    found = LoadedLibrary(library, module, shared, abi, without)
    _load_backends(found)
    return replace(found, aligned=work_buffer.align())


def _import(library: LlamaLibrary) -> ModuleType:
    """Imports the binding over this library. The package's loader is replaced, because it takes no path of a file."""
    if (imported := sys.modules.get(_MODULE)) is not None:
        return imported
    if library.users:
        _preload(library.folder)
    # `_ctypes_extensions` cannot be imported without its package, whose own import loads the library.
    package = ModuleType(_PACKAGE)
    package.__path__ = [str(package_folder())]
    previous = sys.modules.get(_PACKAGE)
    sys.modules[_PACKAGE] = package
    try:
        loader = import_module(_LOADER)
    finally:
        del sys.modules[_PACKAGE]
        if previous is not None:
            sys.modules[_PACKAGE] = previous
    original = loader.load_shared_library

    def load(name: str, folder: Path) -> Any:
        if name == "llama":
            return _Shared(str(library.file))
        return original(name, library.folder if library.users else folder)

    loader.load_shared_library = load  # type: ignore[attr-defined]
    try:
        return import_module(_MODULE)
    finally:
        loader.load_shared_library = original  # type: ignore[attr-defined]


def _preload(folder: Path) -> None:
    """Loads ggml's libraries from this folder, so that those of llama.cpp are found wherever it was built."""
    ending = ".dylib" if sys.platform == "darwin" else ".so"
    for name in _GGML:
        if (file := folder / (name + ending)).is_file():
            ctypes.CDLL(str(file))


def _load_backends(found: LoadedLibrary) -> None:
    """Builds with backends as plug-ins, such as llama.cpp's releases, load none by themselves."""
    count = found.function("ggml_backend_dev_count", ctypes.c_size_t)
    if count() == 0 and found.has("ggml_backend_load_all_from_path"):
        found.function("ggml_backend_load_all_from_path", None, ctypes.c_char_p)(os.fsencode(found.library.folder))


def _has(shared: Any, name: str) -> bool:
    return not isinstance(getattr(shared, name, None), _Absent | None)


def _remedy(library: LlamaLibrary) -> str:
    if not library.users:
        return f"install {BINDING} again, or name another library in {option('llama_lib')}"
    return (
        f"build it from the llama.cpp in {BINDING} {library.binding} (vendor/llama.cpp), install the {BINDING} that was made "
        f"for it, or leave out {option('llama_lib')}"
    )
