"""Requests that refer to something stored go to the replica that keeps it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient

from effort import examples
from headstart.api.app import create_app
from headstart.config import Settings
from headstart.errors import ConfigError
from headstart.fleet.front.affinity import replica_tag, tag_of, wanted_tag
from headstart.serving.runtime import Runtime
from headstart.testing.fake_engine import FakeEngine

TAG = replica_tag("replica-1")
ID = f"resp_{TAG}{'0' * 24}"
ITEM = f"msg_{TAG}{'0' * 24}i0"


def data(**body: Any) -> bytes:
    return json.dumps(body).encode()


def test_a_tag_is_short_and_a_replicas_own() -> None:
    assert TAG == replica_tag("replica-1") != replica_tag("replica-2")
    assert len(TAG) == 8
    assert int(TAG, 16) >= 0


@pytest.mark.parametrize("id", [ID, ITEM, f"fc_{TAG}{'a' * 24}3"])
def test_ids_of_a_replica_show_its_tag(id: str) -> None:
    assert tag_of(id) == TAG


@pytest.mark.parametrize(
    "id", ["", "resp_", f"resp_{TAG}", f"{TAG}{'0' * 24}", "resp_" + "z" * 32, ID + "/x", "msg_" + "0" * 24]
)
def test_other_ids_show_none(id: str) -> None:
    assert tag_of(id) is None


def test_a_fleets_ids_are_found_in_paths_and_bodies() -> None:
    with (
        Runtime(FakeEngine, Settings(memory_budget=32 << 20)) as runtime,
        TestClient(create_app(runtime, model_id="fake", replica_tag=TAG), "http://localhost") as http,
    ):
        made = http.post("/v1/responses", json={"input": "Hello", "max_output_tokens": 2}).json()
        items = http.get(f"/v1/responses/{made['id']}/input_items").json()["data"]
        assert wanted_tag(f"/v1/responses/{made['id']}", b"") == TAG
        assert wanted_tag("/v1/responses", data(input="Go on.", previous_response_id=made["id"])) == TAG
        for item in (*items, *made["output"]):
            assert wanted_tag("/v1/responses", data(input=[{"type": "item_reference", "id": item["id"]}])) == TAG
            again = http.post("/v1/responses", json={"input": [{"id": item["id"]}, {"role": "user", "content": "?"}]})
            assert again.status_code == 200
        assert len(made["id"]) == len("resp_") + 32


def test_a_body_that_every_replica_refuses_is_not_parsed() -> None:
    """Its many lists would keep the front's other requests waiting."""
    named = b'{"previous_response_id": "resp_%s", "input": [%s]}'
    id = b"01234567" * 4
    assert wanted_tag("/v1/responses", named % (id, b"[]")) == "01234567"
    assert wanted_tag("/v1/responses", named % (id, b",".join([b"[]"] * 250_001))) is None


def test_without_a_tag_ids_are_random() -> None:
    with (
        Runtime(FakeEngine, Settings(memory_budget=32 << 20)) as runtime,
        TestClient(create_app(runtime, model_id="fake"), "http://localhost") as http,
    ):
        ids = [http.post("/v1/responses", json={"input": "a", "max_output_tokens": 1}).json()["id"] for _ in range(4)]
        assert len({tag_of(id) for id in ids}) == 4
        assert {len(id) for id in ids} == {len("resp_") + 32}


@pytest.mark.parametrize("tag", ["x", "ABCDEF01", "0123456789", "0123456\n"])
def test_a_tag_of_another_form_is_refused(tag: str) -> None:
    with Runtime(FakeEngine, Settings(memory_budget=32 << 20)) as runtime, pytest.raises(ConfigError, match="8 hexadecimal"):
        create_app(runtime, replica_tag=tag)


FOUND: list[tuple[str, bytes]] = [
    (f"/v1/responses/{ID}", b""),
    (f"/responses/{ID}/input_items", b""),
    (f"//v1/v1/responses/{ID}/", b""),
    (f"/v1/responses/{ID}?cache_salt=a", b""),
    (f"/v1/responses/{ID}/cancel", b"{}"),
    ("/v1/responses", data(previous_response_id=ID)),
    ("/v1/responses/input_tokens", data(previous_response_id=ID, input="a")),
    ("", data(input="a", previous_response_id=ID)),
    ("", data(input=[{"id": ITEM}])),
    ("", data(input=[{"type": None, "id": ITEM, "item_reference": 1}])),
    ("/headstart/explain", data(a={"input": "a"}, b={"input": "b", "previous_response_id": ID})),
]


@pytest.mark.parametrize(("path", "body"), FOUND)
def test_what_a_request_refers_to_is_found(path: str, body: bytes) -> None:
    assert wanted_tag(path, body) == TAG


NOTHING: list[tuple[str, bytes]] = [
    ("/v1/responses", data(input="a")),
    ("/v1/responses", data(input="a", previous_response_id=None)),
    ("/v1/responses", data(input="a", previous_response_id=[ID])),
    ("/v1/responses", data(input=[{"type": "message", "role": "user", "id": ITEM, "content": "a"}])),
    ("/v1/responses/compact", b""),
    ("/v1/responses/resp_", b""),
    ("/headstart/explain", b""),
    (f"/headstart/explain/{ID}", b""),
    ("/v1/chat/completions", data(messages=[{"role": "user", "content": f"previous_response_id {ID}"}])),
    ("/v1/responses", b'{"previous_response_id": ' + b"[" * 100_000),
    ("", b"previous_response_id"),
]


@pytest.mark.parametrize(("path", "body"), NOTHING)
def test_what_refers_to_nothing_goes_anywhere(path: str, body: bytes) -> None:
    assert wanted_tag(path, body) is None


@given(st.text(max_size=20).map(lambda text: f"/v1/responses/{text}") | st.text(max_size=20), st.binary(max_size=40))
@examples(200)
def test_no_request_raises(path: str, body: bytes) -> None:
    assert wanted_tag(path, body) is None
    assert wanted_tag(path, b'{"previous_response_id": ' + body) is None
