"""Memo: what one process has found out about files and engines, for later ones. A JSON file.

What cannot be read is found out again, what cannot be written is not remembered; of two processes that write at once, one wins.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any


def recall(folder: Path | None, name: str) -> dict[str, Any]:
    """What is remembered under a file's name; nothing if that cannot be read. No folder remembers nothing."""
    if folder is None:
        return {}
    try:
        said = json.loads((folder / name).read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}


def remember(folder: Path | None, name: str, known: dict[str, Any]) -> None:
    """Puts this in place of what was remembered."""
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
