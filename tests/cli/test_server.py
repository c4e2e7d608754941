"""Where commands look for a running server: by the options and variables that `serve` reads."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import typer.main

from headstart.api.auth import Keys
from headstart.cli.main import app, main
from headstart.cli.server import ServerAddress, ServerRefusal
from headstart.config import Settings
from headstart.errors import ConfigError
from headstart.serving.runtime import Runtime
from headstart.testing.fake_engine import FakeEngine
from live import serving

NOTHING: dict[str, Any] = dict.fromkeys(("url", "host", "port", "unix_socket", "tls_cert", "api_key", "api_key_file"))
SOCKET, CERT = Path("/run/h.sock"), Path("cert.pem")


def found(typed: tuple[str, ...] = (), **given: Any) -> ServerAddress:
    return ServerAddress.found(NOTHING | given, typed)


def test_without_anything_it_is_where_serve_listens() -> None:
    assert found() == ServerAddress("http://127.0.0.1:8000")


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ({"host": "10.1.2.3"}, "http://10.1.2.3:8000"),
        ({"port": 9000}, "http://127.0.0.1:9000"),
        ({"host": "0.0.0.0", "port": 80}, "http://127.0.0.1:80"),
        ({"host": "::"}, "http://[::1]:8000"),
        ({"host": "fd00::7"}, "http://[fd00::7]:8000"),
        ({"host": "box.lan", "tls_cert": CERT}, "https://box.lan:8000"),
        ({"url": "https://box.lan/v1/", "host": "::", "unix_socket": SOCKET, "tls_cert": CERT}, "https://box.lan"),
        ({"url": "box.lan:81"}, "http://box.lan:81"),
    ],
)
def test_the_environment_says_where(given: dict[str, Any], url: str) -> None:
    assert found(**given).url == url
    assert found(**given).unix_socket is None
    assert found(**given).certificate == (given.get("tls_cert") if "url" not in given else None)


def test_a_socket_takes_the_place_of_an_address() -> None:
    assert found(unix_socket=SOCKET) == ServerAddress("http://localhost", SOCKET)
    assert found(unix_socket=SOCKET, tls_cert=CERT) == ServerAddress("https://localhost", SOCKET, CERT)


def test_what_is_typed_goes_before_the_environment() -> None:
    given = {"url": "http://a", "host": "b", "port": 1, "unix_socket": SOCKET, "tls_cert": CERT}
    assert found(("url",), **given) == ServerAddress("http://a")
    assert found(("port",), **given) == ServerAddress("https://b:1", None, CERT)
    assert found(("unix_socket",), **given) == ServerAddress("https://localhost", SOCKET, CERT)
    assert found(("url", "unix_socket"), **given) == ServerAddress("http://a", SOCKET)
    assert found(("url", "tls_cert"), **given | {"url": "https://a"}) == ServerAddress("https://a", None, CERT)
    for both in (("url", "port"), ("unix_socket", "host")):
        with pytest.raises(ConfigError, match="replace --host and --port"):
            found(both, **given)


def test_a_certificate_means_https() -> None:
    """Fault: with a URL of plain HTTP the key went over the network in clear."""
    for typed in (("tls_cert",), ("tls_cert", "url")):
        with pytest.raises(ConfigError, match=r"--tls-cert is for HTTPS.*give --url https://"):
            found(typed, url="http://box.lan", tls_cert=CERT)
        assert found(typed, url="box.lan", tls_cert=CERT) == ServerAddress("https://box.lan", None, CERT)
        assert found(typed, url="HTTPS://box.lan", tls_cert=CERT).certificate == CERT
    assert found(url="http://box.lan", tls_cert=CERT) == ServerAddress("http://box.lan")


def test_a_port_that_nobody_knows() -> None:
    with pytest.raises(ConfigError, match="the server's log says which"):
        found(port=0)


def test_keys_come_from_where_serve_has_them(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nann = sk-1  # hers\nsk-2\n")
    assert found(api_key="one two").key == "one"
    assert found(api_key_file=file).key == "sk-1"
    assert found(api_key="one", api_key_file=file).key == "one"
    assert found(("api_key_file",), api_key="one", api_key_file=file).key == "sk-1"
    assert found(("api_key_file", "api_key"), api_key="one", api_key_file=file).key == "one"
    with pytest.raises(ConfigError, match="Cannot read --api-key-file"):
        found(api_key_file=tmp_path / "none")


def test_its_options_are_those_of_serve() -> None:
    commands: Any = typer.main.get_command(app)
    serve = {one.name: (one.opts, one.envvar) for one in commands.commands["serve"].params}
    explain = {one.name: (one.opts, one.envvar) for one in commands.commands["explain"].params}
    for name in NOTHING.keys() - {"url"}:
        assert explain[name] == serve[name]


# ── a real one ───────────────────────────────────────────────────────────────────────────────────────────────────────


Explain = Callable[..., str]


@pytest.fixture
def explain(capsys: pytest.CaptureFixture[str]) -> Explain:
    def run(*arguments: str, code: int = 0) -> str:
        capsys.readouterr()  # the server's log
        with pytest.raises(SystemExit) as end:
            main(["explain", *arguments])
        captured = capsys.readouterr()
        assert end.value.code == code, captured
        return captured.out + captured.err

    return run


def test_explain_finds_the_server_that_the_environment_describes(
    explain: Explain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, body = tmp_path / "keys", tmp_path / "body.json"
    keys.write_text("ключ\n", "utf-8")
    keys.chmod(0o600)
    body.write_text(json.dumps({"messages": [{"role": "user", "content": "Say hello."}]}))
    with (
        Runtime(lambda: FakeEngine(slots=1, ctx=1024), Settings(memory_budget=8 << 20)) as runtime,
        serving(runtime, model_id="fake", api_keys=Keys((), keys)) as server,
    ):
        monkeypatch.setenv("HEADSTART_HOST", "0.0.0.0")
        monkeypatch.setenv("HEADSTART_PORT", server.url.rsplit(":", 1)[1])
        assert "says: This server needs an API key" in explain(str(body), str(body), code=2)
        monkeypatch.setenv("HEADSTART_API_KEY_FILE", str(keys))
        assert json.loads(explain(str(body), str(body), "--json"))["prompt"] > 0


@pytest.mark.parametrize(
    ("typed", "where"),
    [((), "http://127.0.0.1:9 ("), (("--port", "1"), "http://127.0.0.1:1 ("), (("--unix-socket", "/no"), "the socket /no (")],
)
def test_typed_options_lead_past_the_environment(
    explain: Explain, monkeypatch: pytest.MonkeyPatch, typed: tuple[str, ...], where: str
) -> None:
    monkeypatch.setenv("HEADSTART_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("HEADSTART_UNIX_SOCKET", "/nowhere")
    assert f"No headstart server answers at {where}" in explain(*typed, code=2)


@pytest.mark.parametrize("url", ["http://host:abc", "http://local host"])
def test_an_address_that_is_none_is_said(explain: Explain, url: str) -> None:
    """Fault: a traceback."""
    assert f"No headstart server answers at {url}" in explain("--url", url, code=2)


@pytest.mark.parametrize("answer", [b"SSH-2.0-OpenSSH_9.2\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n{"])
def test_what_is_no_http_server_is_said(explain: Explain, answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as place:

        def speak() -> None:
            line, _ = place.accept()
            with line:
                line.sendall(answer)
                line.recv(1 << 16)

        threading.Thread(target=speak, daemon=True).start()
        assert "No headstart server answers" in explain("--port", str(place.getsockname()[1]), code=2)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_no_key_goes_where_a_server_redirects_to(status: int) -> None:
    """Fault: the redirect was followed, with the key."""
    asked: list[tuple[str, str | None]] = []

    class Redirecting(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append((self.path, self.headers["authorization"]))
            self.send_response(status)
            self.send_header("location", f"http://127.0.0.1:{port}/elsewhere{self.path}")
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Redirecting) as server:
        port = server.server_port
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(ServerRefusal) as refused:
            ServerAddress(f"http://127.0.0.1:{port}", key="sk-1").ask("/headstart/stats")
        server.shutdown()
    assert f"redirects to http://127.0.0.1:{port}/elsewhere. Redirects" in str(refused.value)
    assert str(refused.value).endswith("give that address with --url.")
    assert (refused.value.status, asked) == (status, [("/headstart/stats", "Bearer sk-1")])
