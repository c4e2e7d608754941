"""How tokens are chosen where a request does not say: as the server was told, in every dialect and in the library."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from headstart.config import Settings
from headstart.interfaces.sampling import Sampling
from headstart.library.headstart import Headstart
from headstart.serving.request import Event, Request
from headstart.serving.runtime import Runtime
from headstart.testing.fake_engine import FakeEngine
from live import serving

HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI, "max_tokens": 2},
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/v1/messages": {"messages": HI, "max_tokens": 2, "model": "fake"},
    "/completion": {"prompt": "hi", "n_predict": 2},
}
TOLD = {"temperature": 0.1, "top_k": 3, "top_p": 0.7, "min_p": 0.2}


@pytest.mark.parametrize("told", [{}, TOLD, {"top_k": 0}])
def test_what_a_request_does_not_say(told: dict[str, Any]) -> None:
    seen: list[Sampling] = []

    def watch(request: Request) -> Any:
        seen.append(request.params.sampling)
        return _ignore

    usual = replace(Sampling(), **told)
    with Runtime(lambda: FakeEngine(ctx=512), Settings(memory_budget=8 << 20, **told)) as runtime:
        runtime.watch(watch)
        with serving(runtime, model_id="fake") as server:
            for path, body in BODIES.items():
                assert server.post(path, json=body).is_success
                assert replace(seen.pop(), logprobs=None) == usual, path
                assert server.post(path, json={**body, "temperature": 0.5}).is_success
                assert replace(seen.pop(), logprobs=None) == replace(usual, temperature=0.5), path
            shown = server.http.get("/props").json()["default_generation_settings"]["params"]
            assert {name: shown[name] for name in TOLD} == {name: getattr(usual, name) for name in TOLD}
        hs = Headstart(runtime)
        hs.chat("hi", max_tokens=2)
        hs.complete("hi", max_tokens=2, top_p=0.4)
        assert seen == [usual, replace(usual, top_p=0.4)]


def _ignore(event: Event) -> None:
    pass
