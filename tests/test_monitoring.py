"""docs/monitoring: what it names exists, and a real Prometheus that scrapes a real server understands all of it."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml  # a dependency of schemathesis

from headstart.api.auth import Keys
from headstart.config import Settings
from headstart.serving.runtime import Runtime
from headstart.testing.fake_engine import FakeEngine
from live import Server, serving, wait_until
from stores import free_port

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "monitoring"
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "dashboard.json").read_text("utf-8"))
ALERTS: list[dict[str, Any]] = yaml.safe_load((FOLDER / "alerts.yaml").read_text("utf-8"))["groups"][0]["rules"]
RULE_TESTS: list[dict[str, Any]] = yaml.safe_load((FOLDER / "alerts.test.yaml").read_text("utf-8"))["tests"]
README = (FOLDER / "README.md").read_text("utf-8")
METRIC = re.compile(r"\b(?:vllm|sglang|headstart):[a-z0-9_]+")


def queries() -> list[tuple[str, str]]:
    """The dashboard's queries, with the title of their panel."""
    return [(panel["title"], target["expr"]) for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]


@contextmanager
def served(folder: Path) -> Iterator[Server]:
    """A server with keys, of which both tiers are in use."""
    (folder / "keys").write_text("operator = sk-operator\nalice = sk-alice\n")
    (folder / "keys").chmod(0o600)
    settings = Settings(memory_budget=1 << 20, cache_dir=folder / "cache", disk_budget=64 << 20)
    with (
        Runtime(lambda: FakeEngine(slots=2, ctx=2048), settings) as runtime,
        serving(runtime, key="sk-operator", model_id="fake", api_keys=Keys((), folder / "keys")) as server,
    ):
        yield server


def use(server: Server, number: int) -> None:
    """Chats, as a client that changes its system prompt; and a request that is wrong."""
    for system in ("Be brief. ", f"It is {number} o'clock. Be brief. "):
        messages = [{"role": "system", "content": system * 9}, {"role": "user", "content": f"Say {number}. " * 20}]
        body = {"messages": messages, "max_tokens": 8, "ignore_eos": True, "stream": True}
        assert server.post("/v1/chat/completions", json=body).is_success
    assert server.post("/v1/completions", json={"prompt": 5}).status_code == 400
    assert server.runtime is not None
    server.runtime.cache.store.counters.update(skipped_budget=1, fault_import=1)


# ── what it names ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_metric_that_it_names_is_exported(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        use(server, 1)
        text = server.http.get("/metrics").text
    exported = set(re.findall(r"^([\w:]+)\{", text, re.MULTILINE))
    named = {name for _, query in queries() for name in METRIC.findall(query)}
    named |= {name for rule in ALERTS for name in METRIC.findall(rule["expr"])}
    named |= set(METRIC.findall(json.dumps([test["input_series"] for test in RULE_TESTS])))
    assert len(named) > 25
    assert named - exported == set()


def test_the_dashboard_is_one_that_grafana_can_place() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids)) > 20
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
        letters = [target["refId"] for target in panel.get("targets", ())]
        assert len(letters) == len(set(letters))
    variables = {one["name"] for one in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD["panels"])))
    assert used == variables | {"__rate_interval", "__range"}


def test_every_alert_is_described_and_tested_on_a_good_state_and_a_bad_one() -> None:
    names = {rule["alert"] for rule in ALERTS}
    assert set(re.findall(r"^\| `(\w+)`", README, re.MULTILINE)) == names
    cases = [case for test in RULE_TESTS for case in test["alert_rule_test"]]
    assert {case["alertname"] for case in cases if case["exp_alerts"]} == names
    assert {case["alertname"] for case in cases if not case["exp_alerts"]} == names
    for case in cases:  # the good server is in the same state, and is not among those that are expected
        assert not any("good" in alert["exp_labels"]["instance"] for alert in case["exp_alerts"])
    for test in RULE_TESTS:
        assert any("good" in one["series"] for one in test["input_series"]), test["name"]


# ── a real Prometheus ────────────────────────────────────────────────────────────────────────────────────────────────


def program(name: str) -> str:
    found = shutil.which(name)
    assert found is not None, (
        f"this test needs {name}, of Prometheus 2.42 or later: apt-get install --no-install-recommends prometheus"
    )
    return found


