"""Paths as people write them. `pathlib` raises for some of them."""

from __future__ import annotations

import os
from pathlib import Path


def expanded(path: str | os.PathLike[str]) -> Path:
    """The path, with a folder for a leading `~`. One of an unknown user stays as it is."""
    return Path(os.path.expanduser(path))


def is_file(path: str | os.PathLike[str]) -> bool:
    """Whether there is such a file that can be reached. No name is too long."""
    return os.path.isfile(path)


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Whether there is such a folder that can be reached. No name is too long."""
    return os.path.isdir(path)
