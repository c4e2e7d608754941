"""`headstart pull` and names of models, against a hub of our own."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from headstart.cli.console import shortened
from headstart.cli.main import main
from headstart.cli.pull import sentence
from headstart.hub.folders import Folders
from headstart.hub.progress import PullProgress
from hub_server import HubRepo, HubServer, hub_server
from process import FOLDERS, HEADSTART, environment, serving, started

NAME = "Own/Tiny-GGUF"
SIZE = 2_000_000


@pytest.fixture(scope="module")
def running_hub() -> Iterator[HubServer]:
    with hub_server() as server:
        yield server


@pytest.fixture
def hub(running_hub: HubServer) -> HubServer:
    running_hub.repos = {NAME: HubRepo({"tiny-Q8_0.gguf": b"GGUF" + random.Random(1).randbytes(SIZE - 4)})}
    running_hub.faults, running_hub.requests, running_hub.sent = type(running_hub.faults)(), [], 0
    return running_hub


@pytest.fixture
def variables(hub: HubServer, tmp_path: Path) -> dict[str, str]:
    """Of a user who has nothing yet."""
    return {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(tmp_path / "hf"),
        "HEADSTART_STATE_DIR": str(tmp_path / "state"),
        "HF_TOKEN": "",
    }


def blob(variables: dict[str, str]) -> Path:
    (found,) = (path for path in Path(variables["HF_HOME"]).rglob("blobs/*") if path.is_file())
    return found


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_pull_says_what_it_does_in_lines(
    hub: HubServer, variables: dict[str, str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        main(["pull", NAME])
    out, err = capfd.readouterr()
    assert ended.value.code == 0, err
    assert err.splitlines()[0] == "headstart: tiny-Q8_0.gguf: 0% of 1.91 MiB"
    assert err.splitlines()[-1].startswith("headstart: tiny-Q8_0.gguf: 100% of 1.91 MiB")
    assert out.startswith(f"{NAME}:Q8_0, 1.91 MiB: {Folders.of().hub}")
    with pytest.raises(SystemExit) as ended:
        main(["pull", f"{NAME}:Q4_K_M"])
    assert ended.value.code == 2
    assert capfd.readouterr().err == f"headstart: {NAME} has no 'Q4_K_M'; it has Q8_0 (1.91 MiB).\n"


@pytest.mark.parametrize("name", ["demo", "Demo"])
def test_the_bundled_model_is_not_fetched(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["pull", name])
    assert ended.value.code == 0
    assert "demo is bundled, so there is nothing to fetch: /" in capfd.readouterr().out


def test_a_line_of_progress() -> None:
    assert sentence(PullProgress("a.gguf", 40, 100)) == "a.gguf: 40% of 100 B"
    assert sentence(PullProgress("a.gguf", 40 << 20, 100 << 20, 2 << 20)) == "a.gguf: 40% of 100 MiB, 2 MiB/s, 30 s left"


@pytest.mark.parametrize(
    ("file", "most", "shown"),
    [("a/b/c-Q8_0.gguf", 20, "c-Q8_0.gguf"), ("a/big-Q8_0-00001-of-00006.gguf", 20, "…00001-of-00006.gguf")],
)
def test_a_bar_has_the_end_of_a_long_name(file: str, most: int, shown: str) -> None:
    assert shortened(file, most) == shown
    assert len(shown) <= most


def test_nothing_is_lost_by_kill_9(hub: HubServer, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed at 40%, the second pull fetches the rest only, and leaves nothing of the first."""
    hub.faults.stall = SIZE * 2 // 5
    killed = subprocess.Popen([*HEADSTART, "pull", NAME], env=environment(**variables), stderr=subprocess.DEVNULL)
    wait_for(lambda: hub.sent >= SIZE * 2 // 5)
    wait_for(lambda: blob(variables).stat().st_size >= SIZE // 5)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    here = blob(variables).stat().st_size
    assert blob(variables).suffix == ".incomplete"
    hub.faults.stall = None
    hub.faults.resume.set()
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        main(["pull", NAME])
    assert ended.value.code == 0
    assert blob(variables).read_bytes() == hub.repos[NAME].files["tiny-Q8_0.gguf"]
    assert hub.contents()[-1].range == f"bytes={here}-{SIZE - 1}"


@pytest.mark.slow
def test_two_processes_fetch_a_file_once(hub: HubServer, variables: dict[str, str]) -> None:
    hub.faults.pause = 0.02
    both = [
        subprocess.Popen([*HEADSTART, "pull", NAME], env=environment(**variables), stderr=subprocess.DEVNULL) for _ in range(2)
    ]
    assert [one.wait(60) for one in both] == [0, 0]
    assert hub.sent == SIZE
    assert blob(variables).read_bytes() == hub.repos[NAME].files["tiny-Q8_0.gguf"]


@pytest.mark.slow
def test_one_goes_on_when_the_other_is_killed(hub: HubServer, variables: dict[str, str]) -> None:
    hub.faults.pause = 0.05
    first = subprocess.Popen([*HEADSTART, "pull", NAME], env=environment(**variables), stderr=subprocess.DEVNULL)
    wait_for(lambda: hub.sent > 0)
    second = subprocess.Popen([*HEADSTART, "pull", NAME], env=environment(**variables), stderr=subprocess.DEVNULL)
    wait_for(lambda: hub.sent > SIZE // 3)
    first.kill()
    first.wait()
    hub.faults.pause = 0.0
    assert second.wait(60) == 0
    assert blob(variables).read_bytes() == hub.repos[NAME].files["tiny-Q8_0.gguf"]
    assert hub.sent < 1.5 * SIZE


@pytest.mark.parametrize("log_format", ["console", pytest.param("json", marks=pytest.mark.slow)])
def test_serve_fetches_what_is_not_here(
    log_format: str, hub: HubServer, variables: dict[str, str], tiny_model: Path, tmp_path: Path
) -> None:
    """One command from an empty machine to the first reply. The model answers to the name that was typed."""
    hub.repos[NAME] = HubRepo({"tiny-F16.gguf": tiny_model.read_bytes()})
    options = ("--ctx", "512", "--slots", "1", "--threads", "1", "--memory-budget", "16MiB", "--port", "0", "--no-disk")
    with serving("-hf", NAME, *options, "--log-format", log_format, **variables) as server:
        line = server.line("tiny-F16.gguf")
        if log_format == "json":
            assert json.loads(line)["event"] == "fetching"
        url = server.address()
        (card,) = httpx.get(f"{url}/v1/models").json()["data"]
        assert card["id"] == f"{NAME}:F16"
        body = {"model": NAME, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == f"{NAME}:F16"
        assert server.end() == 0


@pytest.mark.slow
def test_one_command_on_a_fresh_machine_also_after_kill_9_in_its_download(
    hub: HubServer, tiny_model: Path, tmp_path: Path
) -> None:
    """Nothing is set but the home and the hub. The second try fetches the rest, and answers."""
    data = tiny_model.read_bytes()
    hub.repos[NAME] = HubRepo({"tiny-F16.gguf": data})
    others = ("HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME", "XDG_STATE_HOME", *FOLDERS)
    unset = [word for name in others for word in ("-u", name)]
    command = ["env", *unset, f"HOME={tmp_path}", f"HF_ENDPOINT={hub.url}", *HEADSTART, "serve", NAME]
    command += ["--ctx", "512", "--threads", "1", "--memory-budget", "16MiB", "--port", "0"]
    hub.faults.stall = len(data) * 2 // 5
    with started(command) as server:
        wait_for(lambda: any(path.stat().st_size >= len(data) // 5 for path in tmp_path.rglob("*.incomplete")))
        server.process.kill()
        server.rest()
    hub.faults.stall = None
    hub.faults.resume.set()
    with started(command) as server:
        url = server.address()
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        assert server.end() == 0
    assert not list(tmp_path.rglob("*.incomplete"))
    assert not hub.contents()[-1].range.startswith("bytes=0-")
    assert (tmp_path / ".cache" / "huggingface").is_dir()
