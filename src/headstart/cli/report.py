"""Report: what an issue about headstart needs, without private data.

It has versions, facts about the machine and the model, and settings. It has no prompts, replies, keys, addresses or names of
folders.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from headstart.config import SETTINGS, Settings
from headstart.errors import HeadstartError
from headstart.names import as_variable
from headstart.paths import expanded, is_folder
from headstart.version import __version__

PACKAGES = ("llama-cpp-python", "llguidance", "fastapi", "uvicorn", "pydantic", "jinja2", "numpy")
"""Packages whose version often decides whether a fault can be reproduced."""

PREFIX = "HEADSTART_"
ADDRESSES = {name for name, row in SETTINGS.items() if row.kind.is_address}
"""Settings whose values can contain a password. Of them the report shows only the scheme."""
SHOWN = {as_variable(name) for name, row in SETTINGS.items() if not row.kind.is_path and name not in ADDRESSES}
SHOWN |= {PREFIX + name for name in ("ISOLATE", "KEEP_NOISE", "LOG_FORMAT", "NO_DISK", "REPORT", "SECONDS")}
"""Variables whose values are numbers or one of a few words. For others the report shows only that they are set."""
LIBRARY = ("LLAMA_CPP_LIB_PATH", "CMAKE_ARGS", "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
"""Other variables that change what the engine computes or how fast. For paths the report shows only that they are set."""

ReportLine = tuple[str, str]


def report(settings: Settings) -> tuple[list[ReportLine], bool]:
    """The report as topics with their texts, and whether the model could be loaded.

    Args:
        settings: for loading the model. Nothing is stored, and nothing is compared.
    """
    from headstart.cli.doctor import engine_build, machine

    good, folders = True, _folders(settings)
    try:
        model = list(_model(settings, folders))
    except HeadstartError as error:
        why = _without_paths(error.with_flags, folders)
        good, model = False, [("model", f"{_name(settings.model)} cannot be loaded: {why}")]
    build = ((topic, _without_paths(text, folders)) for topic, text in engine_build())
    return [*_versions(), *machine(), *build, *_settings(settings), *_variables(os.environ), *model], good


def _versions() -> Iterator[ReportLine]:
    yield "headstart", __version__
    yield "Python", f"{platform.python_version()} ({platform.python_implementation()})"
    for name in PACKAGES:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            yield name, "not installed"


def _settings(settings: Settings) -> Iterator[ReportLine]:
    """The settings that differ from the defaults."""
    plain = Settings()
    for field in fields(settings):
        value = getattr(settings, field.name)
        if field.name in ADDRESSES and value is not None:
            yield field.name, _scheme(value)
        elif field.name != "model" and value != getattr(plain, field.name):
            folder = SETTINGS[field.name].kind.metavar == "FOLDER" or (isinstance(value, Path) and is_folder(value))
            yield field.name, "(set)" if folder else _name(value) if isinstance(value, str | Path) else str(value)


def _variables(environment: Mapping[str, str]) -> Iterator[ReportLine]:
    addresses = {as_variable(name) for name in ADDRESSES}
    for name in sorted(environment):
        if name in addresses:
            yield name, _scheme(environment[name])
        elif name.startswith(PREFIX):
            yield name, environment[name] if name in SHOWN else "(set)"
        elif name in LIBRARY:
            yield name, "(set)" if "/" in environment[name] else environment[name]


def _model(settings: Settings, folders: Sequence[str]) -> Iterator[ReportLine]:
    from headstart.cli.console import facts, loading
    from headstart.library.headstart import load

    with loading(settings.model) as progress, load(settings, progress).runtime as runtime:
        for topic, text in facts(runtime).items():
            if settings.shared is not None:
                text = text.replace(settings.shared, _scheme(settings.shared))
            yield topic, _name(text) if topic == "file" else _without_paths(text, folders)


def _name(path: str | Path) -> str:
    """A file's name without its folder."""
    return Path(path).name


def _scheme(address: str) -> str:
    """An address without anything private: it can name a host, a bucket, a folder, a user and a password."""
    scheme = re.match(r"[a-z0-9]+://", address)
    return f"{scheme[0]}…" if scheme else "(set)"


def _folders(settings: Settings) -> list[str]:
    """The folders that are known: the home, the current one, and those of the settings. Inner ones come first."""
    values = [getattr(settings, name) for name, row in SETTINGS.items() if row.kind.is_path]
    found = {expanded("~"), Path.cwd()}
    for path in [Path(settings.model), *(value for value in values if isinstance(value, Path))]:
        for form in (path, expanded(path), expanded(path).absolute(), Path(os.path.realpath(expanded(path)))):
            found |= {form, form.parent}
    return sorted((str(folder) for folder in found if folder.name), key=len, reverse=True)


def _without_paths(text: str, folders: Sequence[str]) -> str:
    """A text without the folders of its paths, which can contain names of people.

    Args:
        folders: those that are known. Others are found if their names have no quotation mark, comma, colon or semicolon.
    """
    for folder in folders:
        text = re.sub(rf"(?<![\w./]){re.escape(folder)}/", "…/", text)
    return re.sub(r"(?<![\w.])(?:~|…)?/(?:[^\s/:;,'\"](?:[^/:;,'\"\n]*[^\s/:;,'\"])?/)+", "…/", text)
