"""The Containerfile: what it promises. No image is built here: that needs the images of a registry."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from headstart.config import SETTINGS
from headstart.names import as_variable
from headstart.serving.runtime import Runtime
from headstart.testing.fake_engine import FakeEngine
from live import serving

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
