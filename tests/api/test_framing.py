"""What a client that parses each line makes of a stream."""

from __future__ import annotations

import json

import httpx

from headstart.api.framing import NDJSON, SSE


def test_silence_means_nothing_to_a_reader_of_lines() -> None:
    chunks = [NDJSON.silence("waiting"), NDJSON.frame({"a": "1\n2"}), NDJSON.silence("waiting"), NDJSON.frame({"b": 3})]
    lines = list(httpx.Response(200, content=iter(chunks)).iter_lines())
    assert [json.loads(line) for line in lines] == [{"a": "1\n2"}, {"b": 3}]


def test_silence_is_a_comment_to_a_reader_of_events() -> None:
    lines = (SSE.silence("waiting") + SSE.frame({"a": 1})).decode().splitlines()
    assert [line for line in lines if line and not line.startswith(":")] == ['data: {"a":1}']
