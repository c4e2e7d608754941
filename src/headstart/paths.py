"""Paths as people write them. `pathlib` raises for some of them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from platformdirs import user_state_path


def expanded(path: str | os.PathLike[str]) -> Path:
    """The path, with a folder for a leading `~`. One of an unknown user stays as it is."""
    return Path(os.path.expanduser(path))


def default_state_dir(environment: Mapping[str, str] | None = None) -> Path:
    """This platform's folder for programs' state, or HEADSTART_STATE_DIR of an environment; by default of this process."""
    named = os.environ if environment is None else environment
    return expanded(named.get("HEADSTART_STATE_DIR") or user_state_path("headstart"))


def is_file(path: str | os.PathLike[str]) -> bool:
    """Whether there is such a file that can be reached. No name is too long."""
    return os.path.isfile(path)


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Whether there is such a folder that can be reached. No name is too long."""
    return os.path.isdir(path)
