from __future__ import annotations

import json

import pytest

from headstart.api.framing import NDJSON, SSE, comment, frame
from headstart.errors import Unavailable
from headstart.models.passing import (
    PassedError,
    PassedEvents,
    answered_headers,
    passed_headers,
    stream_error,
    stream_headers,
    target,
)
from headstart.models.upstream import AnswerHead


def test_keys_and_origins_stay_at_the_front() -> None:
    given = [
        *((b"authorization", b"Bearer secret"), (b"x-api-key", b"secret"), (b"origin", b"http://x"), (b"cookie", b"c")),
        *((b"host", b"llm.example.com"), (b"connection", b"keep-alive"), (b"x-forwarded-for", b"6.6.6.6")),
        *((b"accept", b"text/event-stream"), (b"x-session-id", b"s1"), (b"content-length", b"999")),
    ]
    passed = passed_headers(given, caller=b"t:0:", request_id="req_1", client="1.2.3.4", body=b"12")
    assert dict(passed) == {
        b"accept": b"text/event-stream",
        b"x-session-id": b"s1",
        b"host": b"localhost",
        b"authorization": b"Bearer t:0:",
        b"x-request-id": b"req_1",
        b"x-forwarded-for": b"1.2.3.4",
        b"content-length": b"2",
    }
    assert b"secret" not in b"".join(value for _, value in passed)


def test_the_front_frames_answers_itself() -> None:
    head = AnswerHead(200, ((b"transfer-encoding", b"chunked"), (b"x-request-id", b"1"), (b"content-type", b"a/b")))
    assert answered_headers(head) == [(b"content-type", b"a/b")]


def test_a_path_is_escaped_again() -> None:
    assert target("/v1/models/a b\r\nx: y", b"q=1") == b"/v1/models/a%20b%0D%0Ax:%20y?q=1"


def test_streams_end_with_the_error_of_their_dialect() -> None:
    error = Unavailable("later")
    assert stream_error("/v1/messages", SSE, error, "req_1").startswith(b'event: error\ndata: {"type":"error"')
    assert stream_error("/v1/chat/completions", SSE, error, "req_1").endswith(b"data: [DONE]\n\n")
    assert json.loads(stream_error("/v1/responses", SSE, error, "req_1").split(b"data: ")[1])["message"] == "later"
    assert stream_error("/api/chat", NDJSON, error, "req_1") == b'{"error":"later"}\n'
    assert stream_headers(NDJSON)[0] == (b"content-type", b"application/x-ndjson")
    assert stream_headers(SSE)[0] == (b"content-type", b"text/event-stream; charset=utf-8")


@pytest.mark.parametrize("size", [1, 5, 7, 1000])
def test_the_error_of_a_stream_of_responses_has_the_next_number(size: int) -> None:
    texts = ["a", "\ndata: ", "data: b"]
    stream = comment("waits") + b"".join(
        frame({"type": "x", "delta": text, "sequence_number": number}, "x") for number, text in enumerate(texts)
    )
    events = PassedEvents()
    for start in range(0, len(stream), size):
        events.add(stream[start : start + size])
    end = stream_error("/v1/responses", SSE, Unavailable("later"), "req_1", events.count)
    assert json.loads(end.split(b"data: ")[1])["sequence_number"] == len(texts)


def test_an_error_of_the_process_keeps_its_words() -> None:
    fields = {"message": "too long", "type": "invalid_request_error", "param": "messages", "code": "context_length_exceeded"}
    error = PassedError.of(400, json.dumps({"error": fields}).encode())
    assert (error.status, error.message, error.param, error.code) == (400, "too long", "messages", "context_length_exceeded")
    assert PassedError.of(404, b'{"error":"no such model"}').message == "no such model"  # Ollama's form
    assert PassedError.of(502, b"<html>").status == 502
