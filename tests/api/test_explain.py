"""Why a request computed what it computed: by each answer, by `/headstart/explain` and by `headstart explain`."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from headstart.api.auth import Keys
from headstart.api.explain.routes import account
from headstart.api.service import Nowhere
from headstart.cli.main import main
from headstart.config import Settings
from headstart.explain.causes import CAUSES, Cause
from headstart.prefix_cache.planner import Costs
from headstart.serving.admission import Pace
from headstart.serving.request import Progress, Request
from headstart.serving.runtime import Runtime
from headstart.testing.fake_engine import CHATML, FakeEngine, FakeTokenizer
from live import Server, idle, serving, wait_until
from mutations import MUTATIONS, Body, Mutation, conversation, following
from scripted import Scripted
from templates import TOOLS

Explain = Callable[..., str]

STYLED = "{% if style %}{{ '<|im_start|>style\n' + style + '<|im_end|>\n' }}{% endif %}" + CHATML
"""A template with an option."""

NUMBER = itertools.count(101)


def start(**options: Any) -> Runtime:
    chosen = {"memory_budget", "reuse", "settle", "explain", "cache_dir"} & options.keys()
    settings = {name: options.pop(name) for name in chosen}
    options.setdefault("tokenizer", FakeTokenizer(chat_template=STYLED))
    return Runtime(
        lambda: FakeEngine(**{"slots": 2, "ctx": 4096, **options}), Settings(**{"memory_budget": 32 << 20, **settings})
    )


@pytest.fixture(scope="module", autouse=True)
def plans_of_any_machine() -> Iterator[None]:
    """The fake engine computes a token almost as fast as it restores one, so on a busy machine either may look cheaper."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pace, "costs", Costs())
        yield


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with start(settle="off") as runtime, serving(runtime, model_id="fake") as found:
        yield found


@pytest.fixture
def explain(capsys: pytest.CaptureFixture[str]) -> Explain:
    def run(server: Server, *arguments: str, code: int = 0) -> str:
        capsys.readouterr()  # the server's log
        with pytest.raises(SystemExit) as end:
            main(["explain", *arguments, "--url", server.url])
        captured = capsys.readouterr()
        assert end.value.code == code, captured
        return captured.out + captured.err

    return run


def send(server: Server, body: Body, **headers: str) -> httpx.Response:
    response = server.post("/v1/chat/completions", json=body, headers=headers)
    assert response.status_code == 200, response.text
    return response


def said(response: httpx.Response) -> str:
    content = response.json()["choices"][0]["message"]["content"]
    assert isinstance(content, str)
    return content


def own(response: httpx.Response) -> dict[str, Any]:
    found = response.json()["headstart"]
    assert isinstance(found, dict)
    return found


def explained(server: Server, response: httpx.Response, **query: str) -> dict[str, Any]:
    found = server.http.get(f"/headstart/explain/{response.headers['x-request-id']}", params=query)
    assert found.status_code == 200, found.text
    answer = found.json()
    assert isinstance(answer, dict)
    return answer


def mutated(mutation: Mutation, body: Body, reply: str, number: int) -> Body:
    later = following(body, reply, number) if mutation.turn == "next" else copy.deepcopy(body)
    mutation.change(later)
    return later


