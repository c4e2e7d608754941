"""`GET /headstart/stats`: the numbers of the answers, and for the operator only."""

from __future__ import annotations

from pathlib import Path

import pytest

from headstart.api.auth import Keys
from headstart.config import Settings
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


@pytest.mark.parametrize(("name", "status"), [("operator", 200), ("alice", 403), ("nobody", 401)])
def test_it_is_for_the_operator(tmp_path: Path, name: str, status: int) -> None:
    (tmp_path / "keys").write_text("operator = sk-operator\nalice = sk-alice\n")
    (tmp_path / "keys").chmod(0o600)
    with Runtime(FakeEngine) as runtime, serving(runtime, wait=False, api_keys=Keys((), tmp_path / "keys")) as server:
        headers = {"authorization": f"Bearer sk-{name}"}
        assert server.http.get("/headstart/stats", headers=headers).status_code == status
