"""Who may know whom (docs/architecture.md): imports point downwards only, and the public names are what they claim."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Container
from functools import cache
from pathlib import Path

import pytest

import headstart

SOURCE = Path(headstart.__file__).parent
TESTS = Path(__file__).parent
MODULES = sorted(SOURCE.rglob("*.py"))

COMMON = {"errors", "futures", "longest_match", "lru", "names", "paths", "units", "version"}
"""What everybody may import, beside their own package."""

ALLOWED: dict[str, set[str]] = {
    "errors": {"names"},
    "names": set(),
    "version": set(),
    "futures": set(),
    "longest_match": set(),
    "lru": set(),
    "paths": set(),
    "units": set(),
    "config": {"engines.options", "units", "templates"},
    "templates": set(),
    "memory_plan": {"interfaces.host_memory"},
    "model_names": set(),
    "interfaces": set(),
    "output": {"interfaces"},
    "prompt": {"interfaces", "output"},
    "explain": {"interfaces", "output.json_values", "prompt"},
    "prefix_cache": {"interfaces"},
    "tiers": {
        "interfaces",
        *(f"prefix_cache.{name}" for name in ("blocks", "eviction_order", "expiry", "quota", "reuse_model")),
    },
    "engines": {"interfaces", "memory_plan", "model_names"},
    "testing": {"config", "engines", "interfaces", "prompt", "serving"},
    "testing.simulation": {"config", "interfaces", "prefix_cache", "prompt", "serving", "tiers", "testing.fake_engine"},
    "serving": {
        "interfaces",
        "prefix_cache",
        "prompt",
        "output",
        "explain",
        "tiers",
        "config",
        "memory_plan",
        "model_names",
        "templates",
    },
    "chat": {
        "interfaces",
        "prefix_cache.blocks",
        "prompt",
        "output",
        "serving.prompt_maker",
        "serving.request",
        "serving.turn",
        "serving.runtime",
        "serving.expiry",
    },
    "events": {"interfaces", "prefix_cache", "serving"},
    "observe": {"explain", "serving.request"},
    "traces": {"interfaces"},
    "replay": {"interfaces", "prefix_cache", "traces"},
    "fleet.router": {"interfaces", "prefix_cache.blocks"},
    "fleet.front": {
        "api",
        "chat",
        "config",
        "engines.options",
        "engines.registry",
        "fleet.model_card",
        "fleet.router",
        "interfaces",
        "prefix_cache.blocks",
        "prompt",
        "serving.prompt_maker",
    },
    "fleet.replica": {"interfaces", "prefix_cache", "serving", "tiers.disk", "fleet.router"},
    "fleet.cluster": {
        "api",
        "config",
        "engines.options",
        "engines.registry",
        "fleet.front",
        "fleet.model_card",
        "fleet.replica",
        "fleet.router.reports",
        "interfaces",
        "model_names",
        "observe",
        "serving.request",
        "serving.runtime",
        "serving.running_jobs",
        "tiers.shared.address",
    },
    "fleet": {"interfaces", "fleet.router", "traces"},
    "hub": {
        "engines.gguf",
        "engines.machine",
        "engines.model_file",
        "engines.model_folder",
        "interfaces.host_memory",
        "memory_plan",
        "model_names",
    },
    "library": {"config", "interfaces", "output.parser", "serving", "chat", "engines", "hub"},
    "web": set(),
    "models": {
        *(
            "api",
            "chat.tenancy",
            "chat.validation",
            "config",
            "engines.registry",
            "interfaces.sampling",
            "interfaces.traits",
            "library.headstart",
        ),
        "observe",
        "serving.runtime",
        "tiers.shared.address",
    },
    "api": {
        *("config", "model_names", "interfaces", "output", "prompt", "explain", "serving", "events", "chat", "observe", "web"),
        "hub",
    },
}
"""For each package below the entry points: the modules and packages of headstart that it may import."""

ENTRY_POINTS = {"__init__", "__main__", "cli"}
"""What may import all others but `testing`."""


def own_name(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


@cache
def imports(path: Path) -> frozenset[str]:
    """Modules of headstart that a file imports anywhere, functions and type checking included, without `headstart.`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative import"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            if not names:
                continue
            modules = {name for name in names if is_module(name.removeprefix("headstart."))}
            found |= modules or {node.module or ""}
    return frozenset(name.removeprefix("headstart.") for name in found if name.split(".")[0] == "headstart")


@cache
def is_module(name: str) -> bool:
    base = SOURCE.joinpath(*name.split("."))
    return base.with_suffix(".py").exists() or (base / "__init__.py").exists()


