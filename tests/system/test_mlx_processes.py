"""MLX behind the command line: names, kills and restarts, a folder that llama.cpp's server uses too, and several models."""

from __future__ import annotations

import json
import random
import signal
import sqlite3
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import httpx
import psutil
import pytest

import tiny_hf
from headstart.tiers.disk import Disk
from hub_server import HubRepo, hub_server
from killed import Load, Messages, check_objects, known_objects, post, text
from live import wait_until
from process import Server, run, serving

pytestmark = pytest.mark.slow

KINDS = ("llama", "gemma3_text", "lfm2")
"""Keys and values alone; with sliding windows; with convolution layers."""
OPTIONS = ("--ctx", "2048", "--slots", "2", "--memory-budget", "64MiB", "--port", "0")
NAME = "mlx-community/Tiny-bf16"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model of each kind."""
    root = tmp_path_factory.mktemp("mlx")
    return {kind: tiny_hf.write(root / kind, kind) for kind in KINDS}


def asked(words: str, seed: int) -> Messages:
    return [{"role": "system", "content": text(seed, 60)}, {"role": "user", "content": words}]


def url_of(server: Server) -> str:
    return f"{server.address()}/v1"


@pytest.fixture
def variables(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Of a user who has nothing yet, and of a hub with one model."""
    model = tiny_hf.write(tmp_path / "written", "lfm2", dtype="bfloat16")
    with hub_server() as hub:
        files = {path.name: path.read_bytes() for path in model.iterdir()}
        hub.repos[NAME] = HubRepo(files, small={name for name in files if name != "model.safetensors"})
        yield {
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(tmp_path / "hf"),
            "HF_TOKEN": "",
            "HOME": str(tmp_path / "home"),
            "HEADSTART_STATE_DIR": str(tmp_path / "state"),
            "HEADSTART_CACHE_DIR": str(tmp_path / "cache"),
        }


