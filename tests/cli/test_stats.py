"""`headstart stats` shows the sums of a real server, as text and as a plot."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from headstart.api.auth import Keys
from headstart.cli.main import main
from headstart.config import Settings
from headstart.serving.runtime import Runtime
from headstart.testing.fake_engine import FakeEngine
from live import Server, serving

Run = Callable[..., str]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "keys").write_text("operator = sk-operator\nalice = sk-alice\n")
    (tmp_path / "keys").chmod(0o600)
    settings = Settings(memory_budget=1 << 20)
    with (
        Runtime(lambda: FakeEngine(slots=2, ctx=2048), settings) as runtime,
        serving(runtime, key="sk-operator", model_id="fake", api_keys=Keys((), tmp_path / "keys")) as found,
    ):
        for number in range(3):
            messages = [
                {"role": "system", "content": f"Be brief {number // 2}. " * 30},
                {"role": "user", "content": f"Say {number}."},
            ]
            body = {"messages": messages, "max_tokens": 4, "ignore_eos": True}
            assert found.post("/v1/chat/completions", json=body).is_success
        yield found


@pytest.fixture
def run(server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("HEADSTART_URL", server.url)
    monkeypatch.setenv("COLUMNS", "200")

    def stats(*arguments: str, key: str = "sk-operator", code: int = 0) -> str:
        monkeypatch.setenv("HEADSTART_API_KEY", key)
        capsys.readouterr()  # the server's log
        with pytest.raises(SystemExit) as end:
            main(["stats", *arguments])
        captured = capsys.readouterr()
        assert end.value.code == code, captured
        return captured.out if code == 0 else captured.err

    return stats


def test_text_data_and_plot_say_the_same(run: Run, tmp_path: Path) -> None:
    data = json.loads(run("--json"))
    assert data["requests"] == 3
    assert data["cached"] > 0
    text = run("--plot", str(tmp_path / "out.svg"))
    assert "fake, 3 requests in" in text
    assert f"{data['cached']:,} tokens ({data['cached'] / data['prompt']:.0%})" in text
    assert f"{data['prompt']:,} tokens" in text
    for cause, tokens in data["recomputed"].items():
        assert f"{tokens:,} tokens computed again: {cause}" in text
    root = ElementTree.parse(tmp_path / "out.svg").getroot()
    texts = ["".join(one.itertext()) for one in root.iter("{http://www.w3.org/2000/svg}text")]
    share = f"{data['cached']:,} of {data['prompt']:,} prompt tokens were cached ({data['cached'] / data['prompt']:.0%})"
    assert texts[0] == f"3 requests: {share}"
    assert f"computed {data['computed']:,}" in texts


def test_a_tenant_sees_its_own(run: Run, tmp_path: Path) -> None:
    assert "fake, 0 requests in" in run("--plot", str(tmp_path / "out.svg"), key="sk-alice")
    assert "0 of 0" in (tmp_path / "out.svg").read_text("utf-8")


@pytest.mark.parametrize(
    ("arguments", "key", "said"),
    [
        (("--plot", "out.png"), "sk-operator", "--plot draws SVG: give a name like out.svg."),
        (("--plot", "/no/such/folder/out.svg"), "sk-operator", "Cannot write --plot /no/such/folder/out.svg: No such file"),
        ((), "sk-wrong", "API key"),
    ],
)
def test_what_a_user_can_mend(run: Run, arguments: tuple[str, ...], key: str, said: str) -> None:
    assert said in run(*arguments, key=key, code=2)
