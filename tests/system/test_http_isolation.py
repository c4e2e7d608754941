"""Who asks: keys from the command line and from a file, tenants, users, and what is told of all of them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request as HttpRequest

from headstart.api.auth import Keys
from headstart.api.service import Service
from headstart.chat.tenancy import POLICIES, policy_of, salt, tenant_of
from headstart.config import Settings
from headstart.errors import ConfigError
from headstart.prefix_cache.blocks import root_id
from headstart.prefix_cache.quota import owner_of
from headstart.serving.runtime import Runtime
from headstart.testing.fake_engine import FakeEngine
from live import Server, serving

CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "You answer in the words of the house, and never in others."},
    {"role": "user", "content": "What is in the house?"},
]


def keys_in(path: Path, text: str, *given: str) -> Keys:
    path.write_text(text)
    path.chmod(0o600)
    return Keys(given, path)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


# ── salts ────────────────────────────────────────────────────────────────────────────────────────────────────────────

TEXT = st.text(max_size=4) | st.sampled_from(["\0", "\0a", "a", '"', '","', "\ud800"])
ASKED = st.tuples(st.sampled_from(sorted(POLICIES)), TEXT, st.none() | TEXT, st.none() | TEXT)


def counted(asked: tuple[str, str, str | None, str | None]) -> tuple[str, str, str]:
    """What of a request keeps it apart from others."""
    policy, tenant, user, cache_salt = POLICIES[asked[0]], *asked[1:]
    return tenant if policy.key else "", (user or "") if policy.user else "", cache_salt or ""


@given(ASKED, ASKED)
def test_salts_are_the_same_only_where_all_that_counts_is(
    one: tuple[str, str, str | None, str | None], other: tuple[str, str, str | None, str | None]
) -> None:
    ours, theirs = (salt(POLICIES[asked[0]], *asked[1:]) for asked in (one, other))
    assert (ours == theirs) == (counted(one) == counted(other))
    ours_, theirs_ = (owner_of(root_id(b"model", found)) for found in (ours, theirs))
    if counted(one)[:2] != ("", "") or counted(other)[:2] != ("", ""):
        assert (ours_ == theirs_) == (counted(one)[:2] == counted(other)[:2]), "a salt must not make another owner"


def test_where_nobody_is_kept_apart_the_salt_is_the_requests_own() -> None:
    for name in POLICIES:
        assert salt(POLICIES[name], "", None, None) == ""
        assert salt(POLICIES[name], "", None, "a") == "a"
    assert salt(POLICIES["none"], "tenant", "user", None) == ""
    assert salt(POLICIES["key"], "tenant", "user", None) == salt(POLICIES["user"], "tenant", None, "")


@pytest.mark.parametrize(
    ("name", "given", "isolates"),
    [(None, [], False), (None, ["a"], False), (None, ["a", "b"], True), ("none", ["a", "b"], False), ("user", [], True)],
)
def test_several_keys_are_several_tenants(name: str | None, given: list[str], isolates: bool) -> None:
    assert policy_of(name, several=Keys(given).several).isolates is isolates


def test_what_is_no_policy_names_the_option() -> None:
    with pytest.raises(ConfigError, match="--isolate must be none or key or user, not 'all'"):
        policy_of("all", several=False)


# ── a file of keys ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_file_has_keys_names_and_comments(tmp_path: Path) -> None:
    text = "# ours\n\n  plain==  # of nobody\nalice = key#1\nalice = key=2\r\noperator =\tchef\n"
    keys = keys_in(tmp_path / "keys", text, "given")
    found = {key: keys.find([key.encode()]) for key in ("plain==", "key#1", "key=2", "chef", "given")}
    tenants = {key: one.tenant for key, one in found.items() if one is not None}
    assert tenants == {
        "plain==": tenant_of("key", "plain=="),
        "key#1": tenant_of("name", "alice"),
        "key=2": tenant_of("name", "alice"),
        "chef": tenant_of("name", "operator"),
        "given": tenant_of("key", "given"),
    }
    assert [key for key, one in found.items() if one is not None and one.operator] == ["chef"]
    for wrong in (b"", b"plain", b"plain=== ", b"alice", b"#", b"ours"):
        assert keys.find([wrong]) is None, wrong
    assert keys.find([]) is None
    assert tenant_of("key", "alice") != tenant_of("name", "alice")
    assert not any(key in tenant for key in tenants for tenant in tenants.values())


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("one\ntwo words\n", "line 2: write `key` or `name = key`"),
        ("\n\na b = secret-key\n", "line 3: write"),
        ("name =key-without-a-blank\n", "line 1: write"),
        ("a = secret-key\n\nb = secret-key\n", "line 3: this key occurs twice"),
        ("# none\n", "has no keys"),
        ("", "has no keys"),
    ],
)
def test_a_fault_in_a_file_names_the_line_and_never_a_key(tmp_path: Path, text: str, fault: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(fault)) as raised:
        keys_in(tmp_path / "keys", text)
    assert not re.search("secret|two|without", str(raised.value))


def test_a_file_that_cannot_be_read_says_so(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"schl\xfcssel")
    for path in (tmp_path / "missing", tmp_path, tmp_path / "latin"):
        with pytest.raises(ConfigError, match="Cannot read --api-key-file"):
            Keys((), path)


def test_a_key_is_revoked_without_a_restart(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys"
    keys = keys_in(path, "one\ntwo\n")

    def valid() -> list[str]:
        return [key for key in ("one", "two", "three") if keys.find([key.encode()]) is not None]

    assert valid() == ["one", "two"]
    path.write_text("two\n")
    assert valid() == ["two"]
    path.write_text("two\nfour words in it\n")
    assert valid() == ["two"], "what makes no sense changes nothing"
    os.replace(path, tmp_path / "aside")
    assert valid() == ["two"], "nor does a file that has gone"
    (tmp_path / "new").write_text("six\n")
    os.utime(tmp_path / "new", ns=(os.stat(tmp_path / "aside").st_mtime_ns,) * 2)
    os.replace(tmp_path / "new", path)
    assert valid() == []
    path.write_text("")
    assert valid() == []
    assert keys.find([]) is None, "a file without keys opens nothing"
    path.write_text("three\n")
    assert valid() == ["three"]


@pytest.mark.skipif(os.name != "posix", reason="no modes here")
@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o640, True), (0o604, True)])
def test_a_file_that_others_may_read_gets_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], mode: int, warned: bool
) -> None:
    path = tmp_path / "keys"
    path.write_text("one\n")
    path.chmod(mode)
    Keys((), path)
    told = capsys.readouterr()
    assert ("chmod 600" in told.out + told.err) is warned


# ── over HTTP ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Keys `a` and `b`, and the operator's `chef`."""
    path = tmp_path_factory.mktemp("keys") / "keys"
    keys = keys_in(path, "alice = a\noperator = chef\n", "b")
    settings = Settings(memory_budget=8 << 20, settle="off")
    with (
        Runtime(lambda: FakeEngine(slots=2, ctx=2048), settings) as runtime,
        serving(runtime, key="chef", api_keys=keys) as server,
    ):
        yield server


