"""`headstart install-gpu`: how llama-cpp-python is compiled for a GPU; with `--run` it does that, and tries the result."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from typing import Annotated

import typer

from headstart.errors import ConfigError

EPILOG = """
**Examples**

`headstart install-gpu cuda` — prints the command for NVIDIA's GPUs

`headstart install-gpu vulkan --run` — compiles llama.cpp for Vulkan (minutes), and tries the result
"""


@dataclass(frozen=True, slots=True)
class GpuBackend:
    """A backend that llama.cpp can be compiled with.

    Attributes:
        options: for CMake.
        needs: what must be installed.
    """

    options: str
    needs: str


BACKENDS = {
    "cuda": GpuBackend("-DGGML_CUDA=on", "NVIDIA's CUDA toolkit (nvcc)"),
    "metal": GpuBackend("-DGGML_METAL=on", "Apple's command line tools (xcode-select --install)"),
    "vulkan": GpuBackend("-DGGML_VULKAN=on", "Vulkan's headers and loader, and glslc (apt install libvulkan-dev glslc)"),
    "rocm": GpuBackend("-DGGML_HIP=on", "AMD's ROCm (hipcc)"),
}


def pip_command(version: str) -> list[str]:
    """Compiles this version of llama-cpp-python again, for the Python that runs this."""
    pip = [sys.executable, "-m", "pip", "install", "--force-reinstall", "--no-deps", "--no-cache-dir"]
    return [*pip, "--no-binary", "llama-cpp-python", f"llama-cpp-python=={version}"]


def install_gpu(
    backend: Annotated[str, typer.Argument(metavar="|".join(BACKENDS), help="The GPU's interface.")],
    run: Annotated[bool, typer.Option("--run", help="Run the command, then try the result.")] = False,
    model: Annotated[str, typer.Option(metavar="MODEL", help="Model that tries it.")] = "demo",
) -> None:
    """Prints the command that compiles llama.cpp for this machine's GPU, or runs it.

    With --run, the result must see a GPU, and pass `headstart doctor`. Exit code 0 if it does, 1 if not, 2 if it cannot be
    compiled.
    """
    from headstart.engines.llama.library import binding_version

    row = BACKENDS.get(backend)
    if row is None:
        raise ConfigError(f"There is no backend {backend!r}: there are {', '.join(BACKENDS)}.")
    command = pip_command(binding_version())
    typer.echo(f"# needs {row.needs}")
    typer.echo(f"CMAKE_ARGS={row.options} {shlex.join(command)}")
    if not run:
        return
    arguments = f"{os.environ.get('CMAKE_ARGS', '')} {row.options}".strip()
    if subprocess.run(command, env={**os.environ, "CMAKE_ARGS": arguments}).returncode != 0:
        raise ConfigError(f"llama-cpp-python was not compiled for {backend}: pip's lines above say why. It needs {row.needs}.")
    raise typer.Exit(0 if tried(model) else 1)


def tried(model: str) -> bool:
    """Whether the engine sees a GPU, and computes with the model on it. Other processes try it: this one may have a library."""
    seen = subprocess.run([sys.executable, "-c", _SEES]).returncode == 0
    typer.echo("The engine sees a GPU." if seen else "The engine sees no GPU: is its driver installed?")
    doctor = [sys.executable, "-m", "headstart", "doctor", model, "--seconds", "0"]
    return seen and subprocess.run(doctor).returncode == 0


_SEES = """
import sys
from headstart.engines.llama.devices import devices
sys.exit(not any(device.is_gpu for device in devices()))
"""
