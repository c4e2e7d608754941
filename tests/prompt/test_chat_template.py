from __future__ import annotations

from datetime import datetime

import pytest

from headstart.errors import InvalidRequest, ModelError
from headstart.prompt.chat_template import Template
from headstart.templates import of_model
from headstart.testing.fake_engine import CHATML

NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
FALLBACK = of_model(None).source
HELLO = [{"role": "user", "content": "Hello"}]


def render(source: str, generation: bool = True, **variables: object) -> str:
    template = Template(source, NAMES, now=lambda: datetime(2024, 2, 3, 4, 5))
    return template.render(HELLO, generation=generation, variables=variables)


def test_fallback_is_chatml() -> None:
    assert render(FALLBACK) == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert render(FALLBACK, generation=False) == "<|im_start|>user\nHello<|im_end|>\n"
    assert render(CHATML) == render(FALLBACK)


def test_names_extras_and_messages_reach_the_template() -> None:
    assert render("{{ bos_token }}{{ messages[0].content }}{{ thinking }}{{ eos_token }}", thinking=True) == (
        "<s>HelloTrue</s>"
    )
    assert render("{{ tools is none }} {{ documents is none }}") == "True True"


def test_tojson_is_plain_json() -> None:
    """No HTML escapes, no ASCII escapes, keys in their own order, indent on demand."""
    value = {"b": "<é> & 'x'", "a": [1, None, True]}
    assert render("{{ value | tojson }}", value=value) == """{"b": "<é> & 'x'", "a": [1, null, true]}"""
    assert render("{{ value | tojson(indent=1) }}", value={"a": 1}) == '{\n "a": 1\n}'
    assert render("{{ value | tojson(ensure_ascii=True) }}", value="é") == '"\\u00e9"'


def test_raise_exception_is_a_request_error() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


def test_strftime_now_uses_the_given_clock() -> None:
    assert render("{{ strftime_now('%d %b %Y %H:%M') }}") == "03 Feb 2024 04:05"


def test_generation_blocks_and_loop_controls() -> None:
    source = "{% generation %}<{{ messages[0].content }}>{% endgeneration %}{% for i in range(9) %}{% break %}{% endfor %}"
    assert render(source) == "<Hello>"


def test_block_lines_leave_no_trace() -> None:
    assert render("{% if true %}\nyes\n    {% endif %}\nend") == "yes\nend"


def test_broken_template_is_a_model_error() -> None:
    with pytest.raises(ModelError, match="chat_template="):
        Template("{% for %}", NAMES)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 1 }}",
        "{{ messages[0].nothing.more }}",
        "{{ 1 // 0 }}",
        "{{ none() }}",
        "{{ messages[7].role }}",
        "{% include 'other' %}",
    ],
)
def test_template_that_cannot_cope_is_a_request_error(source: str) -> None:
    with pytest.raises(InvalidRequest):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('true').read() }}",
        "{{ (messages | attr('__class__')).__name__ }}",
        "{{ '{0.__class__.__name__}'.format(messages) }}",
        "{% for message in messages %}{{ loop.__class__ }}{% endfor %}",
        "{% for message in messages %}{{ loop._iterator }}{% endfor %}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{{ range(10 ** 9) | list }}",
    ],
)
def test_sandbox(source: str) -> None:
    """A model file is data from somewhere: its template reaches neither Python nor its caller's messages."""
    before = [dict(message) for message in HELLO]
    try:
        text = render(source)
    except InvalidRequest:
        text = ""
    assert before == HELLO
    assert not any(leak in text for leak in ("class", "list", "builtins", "1"))
