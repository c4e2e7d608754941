"""Which family a template belongs to, by what it writes; and how a template without tools gets them all the same."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headstart.output.parser import Parser, message_of
from headstart.prompt.builder import Prompter
from headstart.prompt.chat_template import Template
from headstart.prompt.family_detection import FAMILIES, GENERIC, PLAIN, THINK, Family, adapt, family_of
from headstart.templates import of_model
from headstart.testing.fake_engine import CHATML, FakeTokenizer
from talks import talk
from templates import REASONING, TOOLS

FALLBACK = of_model(None).source
BY_NAME = {family.name: family for family in FAMILIES}


def template(
    call: str,
    *,
    before: str = "",
    after: str = "",
    between: str = "",
    header: str = "<bot>",
    listed: bool = True,
    end: str = "<e>",
) -> str:
    """A template of few words; `call` is what it writes for each `call`."""
    return (
        ("{{ tools | tojson if tools }}" if listed else "")
        + "{% for m in messages %}{% if m.role == 'assistant' %}"
        + f"{header}{{{{ m.content }}}}{{% if m.tool_calls %}}{before}{{% for c in m.tool_calls %}}"
        + f"{{% set call = c.function %}}{call}{{% if not loop.last %}}{between}{{% endif %}}{{% endfor %}}{after}{{% endif %}}"
        + "{% else %}<{{ m.role }}>{{ m.content }}{% endif %}"
        + end
        + "{% endfor %}{% if add_generation_prompt %}"
        + header
        + "{% endif %}"
    )


NAMED = '{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}'
XML = (
    "<function={{ call.name }}>{% for k, v in call.arguments | items %}\n<parameter={{ k }}>\n{{ v }}\n</parameter>{% endfor %}"
    "\n</function>"
)
WRITTEN: dict[str, str] = {
    "hermes": template("<tool_call>\n" + NAMED + "\n</tool_call>", between="\n"),
    "qwen-xml": template("<tool_call>\n" + XML + "\n</tool_call>", between="\n", header="<bot>\n<think>\n"),
    "seed": template("<seed:tool_call>\n" + XML.replace("\n{{ v }}\n", "{{ v }}") + "\n</seed:tool_call>"),
    "minimax": template(
        '<invoke name="{{ call.name }}">{% for k, v in call.arguments | items %}\n<parameter name="{{ k }}">{{ v }}</parameter>'
        "{% endfor %}</invoke>",
        before="<minimax:tool_call>\n",
        after="\n</minimax:tool_call>",
    ),
    "glm": template(
        "\n<tool_call>{{ call.name }}{% for k, v in call.arguments | items %}\n<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}"
        "</arg_value>{% endfor %}\n</tool_call>"
    ),
    "mistral": template("[TOOL_CALLS]{{ call.name }}[ARGS]{{ call.arguments | tojson }}", header="[/INST]"),
    "mistral-list": template(NAMED, before="[TOOL_CALLS] [", between=", ", after="]"),
    "deepseek-r1": template(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ call.name }}\n```json\n{{ call.arguments | tojson }}\n```"
        "<｜tool▁call▁end｜>",
        before="<｜tool▁calls▁begin｜>",
        after="<｜tool▁calls▁end｜>",
    ),
    "deepseek": template(
        # It joins the text of the arguments, as older clients send them.
        "{{ '<｜tool▁call▁begin｜>' + call.name + '<｜tool▁sep｜>' + call.arguments + '<｜tool▁call▁end｜>' }}",
        before="<｜tool▁calls▁begin｜>",
        after="<｜tool▁calls▁end｜>",
    ),
    "kimi": template(
        "<|tool_call_begin|>functions.{{ call.name }}:{{ loop.index0 }}<|tool_call_argument_begin|>"
        "{{ call.arguments | tojson }}"
        "<|tool_call_end|>",
        before="<|tool_calls_section_begin|>",
        after="<|tool_calls_section_end|>",
    ),
    "phi": template(NAMED, before="<|tool_call|>[", after="]<|/tool_call|>"),
    "phi-each": template("<|tool_call|>{{ call | tojson }}<|/tool_call|>"),
    "lfm-json": template(NAMED, before="<|tool_call_start|>[", between=", ", after="]<|tool_call_end|>"),
    "granite": template(NAMED, before="<|tool_call|>[", after="]"),
    "cohere": template(
        '{"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}',
        before="<|START_ACTION|>[\n",
        after="\n]<|END_ACTION|>",
    ),
    "harmony": template(
        " to=functions.{{ call.name }}<|channel|>commentary json<|message|>{{ call.arguments | tojson }}<|call|>",
        header="<|start|>assistant",
        end="",
    ),
    "lfm": template(
        "{{ call.name }}({% for k, v in call.arguments | items %}{{ k }}={{ v | tojson }}{% if not loop.last %}, {% endif %}"
        "{% endfor %})",
        before="<|tool_call_start|>[",
        between=", ",
        after="]<|tool_call_end|>",
    ),
    "llama4": template(
        "{{ call.name }}({% for k, v in call.arguments | items %}{{ k }}={{ v | tojson }}{% if not loop.last %}, {% endif %}"
        "{% endfor %})",
        before="[",
        between=", ",
        after="]",
    ),
    "llama": template(NAMED.replace('arguments":', 'parameters":'), header="<|header|>assistant<|/header|>\n\n"),
}


def test_every_row_has_a_template() -> None:
    assert set(WRITTEN) == set(BY_NAME)


@pytest.mark.parametrize("name", WRITTEN)
def test_a_template_s_own_calls_tell_its_family(name: str) -> None:
    found = family_of(Template(WRITTEN[name], {}))
    assert found.name == name
    assert found.calls == BY_NAME[name].calls


@pytest.mark.parametrize("blank", ["", "\n"])
def test_values_may_stand_on_their_own_lines(blank: str) -> None:
    written = XML.replace("\n{{ v }}\n", blank + "{{ v }}" + blank)
    found = family_of(Template(template("<tool_call>\n" + written + "\n</tool_call>"), {}))
    assert found.name == "qwen-xml"
    assert found.calls is not None
    assert found.calls.blank == blank


def test_templates_of_the_tests() -> None:
    tools = family_of(Template(TOOLS, {}))
    assert (tools.name, tools.reasoning, tools.adapted) == ("hermes", THINK, False)
    reasoning = family_of(Template(REASONING, {}))
    assert (reasoning.name, reasoning.reasoning, reasoning.adapted) == ("generic", THINK, True)
    fallback = family_of(Template(FALLBACK, {}))
    assert (fallback.name, fallback.reasoning) == ("generic", None)
    bare = family_of(Template(CHATML, {}))
    assert bare.name == "llama"
    assert bare.calls is not None
    assert bare.calls.arguments == "arguments"


def test_tools_that_do_not_reach_the_text_are_listed_by_us() -> None:
    assert family_of(Template(template("<tool_call>" + NAMED + "</tool_call>", listed=False), {})) == Family(
        "generic", GENERIC.calls, None, adapted=True
    )


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no') }}",
        "{{ messages[5].content }}",
        "{{ tools | tojson }}{{ raise_exception('no calls') if messages | length > 1 }}",
        "{{ tools | tojson }}",
        "{{ tools | tojson }}{% for m in messages %}{{ m.tool_calls }}{% endfor %}",
        "",
    ],
)
def test_no_template_is_an_error(source: str) -> None:
    """What writes no calls cannot bring them back either; what writes them as nobody does is taken for the common form."""
    assert family_of(Template(source, {})).name == ("hermes" if "tool_calls" in source else "generic")


@pytest.mark.parametrize(
    ("source", "close"),
    [("[THINK]{{ m }}[/THINK]", "[/THINK]"), ("a</thinking>", "</thinking>"), ("x<|END_THINKING|>", "<|END_THINKING|>")],
)
def test_reasoning_is_what_the_source_knows(source: str, close: str) -> None:
    found = family_of(Template(source, {}))
    assert found.reasoning is not None
    assert found.reasoning.close == close
    assert close in found.visible


def test_reasoning_may_be_open_already() -> None:
    family = family_of(Template(REASONING, {}))
    prompt = Template(REASONING, {}).render([{"role": "user", "content": "?"}])
    assert family.opened(prompt)
    assert not family.opened(prompt + "</think>\n\n")
    assert not family_of(Template(FALLBACK, {})).opened(prompt)


def test_visible_tokens_are_single_ones() -> None:
    """What is written as several tokens is no token: of each family, the marks without their surroundings."""
    assert set(BY_NAME["deepseek-r1"].visible) >= {
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>",
        "</think>",
    }
    assert set(BY_NAME["mistral"].visible) >= {"[TOOL_CALLS]", "[ARGS]"}
    assert "<|message|>" in BY_NAME["harmony"].visible
    assert PLAIN.visible == ("<think>", "</think>")


# ── templates without tools ──────────────────────────────────────────────────────────────────────────────────────────

TOOL: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
ARGUMENTS = '{"city":  "Paris"}'


def call(number: int, arguments: Any = ARGUMENTS) -> dict[str, Any]:
    return {"id": f"call_{number}", "type": "function", "function": {"name": "weather", "arguments": arguments}}


TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": "Let me see.", "reasoning_content": "Hm.", "tool_calls": [call(0), call(1)]},
    {"role": "tool", "tool_call_id": "call_0", "content": "sunny"},
    {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "rain"}, {"type": "text", "text": "y"}]},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": None, "tool_calls": [call(2, {"city": "Rome"})]},
    {"role": "tool", "tool_call_id": "call_2", "content": "hot"},
    {"role": "assistant", "content": "Hot."},
    {"role": "user", "content": "Thanks"},
]


def test_adapted_conversation() -> None:
    messages, tools = adapt(GENERIC, TALK, [TOOL], neighbours=False)
    assert tools is None
    assert [message["role"] for message in messages] == [
        "system",
        "user",
        "assistant",
        "user",
        "assistant",
        "user",
        "assistant",
        "user",
    ]
    assert messages[0]["content"].startswith("Be brief.\n\n# Tools\n")
    assert json.dumps(TOOL) in messages[0]["content"]
    assert messages[2] == {
        "role": "assistant",
        "reasoning_content": "Hm.",
        "content": "Let me see." + '\n<tool_call>\n{"name": "weather", "arguments": {"city":  "Paris"}}\n</tool_call>' * 2,
    }
    assert messages[3]["content"] == (
        "<tool_response>\nsunny\n</tool_response>\n<tool_response>\nrainy\n</tool_response>\nSure?"
    )
    assert messages[4]["content"] == '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    assert adapt(GENERIC, TALK[1:], [TOOL], neighbours=False)[0][0]["content"].startswith("# Tools\n")
    assert adapt(GENERIC, TALK[:2], None, neighbours=False)[0] == TALK[:2]


def test_what_a_user_says_behind_results_is_a_message_of_its_own() -> None:
    """Where a template takes it: else each word of the user's would make the results before it new text."""
    together, _ = adapt(GENERIC, TALK, [TOOL], neighbours=False)
    apart, _ = adapt(GENERIC, TALK, [TOOL], neighbours=True)
    assert apart[3]["content"] + "\nSure?" == together[3]["content"]
    assert apart[4] == {"role": "user", "content": "Sure?"}
    assert [*apart[:3], *apart[5:]] == [*together[:3], *together[4:]]


