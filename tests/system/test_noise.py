"""Reuse under noise: what each client changes of what was said before costs nothing.

O is that of the clean conversation: it has what the user really changed, and replies as the model wrote them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import tiny
from harness import Oracle, check
from headstart.config import Settings
from headstart.engines.llama import LlamaEngine
from headstart.serving.runtime import Runtime
from live import Server, serving
from noise import SPEAKERS, Chat, ClaudeCode, Entry, Llm, Reordering, Reply, Result, Speaker
from scripted import Scripted
from talks import talk
from templates import TOOLS

STRICT = TOOLS.replace(
    "{%- for message in messages %}\n{%- if message.role == 'assistant' %}",
    "{%- for message in messages %}\n"
    "{%- if message.role == 'system' and not loop.first %}{{- raise_exception('system first') }}{%- endif %}\n"
    "{%- if message.role == 'assistant' %}",
)
"""It takes no system message but the first."""
assert STRICT != TOOLS

DATED = "{{- 'It is ' + strftime_now('%S.%f') + '.\\n' }}" + TOOLS
"""What it begins with is never the same twice."""


THOUGHT = "The folder is theirs, and there is something for such things, so that will do. " * 5
NOTE = "A wren, in May, in the hedge; it sings, and it is loud for what it weighs. " * 5


def called(name: str, arguments: str, thought: str = "So let us see.") -> str:
    """A reply with a call; `arguments` as a model may space and order them."""
    call = f'{{"name": "{name}", "arguments": {arguments}}}'
    return f"<think>\n{thought.strip()}\n</think>\n\nLet me see.\n<tool_call>\n{call}\n</tool_call>"


def told(text: str) -> str:
    return f"<think>\nNow it is known, so it can be said.\n</think>\n\n{text}"


Script = tuple[tuple[Entry, str], ...]

SCRIPT: Script = (
    ("Note which bird that was.", called("write_note", f'{{ "text":"{NOTE}" ,"path" : "may.txt" }}', THOUGHT)),
    (Result("written, 5 lines"), told("It was a wren.")),
    ("Is it in another note?", called("find_note", '{"word":"wren",  "deep":true}')),
    (Result("june.txt\njuly.txt"), called("read_note", '{"path": "june.txt", "limit": 40}')),
    (Result("9 June. The wren has five young ones. " * 5), told("Yes, in June.")),
    ("Thank you. And in winter?", told("No note says so.")),
)
OTHER: Script = (("What is a wren?", told("A small bird.")),)


class Counted(Oracle):
    """O of clean conversations."""

    def __init__(self, runtime: Runtime, tools: list[dict[str, Any]]) -> None:
        super().__init__()
        self.runtime = runtime
        self.tools = tools

    def next(self, messages: list[dict[str, Any]], script: str) -> int:
        """The O of a prompt that `script` is replied to."""
        if not self.runtime.prompter.template.late_system:
            messages = early(messages)
        conversation = talk(messages, tools=self.tools, strftime_now=lambda pattern: "now")
        prompt = self.runtime.chat_prompt(conversation, use_reply_tokens=False).tokens
        cost = self.cost(prompt)
        engine = self.runtime.engine
        assert isinstance(engine, Scripted)
        self.learn_tokens([*prompt.tolist(), *engine.tokens(script)])
        return cost


def early(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For a template that takes a system message only as the first: later ones are a user's."""
    head, *rest = messages
    return [head, *({**one, "role": "user"} if one["role"] == "system" else one for one in rest)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    """What it computes matters here to nobody, so two layers do."""
    model = tiny.write(tmp_path_factory.mktemp("models") / "shallow.gguf", layers=2)
    loaded = Scripted(LlamaEngine.load(Settings(str(model), ctx=4096, slots=2, threads=1).engine_options(), block_size=64))
    yield loaded
    loaded.engine.close()


@contextmanager
def serve(engine: Scripted, template: str, folder: Path, *keep: str) -> Iterator[Server]:
    """A server that knows nothing yet. `keep`: noise that it does not undo.

    It does not settle: whether there is time for that between two requests depends on the machine.
    """
    path = folder / "template.jinja"
    path.write_text(template, "utf-8")
    settings = Settings(memory_budget=128 << 20, settle="off", chat_template=path)
    with patch.object(engine, "close"), Runtime(lambda: engine, settings) as runtime:
        with serving(runtime, model_id="demo", keep_noise=keep) as server:
            yield server
        check(runtime)


@dataclass(frozen=True)
class Cost:
    """Of a request. `account`: the server's; `told`: cached tokens in the dialect's own words; `least`: its O."""

    account: dict[str, Any]
    told: int
    least: int

    @property
    def fair(self) -> bool:
        computed: int = self.account["computed"]
        return computed <= 1.02 * self.least + 64


def converse(server: Server, oracle: Counted, speaker: Speaker, script: Script) -> list[Cost]:
    costs = []
    for entry, reply in script:
        least = oracle.next(speaker.clean(entry), reply)
        answer = ask(server, speaker, entry, reply)
        costs.append(Cost(answer["headstart"], told_cached(answer["usage"]), least))
    return costs


def ask(server: Server, speaker: Speaker, entry: Entry, script: str) -> dict[str, Any]:
    """The next request of a conversation."""
    assert server.runtime is not None
    engine = server.runtime.engine
    assert isinstance(engine, Scripted)
    speaker.log.append(entry)
    engine.say(script)
    response = server.post(speaker.path, json=speaker.body())
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    speaker.log.append(Reply(script, answer))
    return answer


def told_cached(usage: dict[str, Any]) -> int:
    if "cache_read_input_tokens" in usage:
        return int(usage["cache_read_input_tokens"])
    details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
    return int(details["cached_tokens"])


def oracle_of(server: Server) -> Counted:
    assert server.runtime is not None
    return Counted(server.runtime, Chat(0).tools())


@pytest.mark.parametrize(
    ("kind", "template"),
    [*((kind, TOOLS) for kind in SPEAKERS), (ClaudeCode, STRICT)],
    ids=lambda value: getattr(value, "__name__", "late" if value == STRICT else ""),
)
def test_noise_costs_nothing(engine: Scripted, tmp_path: Path, kind: type[Speaker], template: str) -> None:
    with serve(engine, template, tmp_path) as server:
        oracle = oracle_of(server)
        costs = converse(server, oracle, kind(1), SCRIPT)
        # Another conversation shares tools and system with it.
        other = converse(server, oracle, kind(2), OTHER)
    for cost in (*costs, *other):
        assert cost.fair, cost
        assert cost.told == cost.account["cached"]
    assert all(cost.told for cost in (*costs[1:], *other))
    # Templates like this one take reasoning back at the next question: nothing that a client did.
    causes = [cost.account["cause"] for cost in costs]
    assert causes == ["first_time", None, "reasoning_stripped", None, None, "reasoning_stripped"]


def test_noise_costs_nothing_where_state_cannot_be_cut(tmp_path: Path) -> None:
    """The environment is said behind the user's question: the reasoning is taken back to behind that."""
    settings = Settings(str(tiny.write(tmp_path / "hybrid.gguf", "qwen35")), ctx=2048, slots=2, threads=1)
    engine = Scripted(LlamaEngine.load(settings.engine_options(), block_size=64))
    with serve(engine, TOOLS, tmp_path) as server:
        for cost in converse(server, oracle_of(server), ClaudeCode(1), SCRIPT):
            assert cost.fair, cost
    engine.engine.close()


def test_the_date_of_a_conversation_stays(engine: Scripted, tmp_path: Path) -> None:
    with serve(engine, DATED, tmp_path) as server:
        for cost in converse(server, oracle_of(server), Llm(1), SCRIPT):
            assert cost.fair, cost


@pytest.mark.parametrize(
    ("rule", "kind", "template"),
    [
        ("billing", ClaudeCode, TOOLS),
        ("roles", Reordering, TOOLS),
        ("arguments", Reordering, TOOLS),
        ("schemas", Reordering, TOOLS),
        ("reasoning", Llm, TOOLS),
        ("clock", Llm, DATED),
    ],
    ids=str.split("billing roles arguments schemas reasoning clock"),
)
def test_left_alone_it_costs(engine: Scripted, tmp_path: Path, rule: str, kind: type[Speaker], template: str) -> None:
    with serve(engine, template, tmp_path, rule) as server:
        oracle = oracle_of(server)
        costs = converse(server, oracle, kind(1), SCRIPT[:2]) + converse(server, oracle, kind(2), OTHER)
    assert not all(cost.fair for cost in costs)