@pytest.mark.slow
@pytest.mark.parametrize("command", [("check", "rules", "alerts.yaml"), ("test", "rules", "alerts.test.yaml")])
def test_promtool_agrees(command: tuple[str, ...]) -> None:
    done = subprocess.run([program("promtool"), *command], cwd=FOLDER, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SUCCESS" in done.stdout


@contextmanager
def prometheus(folder: Path, target: str, key: str) -> Iterator[httpx.Client]:
    """Prometheus with the configuration of the README, which scrapes each second."""
    (found,) = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    (folder / "key").write_text(key)
    for before, after in (
        ("/etc/prometheus/headstart.key", str(folder / "key")),
        ("127.0.0.1:8000", target),
        ("alerts.yaml", str(FOLDER / "alerts.yaml")),
        ("_interval: 15s", "_interval: 1s"),
    ):
        assert before in found
        found = found.replace(before, after)
    (folder / "prometheus.yml").write_text(found)
    url, log = f"127.0.0.1:{free_port()}", folder / "log"
    command = [program("prometheus"), f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    with log.open("w") as output:
        process = subprocess.Popen([*command, f"--web.listen-address={url}"], stdout=output, stderr=output)
    try:
        with httpx.Client(base_url=f"http://{url}", timeout=20) as http:
            wait_until(lambda: process.poll() is not None or _ready(http), 60)
            assert process.poll() is None, log.read_text()
            yield http
    finally:
        process.terminate()
        process.wait(30)


def _ready(http: httpx.Client) -> bool:
    try:
        return http.get("/-/ready").status_code == 200
    except httpx.HTTPError:
        return False


def ask(http: httpx.Client, query: str) -> list[float]:
    """The values of a query."""
    answer = http.get("/api/v1/query", params={"query": query}).json()
    assert answer["status"] == "success", (query, answer)
    return [float(one["value"][1]) for one in answer["data"]["result"]]


def filled(query: str) -> str:
    """A query of the dashboard as Grafana sends it."""
    for variable, value in (("$__rate_interval", "15s"), ("$__range", "1m"), ("$instance", ".*"), ("$model", ".*")):
        query = query.replace(variable, value)
    assert "$" not in query
    return query


@pytest.mark.slow
def test_every_query_finds_what_a_server_says(tmp_path: Path) -> None:
    with served(tmp_path) as server, prometheus(tmp_path, server.url.removeprefix("http://"), "sk-operator") as http:
        stop = threading.Event()

        def traffic() -> None:
            number = 0
            while not stop.wait(0.2):
                number += 1
                use(server, number)

        thread = threading.Thread(target=traffic)
        thread.start()
        try:
            wait_until(lambda: ask(http, 'count_over_time(up{job="headstart"}[1m]) >= 6') != [], 60)
            found = {(title, query): ask(http, filled(query)) for title, query in queries()}
            conditions = {rule["alert"]: ask(http, re.sub(r" (>|==) [\d.]+", "", rule["expr"])) for rule in ALERTS}
            rules = http.get("/api/v1/rules").json()["data"]["groups"][0]["rules"]
        finally:
            stop.set()
            thread.join()
        assert {key for key, values in found.items() if not values or any(map(math.isnan, values))} == set()
        assert {rule["health"] for rule in rules} == {"ok"}
        assert [rule["name"] for rule in rules] == [*conditions]
        empty = {name for name, values in conditions.items() if not values or any(map(math.isnan, values))}
        assert empty == {
            "HeadstartRefuses",
            "HeadstartDoesNotStore",
        }  # no 429, and no entry that was not stored for such a reason
        # What the panels show is what the server says.
        total, cached = (server.metric(f"vllm:prompt_tokens{name}_total") for name in ("", "_cached"))
        wait_until(lambda: ask(http, "vllm:prompt_tokens_total") == [total], 20)
        assert ask(http, "vllm:prompt_tokens_cached_total") == [cached]
        shown = {title: values for (title, _), values in found.items()}
        assert shown["Prompt tokens that were cached"] == [pytest.approx(cached / total, abs=0.2)]
        assert shown["Servers"] == [1.0]
        assert {rule["name"] for rule in rules if rule["state"] == "firing"} <= {"HeadstartStoreHasFaults"}


@pytest.mark.slow
def test_without_the_operator_s_key_a_server_is_down(tmp_path: Path) -> None:
    with served(tmp_path) as server, prometheus(tmp_path, server.url.removeprefix("http://"), "sk-alice") as http:
        wait_until(lambda: ask(http, 'up{job="headstart"}') != [], 60)
        assert ask(http, 'up{job="headstart"}') == [0.0]
        wait_until(lambda: _states(http).get("HeadstartDown") == "pending", 60)


def _states(http: httpx.Client) -> dict[str, str]:
    return {rule["name"]: rule["state"] for rule in http.get("/api/v1/rules").json()["data"]["groups"][0]["rules"]}
