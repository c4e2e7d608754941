"""Client: what is asked of a hub. Sessions, tokens and errors are those of `huggingface_hub`, which is loaded when one is made.

Each request names headstart and its version, and nothing else about this machine. The hub's own client also says which packages
and which agent it runs in.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from headstart.errors import HubError
from headstart.hub.variants import WeightFile
from headstart.version import __version__

if TYPE_CHECKING:
    import httpx2

_COMMIT = re.compile(r"[0-9a-f]{40}")
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_ODD = re.compile(r'[\x00-\x1f\x7f\\:*?"<>|]')
_MOST_PATH, _MOST_NAME = 1024, 200
_USER = re.compile(r"(?<=://)[^/]*@")
_TIMEOUT = 30.0
"""Seconds without a byte after which a connection is given up."""
SLICE = 8 << 30
"""Most bytes of one request. Content delivery networks refuse answers above 50 GB."""


class Interrupted(Exception):
    """The connection broke, or the hub is busy: another attempt may succeed."""

    quotes = False


@dataclass(frozen=True, slots=True)
class Repository:
    """What a hub says of a repository.

    Attributes:
        repo: `OWNER/NAME`.
        commit: the latest one of its main branch, 40 hexadecimal digits.
        files: those whose names are safe and whose content has a known size and hash.
    """

    repo: str
    commit: str
    files: tuple[WeightFile, ...]


@dataclass(frozen=True, slots=True)
class HubContent:
    """The bytes of a file from `start` on. `start` is 0 if the hub cannot continue a file."""

    start: int
    chunks: Iterator[bytes]


class HubClient:
    """The hub that HF_ENDPOINT names, by default huggingface.co.

    Attributes:
        endpoint: its address as it may be shown: without a user and a password, which HF_ENDPOINT may have.

    Raises:
        HubError: HF_HUB_OFFLINE is set, or HF_ENDPOINT is no address.
    """

    def __init__(self) -> None:
        _check_address(os.environ.get("HF_ENDPOINT") or "")  # before the import, which reads it
        from huggingface_hub import constants, get_token

        self._address = (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")
        self.endpoint = _USER.sub("", self._address)
        if offline() or constants.HF_HUB_OFFLINE:
            raise HubError("HF_HUB_OFFLINE is set, so nothing is fetched: unset it.")
        token = None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()
        self._headers = {"user-agent": f"headstart/{__version__}"}
        if token:
            self._headers["authorization"] = f"Bearer {token}"

    def page(self, repo: str) -> str:
        """The address of a repository's page."""
        return f"{self.endpoint}/{repo}"

    def repository(self, repo: str) -> Repository:
        """Asks for the files of a repository.

        Raises:
            HubError: it is not there, may not be read, or the hub cannot be reached.
        """
        import httpx2
        from huggingface_hub import get_session, hf_raise_for_status

        url = f"{self._address}/api/models/{repo}"
        try:
            answer = get_session().get(url, params={"blobs": "true"}, headers=self._headers, timeout=_TIMEOUT)
            hf_raise_for_status(answer)
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise self._explained(error, repo) from None
        try:
            known = answer.json()
            commit = str(known["sha"])
            files = [found for entry in known["siblings"] if (found := _file(entry)) is not None]
        except (ValueError, TypeError, KeyError, RecursionError):
            commit, files = "", []
        if not _COMMIT.fullmatch(commit):
            raise HubError(f"{self.endpoint} does not answer like a hub; check HF_ENDPOINT.")
        return Repository(repo, commit, tuple(files))

    @contextmanager
    def content(self, repository: Repository, file: WeightFile, start: int) -> Iterator[HubContent]:
        """Asks for a file's bytes from `start` on, at most `SLICE` of them.

        Raises:
            Interrupted: the connection broke, also while chunks are read.
            HubError: the hub refuses.
        """
        import httpx2
        from huggingface_hub import get_session, hf_raise_for_status

        url = f"{self._address}/{repository.repo}/resolve/{repository.commit}/{quote(file.path)}"
        stop = min(file.size, start + SLICE)
        headers = self._headers | {"accept-encoding": "identity", "range": f"bytes={start}-{stop - 1}"}
        try:
            with get_session().stream("GET", url, headers=headers, timeout=_TIMEOUT) as answer:
                if answer.status_code >= 400:
                    answer.read()
                hf_raise_for_status(answer)
                # A server that does not know ranges sends the whole file.
                begins = start if answer.headers.get("content-range", "").startswith(f"bytes {start}-") else 0
                yield HubContent(begins, answer.iter_bytes())
        except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError) as error:
            explained = self._explained(error, repository.repo)
            if _is_passing(error):
                raise Interrupted(str(explained)) from None
            raise explained from None

    def _explained(self, error: Exception, repo: str) -> HubError:
        """The error in one line, with the remedy."""
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

        status = _status(error)
        token = "HF_TOKEN" if "authorization" in self._headers else "HF_TOKEN (it is not set)"
        if isinstance(error, GatedRepoError) or status == 403:
            return HubError(
                f"{repo} is gated: accept its terms at {self.page(repo)}, and put a token of the same account into {token}."
            )
        if isinstance(error, RepositoryNotFoundError) or status in (401, 404):
            return HubError(
                f"{self.endpoint} has no {repo}, or shows it to its members only: check the name at {self.page(repo)}; a "
                f"private or gated repository needs a token in {token}."
            )
        if status == 429:
            return HubError(f"{self.endpoint} asks to wait (429): try again later, or put a token into {token}.")
        if status is not None:
            return HubError(f"{self.endpoint} answers with an error ({status}); try again later.")
        reason = " ".join(str(error).replace(self._address, self.endpoint).split()) or type(error).__name__
        return HubError(f"{self.endpoint} cannot be reached ({reason:.200}); check the network and HF_ENDPOINT.")


def _check_address(address: str) -> None:
    """Raises HubError if it is no address of a hub. The message does not quote it: it may have a password."""
    try:
        parts = urlsplit(address)
        fine = not address or (parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0)
    except ValueError:
        fine = False
    if not fine:
        raise HubError("HF_ENDPOINT is no address of a hub: set it to one like https://huggingface.co, or unset it.")


def offline() -> bool:
    """Whether the environment forbids to ask a hub."""
    named = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return named.upper() in ("1", "ON", "YES", "TRUE")


def is_safe(path: str) -> bool:
    """Whether a file of this name stays in the folder of its repository, on every platform, and can be shown on a terminal."""
    parts = path.split("/")
    if len(path) > _MOST_PATH or _ODD.search(path) or not path.isprintable():
        return False
    return all(part and part.strip(" .") and len(part.encode()) <= _MOST_NAME for part in parts)


def _file(entry: Any) -> WeightFile | None:
    """A file of a repository's list; None if it cannot be fetched and checked."""
    path, size = entry["rfilename"], entry.get("size")
    digest = (entry.get("lfs") or {}).get("sha256") or entry.get("blobId")
    if not isinstance(path, str) or not isinstance(size, int) or not isinstance(digest, str):
        return None
    return WeightFile(path, size, digest) if size > 0 and is_safe(path) and _DIGEST.fullmatch(digest) else None


def _status(error: Exception) -> int | None:
    response: httpx2.Response | None = getattr(error, "response", None)
    return None if response is None else response.status_code


def _is_passing(error: Exception) -> bool:
    """Whether another attempt may succeed."""
    import httpx2

    status = _status(error)
    if status is None:
        return isinstance(error, httpx2.TransportError)
    return status in (408, 429) or status >= 500