@pytest.mark.parametrize(
    ("refusal", "behind"),
    [
        ("", "<|im_end|>\n<|im_start|>user\n"),
        ("{{ raise_exception('two in a row') if loop.previtem and loop.previtem.role == message.role }}", "\n"),
    ],
)
def test_a_prompt_has_results_and_the_users_words_as_its_template_takes_them(refusal: str, behind: str) -> None:
    loop = "{%- for message in messages %}"
    assert loop in FALLBACK
    source = FALLBACK.replace(loop, loop + refusal)
    prompt = Prompter(FakeTokenizer(), Template(source, {})).chat(talk(TALK[:6], tools=[TOOL]))
    assert f"rainy\n</tool_response>{behind}Sure?<|im_end|>" in prompt.text


def test_other_families_keep_their_conversation() -> None:
    assert adapt(BY_NAME["hermes"], TALK, [TOOL], neighbours=True) == (TALK, [TOOL])


@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize("neighbours", [True, False])
def test_adapting_is_append_only(start: int, neighbours: bool) -> None:
    talk = TALK[start:]
    for length in range(1, len(talk)):
        shorter, longer = (adapt(GENERIC, talk[:end], [TOOL], neighbours=neighbours)[0] for end in (length, length + 1))
        *before, last = shorter
        assert list(longer[: len(before)]) == before
        assert longer[len(before)]["content"].startswith(last["content"] or "")
        assert {**longer[len(before)], "content": ""} == {**last, "content": ""}
        one, other = (Template(FALLBACK, {}).render(messages, generation=False) for messages in (shorter, longer))
        assert other.startswith(one.removesuffix("<|im_end|>\n"))
        assert not neighbours or talk[length]["role"] == "tool" or other.startswith(one)


def test_an_adapted_call_is_read_as_it_was_sent() -> None:
    """What the model wrote, parsed, sent back and rendered, is what the model wrote."""
    written = f'Let me see.\n<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
    parser = Parser(GENERIC, tools=[TOOL])
    message = message_of(parser.feed(written) + parser.end(), ["call_0"])
    assert message["tool_calls"] == [call(0)]
    assert adapt(GENERIC, [message], None, neighbours=True)[0][0]["content"] == written
