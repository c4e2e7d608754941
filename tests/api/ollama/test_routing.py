from __future__ import annotations

import math
import sys
from typing import Any

import pytest

from headstart.api.dialects import routing_of
from headstart.api.framing import NDJSON, SSE

SAID = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    ("path", "body", "keep", "unloads"),
    [
        ("/api/chat", {}, None, False),
        ("/api/chat", {"keep_alive": 0}, 0.0, True),
        ("/api/chat", {"keep_alive": 0, "messages": SAID}, 0.0, False),
        ("/api/generate", {"keep_alive": "0s", "prompt": ""}, 0.0, True),
        ("/api/generate", {"keep_alive": "1h30m"}, 5400.0, False),
        ("/api/generate", {"keep_alive": -1, "prompt": "a"}, math.inf, False),
        ("/api/generate", {"keep_alive": "-1s"}, math.inf, False),
        ("/api/generate", {"keep_alive": "soon"}, None, False),
        ("/api/generate", {"keep_alive": "1" * 100_000}, None, False),  # took more than a minute, on the front's event loop
        ("/api/generate", {"keep_alive": 10**310}, sys.float_info.max, False),
        ("/api/generate", {"keep_alive": math.nan}, None, False),
        ("/api/generate", {"keep_alive": True}, None, False),
        ("/v1/chat/completions", {"keep_alive": 0}, None, False),
    ],
)
def test_a_body_says_for_how_long_a_model_is_kept(path: str, body: Any, keep: float | None, unloads: bool) -> None:
    routing = routing_of(path, body)
    assert (routing.keep, routing.unloaded is not None) == (keep, unloads)


@pytest.mark.parametrize(("model", "name"), [("a", "a"), (None, "b:latest"), ("", "b:latest"), (["a"], "b:latest")])
def test_the_answer_to_an_unload_has_the_callers_name_of_the_model(model: Any, name: str) -> None:
    answered = routing_of("/api/generate", {"model": model, "keep_alive": 0}).unloaded
    assert answered is not None
    assert (answered("b")["model"], answered("b")["done_reason"]) == (name, "unload")


@pytest.mark.parametrize(
    ("path", "stream", "framing"),
    [
        ("/api/chat", None, NDJSON),
        ("/api/generate", True, NDJSON),
        ("/api/chat", False, None),
        ("/v1/messages", True, SSE),
        ("/v1/messages", None, None),
        ("/tokenize", True, None),
    ],
)
def test_the_form_of_a_stream_is_known_before_a_model_is(path: str, stream: bool | None, framing: Any) -> None:
    assert routing_of(path, {} if stream is None else {"stream": stream}).framing is framing
