"""The Containerfile: what it promises, and (slow) an image that is built and run."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

import containers
from headstart.config import SETTINGS
from headstart.names import as_variable
from headstart.serving.runtime import Runtime
from headstart.testing.fake_engine import FakeEngine
from live import serving, wait_until
from stores import free_port

ROOT = Path(__file__).resolve().parents[1]
FILES = {
    "Containerfile": (ROOT / "Containerfile").read_text("utf-8"),
    "docs/kubernetes/Dockerfile": (ROOT / "docs" / "kubernetes" / "Dockerfile").read_text("utf-8"),
}


class Instruction(NamedTuple):
    """An instruction of a Containerfile, its continued lines joined."""

    name: str
    value: str


def stages(text: str) -> list[list[Instruction]]:
    """The instructions of each stage. What stands before the first one is a stage too."""
    joined = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE))
    found: list[list[Instruction]] = [[]]
    for line in filter(None, joined.splitlines()):
        name, _, value = line.partition(" ")
        if name == "FROM":
            found.append([])
        found[-1].append(Instruction(name, value.strip()))
    return found


GLOBAL, BUILD, RUN = stages(FILES["Containerfile"])


def values(stage: list[Instruction], name: str) -> list[str]:
    return [one.value for one in stage if one.name == name]


@pytest.mark.parametrize("file", FILES)
def test_no_image_is_named_with_the_host_of_a_registry(file: str) -> None:
    start, *rest = stages(FILES[file])
    images = [value.partition("=")[2] for value in values(start, "ARG")]
    images += [values(stage, "FROM")[0].split()[0] for stage in rest]
    images = [image for image in images if not image.startswith("${")]
    assert images
    assert [image for image in images if re.search(r"[.:].*/|localhost/", image)] == []


def test_the_image_that_runs_has_no_compiler_and_is_not_root() -> None:
    assert values(RUN, "COPY") == ["--from=build /opt/headstart /opt/headstart"]
    assert "build-essential" not in " ".join(values(RUN, "RUN"))
    (user,) = values(RUN, "USER")
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user)  # numbers: Kubernetes cannot see that a name is not root
    names = [one.name for one in RUN]
    assert names.index("USER") > max(place for place, name in enumerate(names) if name in ("RUN", "COPY"))


def environment_of_image() -> dict[str, str]:
    return dict(word.split("=", 1) for value in values(RUN, "ENV") for word in shlex.split(value))


def test_all_that_a_server_writes_is_on_the_volume() -> None:
    (volume,) = values(RUN, "VOLUME")
    known = environment_of_image()
    for name in ("HEADSTART_CACHE_DIR", "HEADSTART_STATE_DIR", "HF_HOME", "HOME"):
        assert Path(known[name]).is_relative_to(volume), name
    variables = {as_variable(name) for name in SETTINGS} | {"HEADSTART_HOST", "HEADSTART_PORT"}
    assert {name for name in known if name.startswith("HEADSTART_")} <= variables
    (user,) = values(RUN, "USER")
    owner = user.split(":")
    assert f"install -d -o {owner[0]} -g {owner[1]} -m 700 {volume}" in " ".join(values(RUN, "RUN"))


def test_the_command_gets_signals() -> None:
    """In the form of a list: a shell in between would not pass SIGTERM on."""
    (entry,), (command,) = values(RUN, "ENTRYPOINT"), values(RUN, "CMD")
    assert [*json.loads(entry), *json.loads(command)] == ["headstart", "serve"]


def test_the_health_check_tells_a_server_from_none() -> None:
    (check,) = values(RUN, "HEALTHCHECK")
    program, *arguments = json.loads(check.partition("CMD ")[2])
    assert program == "python3"
    with serving(Runtime(FakeEngine)) as server:
        port = str(server.http.base_url.port)
        command = [sys.executable, *arguments]
        assert subprocess.run(command, env={**os.environ, "HEADSTART_PORT": port}, timeout=30).returncode == 0
    ended = subprocess.run(command, env={**os.environ, "HEADSTART_PORT": port}, capture_output=True, timeout=30)
    assert ended.returncode == 1


@pytest.mark.parametrize(
    ("backend", "wanted"), [("cpu", " "), ("cuda", " -DGGML_CUDA=on"), ("vulkan", " -DGGML_VULKAN=on"), ("tpu", None)]
)
def test_the_backend_sets_the_arguments_of_cmake(backend: str, wanted: str | None, tmp_path: Path) -> None:
    """The shell runs the file's own lines, up to the first that installs something."""
    chosen = values(BUILD, "RUN")[0].partition("&& apt-get update")[0].replace("/cmake-args", str(tmp_path / "arguments"))
    assert "case" in chosen
    done = subprocess.run(
        ["sh", "-euc", chosen], env={"BACKEND": backend, "CPU_ARGS": "-DX=1"}, capture_output=True, text=True, timeout=30
    )
    if wanted is None:
        assert (done.returncode, done.stderr) == (2, f"BACKEND must be cpu, cuda or vulkan, not {backend}\n")
    else:
        assert (tmp_path / "arguments").read_text() == f"-DX=1{wanted}\n"