def rule_of(module: str, rules: Container[str] = ALLOWED) -> str:
    """The rule of a module: the longest name in the rules that it is, or is in; otherwise its package."""
    parts = module.split(".")
    names = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    return next((name for name in names if name in rules), parts[0])


def within(name: str, allowed: set[str]) -> bool:
    return any(name == one or name.startswith(one + ".") for one in allowed)


def test_imports_point_downwards() -> None:
    wrong = {}
    for path in MODULES:
        rule = rule_of(own_name(path))
        if rule in ALLOWED:
            wrong[own_name(path)] = {name for name in imports(path) if not within(name, ALLOWED[rule] | COMMON | {rule})}
    assert {module: sorted(names) for module, names in wrong.items() if names} == {}, "a module must not know these"


def test_only_authors_of_engines_load_what_is_for_testing() -> None:
    """The command line neither, which may import all else."""
    importers = {own_name(path) for path in MODULES if any(within(name, {"testing"}) for name in imports(path))}
    assert "testing.conformance" in importers
    assert not {name for name in importers if not within(name, {"testing"})}


ON_A_FLEET = {"cli.fleet_demo", "cli.fleet_serve", "cli.replay_fleet"}
"""The modules outside `fleet` that may import it."""


def test_one_machine_knows_no_fleet() -> None:
    """Neither does an import of the command line load it."""
    others = [path for path in MODULES if not within(own_name(path), {"fleet"} | ON_A_FLEET)]
    assert len(others) < len(MODULES) - 8
    assert not [own_name(path) for path in others if any(within(name, {"fleet"}) for name in imports(path))]
    for name in ON_A_FLEET:
        tree = ast.parse(SOURCE.joinpath(*name.split(".")).with_suffix(".py").read_text("utf-8"))
        loaded = {node.module for node in tree.body if isinstance(node, ast.ImportFrom)}
        assert not any(str(module).startswith("headstart.fleet") for module in loaded)


WORLD = {"os", "io", "pathlib", "time", "random", "socket", "asyncio", "logging", "mmap", "secrets", "shutil", "sqlite3"}
HTTP = {"fastapi", "starlette", "uvicorn", "httpx"}
DIALECTS = {path.name for path in (SOURCE / "api").iterdir() if (path / "routes.py").exists()}
ABOVE_DIALECTS = {"app", "dialects", "openapi", "service"}
"""Modules of `api` that put the dialects together."""


def test_dialects_know_nothing_of_each_other() -> None:
    for path in sorted((SOURCE / "api").rglob("*.py")):
        place = own_name(path).split(".")[1:2]
        if not set(place) & ABOVE_DIALECTS:
            others = {name for name in imports(path) if name.startswith("api.") and name.split(".")[1] in DIALECTS - set(place)}
            assert not others, own_name(path)


FORBIDDEN = {
    **dict.fromkeys(("interfaces", "output", "prompt", "explain", "prefix_cache"), WORLD | HTTP),
    "tiers": HTTP | {"llama_cpp", "jinja2"},
    "serving": HTTP | {"llama_cpp"},
    "chat": HTTP | {"llama_cpp"},
    "events": HTTP | {"llama_cpp"},
    "library": HTTP,
    "hub": HTTP | {"llama_cpp"},
    "engines": HTTP,
    "fleet": {"ray", "llama_cpp"} | HTTP | (WORLD - {"random"}),
    "fleet.front": {"ray", "llama_cpp"} | (HTTP - {"starlette"}) | WORLD,
    "fleet.front.front": {"ray", "llama_cpp"} | (HTTP - {"starlette"}) | (WORLD - {"asyncio", "time"}),
    "fleet.replica": {"ray", "llama_cpp"} | HTTP | (WORLD - {"time"}),
    "fleet.cluster": {"llama_cpp", "httpx"},
    "api": {"llama_cpp"},
    "models": {"llama_cpp", "httpx"},
    **dict.fromkeys((f"models.{name}" for name in ("choice", "naming", "passing", "plan", "state")), WORLD | {"llama_cpp"}),
    "observe": {"llama_cpp"},
}
"""Outside modules that a package must not touch: what is pure does no I/O and reads no clock, only the API speaks HTTP."""


STORE_CLIENTS = {"valkey", "libvalkey", "obstore", "cryptography"}
"""Outside modules of the shared tier (the extra `shared`): no other package may import them."""


def test_packages_stay_in_their_world() -> None:
    for path in MODULES:
        forbidden = FORBIDDEN.get(rule_of(own_name(path), FORBIDDEN), set())
        used = set()
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                used |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                used.add(node.module.split(".")[0])
        assert not used & forbidden, own_name(path)
        assert own_name(path).startswith("tiers.shared.") or not used & STORE_CLIENTS, own_name(path)
    assert own_name(path).startswith("fleet.cluster.") or "ray" not in used


