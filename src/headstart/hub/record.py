"""Record: which files of Hugging Face's cache headstart has fetched, or was asked to fetch when another program had done so.

Only the former are ever deleted.

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
        own: whether its content is headstart's. If not, another program had fetched it before headstart was asked to.
    """

    repo: str
    path: str
    size: int
    own: bool = True


class FetchRecord:
    """The record of one cache.

    Args:
        state: headstart's folder for state. It need not exist.
        hub: the cache.
    """

    def __init__(self, state: Path, hub: Path) -> None:
        self._folder = state / "fetched" / blake3(os.fsencode(os.path.abspath(hub))).hexdigest(length=8)

    def get(self, repo: str, digest: str) -> Fetched | None:
        """What is noted of the file of this content; None if nothing is."""
        return _read(self._path(repo, digest))

    def has(self, repo: str, digest: str) -> bool:
        """Whether headstart has fetched the file of this content, or begun to."""
        found = self.get(repo, digest)
        return found is not None and found.own

    def all(self) -> list[tuple[str, Fetched]]:
        """Digests and what headstart has fetched, or begun to, with them. What cannot be read is left out."""
        noted = ((path.stem, _read(path)) for path in sorted(self._folder.glob("models--*/*.json")))
        return [(digest, fetched) for digest, fetched in noted if fetched is not None and fetched.own]

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


def _read(path: Path) -> Fetched | None:
    try:
        known = json.loads(path.read_text("utf-8"))
        return Fetched(str(known["repo"]), str(known["path"]), int(known["size"]), bool(known.get("own", True)))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def folder_name(repo: str) -> str:
    """The folder of a repository in Hugging Face's cache."""
    return f"models--{repo.replace('/', '--')}"
