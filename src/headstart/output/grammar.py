"""Grammar: restricts a reply, so that tool calls are valid and the answer has the requested form.

Grammars are Lark's as llguidance reads them. What is guaranteed, once a call begins:

* JSON arguments (`object`, `list`, `named`, `channels`): the name is a known one, the arguments are valid by its schema.
* `xml`, `python`, `keyed`: the names of function and parameters are known ones, required parameters are there, in the order
  of the schema (`keyed`: sorted, as templates write them) and once. Values are valid by their own schemas, except plain
  strings in `xml` and `keyed`: these are free text. In `xml` any value is free text where a string is allowed, or where no
  type is known. Rules that concern several parameters together are not enforced, nor in `keyed` what a
  schema says beside types, constants, alternatives, members and items.

Parameters that a schema does not name are not written, unless it says so. If it names none, they are free, but not with
`strict`: OpenAI's reference says that a function without `parameters` has an empty list of them. A schema without
`strict` is followed as far as llguidance knows its keywords; with it, an unknown keyword is an error when the grammar is
compiled.

Where no call is demanded and no tool is strict, arguments are free. A grammar then only keeps the reply from calls that it may
not have: of other functions, or a second one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from headstart.errors import InvalidRequest
from headstart.interfaces.sampling import Grammar
from headstart.longest_match import longest_of
from headstart.output.formats import Family, ToolCallFormat
from headstart.output.schemas import alternatives, any_string, constants_in, named, properties_of, types_of

__all__ = ["Grammar", "grammar_for"]

Choice = Literal["auto", "none", "required"] | Mapping[str, Any]
"""OpenAI's `tool_choice`."""

_COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""As templates write arguments, so that they come back as they were made."""

_AIRY = {"whitespace_pattern": r"[ \n]{1,32}"}
"""Enough for indentation, but not for endless blanks."""

_ALONE = frozenset({"additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "not", "if", "$ref"})
_SHAPES = {"object": r"\s*\{\s*\"(name|type|function|parameters|arguments)\"", "python": r"\s*\[\s*[\w.:\/-]+\s*\("}
"""Patterns of the beginning of calls without a marker, by form."""

_META = re.compile(r"[\\.+*?()|\[\]{}^$#&~/-]")
_ANY = r"(.|\n)*"


def grammar_for(
    family: Family,
    tools: Sequence[Mapping[str, Any]] | None = None,
    choice: Choice = "auto",
    parallel: bool = True,
    response_format: Mapping[str, Any] | None = None,
    thinking: bool = False,
    controls: Mapping[str, int] | None = None,
    others: bool = False,
) -> Grammar | None:
    """The grammar of a reply; None if it may be anything.

    Args:
        tools: those that the reply may call, in OpenAI's form.
        parallel: whether there may be more than one call.
        response_format: OpenAI's, of what is not a call; also `{"type": "regex", "regex": …}` and
            `{"type": "grammar", "grammar": …}` (Lark, or GBNF as llama.cpp has it).
        thinking: whether the prompt has opened the reasoning. If not, a family that reasons may open it itself.
        controls: ids of the model's control tokens by their texts: other markers are plain text.
        others: whether the prompt names other tools too, which the reply must not call.

    Raises:
        InvalidRequest: a call is demanded of a tool that is not there; or the grammar cannot be read.
    """
    functions = [tool["function"] for tool in tools or () if isinstance(tool.get("function"), Mapping)]
    forced = choice not in ("auto", "none")
    if isinstance(choice, Mapping):
        wanted = (choice.get("function") or choice).get("name")
        functions = [function for function in functions if function.get("name") == wanted]
        if not functions:
            raise InvalidRequest(f"tool_choice names {wanted!r}, which is none of the tools.", param="tool_choice")
    elif forced and not functions:
        raise InvalidRequest("tool_choice demands a call, but there are no tools.", param="tool_choice")
    strict = any(function.get("strict") for function in functions)
    limited = family.calls is not None and choice == "auto" and (others or (bool(functions) and not parallel))
    if response_format is None and not (forced or strict or limited):
        return None  # before anything is made of hundreds of control tokens
    rules = _Rules(controls or {})
    content = _content(rules, response_format)
    if family.calls is None or choice == "none" or not (forced or strict or content or limited):
        functions = []
    elif not (forced or strict or content):
        functions = [{"name": function["name"]} for function in functions]
    if not functions and content is None and not limited:
        return None
    several = parallel and not isinstance(choice, Mapping)
    if family.calls is not None and family.calls.syntax == "channels":
        _harmony(rules, functions, content, forced)
    else:
        _plain(rules, family, functions, content, forced, several, thinking)
    return Grammar("lark", "\n".join(rules.lines) + "\n")


class _Rules:
    """The rules of a grammar as they are added; `start` is the first."""

    def __init__(self, controls: Mapping[str, int]) -> None:
        self.lines: list[str] = []
        self._controls = controls
        self._split = re.compile(f"({longest_of(controls)})")

    def add(self, name: str, body: str) -> str:
        self.lines.append(f"{name}: {body}")
        return name.partition("[")[0]

    def text(self, text: str) -> str:
        """The symbols of a text, in which control tokens may be."""
        parts = filter(None, self._split.split(text))
        return " ".join(f"<[{self._controls[part]}]>" if part in self._controls else _quoted(part) for part in parts)

    def until(self, name: str, marker: str, not_first: Sequence[str] = ()) -> str:
        """Free text and the first `marker` behind it. Marks: see `free`."""
        if marker in self._controls:
            return f"{self.free((), not_first, name.upper())} {self.text(marker)}"
        self.add(f"{name}[lazy]", self.add(name.upper(), _except(f"{_ANY}{_escaped(marker)}", not_first)))
        return name

    def free(self, without: Sequence[str], not_first: Sequence[str], name: str = "TEXT") -> str:
        """Free text that has none of the markers `without`, and begins with none of `not_first` (regular expressions).

        A lexeme is as long as possible. So if a text or a marker may come next, the text must exclude the marker.
        """
        markers = (f"{_ANY}{_escaped(marker)}" for marker in without if marker and marker not in self._controls)
        return self.add(name, _except(_ANY, [*markers, *not_first]))

    def members(self, name: str, parts: Sequence[tuple[str, bool]], comma: str) -> str:
        """The symbol of `parts` in their order, with commas between. Each has whether it must be there."""
        # For each place two rules: what may follow where nothing stands before, and where something does.
        self.add(f"{name}_{len(parts)}", '""')
        self.add(f"more_{name}_{len(parts)}", '""')
        for at, (part, needed) in enumerate(parts):
            rest = f"{part} more_{name}_{at + 1}"
            self.add(f"{name}_{at}", rest + ("" if needed else f" | {name}_{at + 1}"))
            self.add(f"more_{name}_{at}", f"{_quoted(comma)} {rest}" + ("" if needed else f" | more_{name}_{at + 1}"))
        return f"{name}_0"


def _plain(
    rules: _Rules,
    family: Family,
    functions: Sequence[Mapping[str, Any]],
    content: str | None,
    forced: bool,
    several: bool,
    thinking: bool,
) -> None:
    calls, reasoning = family.calls, family.reasoning
    thought, opened = "", [] if reasoning is None or thinking else [rf"\s*{_escaped(reasoning.open)}"]
    if reasoning is not None:
        closed = f"{rules.until('thought', reasoning.close)} BLANK?"
        rules.add("BLANK", r"/[ \n]{1,4}/")
        thought = closed if thinking else f"({rules.text(reasoning.open)} {closed})?"
    options = []
    if functions and calls is not None:
        marker = calls.begin if calls.begin and calls.open else calls.open
        rules.add("calls", _calls(rules, calls, functions, several))
        if forced or content is not None or not marker:
            options.append(f"{rules.text(marker)} calls" if marker else "calls")
        else:
            options.append(f"{rules.until('lead', marker, opened)} calls")
    if not forced:
        if content is None:
            assert calls is not None
            content = rules.free([calls.begin, calls.open], ["" if calls.open else _SHAPES[calls.syntax], *opened])
        options.append(content)
    rules.lines.insert(0, f"start: {thought} ({' | '.join(options)})")


def _harmony(rules: _Rules, functions: Sequence[Mapping[str, Any]], content: str | None, forced: bool) -> None:
    """gpt-oss: at most one call, after reasoning and a word to the user."""
    ended = f"{rules.until('message', '<|end|>')} {rules.text('<|start|>assistant')}"
    head = "".join(f"({rules.text(f'<|channel|>{channel}<|message|>')} {ended})? " for channel in ("analysis", "commentary"))
    options = []
    if functions:
        rules.add("call", " | ".join(_channel_call(rules, function) for function in functions))
        options.append(f"{rules.text('<|channel|>commentary to=functions.')} call")
    if not forced:
        options.append(f"{rules.text('<|channel|>final<|message|>')} {content or rules.free(('<|end|>',), ())}")
    rules.lines.insert(0, f"start: {head}({' | '.join(options)})")


def _channel_call(rules: _Rules, function: Mapping[str, Any]) -> str:
    return f"{rules.text(function['name'] + ' <|constrain|>json<|message|>')} {_arguments(function)}"


# ── calls, from behind their first marker ──────────────────────────────────────────────────────────────────────────────


def _calls(rules: _Rules, calls: ToolCallFormat, functions: Sequence[Mapping[str, Any]], several: bool) -> str:
    blank, seam = calls.blank, rules.text(calls.blank)
    match calls.syntax:
        case "object":
            call = " | ".join(_object(rules, calls, function) for function in functions)
        case "list":
            call = " | ".join(_object(rules, calls, function) for function in functions)
        case "named":
            names = ((rules.text(calls.prefix + function["name"] + calls.separator), function) for function in functions)
            call = " | ".join(f"{name} {_arguments(function)}" for name, function in names)
        case "keyed":
            keyed = (_KeyedCall(rules, calls, number, function) for number, function in enumerate(functions))
            call = " | ".join(each.call() for each in keyed)
        case "xml":
            blank, seam = "", "NL?"
            rules.add("NL", r"/\n{1,2}/")
            call = " | ".join(_xml(rules, calls, number, function) for number, function in enumerate(functions))
        case _:
            call = " | ".join(_python(rules, number, function, ", ") for number, function in enumerate(functions))
            first = " | ".join(_python(rules, number, function, "[") for number, function in enumerate(functions))
            more = rules.add("call", call) + "*" if several else ""
            return f"({first}) {more} {rules.text(']' + calls.close)}"
    rules.add("call", call)
    if calls.syntax == "list":
        more = f" ({_quoted(', ')} call)*" if several else ""
        return f"{rules.text(blank + '[')} call{more} {rules.text(']' + calls.close)}"
    if not calls.open:
        return f"call ({rules.text(calls.between)} call)*" if several else "call"
    rules.add("one", f"{rules.text(blank)} call {rules.text(blank + calls.close)}")
    first = f"{seam} {rules.text(calls.open)}" if calls.begin else ""
    last = f"{seam} {rules.text(calls.finish)}" if calls.finish else ""
    between = seam if calls.syntax == "xml" else rules.text(calls.between)
    if calls.each:
        again = f"{between} {rules.text(calls.begin)} {first} one {last}"
        return f"{first} one {last}" + (f" ({again})*" if several else "")
    return f"{first} one" + (f" ({between} {rules.text(calls.open)} one)*" if several else "") + f" {last}"


def _object(rules: _Rules, calls: ToolCallFormat, function: Mapping[str, Any]) -> str:
    head = f"{{{json.dumps(calls.name)}: {json.dumps(function['name'], ensure_ascii=False)}, {json.dumps(calls.arguments)}: "
    return f"{rules.text(head)} {_arguments(function)} {_quoted('}')}"


def _xml(rules: _Rules, calls: ToolCallFormat, number: int, function: Mapping[str, Any]) -> str:
    root, properties, required = _parameters(function)
    parts = []
    blank, end = rules.text(calls.blank), rules.text(calls.blank + calls.value_end)
    for at, (key, schema) in enumerate(properties.items()):
        if any_string(schema, root) or not types_of(schema, root):
            value = rules.until(f"value_{number}_{at}", calls.value_end)
        else:
            value = f"{blank} ({_plain_value(schema, root, strict=bool(function.get('strict')))}) {end}"
        part = f"{rules.text(calls.key + key + calls.key_end)} {value} NL?"
        parts.append(part if key in required else f"({part})?")
    if not properties and not function.get("strict"):
        name = rules.until(f"value_{number}", calls.value_end)
        parts.append(f"({rules.text(calls.key)} /[a-zA-Z0-9_.-]+/ {rules.text(calls.key_end)} {name} NL?)*")
    return f"{rules.text(function['name'] + calls.name_end)} NL? {' '.join(parts)}"


def _plain_value(schema: Any, root: Mapping[str, Any], *, strict: bool) -> str:
    """A value whose only strings are constants: these stand without quotes, anything else is JSON."""
    choices = alternatives(schema, root)
    constants = [_quoted(value) for each in choices for value in constants_in(each)]
    if not constants:
        return _json(schema, root, strict=strict)
    others = [each for each in choices if not constants_in(each)]
    return " | ".join([*constants, *([_json({"anyOf": others}, root, strict=strict)] if others else [])])


def _python(rules: _Rules, number: int, function: Mapping[str, Any], before: str) -> str:
    """A call with what stands before it, as one lexeme: a text may begin with the same bracket."""
    root, properties, required = _parameters(function)
    strict = bool(function.get("strict"))
    name = f"given_{number}"
    if before == "[" and not properties and not strict:
        given = f'/[a-zA-Z_][a-zA-Z0-9_]*/ "=" {_json({}, {}, strict=False)}'
        rules.add(name, f'({given} (", " {given})*)?')
    elif before == "[":
        parts = []
        for key, schema in properties.items():
            boolean = types_of(schema, root) == {"boolean"}
            value = '("True" | "False")' if boolean else _json(schema, root, strict=strict)
            parts.append((f"{_quoted(key + '=')} {value}", key in required))
        rules.add(name, rules.members(name, parts, ", "))
    return f"{_quoted(before + function['name'] + '(')} {name} {_quoted(')')}"


class _KeyedCall:
    """The symbols of a `keyed` call. Its values are no JSON, so they have rules of their own."""

    def __init__(self, rules: _Rules, calls: ToolCallFormat, number: int, function: Mapping[str, Any]) -> None:
        self._rules = rules
        self._head = rules.text(calls.prefix) + " " + _quoted(function["name"])
        self._quote = calls.quote
        self._name = f"keyed_{number}"
        self._root, *_ = _parameters(function)
        self._strict = bool(function.get("strict"))
        self._found: dict[str, str] = {}  # rules of definitions, which may contain themselves
        self._pending: list[tuple[str, Mapping[str, Any]]] = []
        self._count = 0

    def call(self) -> str:
        arguments = self._object(self._root, whole=self._strict)
        while self._pending:  # no recursion, for any number of definitions may lead to one another
            name, schema = self._pending.pop()
            self._rules.add(name, self._value(schema))
        return f"{self._head} {arguments}"

    def _new(self) -> str:
        self._count += 1
        return f"{self._name}_v{self._count}"

    def _value(self, schema: Any) -> str:
        if not isinstance(schema, Mapping):
            return self._any()
        if isinstance(reference := schema.get("$ref"), str):
            return self._defined(reference)
        if constants := constants_in(schema):
            return f"({' | '.join(map(self._constant, constants))})"
        options = schema.get("anyOf") or schema.get("oneOf")
        if not isinstance(options, list | tuple) or not options:
            kinds = sorted(types_of(schema, self._root))
            if len(kinds) == 1:
                return self._typed(kinds[0], schema)
            options = [{**schema, "type": kind} for kind in kinds]
        return f"({' | '.join(map(self._value, options))})" if options else self._any()

    def _typed(self, kind: str, schema: Mapping[str, Any]) -> str:
        match kind:
            case "string":
                return self._string()
            case "array":
                return self._list(schema)
            case "object":
                return self._object(schema, whole=False)
        return _json(schema, {}, strict=self._strict)

    def _defined(self, reference: str) -> str:
        schema = named(reference, self._root)
        if not isinstance(schema, Mapping):
            return self._any()
        if reference not in self._found:
            self._found[reference] = self._new()
            self._pending.append((self._found[reference], schema))
        return self._found[reference]

    def _string(self) -> str:
        return f"{self._rules.text(self._quote)} {self._rules.until(self._new(), self._quote)}"

    def _list(self, schema: Mapping[str, Any]) -> str:
        least, most = schema.get("minItems"), schema.get("maxItems")
        low = least if isinstance(least, int) and least > 0 else 0
        high = max(most, low) - 1 if isinstance(most, int) else ""
        if high == -1:
            return _quoted("[]")
        item = self._new()
        self._rules.add(item, self._value(schema.get("items")))
        items = f'{item} ("," {item}){{{max(low - 1, 0)},{high}}}'
        return f'"[" {items} "]"' if low else f'"[" ({items})? "]"'

    def _object(self, schema: Mapping[str, Any], *, whole: bool) -> str:
        """`whole`: whether an object without properties has no members."""
        _, properties, required = _parameters({"parameters": schema})
        if not properties and (not whole or _ALONE & set(schema)):
            return self._members_at_will()
        ordered = sorted(properties.items(), key=lambda item: item[0].lower())
        parts = [(f"{_quoted(key + ':')} {self._value(value)}", key in required) for key, value in ordered]
        return f'"{{" {self._rules.members(self._new(), parts, ",")} "}}"'

    def _constant(self, value: Any) -> str:
        quote = self._rules.text(self._quote)
        if isinstance(value, str):
            return f"{quote} {_quoted(value)} {quote}"
        if isinstance(value, Mapping):
            members = [f"{_quoted(f'{key}:')} {self._constant(item)}" for key, item in sorted(value.items())]
        elif isinstance(value, list | tuple):
            members = [*map(self._constant, value)]
        else:
            return _quoted(json.dumps(value))
        opening, closing = "{}" if isinstance(value, Mapping) else "[]"
        return " ".join([_quoted(opening), ' "," '.join(members), _quoted(closing)])

    def _any(self) -> str:
        if "" not in self._found:
            name = self._found[""] = self._new()
            plain = _json({"type": ["number", "boolean", "null"]}, {}, strict=False)
            self._rules.add(name, f'{self._string()} | {plain} | {self._members_at_will()} | "[" ({name} ("," {name})*)? "]"')
        return self._found[""]

    def _members_at_will(self) -> str:
        member = f'/[a-zA-Z_][a-zA-Z0-9_.-]*/ ":" {self._any()}'
        return f'"{{" ({member} ("," {member})*)? "}}"'


def _parameters(function: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[str, Any], frozenset[str]]:
    """The schema of a function's parameters, its properties, and which of them are required."""
    root = function.get("parameters")
    root = root if isinstance(root, Mapping) else {}
    required = root.get("required")
    names = [name for name in required if isinstance(name, str)] if isinstance(required, list | tuple) else []
    return root, dict(properties_of(root)), frozenset(names)


