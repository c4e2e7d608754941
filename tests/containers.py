"""A container engine for tests, and what a test needs of it: an image to build on, images, and containers that run."""

from __future__ import annotations

import os
import shutil
import ssl
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

BASE = "debian:bookworm-slim"
OWN_BASE = "localhost/headstart-tests-debian:bookworm"
"""Debian as debootstrap makes it. It serves as `BASE` where no registry can be reached."""
LIMITS = ("--ulimit=nofile=4096:4096", "--ulimit=nproc=4096:4096")
"""Those that podman otherwise sets itself."""
ENVIRONMENT = {**os.environ, "DISABLE_HC_SYSTEMD": "true"}
"""podman runs health checks by systemd, which need not run here."""


class NoEngine(Exception):
    """Nothing here can build an image and run it. The text says what was tried."""


@dataclass(frozen=True)
class ContainerEngine:
    """podman or docker.

    Attributes:
        program: the command, with the options of all its commands.
        running: options of `run`, without which no container starts on this machine.
        base: an image with apt and Debian's packages.
    """

    program: tuple[str, ...]
    running: tuple[str, ...]
    base: str

    def __call__(self, *arguments: str, timeout: float = 120, check: bool = True) -> str:
        done = self._run(arguments, timeout)
        assert not check or done.returncode == 0, f"{' '.join(arguments)}: {done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        return done.stdout

    def code(self, *arguments: str, timeout: float = 60) -> int:
        """The exit code of a command that may fail."""
        return self._run(arguments, timeout).returncode

    def _run(self, arguments: Sequence[str], timeout: float) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.program, *arguments], capture_output=True, text=True, timeout=timeout, env=ENVIRONMENT, check=False
        )

    def build(self, folder: Path, tag: str, **arguments: str) -> None:
        """Builds the `Containerfile` of a folder, with these build arguments. Layers that are there already are used.

        With podman, pip in the image gets the certificates that it has here, because the network may have one of its own. It
        also gets the wheels in the folder HEADSTART_TEST_WHEELS, if set: with one of llama-cpp-python nothing is compiled.
        """
        options = [word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")]
        if self.program[0] == "podman":
            options += ["--format", "docker", "--isolation", "chroot", "--layers"]
        with tempfile.TemporaryDirectory() as made:
            if self.program[0] == "podman":
                options += _pip_settings(Path(made))
            command = ["build", "--network=host", f"--tag={tag}", f"--file={folder / 'Containerfile'}", *options, str(folder)]
            self(*command, timeout=3000)

    @contextmanager
    def container(self, image: str, *arguments: str, **variables: str) -> Iterator[str]:
        """The name of a container that runs until the block ends. It uses the network of this machine."""
        name = f"headstart-{os.getpid()}"
        given = [f"--env={key}={value}" for key, value in variables.items()]
        self("run", "--detach", "--name", name, "--network=host", *self.running, *given, *arguments, image)
        try:
            yield name
        finally:
            self("rm", "--force", name, check=False)


def _pip_settings(folder: Path) -> list[str]:
    """Options of `podman build` for the settings of pip. They are not part of the image."""
    settings, options = ["[global]"], [f"--volume={folder}/pip.conf:/etc/pip.conf:ro"]
    for setting, place, here in (
        ("cert", "/certificates.pem", os.environ.get("PIP_CERT") or ssl.get_default_verify_paths().cafile),
        ("find-links", "/wheels", os.environ.get("HEADSTART_TEST_WHEELS")),
    ):
        if here:
            settings.append(f"{setting} = {place}")
            options.append(f"--volume={here}:{place}:ro")
    (folder / "pip.conf").write_text("\n".join(settings), "utf-8")
    return options


def find() -> ContainerEngine:
    """An engine of this machine that runs a container. Raises NoEngine."""
    tried = []
    for program, running in _candidates():
        if shutil.which(program[0]) is None:
            tried.append(f"{program[0]} is not installed")
            continue
        engine = ContainerEngine(program, running, "")
        if engine.code("info") != 0:
            tried.append(f"`{' '.join(program)} info` fails")
            continue
        try:
            engine = ContainerEngine(program, running, _base(engine))
        except NoEngine as error:
            tried.append(str(error))
            continue
        done = engine._run(["run", "--rm", "--network=host", *running, engine.base, "true"], 60)
        if done.returncode == 0:
            return engine
        tried.append(f"`{' '.join(program)} run` says: {done.stderr.strip().splitlines()[-1]}")
    raise NoEngine("; ".join(tried))


def _candidates() -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Engines with the options of `run`.

    podman asks for limits that root without CAP_SYS_RESOURCE cannot set, so low ones are tried. crun runs nothing where both
    versions of cgroups are in use, but runc does.
    """
    yield ("podman",), ()
    yield ("podman",), LIMITS
    if (runc := shutil.which("runc")) is not None:
        yield ("podman", f"--runtime={runc}"), LIMITS
    yield ("docker",), ()


def _base(engine: ContainerEngine) -> str:
    for image in (BASE, OWN_BASE):
        if engine.code("image", "inspect", image) == 0:
            return image
    if engine.code("pull", BASE) == 0:
        return BASE
    if shutil.which("debootstrap") is None or os.geteuid() != 0:
        raise NoEngine(f"{engine.program[0]} cannot pull {BASE}, and there is no debootstrap, or the user is not root")
    with tempfile.TemporaryDirectory() as made:
        root = Path(made) / "root"
        make = ["debootstrap", "--variant=minbase", "bookworm", str(root)]
        done = subprocess.run(make, capture_output=True, text=True, timeout=1200, check=False)
        if done.returncode:
            raise NoEngine(f"debootstrap says: {done.stdout.strip().splitlines()[-1]}")
        packed = Path(made) / "root.tar"
        subprocess.run(["tar", "-C", str(root), "-cf", str(packed), "."], check=True, timeout=600)
        engine("import", str(packed), OWN_BASE, timeout=600)
    return OWN_BASE