def check(mutation: Mutation, answer: dict[str, Any], later: Body) -> None:
    found = answer["explanation"]
    if mutation.cause is None:
        assert found is None
        return
    assert found is not None
    assert (found["cause"], found["where"], found["message"]) == (mutation.cause, mutation.where, mutation.message)
    if mutation.place is not None:
        assert found["character"] == mutation.place
    if found["message"] is not None and found["character"]:
        rest = later["messages"][found["message"]]["content"][found["character"] :]
        assert not rest or rest.startswith(found["current"].split("<|")[0])  # else it is in its calls
    if found["where"] is not None:
        assert found["current"][:1] != found["previous"][:1]
    assert found["hint"] == CAUSES[mutation.cause].hint.with_flags


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_each_change_is_named_and_placed(server: Server, explain: Explain, mutation: Mutation) -> None:
    number = next(NUMBER)
    body = conversation(number)
    reply = said(send(server, body))
    later = mutated(mutation, body, reply, number)
    response = send(server, later)
    answer = explained(server, response)
    check(mutation, answer, later)
    mine = own(response)
    assert (answer["prompt"], answer["computed"]) == (mine["cached"] + mine["computed"], mine["computed"])
    found = answer["explanation"]
    page = explain(server, response.headers["x-request-id"])
    if found is None:
        assert (mine["cause"], mine["reason"], mine["recomputed"]) == (None, None, 0)
        assert mine["computed"] <= len(later["messages"][-1]["content"]) + 60
        assert "none" in page
        return
    assert (mine["cause"], mine["recomputed"], mine["hint"]) == (found["cause"], found["recomputed"], found["hint"])
    assert mine["reason"] == CAUSES[Cause(found["cause"])].reason
    assert found["recomputed"] <= mine["computed"]
    assert (found["recomputed"] > 40) == mutation.again, found
    assert found["cause"] in page
    assert found["hint"] in page
    if found["where"] is not None:
        assert json.dumps(found["current"], ensure_ascii=False)[1:-1].replace('\\"', '"') in page
        assert mine["diverged_at"] == {key: found[key] for key in ("message", "character", "current", "previous")}


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_two_bodies_are_compared_without_computing(
    server: Server, explain: Explain, tmp_path: Path, mutation: Mutation
) -> None:
    number = next(NUMBER)
    body = conversation(number)
    later = mutated(mutation, body, "A reply.", number)
    if mutation.name == "last reply edited":  # the first body does not know its reply
        return
    assert server.runtime is not None
    engine = server.runtime.engine
    assert isinstance(engine, FakeEngine)
    files = [tmp_path / name for name in ("a.json", "b.json")]
    for path, one in zip(files, (body, later), strict=True):
        path.write_text(json.dumps(one))
    before = engine.prefilled
    answer = json.loads(explain(server, *map(str, files), "--json"))
    assert engine.prefilled == before
    check(mutation, answer, later)


def test_each_user_asks_for_their_own(explain: Explain) -> None:
    with start() as runtime, serving(runtime, model_id="fake", isolate="user") as server:
        sent = send(server, {**conversation(1), "user": "ann"})
        id = sent.headers["x-request-id"]
        assert json.loads(explain(server, id, "--user", "ann", "--json"))["id"] == id
        assert "is among the latest ones" in explain(server, id, code=2)


def test_one_body_cannot_be_compared(server: Server, explain: Explain, tmp_path: Path) -> None:
    there = tmp_path / "body"
    there.write_text("{}")
    for name in (str(there), "missing.json"):
        assert "Give two files" in explain(server, name, code=2)


# ── what is not in the text ──────────────────────────────────────────────────────────────────────────────────────────


def cause(response: httpx.Response) -> str | None:
    found = own(response)["cause"]
    assert found is None or isinstance(found, str)
    return found


def test_a_new_conversation_misses_nothing(server: Server) -> None:
    body = conversation(next(NUMBER))
    send(server, body)
    alone = send(server, {"messages": [{"role": "user", "content": "Ωmega, which nobody has ever asked"}], "max_tokens": 1})
    beside = send(server, body | {"messages": [body["messages"][0], {"role": "user", "content": "Who was Homer?"}]})
    assert [cause(alone), own(alone)["recomputed"]] in (["first_time", 0], [None, 0])
    assert (cause(beside), own(beside)["recomputed"], own(beside)["diverged_at"]) == (None, 0, None)


