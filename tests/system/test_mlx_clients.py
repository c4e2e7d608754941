"""MLX behind the vendors' own SDKs, the library, a shared store, and what the server says of its cache: tiny random models.

Their replies mean nothing, but a grammar makes them calls and JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from anthropic import Anthropic

import headstart
import templates
import tiny_hf
from harness import ask, assistant, check, system, user
from headstart.config import Settings
from headstart.engines import registry
from headstart.serving.runtime import Runtime
from killed import text
from live import Server, serving, wait_until
from process import run
from sharing import stored
from stores import ValkeyServer

pytestmark = pytest.mark.slow

KINDS = ("llama", "gemma3_text", "lfm2")
"""Keys and values alone; with sliding windows; with convolution layers."""
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
LOOK = {"type": "function", "function": {"name": "look", "description": "Looks at a city.", "parameters": SCHEMA}}
BLANKS = {str(tiny_hf.byte_token(byte)): -100.0 for byte in b" \t\r\n"}
"""`logit_bias` without blanks, of which a grammar of JSON allows any number, and a random model may write nothing else."""
RIVERS: list[dict[str, Any]] = [system(text(1, 60)), user("Name a river.")]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model of each kind, whose template has tools."""
    root = tmp_path_factory.mktemp("mlx")
    found = {kind: tiny_hf.write(root / kind, kind) for kind in KINDS}
    for folder in found.values():
        (folder / "chat_template.jinja").write_text(templates.TOOLS_ALONE, "utf-8")
    return found


def settings_of(folder: Path, **given: Any) -> Settings:
    return Settings(str(folder), **{"ctx": 2048, "slots": 2, "memory_budget": 64 << 20, **given})


def runtime(settings: Settings) -> Runtime:
    return Runtime(lambda: registry.load(settings.engine_options()), settings)


@pytest.fixture(scope="module", params=KINDS)
def server(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Iterator[Server]:
    settings = settings_of(folders[request.param], reuse="exact")
    with serving(lambda: runtime(settings), model_id="mlx-tiny") as made:
        yield made


@pytest.fixture
def claude(server: Server) -> Iterator[Anthropic]:
    with Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def asked(server: Server, messages: list[dict[str, Any]], **options: Any) -> Any:
    given = {"model": "mlx-tiny", "max_tokens": 24, "temperature": 0, **options}
    return server.openai.chat.completions.create(messages=messages, **given)  # type: ignore[call-overload]


# ── OpenAI ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_conversation_is_computed_once(server: Server) -> None:
    first = asked(server, RIVERS)
    wait_until(lambda: server.http.get("/health").is_success and not any(_busy(server)), 30)
    messages = [*RIVERS, assistant(first.choices[0].message.content), user("And another one?")]
    second = asked(server, messages)
    fresh = second.usage.prompt_tokens - first.usage.prompt_tokens
    assert second.headstart["computed"] <= fresh + 64
    assert second.usage.prompt_tokens_details.cached_tokens == second.headstart["cached"] >= 64
    explained = server.http.get("/headstart/explain").json()
    assert explained["prompt"] == second.usage.prompt_tokens
    assert asked(server, messages, extra_body={"cache_prompt": False}).choices[0].message == second.choices[0].message


def _busy(server: Server) -> Iterator[bool]:
    yield from (slot["is_processing"] for slot in server.http.get("/slots").json())


def test_a_stream_says_the_same_as_a_whole_answer(server: Server) -> None:
    whole = asked(server, RIVERS, max_tokens=40, logprobs=True, top_logprobs=3)
    chunks = list(asked(server, RIVERS, max_tokens=40, stream=True, logprobs=True, top_logprobs=3))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    streamed = [item for chunk in chunks if chunk.choices[0].logprobs for item in chunk.choices[0].logprobs.content]
    assert streamed == whole.choices[0].logprobs.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_a_schema_is_kept(server: Server) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA, "strict": True}}
    for seed in range(3):
        answer = asked(server, RIVERS, response_format=form, max_tokens=200, logit_bias=BLANKS, temperature=1.0, seed=seed)
        trip = json.loads(answer.choices[0].message.content)
        assert trip.keys() == {"city", "days"}
        assert trip["city"] in ("Rome", "Oslo")
        assert 1 <= trip["days"] <= 9


