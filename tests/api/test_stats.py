"""`GET /headstart/stats`: the numbers of the answers, all for the operator, and for a tenant those of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from headstart.api.auth import Keys
from headstart.config import Settings
from headstart.observe import stats
from headstart.observe.report import Summary
from headstart.observe.stats import TenantStats
from headstart.serving.runtime import Runtime
from headstart.testing.fake_engine import FakeEngine
from live import serving


def test_it_says_what_the_answers_said() -> None:
    words = "Roses in the garden. " * 20
    body = {"messages": [{"role": "user", "content": words}], "max_tokens": 4, "ignore_eos": True}
    with (
        Runtime(lambda: FakeEngine(slots=2, ctx=2048, delay=0.002), Settings(memory_budget=1 << 20)) as runtime,
        serving(runtime, wait=False, model_id="fake") as server,
    ):
        assert server.http.get("/headstart/stats").json()["requests"] == 0
        used = [server.post("/v1/chat/completions", json=body).json()["headstart"] for _ in range(3)]
        found = server.http.get("/headstart/stats").json()
    assert found["requests"] == sum(found["steps"]["requests"]) == 3
    assert found["cached"] == sum(one["cached"] for one in used) > 0
    assert found["computed"] == sum(one["computed"] for one in used)
    assert found["tiers"]["live"] == sum(one["live"] for one in used)
    assert found["saved_seconds"] > 0
    assert found["ttft"]["cold"]["requests"] == 1
    assert found["ttft"]["warm"]["requests"] == 2
    assert found["stored"]["memory"]["budget"] == 1 << 20
    assert found["slots"] == 2
    assert found["model"] == "fake"


def test_a_tenant_sees_its_own(tmp_path: Path) -> None:
    names = ("operator", "alice", "bob", "carol")
    (tmp_path / "keys").write_text("".join(f"{name} = sk-{name}\n" for name in names))
    (tmp_path / "keys").chmod(0o600)
    headers = {name: {"authorization": f"Bearer sk-{name}"} for name in (*names, "nobody")}
    body = {"messages": [{"role": "user", "content": "Roses in the garden. " * 20}], "max_tokens": 4}
    with (
        Runtime(lambda: FakeEngine(delay=0.02)) as runtime,  # a cold prefill is slower than a restore on a busy machine too
        serving(runtime, wait=False, api_keys=Keys((), tmp_path / "keys")) as server,
    ):
        used = {
            name: [server.post("/v1/chat/completions", json=body, headers=headers[name]) for _ in range(2)]
            for name in ("alice", "bob")
        }
        found = {name: server.http.get("/headstart/stats", headers=headers[name]).json() for name in names}
        assert server.http.get("/headstart/stats", headers=headers["nobody"]).status_code == 401
    for name, answers in used.items():
        assert found[name]["requests"] == 2
        assert found[name]["cached"] == sum(one.json()["headstart"]["cached"] for one in answers) > 0
        assert found[name]["saved_seconds"] > 0
        assert not {"running", "waiting"} & found[name].keys(), "what others do"
        assert not found[name]["stored"], "what others have"
    assert (found["operator"]["requests"], found["carol"]["requests"]) == (4, 0)


def test_the_latest_tenants_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats, "TENANTS", 2)
    own, one = TenantStats(), Summary(1, 0, 0, 1, 1, {}, "fast", None, True, 0, 0.0, 0.0, 0.0, 0.0)
    for tenant in ("a", "b", "a", "c"):
        own.record(tenant, one, 0.0)
    assert [own.of(tenant).view()["requests"] for tenant in "abc"] == [2, 0, 1]