def test_rules_see_real_packages() -> None:
    """A renamed package must not slip out of the table."""
    present = {own_name(path).split(".")[0] for path in MODULES if path.parent != SOURCE}
    assert present - {"cli"} == {name for name in ALLOWED if (SOURCE / name).is_dir()}
    assert {rule_of(own_name(path)) for path in MODULES} - ENTRY_POINTS == ALLOWED.keys()
    assert {own_name(path) for path in MODULES} >= {name for name in ALLOWED if "." in name}
    assert "interfaces.traits" in imports(SOURCE / "prefix_cache" / "planner.py")


def test_each_test_file_stands_where_its_module_stands() -> None:
    """`tests/tiers/test_memory.py` tests `tiers/memory.py`; whole behaviours are in `tests/system`. The root has the rest."""
    files = [path.relative_to(TESTS) for path in TESTS.glob("*/**/test_*.py")]
    modules = {file: SOURCE / file.parent / file.stem.removeprefix("test_") for file in files if file.parts[0] != "system"}
    assert modules
    assert not {file for file, module in modules.items() if not (module.is_dir() or module.with_suffix(".py").exists())}


def test_nothing_is_imported_in_a_circle() -> None:
    """In functions neither."""
    above = {own_name(path): imports(path) for path in MODULES}
    while leaves := {name for name, needs in above.items() if not needs & above.keys()}:
        above = {name: needs for name, needs in above.items() if name not in leaves}
    assert not above


IN_PROCESS = """
import sys
import headstart
from headstart.config import Settings
from headstart.serving.runtime import Runtime
from headstart.testing.fake_engine import FakeEngine

with headstart.Headstart(Runtime(FakeEngine, Settings(memory_budget=1 << 20))) as hs:
    assert hs.chat("Hello.", max_tokens=4).tokens

def show_loaded():
    print(*{name.split(".")[0] for name in sys.modules}, *(name for name in sys.modules if name.startswith("headstart.")))

show_loaded()
import headstart.cli.doctor, headstart.cli.main, headstart.cli.server
import headstart.engines.llama, headstart.hub.finders, headstart.models.serve
from headstart.engines import registry
from headstart.engines.options import EngineOptions

registry.check(EngineOptions(sys.argv[1]))
show_loaded()
"""
"""Prints what the library has loaded, and then what a server of a GGUF file has."""


@pytest.fixture(scope="module")
def loaded(tiny_model: Path) -> tuple[set[str], set[str]]:
    command = [sys.executable, "-c", IN_PROCESS, str(tiny_model)]
    library, server = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return set(library.split()), set(server.split())


def test_a_server_of_a_gguf_file_loads_no_other_engine(loaded: tuple[set[str], set[str]]) -> None:
    _, found = loaded
    assert {"headstart.engines.llama.engine", "headstart.engines.registry", "headstart.api.app", "fastapi"} <= found
    assert not found & {"mlx", "mlx_lm", "tokenizers", "safetensors", "transformers", "headstart.engines.mlx"}


def test_on_one_machine_nothing_of_a_fleet_is_loaded(loaded: tuple[set[str], set[str]]) -> None:
    _, found = loaded
    assert "headstart.cli.main" in found
    of_a_fleet = ("headstart.fleet", "headstart.cli.fleet", "headstart.tiers.shared.")
    assert not [name for name in found if name.startswith(of_a_fleet)]


def test_the_library_loads_no_http(loaded: tuple[set[str], set[str]]) -> None:
    found, _ = loaded
    assert "headstart.chat.messages" in found
    assert not found & (HTTP | {"headstart.api", "headstart.cli", "h11", "multipart"})
    assert not [name for name in found if name in STORE_CLIENTS or f"{name}.".startswith("headstart.tiers.shared.")]


def test_exports_are_sorted_and_complete() -> None:
    names = headstart.__all__
    assert names == sorted(names)
    assert len(names) == len(set(names))
    public = {
        name
        for node in ast.walk(ast.parse((SOURCE / "__init__.py").read_text("utf-8")))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("headstart.")
        for name in (alias.asname or alias.name for alias in node.names)
    }
    assert public == set(names)
    for name in names:
        assert getattr(headstart, name) is not None


def test_public_errors_are_all_exported() -> None:
    """The error tree that the module draws is the one that a user can catch."""
    tree = [node.name for node in ast.parse((SOURCE / "errors.py").read_text("utf-8")).body if isinstance(node, ast.ClassDef)]
    assert set(tree) <= set(headstart.__all__)