def test_what_is_copied_exists_and_is_not_ignored() -> None:
    taken = [word for value in values(BUILD, "COPY") for word in value.split()[:-1]]
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines() if line.startswith("!")}
    assert set(taken) == kept
    assert [name for name in taken if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("file", FILES)
def test_what_a_wheel_is_made_of_is_copied(file: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {"pyproject.toml", project["project"]["readme"], *project["project"]["license-files"]}
    needed |= {path.partition("/")[0] for path in (*wheel["packages"], *wheel["shared-data"])}
    taken = {word for value in values(stages(FILES[file])[1], "COPY") for word in value.split()[:-1]}
    assert needed <= taken


@pytest.fixture(scope="module")
def engine() -> containers.ContainerEngine:
    try:
        return containers.find()
    except containers.NoEngine as error:
        pytest.skip(f"no container engine works here: {error}")


@pytest.fixture(scope="module")
def image(engine: containers.ContainerEngine) -> Iterator[str]:
    tag = "localhost/headstart-tests"
    engine.build(ROOT, tag, BUILD_IMAGE=engine.base, RUN_IMAGE=engine.base, EXTRAS="[demo]")
    yield tag
    engine("rmi", "--force", tag, check=False)


@pytest.mark.slow
@pytest.mark.timeout(4000)
def test_an_image_serves_from_its_volume_and_is_not_root(engine: containers.ContainerEngine, image: str) -> None:
    """The second container has the volume of the first, and computes the same prompt from there."""
    volume, port = f"headstart-tests-{os.getpid()}", free_port()
    variables = {"HEADSTART_PORT": str(port), "HEADSTART_THREADS": "2", "HEADSTART_CTX": "2048", "HEADSTART_SLOTS": "1"}
    asked = {"messages": [{"role": "user", "content": "Name the rivers of Europe. " * 40}], "max_tokens": 8, "temperature": 0}
    (user,) = values(RUN, "USER")
    texts, cached = [], []
    engine("volume", "create", volume)
    try:
        for _ in range(2):
            with engine.container(image, "--read-only", f"--volume={volume}:/var/lib/headstart", **variables) as name:
                wait_until(lambda name=name: healthy(engine, name), 300)  # type: ignore[misc]
                answer = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=asked, timeout=120).json()
                texts.append(answer["choices"][0]["message"]["content"])
                cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
                assert ":".join(engine("exec", name, "id", option).strip() for option in ("-u", "-g")) == user
                assert engine.code("exec", name, "touch", "/opt/headstart/made") != 0
                engine("stop", "--time", "60", name)
                assert engine("inspect", "--format", "{{.State.ExitCode}}", name).strip() == "0"
                assert engine.code("exec", name, "true") != 0
        assert cached[0] == 0
        assert cached[1] >= 64
        assert texts[0]
        assert texts[0] == texts[1]
    finally:
        engine("volume", "rm", "--force", volume, check=False)


def healthy(engine: containers.ContainerEngine, name: str) -> bool:
    """Whether the image's own check passes. docker runs it itself and tells; podman runs it when it is asked."""
    assert engine("inspect", "--format", "{{.State.Status}}", name).strip() == "running", engine("logs", name)
    if engine.program[0] == "podman":
        return engine.code("healthcheck", "run", name) == 0
    return engine("inspect", "--format", "{{.State.Health.Status}}", name).strip() == "healthy"