# ── values ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _arguments(function: Mapping[str, Any]) -> str:
    root, properties, _ = _parameters(function)
    schema, strict = {**root, "type": "object"}, bool(function.get("strict"))
    if (properties or strict) and not _ALONE & set(root):
        schema["additionalProperties"] = False
    return _json(schema, {}, strict=strict)


def _json(schema: Any, root: Mapping[str, Any], *, strict: bool, layout: Mapping[str, Any] = _COMPACT) -> str:
    """A JSON value. `root`: where the definitions are that the schema refers to."""
    whole = dict(schema) if isinstance(schema, Mapping) else {}
    whole |= {key: root[key] for key in ("$defs", "definitions") if key in root}
    return "%json " + json.dumps({**whole, "x-guidance": {**layout, "lenient": not strict}})


def _content(rules: _Rules, response_format: Mapping[str, Any] | None) -> str | None:
    """What the answer itself must be; None if it may be anything."""
    if not response_format or response_format.get("type") == "text":
        return None
    match dict(response_format):
        case {"type": "json_object"}:
            return _json({"type": "object"}, {}, strict=False, layout=_AIRY)
        case {"type": "json_schema", **rest}:
            form = rest.get("json_schema")
            form = form if isinstance(form, Mapping) else rest
            return _json(form.get("schema"), {}, strict=bool(form.get("strict")), layout=_AIRY)
        case {"type": "regex", "regex": str(pattern)}:
            return rules.add("ANSWER", f"/{_slashed(pattern)}/")
        case {"type": "grammar", "grammar": str(text)}:
            return rules.add("answer", f"%lark {{\n{_lark(text)}\n}}")
    raise InvalidRequest("response_format is of no known type.", param="response_format")


def _lark(text: str) -> str:
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(text)
    except Exception as error:  # whatever a stranger's grammar makes of a converter
        raise InvalidRequest(f"The grammar cannot be read: {error}", param="response_format") from error


def _quoted(value: Any) -> str:
    return json.dumps(value if isinstance(value, str) else json.dumps(value), ensure_ascii=False)


def _except(pattern: str, prefixes: Sequence[str]) -> str:
    return " & ".join([f"/{pattern}/", *(f"~/{prefix}{_ANY}/" for prefix in prefixes if prefix)])


def _escaped(text: str) -> str:
    return _META.sub(r"\\\g<0>", text).replace("\n", r"\n")


def _slashed(pattern: str) -> str:
    """A regular expression as it can stand between slashes."""
    return re.sub(r"\\.|/", lambda found: found[0] if found[0] != "/" else r"\/", pattern, flags=re.DOTALL).replace("\n", r"\n")
