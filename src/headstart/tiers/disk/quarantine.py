"""Quarantine: a folder of bad objects (corrupt, truncated, foreign), kept for inspection."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from pathlib import Path

from headstart.tiers.disk import files

KEPT = 4
"""Most objects that are kept: the latest ones."""


class Quarantine:
    """A folder of bad objects. They are deleted when their space is needed. All methods raise OSError."""

    def __init__(self, folder: Path) -> None:
        files.make(folder)
        self.folder = folder

    @property
    def used(self) -> int:
        """Bytes that it occupies."""
        return files.occupied(self.folder)

    def take(self, object: Path) -> None:
        """Moves an object into the folder, if it exists."""
        with contextlib.suppress(FileNotFoundError):
            os.replace(object, self.folder / object.name)
        self.tidy(KEPT)

    def drop(self, names: Collection[str], before: float) -> None:
        """Deletes objects with these names, and all objects written up to `before`."""
        for path in self.folder.iterdir():
            if path.name in names or path.stat().st_mtime <= before:
                path.unlink(missing_ok=True)

    def empty(self) -> int:
        """Deletes all objects; returns how many. It also raises if one stays: it may be a part of a deleted chain."""
        held = len(list(self.folder.iterdir()))
        files.empty(self.folder)
        return held

    def tidy(self, keep: int) -> None:
        """Deletes all but the latest `keep` objects, as far as possible."""
        for path in sorted(self.folder.iterdir(), key=lambda path: -path.stat().st_ctime_ns)[keep:]:
            with contextlib.suppress(OSError):
                path.unlink()
