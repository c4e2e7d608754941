"""Chat template: messages → text, with the model's own Jinja chat template in a sandbox.

The dialect is that of transformers' `apply_chat_template` (immutable sandbox, `tojson` without HTML escapes,
`raise_exception`, `strftime_now`, loop controls, `generation` blocks).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from types import MappingProxyType
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
from jinja2.runtime import LoopContext

from headstart.errors import InvalidRequest, ModelError
from headstart.interfaces.conversation import Message
from headstart.names import option

_PROBE = "headstart_probe"
_USER: Message = {"role": "user", "content": "headstart_question"}
_REPLY: Message = {"role": "assistant", "content": "headstart_answer"}


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's text for training. Here only its content is rendered."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's own declaration)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox for a model's template. The attributes of a loop that templates read for each message need no check."""

    _HARMLESS = frozenset({"first", "last", "index", "index0", "previtem", "nextitem"})

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return (type(obj) is LoopContext and attr in self._HARMLESS) or super().is_safe_attribute(obj, attr, value)


class Template:
    """A compiled chat template.

    Args:
        source: the Jinja text.
        names: `bos_token`, `eos_token`, … of the model.
        now: the clock behind `strftime_now`.

    Raises:
        ModelError: the text is not a template.
    """

    def __init__(self, source: str, names: Mapping[str, str], now: Callable[[], datetime] = datetime.now) -> None:
        environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda pattern: now().strftime(pattern)
        self.source = source
        self._names = dict(names)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelError(
                f"The chat template does not compile ({error}); give another with {option('chat_template')}."
            ) from error

    @cached_property
    def late_system(self) -> bool:
        """Whether a system message after a user message is rendered in its place, and a second one after the first."""
        system: Message = {"role": "system", "content": _PROBE}
        try:
            late = self.render([_USER, system, _REPLY, _USER], generation=False)
            twice = self.render([{**system, "content": "headstart_first"}, system, _USER], generation=False)
        except InvalidRequest:
            return False
        places = [late.find(text) for text in (_USER["content"], _PROBE, _REPLY["content"])]
        return places == sorted(places) and places[0] >= 0 and _PROBE in twice and "headstart_first" in twice

    @cached_property
    def text_arguments(self) -> bool:
        """Whether the template needs the arguments of a call as JSON text."""
        call = {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": {_PROBE: 1}}}
        try:
            text = self.render([_USER, {**_REPLY, "tool_calls": [call]}], generation=False)
        except InvalidRequest:
            return True
        return f"'{_PROBE}'" in text

    @cached_property
    def neighbours(self) -> bool:
        """Whether two messages of a user may follow each other."""
        try:
            text = self.render([_USER, {**_USER, "content": _PROBE}], generation=False)
        except InvalidRequest:
            return False
        return _PROBE in text

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        generation: bool = True,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """The text of a conversation; with `generation`, up to where the assistant's reply begins.

        Raises:
            InvalidRequest: the template refuses these messages; the message has the template's error.
        """
        names: dict[str, Any] = {"documents": None, **self._names, **variables}
        names |= {"messages": messages, "tools": tools or None, "add_generation_prompt": generation}
        try:
            return self._template.render(names)
        except Exception as error:  # a template is a program of its own: it may fail in any way
            raise InvalidRequest(f"The model's chat template refuses these messages: {error}", param="messages") from error
