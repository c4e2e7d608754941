"""`headstart fleet` where it cannot start, or not as it was asked to: what the command says. Ray is real."""

from __future__ import annotations

import os
import platform
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest

pytest.importorskip("ray")

from live import wait_until
from stores import HOST, free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith(("HEADSTART_", "RAY_"))}
ENVIRONMENT |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


def command(*arguments: str, code: int) -> str:
    """The last line that the command writes."""
    given = [sys.executable, "-m", "headstart", "fleet", *arguments]
    done = subprocess.run(given, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False)
    said = done.stderr.strip().splitlines() or [""]
    assert done.returncode == code, said[-20:]
    return said[-1]


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a cluster that runs already."""
    folder, port = tempfile.mkdtemp(prefix="hs-"), free_port()  # a path of pytest is too long for Ray's sockets
    given = {"port": port, "node-ip-address": HOST, "temp-dir": folder, "include-dashboard": "false", "num-cpus": 3}
    given |= {"object-store-memory": 100 << 20}
    given |= {"ray-client-server-port": free_port(), "dashboard-agent-listen-port": free_port()}
    options = [f"--{name}={value}" for name, value in given.items()]
    ray = [sys.executable, "-m", "ray.scripts.scripts"]
    start = [*ray, "start", "--head", "--block", "--disable-usage-stats", *options]
    process = subprocess.Popen(start, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        address = f"{HOST}:{port}"
        status = [*ray, "status", "--address", address]
        asked = partial(subprocess.run, status, env=ENVIRONMENT, capture_output=True, timeout=60, check=False)
        wait_until(lambda: asked().returncode == 0, 120)
        assert process.poll() is None
        yield address
    finally:
        process.terminate()
        process.wait(60)
        shutil.rmtree(folder, ignore_errors=True)


def test_a_fleet_on_a_cluster(cluster: str, tmp_path: Path) -> None:
    port, other = str(free_port()), str(free_port())
    on = ("--replicas", "1", "--replica-cpus", "0.5", "--address", cluster)
    said = command("serve", "model.gguf", *on, code=2)
    assert f"MODEL model.gguf is a relative path: give a path that is right on every machine, like {Path.cwd()}" in said
    key = tmp_path / "wrong.key"
    key.write_text("no key")
    key.chmod(0o600)
    reasons = {
        ("/nowhere/model.gguf",): "There is no model '/nowhere/model.gguf'; give the path of a .gguf file",
        ("demo", "--shared", tmp_path.as_uri(), "--shared-key-file", str(key)): f"{key} is no key file",
    }
    for arguments, why in reasons.items():
        said = command("serve", *arguments, *on, "--no-disk", "--port", port, code=2)
        assert said.startswith(f"headstart: The fleet does not start: on {platform.node()}: {why}")
    said = command("serve", "demo", *on, "--no-disk", "--port", other, code=2)
    assert said.startswith(f"headstart: Ray Serve runs on this cluster already, at {HOST}:{port}: ")
    said = command("serve", "demo", *on, "--no-disk", "--ctx", "512", "--slots", "1", code=0)
    assert said == f"serving at http://{HOST}:{port}/v1; headstart fleet status --port {port}"
    assert httpx.get(f"http://{HOST}:{port}/health", trust_env=False, timeout=30).status_code == 200
    command("stop", cluster, code=0)


def test_a_port_in_use() -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = str(taken.getsockname()[1])
        said = command("serve", "demo", "--replicas", "1", "--no-disk", "--port", port, code=2)
    assert said.startswith("headstart: The fleet does not start: ")
    assert f"{HOST}:{port}" in said
