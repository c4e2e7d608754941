"""Inside: runs in its own network namespace. It serves, runs commands one after the other, and records the results.

`python -m agents.inside PLAN`: PLAN is a JSON file with `out`, `workspace`, `template`, and `commands` with `argv`, `env`;
`{url}` in them is the server's.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import uvicorn

from agents import part
from agents.stage import Cast, Directed, Record, Recorder
from headstart.api.app import create_app
from headstart.api.sockets import listen
from headstart.config import Settings
from headstart.engines import registry
from headstart.serving.runtime import Runtime

CTX = 65_536
"""Agents send long first prompts, and tiny vocabularies need many tokens for them."""
PATIENCE = 480
"""Seconds that one command may take."""


def loopback_up() -> None:
    """Brings loopback up, which is down in a fresh namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as plug:
        fcntl.ioctl(plug, 0x8914, struct.pack("16sH22x", b"lo", 0x1))  # SIOCSIFFLAGS, IFF_UP


def main(plan: dict[str, Any]) -> None:
    loopback_up()
    settings = Settings(plan["model"], ctx=CTX, slots=2, memory_budget=1 << 30, chat_template=Path(plan["template"]))
    records: list[Record] = []
    runtime = Directed(lambda: Cast(registry.load(settings.engine_options())), settings, part.reply)
    bound = listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{bound.getsockname()[1]}"
    app = Recorder(create_app(runtime, model_id="demo"), records)
    server = uvicorn.Server(uvicorn.Config(app, http="httptools", ws="none", log_config=None, access_log=False))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        runs = []
        for command in plan["commands"]:
            runs.append(run(command, url, plan["workspace"]))
            settled(runtime)
    finally:
        server.should_exit = True
        thread.join()
        bound.close()
        runtime.close()
    result = {"runs": runs, "records": [record.as_dict() for record in records]}
    Path(plan["out"]).write_text(json.dumps(result, indent=1), "utf-8")


def settled(runtime: Runtime) -> None:
    """Waits until finished turns are settled. People pause longer than that between turns."""
    until = time.monotonic() + PATIENCE
    while not runtime.scheduler.idle and time.monotonic() < until:
        time.sleep(0.02)


def run(command: dict[str, Any], url: str, workspace: str) -> dict[str, Any]:
    argv = [word.replace("{url}", url) for word in command["argv"]]
    env = {name: value.replace("{url}", url) for name, value in command["env"].items()}
    for path, text in command.get("files", {}).items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text.replace("{url}", url), "utf-8")
    started = time.monotonic()
    try:
        done = subprocess.run(
            argv, env=env, cwd=workspace, capture_output=True, text=True, timeout=PATIENCE, stdin=subprocess.DEVNULL
        )
        outcome = {"code": done.returncode, "out": done.stdout, "err": done.stderr}
    except subprocess.TimeoutExpired as error:
        outcome = {"code": None, "out": _text(error.stdout), "err": _text(error.stderr)}
    return {**outcome, "seconds": time.monotonic() - started}


def _text(data: Any) -> str:
    return data.decode("utf-8", "replace") if isinstance(data, bytes) else data or ""


if __name__ == "__main__":
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    main(json.loads(Path(sys.argv[1]).read_text("utf-8")))
