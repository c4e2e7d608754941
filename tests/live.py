"""A real uvicorn server in a thread, on its own port."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn
from openai import OpenAI

from headstart.api.app import create_app
from headstart.api.server import Server as Stoppable
from headstart.api.sockets import listen
from headstart.serving.runtime import Runtime


@dataclass
class Server:
    """`http` and `openai` are clients of the server at `url`. `stop` stops it, as one signal does. `app` is its ASGI app."""

    url: str
    http: httpx.Client
    openai: OpenAI
    runtime: Runtime | None
    stop: Callable[[], None]
    app: Any = None

    def post(self, path: str, **options: Any) -> httpx.Response:
        return self.http.post(path, **options)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples with these labels."""
        found = [
            float(line.rsplit(" ", 1)[1])
            for line in self.http.get("/metrics").text.splitlines()
            if line.split("{")[0] == name and all(f'{key}="{value}"' in line for key, value in labels.items())
        ]
        assert found, name
        return sum(found)

    def idle(self) -> bool:
        """Whether nothing runs or waits."""
        assert self.runtime is not None
        return idle(self.runtime)


def idle(runtime: Runtime) -> bool:
    """Whether nothing runs or waits."""
    now = runtime.snapshot()
    return now["running"] == now["waiting"] == 0 and not any(slot["is_processing"] for slot in now["slots"])


def wait_until(condition: Callable[[], bool], timeout: float = 60.0) -> None:
    """Waits for what happens at once on a quiet machine."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


def events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """The data objects of an event stream, which must end with [DONE]."""
    done = False
    for line in lines:
        assert not done or not line, f"after [DONE]: {line}"
        if line.startswith("data: "):
            if line == "data: [DONE]":
                done = True
            else:
                yield json.loads(line[6:])
        else:
            assert line == "" or line.startswith(":"), line
    assert done, "the stream did not end with [DONE]"


def raw(server: Server, path: str, body: dict[str, Any]) -> socket.socket:
    """A connection on which a request has been sent and nothing has been read."""
    host, port = server.url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    line = socket.create_connection((host, int(port)))
    line.sendall(b"POST %s HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % (path.encode(), len(data)) + data)
    return line


def _ready(http: httpx.Client) -> bool:
    response = http.get("/health")
    assert response.status_code == 200 or response.json()["error"]["message"] == "Loading model", response.text
    return response.status_code == 200


@contextmanager
def serving(
    load: Runtime | Callable[[], Runtime], *, key: str = "", wait: bool = True, drain: float = 5.0, **options: Any
) -> Iterator[Server]:
    """Serves until the block ends; the server must then stop by itself."""
    bound = listen("127.0.0.1", 0)
    app = create_app(load, **options)
    config = uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        log_config=None,
        access_log=False,
        timeout_keep_alive=65,  # as in `headstart serve`: an idle connection must not be closed while the client sends
    )
    server = Stoppable(config, app.state.service, drain)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    url = f"http://127.0.0.1:{bound.getsockname()[1]}"
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        with (
            httpx.Client(base_url=url, timeout=60, headers=headers) as http,
            OpenAI(base_url=f"{url}/v1", api_key=key or "none", max_retries=0, timeout=60) as openai,
        ):
            wait_until(lambda: server.started)
            if wait:
                wait_until(lambda: _ready(http), 180)
            yield Server(
                url, http, openai, load if isinstance(load, Runtime) else None, lambda: server.handle_exit(0, None), server
            )
    finally:
        server.should_exit = True
        thread.join(30)
        bound.close()
        assert not thread.is_alive()
