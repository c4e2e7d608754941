"""The docs say what is: pages that are generated are current, and those that people write leave nothing out."""

from __future__ import annotations

import dataclasses
import json
import re
import runpy
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

import headstart
from headstart.api.app import create_app
from headstart.api.openapi import EVENTS
from headstart.api.service import Service
from headstart.models import routes as several
from headstart.observe.metrics import SOURCES
from headstart.serving.runtime import Runtime
from headstart.testing.fake_engine import FakeEngine
from headstart.tiers.shared import envelope, store
from live import serving

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES: dict[str, Any] = runpy.run_path(str(DOCS / "generate.py"))["PAGES"]
DRAWINGS: dict[str, Any] = runpy.run_path(str(DOCS / "draw.py"))["DRAWINGS"]


def read(name: str) -> str:
    return (DOCS / name).read_text("utf-8")


@pytest.mark.parametrize("page", PAGES)
def test_generated_pages_are_current(page: str) -> None:
    assert read(page) == PAGES[page](), "run `make docs`"


@pytest.mark.parametrize("drawing", DRAWINGS)
def test_drawings_are_current(drawing: str) -> None:
    assert read(drawing) == DRAWINGS[drawing](), "run `make docs`"


def test_the_library_page_explains_every_name() -> None:
    page = read("library.md")
    for name in set(headstart.__all__) - {"__version__"}:
        assert name in page
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert {field.name for field in dataclasses.fields(headstart.Settings)} <= {row.split("`")[1] for row in rows}
    assert [row for row in rows if not row.split("|")[-2].strip()] == []


def routes(of: Any) -> Iterator[tuple[str, str]]:
    """Methods and paths, those of included routers too."""
    for route in of.routes:
        if (inner := getattr(route, "original_router", None)) is not None:
            yield from routes(inner)
        else:
            yield from ((method, route.path.replace(":path}", "}")) for method in route.methods - {"HEAD"})


def test_every_route_is_described() -> None:
    runtime = Runtime(FakeEngine)
    try:
        known = set(routes(create_app(runtime))) | set(routes(several.router))
    finally:
        runtime.close()
    assert ("POST", "/v1/messages") in known
    described = set()
    for methods, path in re.findall(r"`((?:GET|POST|DELETE|PUT)(?:, (?:GET|POST|DELETE|PUT))*) (/[^`?]*)`", read("http.md")):
        described |= {(method, path) for method in methods.split(", ")}
    assert known - described == set()
    assert described - known == set()


def test_every_metric_is_described() -> None:
    with serving(Runtime(FakeEngine)) as server:
        server.post("/v1/completions", json={"prompt": "Once", "max_tokens": 2})
        server.post("/v1/completions", json={"prompt": 5})
        assert server.runtime is not None
        server.runtime.cache.store.counters.update(skipped_budget=1, fault_import=1)
        text = server.http.get("/metrics").text
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    types = {name: kind for name, kind in types.items() if not name.endswith("_created")}
    labels: dict[str, set[str]] = {name: set() for name in types}
    for name, given in re.findall(r"^([\w:]+?)(?:_bucket|_count|_sum)?\{([^}]*)\}", text, re.MULTILINE):
        if not name.endswith("_created"):
            labels[name] |= set(re.findall(r"(\w+)=", given)) - {"model_name", "le"}
    rows = re.findall(r"^\| `([^`]+)` \| (\w+) \| ([^|]*)\| ([^|]+) \|$", read("metrics.md"), re.MULTILINE)
    told = {name: (kind, set(re.findall(r"`(\w+)`", said))) for name, kind, said, _ in rows}
    assert {name: kind for name, (kind, _) in told.items()} == types
    for name, seen in labels.items():
        assert told[name][1] == seen or (not seen and told[name][1]), name


def test_reasons_of_the_shared_tier_are_described() -> None:
    page = read("metrics.md")
    for tier in SOURCES:
        assert f"`{tier}`" in page
    skipped = ("full", "store_full", "failing", "slow")
    for reason in (*get_args(store.Reason), *get_args(envelope.SealReason), *skipped, "differs", "distrusted"):
        assert f"`{reason}`" in page, reason


