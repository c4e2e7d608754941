"""`headstart ps` of a server with one model; tests/system/test_several_models.py asks one with several."""

from __future__ import annotations

import json

import pytest

from headstart.cli.main import main
from headstart.serving.runtime import Runtime
from headstart.testing.fake_engine import FakeEngine
from live import serving


def test_one_model_is_listed_like_several(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with Runtime(FakeEngine) as runtime, serving(runtime, model_id="fake") as server:
        monkeypatch.setenv("HEADSTART_URL", server.url)
        shown = []
        for options in ([], ["--json"]):
            with pytest.raises(SystemExit) as ended:
                main(["ps", *options])
            assert ended.value.code == 0
            shown.append(capfd.readouterr().out)
    assert [line.split() for line in shown[0].splitlines()[-2:]] == [
        ["MODEL", "STATE", "RUNNING", "WAITING"],
        ["fake", "ready", "0", "0"],
    ]
    assert json.loads(shown[1][shown[1].index("{") :])["models"][0]["name"] == "fake"