def test_a_tool_is_called_and_its_result_goes_on(server: Server) -> None:
    answer = asked(server, RIVERS, tools=[LOOK], tool_choice="required", max_tokens=300, logit_bias=BLANKS)
    assert answer.choices[0].finish_reason == "tool_calls"
    message = answer.choices[0].message
    (call,) = message.tool_calls
    assert call.function.name == "look"
    assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
    streamed = list(asked(server, RIVERS, tools=[LOOK], tool_choice="required", max_tokens=300, logit_bias=BLANKS, stream=True))
    parts = [part for chunk in streamed for part in chunk.choices[0].delta.tool_calls or []]
    assert "".join(part.function.arguments or "" for part in parts) == call.function.arguments
    result = {"role": "tool", "tool_call_id": call.id, "content": "It rains."}
    after = asked(server, [*RIVERS, message.model_dump(exclude_none=True), result], tools=[LOOK])
    assert after.headstart["cached"] >= 64
    assert after.headstart["computed"] < after.usage.prompt_tokens / 2


def test_several_replies_and_a_stop_text(server: Server) -> None:
    answer = asked(server, RIVERS, n=3, temperature=1.0, seed=3, stop=["e"], max_tokens=16)
    assert len(answer.choices) == 3
    assert all("e" not in choice.message.content for choice in answer.choices)
    responses = server.openai.responses.create(model="mlx-tiny", input="Hello.", max_output_tokens=16)
    assert responses.status in ("completed", "incomplete")
    assert responses.usage is not None


# ── Anthropic ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_messages_of_anthropics_sdk(claude: Anthropic) -> None:
    how: dict[str, Any] = {"model": "mlx-tiny", "max_tokens": 24, "extra_body": {"temperature": 0}}
    mark = [{"type": "text", "text": text(4, 60), "cache_control": {"type": "ephemeral"}}]
    first = claude.messages.create(system=mark, messages=[{"role": "user", "content": "Name a river."}], **how)
    again: list[Any] = [{"role": "user", "content": "Name a river."}, first.to_param(), {"role": "user", "content": "More."}]
    counted = claude.messages.count_tokens(model="mlx-tiny", system=mark, messages=again).input_tokens
    with claude.messages.stream(system=mark, messages=again, **how) as stream:
        second = stream.get_final_message()
    usage = second.usage
    total = usage.input_tokens + (usage.cache_creation_input_tokens or 0) + (usage.cache_read_input_tokens or 0)
    assert total == counted
    assert (usage.cache_read_input_tokens or 0) >= 64
    tool: Any = {"name": "look", "description": "Looks at a city.", "input_schema": SCHEMA}
    how |= {"tools": [tool], "tool_choice": {"type": "any"}}
    how |= {"max_tokens": 1500, "extra_body": {"temperature": 1}}  # drawn by chance, blanks come to an end
    called = claude.messages.create(messages=[{"role": "user", "content": "Look."}], **how)
    assert called.stop_reason == "tool_use"
    calls = [block for block in called.content if block.type == "tool_use"]
    assert {block.name for block in calls} == {"look"}
    assert all({"city", "days"} == dict(block.input).keys() for block in calls)


# ── what is kept apart, and what is said ─────────────────────────────────────────────────────────────────────────────


def test_keys_share_nothing(folders: dict[str, Path]) -> None:
    settings = settings_of(folders["gemma3_text"], reuse="exact")
    with serving(lambda: runtime(settings), key="a", model_id="mlx-tiny", api_keys=["a", "b"]) as server:

        def send(key: str) -> dict[str, Any]:
            body = {"messages": RIVERS, "max_tokens": 8, "temperature": 0}
            headers = {"authorization": f"Bearer {key}"}
            found: dict[str, Any] = httpx.post(
                f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=60
            ).json()
            return found

        first, other, again = send("a"), send("b"), send("a")
        assert first["headstart"]["cached"] == other["headstart"]["cached"] == 0
        assert again["headstart"]["cached"] >= 64
        assert first["choices"] == other["choices"] == again["choices"]


def test_why_tokens_were_computed_again(folders: dict[str, Path]) -> None:
    settings = settings_of(folders["lfm2"])
    with serving(lambda: runtime(settings), model_id="mlx-tiny") as server:
        asked(server, [system(f"Today is Monday. {text(6, 60)}"), user("Hello.")])
        asked(server, [system(f"Today is Friday. {text(6, 60)}"), user("Hello.")])
        found = server.http.get("/headstart/explain").json()["explanation"]
        assert (found["cause"], found["where"]) == ("system_changed", "system")
        assert found["current"].startswith("Friday"[:1])
        assert found["previous"].startswith("Monday"[:1])