def test_keys_come_in_either_header(server: Server) -> None:
    def status(*headers: tuple[str, str]) -> int:
        return httpx.get(f"{server.url}/v1/models", headers=list(headers)).status_code

    wrong, right = ("x-api-key", "c"), ("x-api-key", "a")
    assert status(right) == status(("authorization", "bearer  a")) == 200
    assert status(wrong) == status() == status(("x-api-key", "Bearer a")) == status(("authorization", "a")) == 401
    assert status(wrong, ("authorization", "Bearer a")) == status(right, ("authorization", "Bearer c")) == 200
    schemes = server.http.get("/openapi.json").json()["components"]["securitySchemes"]
    assert {scheme["type"] for scheme in schemes.values()} == {"http", "apiKey"}


@pytest.mark.parametrize("path", ["/metrics", "/slots"])
def test_what_is_told_of_all_tenants_is_for_the_operator(server: Server, path: str) -> None:
    assert server.http.get(path).status_code == 200
    refused = httpx.get(f"{server.url}{path}", headers=bearer("a"))
    assert refused.status_code == 403
    assert "'operator'" in refused.json()["error"]["message"]
    assert httpx.get(f"{server.url}{path}").status_code == 401


def test_a_slot_is_erased_by_the_operator_only(server: Server) -> None:
    path = f"{server.url}/slots/0?action=erase"
    assert httpx.post(path, headers=bearer("a")).status_code == 403
    assert httpx.post(path, headers=bearer("chef")).status_code == 200


def test_what_is_stored_of_all_is_not_told_to_one(server: Server) -> None:
    told = [httpx.get(f"{server.url}/props", headers=bearer(key)).json()["headstart"]["tiers"] for key in ("chef", "a")]
    assert told[0]["memory"]["budget"]
    assert told[1] == {}