def test_from_a_name_to_a_reply_and_on_after_a_kill(variables: dict[str, str], tmp_path: Path) -> None:
    chat = asked("Say something.", 1)
    with serving(NAME, *OPTIONS, **variables) as server:
        url = url_of(server)
        (card,) = httpx.get(f"{url}/models").json()["data"]
        assert (card["id"], card["meta"]["format"], card["meta"]["architecture"]) == (NAME, "safetensors", "lfm2")
        first = post(url, chat, model=NAME)
        assert first["model"] == NAME
        wait_until(lambda: known_objects(tmp_path / "cache") >= first["usage"]["prompt_tokens"] // 64, 60)
        listed = json.loads(run("models", "--json", **variables).stdout)["models"]
        (own,) = (model for model in listed if model["name"] == NAME)
        assert (own["source"], own["architecture"], own["ctx"]) == ("headstart", "lfm2", 4096)
        assert server.process.pid in [user["pid"] for user in own["used_by"]]
        assert own["conversations"] == 1
        refused = run("rm", "--yes", NAME, **variables)
        assert refused.returncode == 2
        assert "is in use by" in refused.stderr
        server.end(signal.SIGKILL)
    chat += [{"role": "assistant", "content": first["choices"][0]["message"]["content"]}, {"role": "user", "content": "On."}]
    with serving(NAME, *OPTIONS, **{**variables, "HF_HUB_OFFLINE": "1"}) as server:
        second = post(url_of(server), chat)
        assert second["headstart"]["tiers"]["disk"] >= first["usage"]["prompt_tokens"] - 64
        assert server.end() == 0
    words = run("cache", "ls", **variables).stdout
    assert "Tiny-bf16" in words
    assert text(1, 3) in words  # its text, without the weights
    assert run("rm", "--yes", "--conversations", NAME, **variables).returncode == 0
    assert not [path for path in (tmp_path / "hf").rglob("*") if path.is_file() and path.suffix != ".lock"]
    assert not [path for path in (tmp_path / "cache" / "objects").rglob("*") if path.is_file()]


@pytest.mark.parametrize("reuse", ["exact", "fast"])
@pytest.mark.parametrize("kind", KINDS)
def test_killed_and_started_again(kind: str, reuse: str, folders: dict[str, Path], tmp_path: Path) -> None:
    options = (str(folders[kind]), *OPTIONS, "--cache-dir", str(tmp_path), "--reuse", reuse)
    chat = asked("Say something.", 2)
    with serving(*options) as server:
        first = post(url_of(server), chat)
        blocks = first["usage"]["prompt_tokens"] // 64
        wait_until(lambda: known_objects(tmp_path) >= blocks, 60)
        server.end(signal.SIGKILL)
    chat += [{"role": "assistant", "content": first["choices"][0]["message"]["content"]}, {"role": "user", "content": "On."}]
    with serving(*options) as server, serving(*options[:-4], "--no-disk", "--reuse", reuse) as cold:
        second, fresh = (post(url_of(one), chat, logprobs=True, top_logprobs=5) for one in (server, cold))
        assert second["headstart"]["tiers"]["disk"] >= first["usage"]["prompt_tokens"] - 64
        assert fresh["headstart"]["cached"] == 0
        if reuse == "exact":
            assert second["choices"] == fresh["choices"]
        assert server.end() == cold.end() == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kill", range(3))
def test_killed_under_load(kind: str, kill: int, folders: dict[str, Path], tmp_path: Path) -> None:
    """Whatever the kill interrupts, nothing that was stored is lost, and what comes back is the answer."""
    dice = random.Random(f"{kind} {kill}")
    options = (str(folders[kind]), *OPTIONS, "--ctx", "4096", "--reuse", "exact")  # 400 words have 2,600 tokens
    with serving(*options, "--cache-dir", str(tmp_path)) as server:
        load = Load(url_of(server), kill)
        time.sleep(dice.uniform(1.0, 4.0))
        server.end(signal.SIGKILL)
        load.join()
    intact = check_objects(tmp_path)
    with serving(*options, "--cache-dir", str(tmp_path)) as server, serving(*options, "--no-disk") as cold:
        urls = [url_of(one) for one in (server, cold)]
        restored = 0
        for chat in [*load.sent[:3], *load.sent[-3:]]:
            warm, fresh = (post(url, chat, logprobs=True, top_logprobs=5) for url in urls)
            assert warm["choices"] == fresh["choices"]
            restored += warm["headstart"]["tiers"].get("disk", 0)
        with closing(Disk(tmp_path, 1 << 40)) as disk:
            assert disk.catalog.keys() >= intact
        assert server.end() == cold.end() == 0
    assert len(intact) < 4 or restored


def test_a_folder_that_llama_cpps_server_uses_too(folders: dict[str, Path], tiny_model: Path, tmp_path: Path) -> None:
    """The same conversations at both, in turn and with restarts: each finds its own, and no fingerprint is shared."""
    models = {"mlx": folders["llama"], "llama": tiny_model}
    talks = {name: [asked("Say something.", number) for number in range(3)] for name in models}

    def turn(first: bool) -> None:
        with (
            serving(str(models["mlx"]), *OPTIONS, "--cache-dir", str(tmp_path), "--reuse", "exact") as mlx,
            serving(str(models["llama"]), *OPTIONS, "--cache-dir", str(tmp_path), "--reuse", "exact") as llama,
        ):
            urls = {"mlx": url_of(mlx), "llama": url_of(llama)}
            for number in range(3):
                for name, url in urls.items():
                    chat = talks[name][number]
                    answer = post(url, chat)
                    tiers = answer["headstart"]["tiers"]
                    assert tiers.get("disk", 0) == 0 if first else tiers["disk"] >= 64, (name, answer["headstart"])
                    reply = answer["choices"][0]["message"]["content"]
                    chat += [{"role": "assistant", "content": reply}, {"role": "user", "content": "Go on."}]
            assert mlx.end() == llama.end() == 0

    turn(first=True)
    assert check_objects(tmp_path)
    with closing(Disk(tmp_path, 1 << 40)) as disk:
        stored = {fingerprint: model.file for fingerprint, model in disk.catalog.models().items()}
        counts = dict.fromkeys(stored, 0)
        for row in disk.catalog.rows():
            counts[row.label.fingerprint] += 1
    assert sorted(stored.values()) == sorted(map(str, models.values()))
    assert all(counts.values())
    turn(first=False)
    with closing(sqlite3.connect(tmp_path / "index.sqlite")) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_beside_a_gguf_in_one_server(folders: dict[str, Path], tiny_model: Path, tmp_path: Path) -> None:
    """With memory for one of them, each goes on where it was after the other took its place."""
    place = tmp_path / "models"
    place.mkdir()
    (place / "plain.gguf").symlink_to(tiny_model)
    (place / "windows").symlink_to(folders["gemma3_text"])
    options = ("--models-dir", str(place), "--keep-loaded", "1", "--reuse", "exact", *OPTIONS)
    with serving(*options, "--cache-dir", str(tmp_path / "cache")) as server:
        url = url_of(server)
        assert {model["id"] for model in httpx.get(f"{url}/models").json()["data"]} == {"plain", "windows"}
        talks = {name: asked("Say something.", 7) for name in ("plain", "windows")}
        for turn in range(3):
            for name, chat in talks.items():
                answer = post(url, chat, model=name)
                assert answer["model"] == name
                if turn:
                    assert answer["headstart"]["tiers"]["disk"] >= 64
                    new = httpx.post(f"{url[:-3]}/tokenize", json={"model": name, "content": chat[-1]["content"]}, timeout=60)
                    assert answer["headstart"]["computed"] <= len(new.json()["tokens"]) + 64 + 16
                reply = answer["choices"][0]["message"]["content"]
                chat += [{"role": "assistant", "content": reply}, {"role": "user", "content": f"Go on, {turn}."}]
        assert server.end() == 0


def test_doctor_examines_a_folder(folders: dict[str, Path]) -> None:
    for kind, what in (("llama", "KV only"), ("lfm2", "KV and state")):
        found = run("doctor", str(folders[kind]), "--seconds", "2", "--ctx", "2048", COLUMNS="200")
        assert found.returncode == 0, found.stdout + found.stderr
        assert what in found.stdout
        assert "possible; " in found.stdout
        assert "equal to the last bit" in found.stdout


def test_starts_and_stops_end_with_code_0(folders: dict[str, Path]) -> None:
    """A thread that used MLX must not end while the interpreter does."""
    for number in range(10):
        with serving(str(folders["gemma3_text"]), *OPTIONS, "--no-disk") as server:
            url = url_of(server)
            if number % 2:
                post(url, asked("Hello.", 3), max_tokens=4)
            assert server.end() == 0, number


@pytest.mark.timeout(1800)
def test_memory_stays_flat(folders: dict[str, Path], tmp_path: Path) -> None:
    """Two thousand requests of four clients, of which some go on with earlier ones, in budgets that are long full."""
    budgets = ("--memory-budget", "16MiB", "--disk-budget", "64MiB", "--cache-dir", str(tmp_path))
    with serving(str(folders["lfm2"]), *OPTIONS, *budgets) as server:
        url, process, dice = url_of(server), psutil.Process(server.process.pid), random.Random(1)
        talks = [asked(text(dice.getrandbits(60), dice.randint(5, 100)), number) for number in range(64)]

        def turn(number: int) -> None:
            chat = talks[number % len(talks)]
            answer = post(url, chat, max_tokens=8)
            if len(chat) > 6:
                chat[:] = asked(text(number, 40), number)
            else:
                reply = answer["choices"][0]["message"]["content"]
                chat += [{"role": "assistant", "content": reply}, {"role": "user", "content": text(number, 10)}]

        with ThreadPoolExecutor(4) as clients:
            sizes = []
            for begin in range(0, 2000, 500):
                assert len([*clients.map(turn, range(begin, begin + 500))]) == 500
                sizes.append(process.memory_info().rss)
        assert sizes[-1] < sizes[0] + (48 << 20), sizes
        assert server.end() == 0


def test_no_mlx_for_a_gguf(tiny_model: Path) -> None:
    code = (
        "import sys, headstart\n"
        f"with headstart.open({str(tiny_model)!r}, ctx=512, cache_dir=None) as hs: hs.chat('Hello', max_tokens=2)\n"
        "print(*sys.modules)"
    )
    loaded = run(code=code).stdout.split()
    assert "headstart.engines.registry" in loaded
    assert not {"mlx", "mlx_lm", "tokenizers"} & set(loaded)


def test_listing_models_loads_no_mlx(variables: dict[str, str]) -> None:
    code = f"import sys\nfrom headstart.hub.pull import pull\npull({NAME!r})\nfrom headstart.cli.main import main\n"
    code += "try: main(['models'])\nexcept SystemExit: print(*sys.modules)"
    printed = run(code=code, **variables).stdout
    assert NAME in printed
    assert not {"mlx", "mlx_lm", "tokenizers"} & {*printed.split()}
