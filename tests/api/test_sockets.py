"""TLS and Unix sockets: `headstart serve` as a process, and clients that come over them."""

from __future__ import annotations

import json
import os
import shutil
import socket
import ssl
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from openai import OpenAI

from headstart.api.sockets import UnixSocket
from headstart.api.tls import tls
from headstart.errors import ConfigError
from process import Here, serving

OPENSSL = shutil.which("openssl")
needs_openssl = pytest.mark.skipif(OPENSSL is None, reason="the command openssl makes the certificate")
SMALL = ("--ctx", "512", "--slots", "1", "--threads", "1", "--memory-budget", "8MiB", "--no-disk", "--log-format", "json")
BODY = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 4, "temperature": 0}


def certificate(folder: Path, name: str = "localhost") -> tuple[Path, Path]:
    """A certificate that signs itself, for `name` and 127.0.0.1, and its key."""
    assert OPENSSL is not None
    cert, key = folder / f"{name}.crt", folder / f"{name}.key"
    command = [OPENSSL, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    command += ["-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{name},IP:127.0.0.1"]
    subprocess.run([*command, "-keyout", key, "-out", cert], check=True, capture_output=True)
    return cert, key


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def short(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder whose name leaves room in the hundred bytes of a socket's path."""
    folder = Path(f"/tmp/headstart-{os.getpid()}")
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


# ── TLS ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


@needs_openssl
def test_serves_https_and_takes_a_renewed_certificate(
    tiny_model: Path, made: tuple[Path, Path], tmp_path: Path, here: Here
) -> None:
    cert, key = (Path(shutil.copy(path, tmp_path)) for path in made)
    with serving(str(tiny_model), *SMALL, "--port", "0", "--tls-cert", str(cert), "--tls-key", str(key)) as server:
        url = json.loads(server.line('"listening"'))["url"]
        assert url.startswith("https://127.0.0.1:")
        trusting = ssl.create_default_context(cafile=str(cert))
        with httpx.Client(base_url=url, verify=trusting, timeout=60) as http:
            assert http.post("/chat/completions", json=BODY).json()["usage"]["completion_tokens"] > 0
            with http.stream("POST", "/chat/completions", json={**BODY, "stream": True}) as response:
                assert [line for line in response.iter_lines() if line][-1] == "data: [DONE]"
        explained = here("explain", "--json", "--url", url, SSL_CERT_FILE=str(cert))
        assert json.loads(explained.stdout)["prompt"] > 0, explained.stderr
        port = url.removesuffix("/v1").rsplit(":", 1)[1]
        explained = here("explain", "--json", HEADSTART_PORT=port, HEADSTART_TLS_CERT=str(cert))
        assert json.loads(explained.stdout)["prompt"] > 0, explained.stderr
        other = certificate(tmp_path, "other")[0]
        refused = here("explain", HEADSTART_PORT=port, HEADSTART_TLS_CERT=str(other))
        assert f"its certificate is not the one in {other}" in refused.stderr
        with pytest.raises(httpx.ConnectError, match="certificate"):
            httpx.get(f"{url}/models")
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{url.replace('https', 'http')}/models")
        renewed = certificate(tmp_path, "renewed")
        os.replace(renewed[0], cert)  # the key comes a moment later: until then they do not fit
        assert httpx.get(f"{url}/models", verify=trusting).status_code == 200
        os.replace(renewed[1], key)
        assert httpx.get(f"{url}/models", verify=ssl.create_default_context(cafile=str(cert))).status_code == 200
        with pytest.raises(httpx.ConnectError, match="certificate"):
            httpx.get(f"{url}/models", verify=trusting)
        assert server.end() == 0
        server.line("certificate read again")
        log = "".join(server.lines)
        assert "the previous one stays" in log
        assert "Traceback" not in log


Complaint = Callable[..., str]


@pytest.fixture
def complaint(here: Here) -> Complaint:
    """What `headstart serve` says of arguments that it refuses before anything is started: so this process will do."""

    def find(*arguments: str) -> str:
        result = here("serve", *arguments)
        assert result.returncode == 2, result.stderr
        (line,) = result.stderr.splitlines()
        return line

    return find


@needs_openssl
def test_tls_files_that_cannot_be_used_are_named(
    tiny_model: Path, made: tuple[Path, Path], tmp_path: Path, complaint: Complaint
) -> None:
    cert, key = made
    context = tls(cert, key).context()
    assert context is not None
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    other = certificate(tmp_path, "other")
    secret = tmp_path / "secret.key"
    assert OPENSSL is not None
    command = [OPENSSL, "pkey", "-in", key, "-aes256", "-passout", "pass:word", "-out", secret]
    subprocess.run(command, check=True, capture_output=True)
    broken = tmp_path / "broken.crt"
    broken.write_text(cert.read_text().replace("MII", "XXX", 1))
    for one, two, said in (
        (cert, other[1], "is not the key of --tls-cert"),
        (cert, secret, "has a passphrase"),
        (cert, cert, "holds no private key"),
        (key, key, "holds no certificate"),
        (broken, key, "cannot be used"),
        (tmp_path / "none.crt", key, "No such file"),
        (cert, tmp_path, "Is a directory"),
    ):
        with pytest.raises(ConfigError, match=said) as caught:
            tls(one, two)
        assert "--tls-" in str(caught.value)
    assert "belong together" in complaint(str(tiny_model), "--tls-cert", str(cert))
    assert "belong together" in complaint(str(tiny_model), "--tls-key", str(key))
    assert "is not the key of" in complaint(
        str(tiny_model), *SMALL, "--port", "0", "--tls-cert", str(cert), "--tls-key", str(other[1])
    )


# ── Unix sockets ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_serves_the_sdk_over_a_unix_socket(tiny_model: Path, short: Path, here: Here, complaint: Complaint) -> None:
    path = short / "a b.sock"
    with serving(str(tiny_model), *SMALL, "--unix-socket", str(path)) as server:
        told = json.loads(server.line('"listening"'))
        assert told["url"] == "http://localhost/v1"
        assert told["unix_socket"] == str(path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        transport = httpx.HTTPTransport(uds=str(path))
        with OpenAI(base_url=told["url"], api_key="none", http_client=httpx.Client(transport=transport)) as client:
            answer = client.chat.completions.create(model="tiny-llama", **BODY)  # type: ignore[call-overload]
            assert answer.usage.completion_tokens > 0
            stream = client.chat.completions.create(model="tiny-llama", stream=True, **BODY)  # type: ignore[call-overload]
            assert [event.choices[0].finish_reason for event in stream if event.choices][-1] in ("stop", "length")
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost") as proxy:
            for header, client in (({"x-forwarded-for": "203.0.113.9"}, "203.0.113.9"), ({}, "unix")):
                proxy.post("/v1/chat/completions", json={}, headers=header)
                assert json.loads(server.line('"refused"'))["client"] == client
        explained = here("explain", "--json", "--unix-socket", str(path))
        assert json.loads(explained.stdout)["cached"] > 0, explained.stderr
        if shutil.which("curl"):
            listed = subprocess.run(f"{told['curl']} --show-error --verbose", shell=True, capture_output=True, text=True)
            assert listed.returncode == 0, listed.stderr
            assert json.loads(listed.stdout)["data"]
        assert "Another server listens" in complaint(str(tiny_model), *SMALL, "--unix-socket", str(path))
        assert path.exists()
        assert server.end() == 0
    assert not path.exists()


def test_a_socket_that_was_left_behind_is_replaced(tiny_model: Path, short: Path) -> None:
    path = short / "s"
    arguments = (str(tiny_model), *SMALL, "--unix-socket", str(path), "--unix-socket-mode", "660")
    with socket.socket(socket.AF_UNIX) as left:  # as a killed server leaves it
        left.bind(str(path))
        left.listen()
    assert path.is_socket()
    with serving(*arguments) as server:
        server.line('"listening"')
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        assert server.end() == 0
    assert not path.exists()


def test_what_is_no_stale_socket_stays(short: Path) -> None:
    note = short / "note"
    note.write_text("mine")
    with pytest.raises(ConfigError, match="not a socket"):
        UnixSocket(note)
    assert note.read_text() == "mine"
    with pytest.raises(ConfigError, match="No such file"):
        UnixSocket(short / "none" / "s")
    with pytest.raises(ConfigError, match="too long"):
        UnixSocket(short / ("x" * 120))
    with socket.socket(socket.AF_UNIX) as busy:
        busy.bind(str(short / "busy"))
        busy.listen()
        with pytest.raises(ConfigError, match="listens on"):
            UnixSocket(short / "busy")
    taken = UnixSocket(short / "s")
    (short / "s").unlink()
    successor = UnixSocket(short / "s")
    taken.close()
    assert (short / "s").is_socket()  # the successor's
    successor.close()
    successor.close()
    assert not (short / "s").exists()


def test_a_refused_start_leaves_no_socket(tiny_model: Path, short: Path, complaint: Complaint) -> None:
    path = short / "s"
    assert "--cors" in complaint(str(tiny_model), *SMALL, "--unix-socket", str(path), "--cors", "nowhere")
    assert not path.exists()
    for extra, said in (
        (("--port", "0"), "replaces"),
        (("--host", "::1"), "replaces"),
        (("--unix-socket-mode", "rw"), "600 or 660"),
    ):
        assert said in complaint(str(tiny_model), *SMALL, "--unix-socket", str(path), *extra)


def test_explain_names_the_socket_where_nobody_answers(short: Path, here: Here) -> None:
    result = here("explain", "--unix-socket", str(short / "none"))
    assert result.returncode == 2
    assert f"No headstart server answers at the socket {short / 'none'}" in result.stderr
