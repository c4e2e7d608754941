"""Cache: Hugging Face's folder of downloaded files, as `huggingface_hub` and other programs read and write it.

<hub>/models--OWNER--NAME/blobs/<digest>                     the content of a file, under its hash
                          snapshots/<commit>/<path>          a link to it
                          refs/main                          the latest commit
<hub>/.locks/models--OWNER--NAME/<digest>.lock               held by who downloads it
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headstart.errors import HubError
from headstart.hub.client import is_safe
from headstart.hub.record import folder_name


class HubCache:
    """The folders of one repository in a cache. None need exist."""

    def __init__(self, hub: Path, repo: str) -> None:
        self.hub, self._name = hub, folder_name(repo)
        self.folder = hub / self._name

    def blob(self, digest: str) -> Path:
        """The complete content."""
        return self.folder / "blobs" / digest

    def partial(self, digest: str) -> Path:
        """What headstart has of a content that is not complete. Other programs' partial files have other names."""
        return self.folder / "blobs" / f"{digest}.headstart.incomplete"

    def lock(self, digest: str) -> Path:
        return self.hub / ".locks" / self._name / f"{digest}.lock"

    def snapshot(self, commit: str) -> Path:
        return self.folder / "snapshots" / commit

    def linked(self) -> set[str]:
        """The digests of the contents that a file of a snapshot has."""
        snapshots = self.folder / "snapshots"
        return {os.path.basename(os.readlink(path)) for path in snapshots.glob("*/**/*") if path.is_symlink()}

    def link(self, commit: str, path: str, digest: str) -> Path:
        """Makes the file of a snapshot, a link to its content. Returns it.

        Raises:
            HubError: its name would lead out of the snapshot, or something else has its name.
            OSError: it cannot be made.
        """
        if not is_safe(path):
            raise HubError(f"The hub has a file of the name {path!r:.100}, which is not safe to write.")
        place = self.snapshot(commit) / path
        place.parent.mkdir(parents=True, exist_ok=True)
        if not place.parent.resolve().is_relative_to(self.snapshot(commit).resolve()):
            raise HubError(f"'{place.parent}' leads out of '{self.snapshot(commit)}'; remove that link.")
        target = os.path.relpath(self.blob(digest), place.parent)
        if not (place.is_symlink() and os.readlink(place) == target):
            with _beside(place) as temporary:
                os.symlink(target, temporary)
                os.replace(temporary, place)
        return place

    def set_main(self, commit: str) -> None:
        """Notes the latest commit of the main branch, so that other programs find it without a network."""
        place = self.folder / "refs" / "main"
        place.parent.mkdir(parents=True, exist_ok=True)
        with _beside(place) as temporary:
            temporary.write_text(commit)
            os.replace(temporary, place)


@contextmanager
def _beside(place: Path) -> Iterator[Path]:
    """A name that is free, in the folder of `place`."""
    with tempfile.TemporaryDirectory(prefix=".headstart-", dir=place.parent) as folder:
        yield Path(folder, place.name)
