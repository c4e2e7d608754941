"""Record: which files of Hugging Face's cache headstart has fetched. Nothing else in that cache is ever deleted.

It is a folder with one small file for each fetched one, so that processes that fetch different files need no common lock. The
name of a cache is a part of the path, because HF_HOME may differ from day to day.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from blake3 import blake3


@dataclass(frozen=True, slots=True)
class Fetched:
    """A file that headstart has fetched, or begun to fetch.

    Attributes:
        repo: `OWNER/NAME`.
        path: the file's path in the repository, with `/`.
        size: bytes of the complete file.
    """

    repo: str
    path: str
    size: int


class FetchRecord:
    """The record of one cache.

    Args:
        state: headstart's folder for state. It need not exist.
        hub: the cache.
    """

    def __init__(self, state: Path, hub: Path) -> None:
        self._folder = state / "fetched" / blake3(os.fsencode(os.path.abspath(hub))).hexdigest(length=8)

    def has(self, repo: str, digest: str) -> bool:
        """Whether headstart has fetched the file of this content, or begun to."""
        return self._path(repo, digest).is_file()

    def all(self) -> list[tuple[str, Fetched]]:
        """Digests and what has them. What cannot be read is left out."""
        found = []
        for path in sorted(self._folder.glob("models--*/*.json")):
            try:
                known = json.loads(path.read_text("utf-8"))
                found.append((path.stem, Fetched(str(known["repo"]), str(known["path"]), int(known["size"]))))
            except (OSError, ValueError, TypeError, KeyError, RecursionError):
                continue
        return found

    def add(self, digest: str, fetched: Fetched) -> None:
        """Notes it, before the first byte is fetched. Raises OSError if it cannot be noted."""
        path = self._path(fetched.repo, digest)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=".", dir=path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(asdict(fetched), file)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise

    def forget(self, repo: str, digest: str) -> None:
        """Removes it, if it is there."""
        path = self._path(repo, digest)
        path.unlink(missing_ok=True)
        for folder in (path.parent, self._folder):
            try:
                folder.rmdir()
            except OSError:
                return  # it has other files

    def _path(self, repo: str, digest: str) -> Path:
        return self._folder / folder_name(repo) / f"{digest}.json"


def folder_name(repo: str) -> str:
    """The folder of a repository in Hugging Face's cache."""
    return f"models--{repo.replace('/', '--')}"
