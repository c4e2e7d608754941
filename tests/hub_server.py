"""A hub of our own: it speaks what headstart asks of Hugging Face's, with files of the test's, faults on demand, and a log."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

COMMIT = "1234567890abcdef1234567890abcdef12345678"


@dataclass
class HubRepo:
    """A repository.

    Attributes:
        files: contents by path.
        small: paths of files that are stored in git, so that their hash is git's.
        private, gated: who may read it: members with a token; who has accepted its terms.
        digests, sizes: what the hub says, where that is wrong.
    """

    files: dict[str, bytes]
    commit: str = COMMIT
    small: set[str] = field(default_factory=set)
    private: bool = False
    gated: bool = False
    digests: dict[str, str] = field(default_factory=dict)
    sizes: dict[str, Any] = field(default_factory=dict)

    def entry(self, path: str) -> dict[str, Any]:
        data = self.files[path]
        known: dict[str, Any] = {"rfilename": path, "size": self.sizes.get(path, len(data))}
        blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        if path in self.small:
            return known | {"blobId": self.digests.get(path, blob)}
        digest = self.digests.get(path, hashlib.sha256(data).hexdigest())
        return known | {"blobId": blob, "lfs": {"sha256": digest, "size": len(data), "pointerSize": 134}}


@dataclass
class HubFaults:
    """What is wrong with contents. A request reads each of these once, when it begins.

    Attributes:
        cut: bytes of one answer after which the connection breaks; None for none.
        stall: as `cut`, but the connection stays, and nothing more comes until `resume` is set.
        statuses: of the next requests, in place of an answer.
        ranges: whether parts of a file can be asked for.
        pause: seconds before each 64 KiB.
    """

    cut: int | None = None
    stall: int | None = None
    statuses: list[int] = field(default_factory=list)
    ranges: bool = True
    pause: float = 0.0
    resume: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True)
class HubRequest:
    path: str
    range: str
    token: str
    agent: str


class HubServer:
    """The hub, and a second host that sends contents, to which the first one leads."""

    def __init__(self) -> None:
        self.repos: dict[str, HubRepo] = {}
        self.faults = HubFaults()
        self.requests: list[HubRequest] = []
        self.token = "hf_secret"
        self.sent = 0
        """Bytes of contents."""
        self._servers = [_Server(("127.0.0.1", 0), _handler(self)) for _ in range(2)]
        for server in self._servers:
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._servers[0].server_address[1]}"

    @property
    def contents_url(self) -> str:
        return f"http://127.0.0.1:{self._servers[1].server_address[1]}"

    def contents(self) -> list[HubRequest]:
        """The requests for contents, at the second host."""
        return [request for request in self.requests if request.path.startswith("/contents/")]

    def close(self) -> None:
        self.faults.resume.set()
        for server in self._servers:
            server.shutdown()
            server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that leaves is no error here."""


def _handler(hub: HubServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            headers = self.headers
            token = (headers["authorization"] or "").removeprefix("Bearer ")
            hub.requests.append(HubRequest(path, headers["range"] or "", token, headers["user-agent"] or ""))
            parts = path.split("/", 5)
            if path.startswith("/api/models/"):
                self.send_list("/".join(parts[3:5]), token)
            elif path.startswith("/contents/"):
                self.send_content(hub.repos["/".join(parts[2:4])].files["/".join(parts[4:])])
            elif len(parts) == 6 and parts[3] == "resolve":
                self.send_place("/".join(parts[1:3]), parts[5], token)
            else:
                self.refuse(404)

        def send_list(self, name: str, token: str) -> None:
            repo = hub.repos.get(name)
            if repo is None or (repo.private and token != hub.token):
                self.refuse(401, "RepoNotFound")
                return
            self.answer(json.dumps({"id": name, "sha": repo.commit, "siblings": [repo.entry(path) for path in repo.files]}))

        def send_place(self, name: str, path: str, token: str) -> None:
            repo = hub.repos.get(name)
            if repo is None or path not in repo.files:
                self.refuse(404, "EntryNotFound")
            elif repo.gated and token != hub.token:
                self.refuse(401, "GatedRepo")
            else:
                self.send_response(302)
                self.send_header("Location", f"{hub.contents_url}/contents/{name}/{path}?signature=x")
                self.send_header("Content-Length", "0")
                self.end_headers()

        def send_content(self, data: bytes) -> None:
            faults = hub.faults
            cut, stall, pause, ranges = faults.cut, faults.stall, faults.pause, faults.ranges
            if faults.statuses:
                self.refuse(faults.statuses.pop(0))
                return
            start, stop = 0, len(data)
            if ranges and self.headers["range"]:
                first, _, last = self.headers["range"].removeprefix("bytes=").partition("-")
                start, stop = int(first), min(stop, int(last) + 1)
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
            else:
                self.send_response(200)
            self.send_header("Content-Length", str(stop - start))
            self.end_headers()
            for at in range(start, stop, 1 << 16):
                end = min(stop, at + (1 << 16))
                limits = [start + limit for limit in (cut, stall) if limit is not None]
                last = min([end, *limits])
                time.sleep(pause)
                hub.sent += last - at  # first: the client may be done before this thread goes on
                self.wfile.write(data[at:last])
                if last < end or last in limits:
                    self.wfile.flush()
                    if stall is not None:
                        faults.resume.wait(60)
                    self.close_connection = True
                    self.connection.close()
                    return

        def refuse(self, status: int, code: str = "") -> None:
            self.send_response(status)
            if code:
                self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def answer(self, text: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler


@contextlib.contextmanager
def hub_server() -> Iterator[HubServer]:
    server = HubServer()
    try:
        yield server
    finally:
        server.close()


@contextlib.contextmanager
def named_hub(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[HubServer]:
    """A hub that this process pulls from, into a folder. There is no token, and pauses are short."""
    with hub_server() as running:
        for name, value in {"HF_ENDPOINT": running.url, "HF_HOME": folder, "HEADSTART_STATE_DIR": folder / "state"}.items():
            monkeypatch.setenv(name, str(value))
        for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_CACHE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(folder / "no-token"))
        monkeypatch.setattr("headstart.hub.download.PAUSE", 0.001)
        yield running