@pytest.mark.parametrize("kind", KINDS)
def test_reasoning_that_the_template_strips_is_settled(kind: str, folders: dict[str, Path], tmp_path: Path) -> None:
    template = tmp_path / "reasoning.jinja"
    template.write_text(templates.REASONING, "utf-8")
    settings = settings_of(folders[kind], reuse="exact", chat_template=template)
    with runtime(settings) as rt:
        chat = [system(text(7, 60)), user("Think.")]
        first = ask(rt, chat, max_tokens=24)
        wait_until(lambda: rt.scheduler.idle, 60)
        half = len(first.text) // 2
        chat += [assistant(f"{first.text[:half]}\n</think>\n\n{first.text[half:]}"), user("And now?")]
        second = ask(rt, chat, max_tokens=4)
        new = second.report.prompt - first.report.prompt
        assert second.report.computed <= max(new, 0) + 2 * 64
        assert second.report.cached >= first.report.prompt - 2 * 64
        check(rt)


def test_warm_then_serve(folders: dict[str, Path], tmp_path: Path) -> None:
    prompt = tmp_path / "handbook.txt"
    prompt.write_text(text(8, 100))
    where = ("--cache-dir", str(tmp_path / "cache"))
    warmed = run("warm", str(prompt), str(folders["gemma3_text"]), "--ctx", "2048", *where)
    assert warmed.returncode == 0, warmed.stderr
    settings = settings_of(folders["gemma3_text"], cache_dir=tmp_path / "cache", slots=None)
    with runtime(settings) as rt:
        answer = ask(rt, [system(text(8, 100)), user("Hello.")])
        assert answer.report.tiers["disk"] >= 256
        assert answer.report.computed <= 2 * 64


# ── the library ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", KINDS)
def test_the_library_opens_a_folder(kind: str, folders: dict[str, Path], tmp_path: Path) -> None:
    given: dict[str, Any] = {"ctx": 2048, "slots": 1, "memory_budget": 64 << 20, "cache_dir": tmp_path, "reuse": "exact"}
    chat: list[Any] = [*RIVERS]
    with headstart.open(folders[kind], **given) as hs:
        stream = hs.chat(chat, stream=True, max_tokens=12, temperature=0.0)
        assert "".join(stream) == stream.reply.text
        chat += [stream.reply.message, {"role": "user", "content": "More."}]
        first = stream.reply.report
    with headstart.open(folders[kind], **given) as hs:
        second = hs.chat(chat, max_tokens=12, temperature=0.0)
        assert second.report.tiers["disk"] >= 64
        assert second.report.computed <= second.report.prompt - first.prompt + 64
        blanks = {int(token): bias for token, bias in BLANKS.items()}
        called = hs.chat(RIVERS, tools=[LOOK], tool_choice="required", max_tokens=300, logit_bias=blanks)
        assert called.finish_reason == "tool_calls"
        assert called.tool_calls
    with headstart.open(folders[kind], **{**given, "cache_dir": None}) as hs:
        cold = hs.chat(chat, max_tokens=12, temperature=0.0)
        assert (cold.text, cold.report.cached) == (second.text, 0)


# ── a shared store ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("store", ["file", "valkey"])
def test_conversations_move_between_servers(
    kind: str,
    store: str,
    folders: dict[str, Path],
    tmp_path: Path,
    key_file: Path,
    patient: None,
    request: pytest.FixtureRequest,
) -> None:
    """Each turn is asked at the other server; a third one computes cold."""
    (tmp_path / "store").mkdir()
    valkey: ValkeyServer | None = request.getfixturevalue("valkey") if store == "valkey" else None
    url = valkey.url if valkey is not None else f"file://{tmp_path}/store"
    given = {"reuse": "exact", "slots": 1}
    shared = settings_of(folders[kind], shared=url, shared_key_file=key_file, **given)
    with runtime(shared) as one, runtime(shared) as other, runtime(settings_of(folders[kind], settle="off", **given)) as alone:
        shares: list[int] = []
        messages = [system(text(9, 60)), user("Tell me of the house.")]
        for turn, rt in enumerate((one, other, one, other)):
            found = ask(rt, messages, max_tokens=12, keep_logits=True)
            fresh = ask(alone, messages, max_tokens=12, keep_logits=True, reuse=False)
            assert found.logits is not None
            assert fresh.logits is not None
            assert found.logits.tobytes() == fresh.logits.tobytes()
            assert found.text == fresh.text
            shares.append(found.report.tiers.get("shared", 0))
            if turn:
                assert found.report.computed <= len(messages[-1]["content"]) + len(messages[-2]["content"]) + 64 + 64
            messages = [*messages, assistant(found.text), user(f"And what of its room {turn}?")]
            stored(rt)
        assert shares[0] == 0
        assert shares[1] >= 256, shares  # it had nothing of its own
        for rt in (one, other):
            check(rt)
            assert not [name for name in rt.cache.shared.counters if name.startswith("fault")]
