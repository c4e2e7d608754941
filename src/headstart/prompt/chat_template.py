"""Chat template: messages → text, with the model's own Jinja chat template in a sandbox.

The dialect is that of transformers' `apply_chat_template` (immutable sandbox, `tojson` without HTML escapes,
`raise_exception`, `strftime_now`, loop controls, `generation` blocks).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
from jinja2.runtime import LoopContext

from headstart.errors import InvalidRequest, ModelError
from headstart.interfaces.conversation import Message
from headstart.names import option
from headstart.prompt.escape import ESCAPE

CallIds = Literal["any", "nine", "named"]
"""The ids of tool calls that a template takes. `nine`: nine letters or digits (Mistral). `named`: `functions.NAME:NUMBER`,
because the template writes the id in place of the function's name (Kimi)."""

_NOT_ASCII = re.compile(f"[^\\x00-\\x7f{ESCAPE}]")
_PROBE = "headstart_probe"
_USER: Message = {"role": "user", "content": "headstart_question"}
_REPLY: Message = {"role": "assistant", "content": "headstart_answer"}
_SHORT_ID = "call00000"
_LONG_ID = f"call_{'0' * 24}"


def _calling(*arguments: Any, id: str = _SHORT_ID, name: str = "f", **fields: Any) -> Message:
    """A reply with a call for each of `arguments`."""
    calls = [{"id": id, "type": "function", "function": {"name": name, "arguments": each}} for each in arguments]
    return {"role": "assistant", "content": "", **fields, "tool_calls": calls}


_RESULT: Message = {"role": "tool", "tool_call_id": _SHORT_ID, "content": "headstart_result"}


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's text for training. Here only its content is rendered."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's own declaration)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, indent=indent, **options)
    # The mark of an escaped control token stays: `unescape` looks for it.
    return _NOT_ASCII.sub(lambda found: json.dumps(found[0])[1:-1], text) if ensure_ascii else text


def _replaced(program: jinja2.nodes.Template) -> list[tuple[str, str]]:
    """The fixed words that a template replaces in strings, and by what, in the order in which it does so.

    They are the arguments of `.replace(…)` and `| replace(…)`, also by the name of a variable. What `.split(…)` takes counts as
    deleted: the parts may be joined. A single character there separates lines or words.
    """
    named = {
        assigned.target.name: assigned.node
        for assigned in program.find_all(jinja2.nodes.Assign)
        if isinstance(assigned.target, jinja2.nodes.Name)
    }

    def words(call: jinja2.nodes.Call | jinja2.nodes.Filter) -> list[str]:
        given = [named.get(each.name, each) if isinstance(each, jinja2.nodes.Name) else each for each in call.args[:2]]
        return [each.value for each in given if isinstance(each, jinja2.nodes.Const) and isinstance(each.value, str)]

    def found(node: jinja2.nodes.Node) -> Iterator[tuple[str, str]]:
        for inner in node.iter_child_nodes():  # of `a.replace(…).replace(…)` the first one is inside the second
            yield from found(inner)
        if isinstance(node, jinja2.nodes.Call | jinja2.nodes.Filter):
            match (node.name if isinstance(node, jinja2.nodes.Filter) else getattr(node.node, "attr", "")), words(node):
                case "replace", [old, new]:
                    yield old, new
                case "split", [separator] if len(separator) > 1:
                    yield separator, ""

    return [*found(program)]


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

    Attributes:
        replaced: fixed words that it replaces in strings, and by what, in the order in which it does so.

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
            self.replaced = _replaced(environment.parse(source))
        except jinja2.TemplateError as error:
            raise ModelError(
                f"The chat template does not compile ({error}); give another with {option('chat_template')}."
            ) from error

    # ── what it takes: found by rendering test conversations ─────────────────────────────────────────────────────────

    @cached_property
    def system_role(self) -> bool:
        """Whether a system message in front is rendered. True also for a template that refuses everything."""
        return _PROBE in self._tried({"role": "system", "content": _PROBE}, _USER) or not self._tried(_USER)

    @cached_property
    def late_system(self) -> bool:
        """Whether a system message after a user message is rendered in its place, and a second one after the first."""
        system: Message = {"role": "system", "content": _PROBE}
        late = self._tried(_USER, system, _REPLY, _USER)
        twice = self._tried({**system, "content": "headstart_first"}, system, _USER)
        places = [late.find(text) for text in (_USER["content"], _PROBE, _REPLY["content"])]
        return places == sorted(places) and places[0] >= 0 and _PROBE in twice and "headstart_first" in twice

    @cached_property
    def neighbours(self) -> bool:
        """Whether two messages of a user may follow each other."""
        return _PROBE in self._tried(_USER, {**_USER, "content": _PROBE})

    @cached_property
    def text_arguments(self) -> bool:
        """Whether the template needs the arguments of a call as JSON text."""
        text = self._tried(_USER, _calling({_PROBE: 1}))
        return f"'{_PROBE}'" in text if text else bool(self._tried(_USER, _calling(json.dumps({_PROBE: 1}))))

    @cached_property
    def several_calls(self) -> bool:
        """Whether a reply may have more than one tool call. True also for a template that writes no calls."""
        one, two = self._arguments(_PROBE), self._arguments("headstart_other")
        both = self._tried(_USER, _calling(one, two))
        return (_PROBE in both and "headstart_other" in both) or _PROBE not in self._tried(_USER, _calling(one))

    @cached_property
    def call_ids(self) -> CallIds:
        """The ids of tool calls that the template takes."""
        arguments = self._arguments("key")
        if not self._tried(_USER, _calling(arguments, id=_LONG_ID)):
            return "nine" if self._tried(_USER, _calling(arguments)) else "any"
        named = self._tried(_USER, _calling(arguments, id=f"functions.{_PROBE}:0", name=_PROBE))
        return "named" if _PROBE in named and _PROBE not in self._tried(_USER, _calling(arguments, name=_PROBE)) else "any"

    @cached_property
    def reasoning_field(self) -> str:
        """The field of a message in which the template looks for its reasoning."""
        call = self._arguments("key")
        for field in ("reasoning_content", "thinking", "reasoning"):
            reason = {field: _PROBE}
            if _PROBE in self._tried(_USER, _calling(call, **reason), _RESULT) or _PROBE in self._tried(
                _USER, {**_REPLY, **reason}
            ):
                return field
        return "reasoning_content"

    @cached_property
    def content_beside_reasoning(self) -> bool:
        """Whether a reply with calls may have content as well as reasoning. gpt-oss has one message before a call."""
        fields = {self.reasoning_field: _PROBE, "content": _REPLY["content"]}
        return bool(self._tried(_USER, _calling(self._arguments("key"), **fields), _RESULT))

    def _arguments(self, key: str) -> Any:
        return json.dumps({key: 1}) if self.text_arguments else {key: 1}

    def _tried(self, *messages: Message) -> str:
        """The text of a test conversation; empty if the template refuses it."""
        try:
            return self.render(messages, generation=False)
        except InvalidRequest:
            return ""

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