def test_identical_replies_of_others_are_no_change() -> None:
    """Two callers begin alike and get the same call, under other ids; then each has a result of its own."""
    tool = {"type": "function", "function": {"name": "ls", "parameters": {"type": "object", "properties": {}}}}
    call = '<tool_call>\n{"name": "ls", "arguments": {"all":true,"path":"/etc"}}\n</tool_call>'
    engine = Scripted(FakeEngine(slots=2, ctx=4096, tokenizer=FakeTokenizer(chat_template=TOOLS)))
    with Runtime(lambda: engine, Settings(memory_budget=32 << 20)) as runtime, serving(runtime, model_id="fake") as server:
        asked = [{"role": "user", "content": "List everything in /etc, please."}]
        engine.say(call, call)
        replies = [send(server, {"messages": asked, "tools": [tool]}).json()["choices"][0]["message"] for _ in range(2)]
        assert replies[0]["tool_calls"][0]["id"] != replies[1]["tool_calls"][0]["id"]
        for number, reply in enumerate(replies):
            engine.say("done")
            content = f"user {number} sees file {number}" * 3
            result = {"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "content": content}
            assert cause(send(server, {"messages": [*asked, reply, result], "tools": [tool]})) is None


def test_evicted() -> None:
    with start(slots=1, memory_budget=0, settle="off") as runtime, serving(runtime, model_id="fake") as server:
        body = conversation(1)
        first = send(server, body)
        assert (cause(first), own(first)["reason"]) == ("first_time", "cold")
        send(server, {"messages": [{"role": "user", "content": "somebody else"}], "max_tokens": 1})
        again = send(server, body)
        assert cause(again) == "evicted"
        assert own(again)["recomputed"] >= first.json()["usage"]["prompt_tokens"] - 40
        assert explained(server, again)["explanation"]["where"] is None


def test_no_checkpoint() -> None:
    """Rows of all that both have are there, but this model cannot go back to where they part."""
    words = " ".join(f"word {number}" for number in range(150))
    with start(slots=1, sliceable=False, settle="off") as runtime, serving(runtime, model_id="fake") as server:
        head = conversation(1)["messages"][0]
        send(server, {"messages": [head, {"role": "user", "content": words}], "max_tokens": 1})
        response = send(server, {"messages": [head, {"role": "user", "content": words[:-200]}], "max_tokens": 1})
        assert (cause(response), own(response)["reason"]) == ("no_checkpoint", "state")
        assert own(response)["recomputed"] > 20


def test_exact_mode_without_settling_is_derived() -> None:
    with start(slots=1, reuse="exact", settle="off") as runtime, serving(runtime, model_id="fake") as server:
        body = conversation(1) | {"max_tokens": 80}
        later = following(body, said(send(server, body)), 1)
        response = send(server, later)
        assert (cause(response), own(response)["reason"]) == ("derived", "derived")
        assert 40 < own(response)["recomputed"] <= 88


def test_reply_tokens_differ() -> None:
    """A reply in other tokens than the tokenizer's, whose spelling is forgotten."""
    tokenizer = FakeTokenizer(["ab", "ba", "aa", "bb"], chat_template=STYLED)
    with start(slots=1, settle="off", alphabet=b"ab", tokenizer=tokenizer) as runtime, serving(runtime) as server:
        body = conversation(1) | {"max_tokens": 80, "tools": []}
        later = following(body, said(send(server, body)), 1)
        runtime.prompter.use_reply_tokens = False
        response = send(server, later)
        assert cause(response) == "reply_tokens_differ"
        assert own(response)["recomputed"] > 20
        assert explained(server, response)["explanation"]["where"] is None


@pytest.mark.parametrize("settle", ["on", "off"])
def test_reasoning_stripped(settle: str, explain: Explain) -> None:
    tokenizer = FakeTokenizer(chat_template=TOOLS)
    thought = "The user wants two cities, so I have to think of the road between them, and of its tolls."
    with start(slots=1, settle=settle, tokenizer=tokenizer) as runtime, serving(runtime, model_id="fake") as server:
        body: Body = {"max_tokens": 4, "ignore_eos": True, "messages": conversation(1)["messages"][:4]}
        body["messages"][2] = {"role": "assistant", "content": "I look.", "reasoning_content": thought}
        send(server, body)
        dropped = copy.deepcopy(body)
        del dropped["messages"][2]["reasoning_content"]
        response = send(server, dropped)
        found = explained(server, response)["explanation"]
        assert (found["cause"], found["where"], found["message"]) == ("reasoning_stripped", "messages", 2)
        assert "The user wants" in found["previous"]
        assert found["recomputed"] > len(body["messages"][3]["content"])
        assert "reasoning_stripped" in explain(server, response.headers["x-request-id"])
        # The template drops it as soon as the user speaks again.
        stripped = copy.deepcopy(body)
        stripped["messages"].append({"role": "user", "content": "And by train?"})
        found = explained(server, send(server, stripped))["explanation"]
        assert found is None or found["cause"] == "reasoning_stripped"


@pytest.mark.parametrize("header", ["", "<think>\n"])
def test_the_client_drops_the_reasoning_of_a_reply(header: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reasoning in a reply's text, whether the model or the generation header begins it; the answer is too far behind it."""
    template = CHATML.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n" + header)
    thought = ("<think>\n" if not header else "") + "It may rain, and then again it may not. " * 3 + "\n</think>\n\n"
    answer = "Take an umbrella, and good boots, for it is going to rain all over France this week."
    tokenizer = FakeTokenizer(chat_template=template)
    with start(slots=1, settle="off", tokenizer=tokenizer) as runtime, serving(runtime, model_id="fake") as server:
        said = iter([*(thought + answer).encode()] * 2)
        monkeypatch.setattr(runtime.engine, "sample", lambda slot, sampler: next(said))
        body = conversation(1) | {"max_tokens": len(thought + answer)}
        send(server, body)
        response = send(server, following(body, answer, 1) | {"max_tokens": 1})
        found = explained(server, response)["explanation"]
        assert (found["cause"], found["where"], found["message"]) == ("reasoning_stripped", "messages", 6)
        edited = following(body, answer.replace("Take", "Buy"), 1) | {"max_tokens": 1}
        assert explained(server, send(server, edited))["explanation"]["cause"] == "message_changed"


def test_after_a_restart(tmp_path: Path) -> None:
    """What is on disk is found; that the template was another one is known although no text is kept."""
    other, body, prompt = STYLED.replace("<|im_start|>tools", "<|im_start|>functions"), conversation(1), 0
    for template, expected in ((STYLED, "first_time"), (STYLED, None), (other, "template_changed"), (other, None)):
        tokenizer = FakeTokenizer(chat_template=template)
        with start(tokenizer=tokenizer, cache_dir=tmp_path) as runtime, serving(runtime, model_id="fake") as server:
            response = send(server, body)
            assert cause(response) == expected
            assert (own(response)["cached"] > 0) == (expected is None)
            assert own(response)["recomputed"] == (prompt if expected == "template_changed" else 0)
            prompt = response.json()["usage"]["prompt_tokens"]
            stranger = send(server, body | {"cache_salt": expected or template})
            assert cause(stranger) == "first_time", "salts share nothing"


# ── who may know ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def tenants(tmp_path: Path) -> Iterator[Server]:
    """A server that knows alice, bob and carol by their keys."""
    file = tmp_path / "keys"
    file.write_text("".join(f"{name} = {name}-key\n" for name in ("alice", "bob", "carol")))
    file.chmod(0o600)
    with start() as runtime, serving(runtime, api_keys=Keys((), file), model_id="fake") as server:
        yield server


@pytest.fixture
def opened() -> Iterator[Server]:
    """A server that knows nobody."""
    with start() as runtime, serving(runtime, model_id="fake") as server:
        yield server


def by(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}-key"} if name else {}


@pytest.mark.parametrize("other", ["alice", "bob", ""])
def test_another_salt_reveals_nothing(tenants: Server, opened: Server, other: str) -> None:
    """Fault: text, length or existence of what was asked with another salt, also by the same key, in an answer."""
    tenants = tenants if other else opened
    body = conversation(1)
    send(tenants, body | {"cache_salt": "a"}, **by("alice" if other else ""))
    response = send(tenants, body | {"cache_salt": "b"}, **by(other))
    stranger = send(tenants, conversation(2) | {"cache_salt": "c"}, **by("carol" if other else ""))
    known, unknown = ({**own(one), "computed": 0, "cached": 0} for one in (response, stranger))
    assert known == unknown
    assert (known["cause"], known["recomputed"], known["diverged_at"]) == ("first_time", 0, None)


def test_only_ones_own_requests_are_explained(tenants: Server, opened: Server) -> None:
    def last(server: Server, tenant: str = "", id: str = "", **query: str) -> httpx.Response:
        return server.http.get("/headstart/explain" + id, params=query, headers=by(tenant))

    assert last(tenants, "alice").json()["error"]["code"] == "request_not_found"
    assert "only with the same cache_salt" in last(opened).json()["error"]["message"]
    alice = send(tenants, conversation(1) | {"cache_salt": "a"}, **by("alice")).headers["x-request-id"]
    assert last(tenants, "alice").json()["id"] == alice
    assert last(tenants, "alice", "/" + alice).json()["id"] == alice
    assert last(tenants, "bob", cache_salt="a").status_code == 404
    assert last(tenants, "bob", "/" + alice, cache_salt="a").status_code == 404
    nobody = send(opened, conversation(2) | {"cache_salt": "n"}).headers["x-request-id"]
    assert last(opened).status_code == 404
    assert last(opened, id="/" + nobody).status_code == 404
    assert last(opened, cache_salt="n").json()["id"] == nobody


def test_keys_are_needed_where_there_are_keys(explain: Explain) -> None:
    with start() as runtime, serving(runtime, key="secret", api_keys=("secret",), model_id="fake") as server:
        for call in (
            lambda: httpx.get(f"{server.url}/headstart/explain"),
            lambda: httpx.post(f"{server.url}/headstart/explain"),
        ):
            assert call().status_code == 401
        assert "says: This server needs an API key" in explain(server, code=2)
        response = send(server, conversation(1))
        assert response.headers["x-request-id"] in explain(server, "--last", "--api-key", "secret")


# ── the command and the routes ───────────────────────────────────────────────────────────────────────────────────────


def test_the_page_shows_both_texts(server: Server, explain: Explain) -> None:
    number = next(NUMBER)
    body = conversation(number)
    reply = said(send(server, body))
    later = following(body, reply, number)
    later["messages"][0]["content"] = later["messages"][0]["content"].replace("Monday", "Tuesday")
    response = send(server, later)
    lines = explain(server, "--last").splitlines()
    assert lines[0].startswith(f"request  {response.headers['x-request-id']}")
    marks = {line.split(" ")[0]: line for line in lines if line[:1].strip()}
    pointer = next(line for line in lines if line.endswith("▼")).index("▼")
    assert marks["current"][pointer:].startswith("Tuesday, 3 March.")
    assert marks["previous"][pointer:].startswith("Monday, 3 March.")
    assert marks["current"][:pointer].endswith("Today is ")
    assert "message 0 (the system prompt), character 32" in marks["place"]
    assert "system_changed (Anthropic), input_changed (OpenAI)" in marks["called"]
    assert "cost     about " in marks["cost"]


def test_two_bodies_that_have_another_model_or_salt(server: Server) -> None:
    def compare(**changes: Any) -> dict[str, Any]:
        body = conversation(1)
        found = server.post("/headstart/explain", json={"a": body, "b": body | changes}).json()
        assert isinstance(found, dict)
        return found

    other = compare(model="another")
    assert other["explanation"] is None, "one name is no other model"
    found = server.post(
        "/headstart/explain", json={"a": conversation(1) | {"model": "x"}, "b": conversation(1) | {"model": "y"}}
    )
    assert found.json()["explanation"]["cause"] == "model_changed"
    assert found.json()["anthropic"]["type"] == found.json()["responses"]["reason"] == "model_changed"
    items = [{"model": model, "input": "Which two models are these?"} for model in ("x", "y")]
    found = server.post("/headstart/explain", json={"a": items[0], "b": items[1]})
    assert found.json()["explanation"]["cause"] == "model_changed"
    assert compare(cache_salt="b")["explanation"]["cause"] == "salt_differs"


def test_what_cannot_be_explained(server: Server, explain: Explain, tmp_path: Path) -> None:
    assert "No request 'nothing' is among" in explain(server, "nothing", code=2)
    bad = tmp_path / "bad.json"
    bad.write_text("{")
    assert "Cannot read a request from" in explain(server, str(bad), str(bad), code=2)
    bad.write_text("[]")
    assert "must be a JSON object" in explain(server, str(bad), str(bad), code=2)
    bad.write_text('{"messages": []}')
    assert "In 'a': Invalid 'messages'" in explain(server, str(bad), str(bad), code=2)
    assert "Give one request id" in explain(server, "a", "b", "c", code=2)
    assert "Give one request id" in explain(server, "a", "--last", code=2)
    with pytest.raises(SystemExit) as end:
        main(["explain", "--url", "http://127.0.0.1:9"])
    assert end.value.code == 2


def test_switched_off() -> None:
    with start(explain="off") as runtime, serving(runtime, model_id="fake") as server:
        response = send(server, conversation(1))
        assert (own(response)["cause"], own(response)["recomputed"], own(response)["seconds"]) == (None, None, None)
        refused = server.http.get("/headstart/explain")
        assert refused.status_code == 404
        assert "started with --explain off" in refused.json()["error"]["message"]


def test_a_message_that_changed_in_two_places_costs_what_is_between_them(server: Server, explain: Explain) -> None:
    """A date at the top of the system prompt and a status at its bottom: the answer, the page and the metrics say one cost."""
    rules = " ".join(f"Rule {number} is to do as rule {number * 7 % 100} says." for number in range(30))
    metric = "headstart:recomputed_tokens_total"

    def ask(system: str, question: str) -> httpx.Response:
        return send(server, {"messages": [{"role": "system", "content": system}, {"role": "user", "content": question}]})

    ask(f"It is Monday. {rules} 2 open.", "Hi")
    before = server.metric(metric, cause="system_changed")
    response = ask(f"It is Friday. {rules} 17 new.", "Well, what is there to do?")
    mine, told = own(response), explained(server, response)["explanation"]
    assert (mine["cause"], mine["diverged_at"]["character"]) == ("system_changed", len("It is "))
    assert len(rules) <= mine["recomputed"] <= mine["computed"]
    assert (told["recomputed"], told["seconds"]) == (mine["recomputed"], mine["seconds"])
    assert server.metric(metric, cause="system_changed") == before + mine["recomputed"]
    assert f"about {mine['recomputed']:,} tokens computed again" in explain(server, "--last")


@pytest.mark.parametrize(
    ("route", "asked"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": "One of thirty-one tokens, drawn thrice."}], "n": 3}),
        ("completions", {"prompt": ["a first prompt of some length", "and a second one, that is longer"], "n": 2}),
        ("responses", {"input": "What is there to be said of it?"}),
        ("messages", {"messages": [{"role": "user", "content": "What else is there to be said of it?"}]}),
    ],
)
def test_what_a_request_computed_is_one_figure(
    server: Server, route: str, asked: Body, capsys: pytest.CaptureFixture[str]
) -> None:
    """A prompt counts once, also where several replies are drawn from it: in usage, timings, metrics, page and log."""
    body = {"max_output_tokens" if route == "responses" else "max_tokens": 16, **asked}
    metrics = ("headstart:computed_tokens_total", "vllm:prompt_tokens_cached_total", "vllm:prompt_tokens_total")
    for again in (False, True):
        before = [server.metric(metric) for metric in metrics]
        capsys.readouterr()
        response = server.post(f"/v1/{route}", json=body)
        line = next(line for line in capsys.readouterr().out.splitlines() if "finished" in line)
        answer, mine, told = response.json(), own(response), explained(server, response)
        usage, computed, cached = answer["usage"], mine["computed"], mine["cached"]
        if route == "messages":
            new = usage["input_tokens"] + usage["cache_creation_input_tokens"]
            assert (usage["cache_read_input_tokens"], new) == (cached, computed)
        else:
            kind = "input_tokens" if route == "responses" else "prompt_tokens"
            assert usage[f"{kind}_details"] == {"cached_tokens": cached, "cache_write_tokens": computed}
            assert usage[kind] == cached + computed
        assert (answer["timings"]["cache_n"], answer["timings"]["prompt_n"]) == (cached, computed)
        assert told["prompt"] == cached + computed
        for name in ("cached", "live", "tiers", "computed", "mode"):
            assert told[name] == mine[name]
        assert (told["explanation"] or {"cause": None})["cause"] == mine["cause"]
        counted = [server.metric(metric) - one for metric, one in zip(metrics, before, strict=True)]
        assert counted == [computed, cached, computed + cached]
        assert f" cached={cached} " in line
        assert f" computed={computed} " in line
        assert again == (cached > 8)


def test_seconds_are_null_as_long_as_no_prefill_was_measured(explain: Explain, tmp_path: Path) -> None:
    later = conversation(1)
    later["messages"][0]["content"] = "Today is Tuesday."
    file = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, body in zip(file, (conversation(1), later), strict=True):
        path.write_text(json.dumps(body))
    with start() as runtime, serving(runtime, model_id="fake") as server:
        assert json.loads(explain(server, *map(str, file), "--json"))["explanation"]["seconds"] is None
        assert "tokens computed again\n" in explain(server, *map(str, file)), "and no time"
        first = send(server, conversation(1))
        assert (own(first)["cause"], own(first)["recomputed"], own(first)["seconds"]) == ("first_time", 0, None)
        assert explained(server, first)["explanation"]["seconds"] is None
        second = send(server, later)
        assert own(second)["recomputed"] > 0
        assert own(second)["seconds"] is not None
        assert json.loads(explain(server, *map(str, file), "--json"))["explanation"]["seconds"] > 0


def test_causes_are_counted_and_logged(server: Server) -> None:
    body = conversation(next(NUMBER))
    send(server, body)
    send(server, body | {"cache_prompt": False})
    assert server.metric("headstart:misses_total", cause="disabled") >= 1
    assert server.metric("headstart:recomputed_tokens_total", cause="disabled") >= 1


def test_servers_of_a_fleet_find_each_others_requests() -> None:
    runtimes: list[Runtime] = []

    class Fleet(Nowhere):
        async def explain(self, tenant: str, salt: str, request_id: str | None) -> list[dict[str, Any] | None]:  # type: ignore[override]
            return [account(one, tenant, salt, request_id) for one in runtimes]

    options: dict[str, Any] = {"model_id": "fake", "elsewhere": Fleet(), "api_keys": ["one", "two"]}
    with start() as first, start() as second, serving(first, **options) as a, serving(second, **options) as b:
        runtimes += [first, second]
        mine, other = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
        ids = [send(server, body, **mine).headers["x-request-id"] for server in (a, b)]
        own = send(b, body, **{**mine, "x-request-id": "chosen"}).headers["x-request-id"]
        for server in (a, b):
            assert [server.http.get(f"/headstart/explain/{id}", headers=mine).json()["id"] for id in ids] == ids
            assert server.http.get("/headstart/explain", headers=mine).json()["id"] == own == "chosen"
            assert server.http.get("/headstart/explain/chosen", headers=other).status_code == 404


def test_a_cancelled_request_is_explained_to_its_owner() -> None:
    with start(slots=1, delay=0.002) as runtime, serving(runtime, model_id="fake", api_keys=["one", "two"]) as server:
        mine, other = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
        body = {"prompt": "x " * 500, "max_tokens": 400, "stream": True, "ignore_eos": True}
        send(server, {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}, **mine)

        def account_of(id: str, headers: dict[str, str]) -> httpx.Response:
            return server.http.get(f"/headstart/explain/{id}", headers=headers)

        with server.http.stream("POST", "/v1/completions", json=body, headers=mine) as running:
            chunks = (json.loads(line[6:]) for line in running.iter_lines() if line.startswith("data: {"))
            next(chunk for chunk in chunks if any(choice.get("text") for choice in chunk.get("choices", [])))
            queued = Request(runtime.text_prompt("y " * 500), id="queued")
            handle = runtime.submit(queued, lambda event: None)
            wait_until(lambda: runtime.snapshot()["waiting"] == 1)
            handle.cancel()
            wait_until(lambda: runtime.snapshot()["waiting"] == 0)
        id = running.headers["x-request-id"]
        wait_until(server.idle)
        found = account_of(id, mine).json()
        assert found["state"] == "cancelled"
        assert found["cached"] + found["computed"] == found["prompt"] >= 500
        assert 0 < found["completion"] < 400
        assert account_of(id, other).status_code == 404
        assert [record.id for record in runtime.scheduler.history.latest()].count("queued") == 0
        known = server.http.get("/headstart/events?once=true", headers=mine).text
        assert '"state":"cancelled"' in known
        repeated = server.post("/v1/completions", json={**body, "stream": False, "max_tokens": 1}, headers=mine)
        assert own(repeated)["cause"] is None
        assert own(repeated)["cached"] > 0


def test_a_prompt_that_was_cancelled_counts_only_what_was_computed() -> None:
    with start(slots=1, delay=0.02) as runtime:
        events: list[object] = []
        handle = runtime.submit(Request(runtime.text_prompt("x " * 2000), id="cut"), events.append)
        wait_until(lambda: any(isinstance(event, Progress) for event in events))
        handle.cancel()
        wait_until(lambda: idle(runtime))
        (record,) = runtime.scheduler.history.latest()
        found = account(runtime, "", "", "cut")
        assert found is not None
        assert (found["state"], found["completion"], found["ttft"], found["cached"]) == ("cancelled", 0, None, 0)
        assert 0 < found["computed"] == len(record.tokens) < found["prompt"]
