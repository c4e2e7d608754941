"""Perform: runs a client's whole task in its own network namespace."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import templates
from agents.clients import CannotRun, Client
from agents.part import FILE, NOTES

TESTS = Path(__file__).resolve().parents[1]
PATIENCE = 1500
"""Most seconds for the whole task."""


@dataclass(frozen=True)
class Performance:
    """`runs`: results of the commands (`code`, `out`, `err`); `calls`: of the server, with the fields of `stage.Record`."""

    runs: list[dict[str, Any]]
    calls: list[dict[str, Any]]


def isolated() -> list[str]:
    """The command prefix that leaves only loopback. Raises CannotRun."""
    command = ["unshare", "--map-root-user", "--net"]
    if shutil.which("unshare") is None or subprocess.run([*command, "true"], capture_output=True).returncode:
        raise CannotRun("no network namespace can be made here")
    return command


def perform(client: Client, model: Path, folder: Path) -> Performance:
    """Raises CannotRun."""
    command, program = isolated(), client.install()
    workspace, home = folder / "work", folder / "home"
    workspace.mkdir()
    home.mkdir()
    (workspace / FILE).write_text(NOTES, "utf-8")
    (folder / "template.jinja").write_text(templates.TOOLS, "utf-8")
    plan = {
        "model": str(model),
        "template": str(folder / "template.jinja"),
        "workspace": str(workspace),
        "commands": client.commands(program, home),
        "out": str(folder / "result.json"),
    }
    (folder / "plan.json").write_text(json.dumps(plan), "utf-8")
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [*command, sys.executable, "-m", "agents.inside", str(folder / "plan.json")],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads((folder / "result.json").read_text("utf-8"))
    return Performance(result["runs"], result["records"])