@pytest.mark.parametrize("options", [{}, {"api_keys": ["one"]}, {"api_keys": ["one", "two"], "isolate": "none"}])
def test_where_nobody_is_kept_apart_everybody_may_know(options: dict[str, Any]) -> None:
    with Runtime(FakeEngine) as runtime, serving(runtime, key="one", **options) as server:
        assert server.http.get("/metrics").status_code == server.http.get("/slots").status_code == 200


def test_the_salt_of_a_request_is_of_its_tenant() -> None:
    service = Service(policy=POLICIES["user"])
    request = HttpRequest({"type": "http", "tenant": "t", "headers": []})
    assert service.salt(request, "u", "s") == salt(POLICIES["user"], "t", "u", "s")
    assert service.salt(HttpRequest({"type": "http", "headers": []})) == ""
    assert Service().salt(request, "u", "s") == "s"


def ask(server: Server, key: str, **body: Any) -> dict[str, Any]:
    body = {"messages": CHAT, "max_tokens": 1, **body}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, headers={"x-api-key": key})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()["headstart"]
    return found


def test_keys_share_nothing_and_salts_come_on_top(server: Server) -> None:
    assert ask(server, "a")["cached"] == 0
    assert ask(server, "b")["cached"] == 0
    assert ask(server, "b")["reason"] is None
    assert ask(server, "a", user="somebody")["cached"] > 0, "users are not kept apart unless that is asked for"
    assert ask(server, "a", cache_salt="x")["cached"] == 0
    assert ask(server, "b", cache_salt="x")["cached"] == 0
    assert ask(server, "a", cache_salt="x")["cached"] > 0


def test_texts_are_one_prompt_too(server: Server) -> None:
    def cached(key: str) -> int:
        body = {"prompt": "a text that is long enough to be kept", "max_tokens": 1}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=bearer(key))
        found: int = answer.json()["headstart"]["cached"]
        return found

    assert cached("a") == 0
    assert cached("b") == 0
    assert cached("a") > 0


def test_users_share_nothing_where_that_is_asked_for() -> None:
    with Runtime(lambda: FakeEngine(slots=2, ctx=2048)) as runtime, serving(runtime, api_keys=["a"], isolate="user") as server:
        assert ask(server, "a", user="one")["cached"] == 0
        assert ask(server, "a", user="two")["cached"] == 0
        assert ask(server, "a")["cached"] == 0
        assert ask(server, "a", safety_identifier="one")["cached"] > 0
        assert ask(server, "a", user="two", prompt_cache_key="one")["cached"] > 0
        assert ask(server, "a", prompt_cache_key="new")["cached"] > 0, "it is a hint only"


def test_stored_responses_are_their_users_where_that_is_asked_for() -> None:
    """Fault: who knows the id of another user's response goes on from it, reads it, or deletes it."""
    with (
        Runtime(lambda: FakeEngine(slots=2, ctx=2048)) as runtime,
        serving(runtime, key="a", api_keys=["a"], isolate="user") as server,
    ):
        body = {"input": "a secret", "max_output_tokens": 2}
        made = server.post("/v1/responses", json=body | {"user": "one"}).json()
        path = f"/v1/responses/{made['id']}"
        for user, status in (("two", 404), ("", 404), ("one", 200)):
            following = body | {"previous_response_id": made["id"], "user": user}
            assert server.post("/v1/responses", json=following).status_code == status
            for url in (path, f"{path}/input_items"):
                assert server.http.get(url, params={"user": user} if user else {}).status_code == status
        assert server.http.delete(path, params={"user": "two"}).status_code == 404
        assert server.http.delete(path, params={"user": "one"}).status_code == 200


@pytest.mark.parametrize("path", ["/tokenize", "/v1/chat/completions/input_tokens", "/apply-template"])
def test_what_is_tokenised_for_one_is_remembered_for_it_alone(server: Server, path: str) -> None:
    assert server.runtime is not None
    known = server.runtime.prompter._prompt_tokenizer
    text = f"what {path} gets"
    body = {"content": text, "messages": [{"role": role, "content": text} for role in ("user", "assistant", "user")]}
    assert httpx.post(f"{server.url}{path}", json=body, headers=bearer("a")).status_code == 200
    salts = {salt for (salt, segment), _ in known._memo.items() if text in segment}
    begun = {kept.key[0] for prefix, kept in known._prefixes._known.items() if text in prefix.text}
    assert len(salts) == 1
    assert "" not in salts
    assert begun == (set() if path == "/tokenize" else salts)
