"""Which family a template belongs to, by what it writes."""

from __future__ import annotations

import pytest

from headstart.prompt.chat_template import Template
from headstart.prompt.family_detection import FAMILIES, GENERIC, PLAIN, THINK, Family, family_of
from headstart.templates import of_model
from headstart.testing.fake_engine import CHATML
from templates import NAMED_IDS, REASONING, TOOLS

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
    "nemotron": template(NAMED, before="<TOOLCALL>[", between=", ", after="]</TOOLCALL>", header="<bot>\n<think>\n\n"),
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
    "gemma4": template(
        "<|tool_call>call:{{ call.name }}{{ '{' }}"
        "{% for k, v in call.arguments | dictsort %}"
        '{{ k }}:{% if v is string %}<|"|>{{ v }}<|"|>{% else %}{{ v }}{% endif %}{% if not loop.last %},{% endif %}'
        "{% endfor %}}<tool_call|>",
        header="<|turn>model\n",
        end="<turn|>\n",
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


def test_the_reasoning_of_nemotron() -> None:
    """Its template shows the form of calls in the list of tools too, with braces that no call has."""
    shown = '{{ \'<TOOLCALL>[{{"name": "tool_name1", "arguments": "tool_args1"}}]</TOOLCALL>\' if tools }}'
    strips = "{% set parts = ''.split('</think>') %}"
    found = family_of(Template(shown + strips + WRITTEN["nemotron"], {}))
    assert (found.name, found.reasoning) == ("nemotron", THINK)


def test_the_reasoning_of_gemma() -> None:
    """Its template ends a prompt with reasoning that is empty, where a reply shall have none."""
    nothing = "<|channel>thought\n<channel|>"
    source = WRITTEN["gemma4"].removesuffix("{% endif %}") + "{% if not enable_thinking %}" + nothing + "{% endif %}{% endif %}"
    found = family_of(Template(source, {}))
    assert (found.name, found.reasoning) == ("gemma4", BY_NAME["gemma4"].reasoning)
    assert {"<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'} < set(found.visible)
    assert not found.opened(Template(source, {}).render([{"role": "user", "content": "?"}]))


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
    """What writes no calls cannot bring them back. What writes them as nobody does teaches the model what nobody can read."""
    assert family_of(Template(source, {})).name == "generic"


def test_what_is_nearly_hermes_is_taken_for_it() -> None:
    source = template('<tool_call>{"name": "{{ call.name }}", "input": {{ call.arguments | tojson }}}</tool_call>')
    assert family_of(Template(source, {})).name == "hermes"


def test_a_template_may_write_the_id_in_place_of_the_name() -> None:
    assert family_of(Template(NAMED_IDS, {})).name == "kimi"


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
