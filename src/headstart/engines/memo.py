"""Memo: a JSON file with what earlier processes found out about files and engines.

An unreadable memo counts as empty. A memo that cannot be written is given up silently, because it only saves time. If two
processes write at once, the last one wins.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any


def recall(folder: Path | None, name: str) -> dict[str, Any]:
    """The memo of that name; empty if it cannot be read, or if there is no folder."""
    if folder is None:
        return {}
    try:
        known = json.loads((folder / name).read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return known if isinstance(known, dict) else {}


def remember(folder: Path | None, name: str, known: dict[str, Any]) -> None:
    """Replaces the memo of that name."""
    if folder is None:
        return
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{name}.", dir=folder)  # of mode 0600: it may name the user's files
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(known, file, indent=1)
            os.replace(temporary, folder / name)
        except BaseException:
            os.unlink(temporary)
            raise