@pytest.mark.parametrize("page", ["security.md", "privacy.md"])
def test_what_leaves_the_machine_is_said_where_people_look_for_it(page: str) -> None:
    text = read(page)
    for option in ("--shared", "--shared-encrypt", "--cache-dir", "--no-disk", "--expire"):
        assert f"`{option}`" in text
    assert "shared.md" in text


def test_llms_recipe_lets_it_ask_for_schemas_and_tools() -> None:
    recipe = read("clients.md").partition("\n## llm\n")[2].partition("```yaml")[2].partition("```")[0]
    assert {"supports_schema: true", "supports_tools: true"} <= {line.strip() for line in recipe.splitlines()}


def test_privacy_names_all_that_limits_and_deletes() -> None:
    text = read("privacy.md")
    for option in ("--shared-expire", "--shared-mode read", "--explain off", "headstart fleet rm", "headstart cache rm"):
        assert option in text


@pytest.mark.parametrize("page", ["privacy.md", "format.md"])
def test_all_files_of_the_folder_for_state_are_described(page: str) -> None:
    """Fault: both pages knew two of them."""
    sources = (path.read_text("utf-8") for path in (ROOT / "src/headstart").rglob("*.py"))
    files = {name for source in sources for name in re.findall(r'^MEMO = "(.+)"$', source, re.MULTILINE)}
    assert len(files) == 4
    text = (DOCS / page).read_text("utf-8")
    assert {name for name in (*files, "fetched/") if name not in text} == set()


def test_foreign_model_names_are_as_described() -> None:
    service, table = Service("mine"), read("http.md").partition("| taken | examples |")[2].partition("\n\n")[0]
    names = re.findall(r"`([\w.-]+)`", " ".join(line.split("|")[2] for line in table.splitlines() if line.count("|") == 3))
    assert len(names) > 8
    for name in names:
        service.check_model(name)
    for name in ("gpt-oss-20b", "gemini-pro", "llama3"):
        with pytest.raises(headstart.NotFound):
            service.check_model(name)


def test_the_readme_is_short_and_shows_the_real_run() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    assert readme.count("\n") <= 90
    assert re.search("^make demo .*\nmake test ", readme, re.MULTILINE)
    turns = json.loads(read("demo.json"))
    prompt, computed = (sum(turn[name] for turn in turns) for name in ("prompt", "computed"))
    assert f"Of {prompt:,} prompt tokens headstart computed {computed:,} ({computed / prompt:.0%})" in readme


def test_the_readme_links_every_page() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    for page in DOCS.glob("*.md"):
        assert f"docs/{page.name}" in readme, page.name


def test_decisions_are_dated_and_listed() -> None:
    pages = sorted((DOCS / "decisions").glob("2*.md"))
    assert len(pages) > 40
    listed = re.findall(r"^\* (\S+): \[(.*)\]\((.*)\)$", read("decisions/README.md"), re.MULTILINE)
    for page in pages:
        title, _, date, *_ = page.read_text("utf-8").splitlines()
        assert page.name.startswith(f"{date}-")
        assert (date, title.removeprefix("# "), page.name) in listed
    assert len(listed) == len(pages)


def test_contributing_names_files_that_exist() -> None:
    named = re.findall(r"`((?:src|tests|docs|examples)/[^`]*)`", (ROOT / "CONTRIBUTING.md").read_text("utf-8"))
    assert len(named) > 25
    assert [name for name in named if "NAME" not in name and not (ROOT / name).exists()] == []


def test_contributing_names_commits_that_exist() -> None:
    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)

    if shutil.which("git") is None or git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("the history is not here")
    named = re.findall(r"`([0-9a-f]{7,})`", (ROOT / "CONTRIBUTING.md").read_text("utf-8"))
    assert len(named) >= 4
    assert [name for name in named if git("cat-file", "-e", f"{name}^{{commit}}").returncode] == []


def test_links_between_pages_lead_somewhere() -> None:
    for page in (*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "src").rglob("*.md"), *(ROOT / "tests").rglob("*.md")):
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text("utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_page_of_events_has_those_of_openapi() -> None:
    content = EVENTS[200]["content"]["text/event-stream"]["schema"]["properties"]["event"]
    assert re.findall(r"^\| `(\w+)` \|", read("events.md").partition("**Entries**")[0], re.MULTILINE) == content["enum"]
