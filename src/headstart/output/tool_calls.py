"""Tool calls: reads the calls in a reply, in the format of the model's family."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from headstart.output.coerce import cast, partial_value
from headstart.output.formats import ToolCallFormat
from headstart.output.json_values import json_text, paired
from headstart.output.python_source import calls_in
from headstart.output.scanner import Incremental, Scanner, TextSink
from headstart.output.schemas import properties_of, types_of

_NAMES = ("name", "function", "tool_name")
_ARGUMENTS = ("arguments", "parameters")
_BESIDES = ("type", "id", "tool_call_id")

SHORT = 256
"""Most characters of a name, with what stands around it."""

_BETWEEN = " \t\r\n,"
_TOO_MANY = " \t\r\n}"

_WORD = re.compile(r"[\w.:/-]*")
_NEXT = re.compile(r"\s*,?\s*[\w.:/-]*\s*")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_XML_NAME = re.compile(r"[^\s<>\"'{}\[\]]+")


class CallReader:
    """Reads calls from `scan`, which it leaves behind the last one.

    Args:
        schemas: of the parameters of each function, for the forms that write values as plain text.
        announce: receives the name of each call.
        argue: receives the JSON text of its arguments, part by part.

    Attributes:
        count: calls announced so far.
    """

    def __init__(
        self,
        scan: Scanner,
        calls: ToolCallFormat,
        schemas: Mapping[str, Mapping[str, Any]],
        announce: TextSink,
        argue: TextSink,
    ) -> None:
        self._scan = scan
        self._calls = calls
        self._schemas = schemas
        self._announce = announce
        self._argue = argue
        self.count = 0

    def _call(self, name: str) -> None:
        self._scan.kept = None
        self.count += 1
        self._announce(name)

    def read(self, found: str) -> Incremental[bool]:
        """Reads the call, or the list of calls, behind the marker `found`; False if there is none."""
        scan = self._scan
        if not self._calls.open:
            return (yield from self.bare())
        if found != self._calls.open:
            yield from scan.blanks()
            if not (yield from scan.take(self._calls.open)):
                return False
        if not (yield from self._one()):
            return False
        scan.kept = None
        yield from scan.blanks()
        if self._calls.finish and (yield from scan.ends(self._calls.finish)):
            yield from scan.blanks()
        return True

    def _one(self) -> Incremental[bool]:
        match self._calls.syntax:
            case "named":
                called = yield from self._named()
            case "xml":
                return (yield from self._xml())
            case "keyed":
                called = yield from self._keyed()
            case _:
                called = yield from self._listed()
        if called and self._calls.syntax == "object" and self._calls.close:
            yield from self._further()
        if called:
            yield from self._close(self._calls.close, braces=self._calls.syntax == "object")
        return called

    def _further(self) -> Incremental[None]:
        """Objects behind the first one of a call's markers: some models write all of their calls there."""
        scan = self._scan
        while True:
            scan.keep()
            yield from scan.blanks(_BETWEEN)
            if (yield from scan.peek()) != "{":
                scan.rewind()
                return
            if not (yield from self._object()):
                self._back()
                return

    def _close(self, marker: str, *, braces: bool = False) -> Incremental[None]:
        """The marker behind a call, if it is there. `braces`: closing ones may stand before it, as models write too many."""
        self._scan.keep()
        yield from self._scan.blanks(_TOO_MANY if braces else None)
        if not marker or not (yield from self._scan.ends(marker.strip())):
            self._scan.rewind()
        self._scan.kept = None

    def _back(self) -> None:
        """Back to where a further call might have begun, unless the reply ended in it: then it is no text."""
        if self._scan.starved:
            self._scan.drop()
        else:
            self._scan.rewind()

    def bare(self) -> Incremental[bool]:
        """Calls that are known by their shape only, one after the other."""
        scan = self._scan
        yield from scan.blanks()
        if self._calls.begin and (yield from scan.take(self._calls.begin)):
            yield from scan.blanks()
        count = self.count
        while True:
            called = yield from (self._listed() if self._calls.syntax == "python" else self._object(strict=True))
            if not called:
                if self.count > count:
                    self._back()
                return self.count > count
            yield from self._close(self._calls.finish)
            scan.keep()
            yield from scan.blanks()
            if (yield from scan.take(";")):
                yield from scan.blanks()

    # ── forms of calls: each reads one, or gives False where nothing was announced ───────────────────────────────────

    def _object(self, *, strict: bool = False, nested: bool = False) -> Incremental[bool]:
        """A JSON object. `strict`: it must have name and arguments, and nothing that a call has not."""
        scan, count = self._scan, self.count
        yield from scan.blanks()
        if not (yield from scan.take("{")):
            return False
        name, early = "", ""
        while (yield from self._key_follows()):
            key = yield from self._string()
            yield from scan.blanks()
            if key is None or not (yield from scan.take(":")):
                break
            yield from scan.blanks()
            raw: list[str] = []
            plain = key in _ARGUMENTS and (not strict or (yield from scan.peek()) == "{")
            if plain and name and self.count == count and (yield from scan.peek()) == "{":
                self._call(name)
                if not (yield from scan.value(self._argue)):
                    return True
            elif key in _NAMES and not name and (yield from scan.peek()) == '"':
                name = (yield from self._string()) or ""
            elif key == "function" and not name and not nested and (yield from scan.peek()) == "{":
                if not (yield from self._object(strict=strict, nested=True)):
                    break
            elif (strict and not plain and key not in _BESIDES) or not (yield from scan.value(raw.append)):
                break
            elif key in _ARGUMENTS:
                early = "".join(raw)
            yield from scan.blanks()
            if (yield from scan.take(",")):
                continue
            if (yield from scan.take("}")) and self.count == count and name and (early or not strict):
                arguments = _unquoted(early).strip()
                arguments = "{}" if arguments in ("", "null") else arguments
                if arguments.startswith("{"):
                    self._call(name)
                    self._argue(arguments)
            break
        return self.count > count

    def _key_follows(self) -> Incremental[bool]:
        yield from self._scan.blanks()
        return (yield from self._scan.peek()) == '"'

    def _string(self) -> Incremental[str | None]:
        raw: list[str] = []
        if (yield from self._scan.peek()) != '"' or not (yield from self._scan.value(raw.append)):
            return None
        try:
            return paired(json.loads("".join(raw), strict=False))
        except ValueError:
            return None

    def _listed(self) -> Incremental[bool]:
        """A list of objects or of Python calls, or one object: models write what others are taught."""
        scan = self._scan
        yield from scan.blanks()
        if not (yield from scan.take("[")):
            return self._calls.syntax != "python" and (yield from self._object())
        yield from scan.blanks()
        if (yield from scan.peek()) != "{":
            return (yield from self._python())
        return bool(self._calls.open) and (yield from self._objects())

    def _objects(self) -> Incremental[bool]:
        """Objects up to the bracket that closes their list."""
        scan, count = self._scan, self.count
        while (yield from self._object()):
            scan.keep()
            yield from scan.blanks()
            if not (yield from scan.take(",")):
                yield from scan.take("]")
                scan.kept = None
                return True
        if self.count > count:
            self._back()
        return self.count > count

    def _named(self) -> Incremental[bool]:
        scan = self._scan
        yield from scan.blanks()
        if self._calls.prefix:
            yield from scan.take(self._calls.prefix)
        separator = self._calls.separator.strip()
        head = yield from scan.within(SHORT, separator)
        if head is None:
            return False
        yield from scan.take(separator)
        yield from scan.blanks()
        found = re.fullmatch(self._calls.name_pattern, head[0], re.DOTALL)
        if found is None or not found[1] or (yield from scan.peek()) != "{":
            return False
        self._call(found[1])
        yield from scan.value(self._argue)
        return True

    def _xml(self) -> Incremental[bool]:
        scan = self._scan
        head = yield from scan.within(SHORT, self._calls.name_end, self._calls.key, self._calls.close)
        name = head[0].strip() if head else ""
        if not _XML_NAME.fullmatch(name):
            return False
        yield from scan.take(self._calls.name_end)
        self._call(name)
        root = self._schemas.get(name, {})
        key_end, *behind = self._calls.key_end.split()
        lead = "{"
        while True:
            scan.keep()
            yield from scan.blanks()
            if not (yield from scan.take(self._calls.key)):
                break
            found = yield from scan.within(SHORT, key_end)
            if found is None:
                break
            yield from scan.take(key_end)
            for marker in behind:
                yield from scan.blanks()
                yield from scan.ends(marker)
            scan.kept = None
            key, parts = found[0].strip(), list[str]()
            whole = bool((yield from scan.until((self._calls.value_end,), parts.append)))
            text = "".join(parts).removeprefix(self._calls.blank)
            schema = properties_of(root).get(key)
            self._argue(f"{lead}{json_text(key)}: ")
            if not whole:
                scan.drop()
                self._argue(partial_value(text.removesuffix(self._calls.blank), schema, root))
                return True
            self._argue(json_text(cast(text.removesuffix(self._calls.blank), schema, root)))
            lead = ", "
        if not (yield from scan.take(self._calls.close)):
            if scan.over:  # it breaks off, perhaps within a marker
                scan.drop()
                return True
            scan.rewind()
        scan.kept = None
        self._argue("{}" if lead == "{" else "}")
        return True

    def _keyed(self) -> Incremental[bool]:
        scan = self._scan
        yield from scan.blanks()
        yield from scan.take(self._calls.prefix)
        head = yield from scan.within(SHORT, "{")
        name = head[0].strip() if head else ""
        if not _XML_NAME.fullmatch(name):
            return False
        self._call(name)
        if not (yield from self._members(self._schemas.get(name, {}))):
            self._back()
        return True

    def _members(self, root: Mapping[str, Any]) -> Incremental[bool]:
        """An object with bare keys, as JSON; False if it breaks off. `root`: its schema."""
        scan, quote = self._scan, self._calls.quote
        closing: list[str] = []  # the brackets that are open: no recursion, for a model may open any number
        lead, schema = "", None
        while True:
            scan.keep()
            yield from scan.blanks(_BETWEEN if closing else None)
            char = yield from scan.peek()
            if closing and char and char in "}]":
                yield from scan.take(char)
                self._argue(closing.pop())
                lead = ", "
                if not closing:
                    return True
                continue
            if not char:
                return False
            if closing[-1:] == ["}"]:
                found = yield from scan.within(SHORT, ":", "}")
                if found is None or not (yield from scan.take(":")):
                    return False
                key = _bare(found[0].strip(), quote, '"')
                schema = properties_of(root).get(key) if len(closing) == 1 else None
                lead += f"{json_text(key)}: "
                scan.keep()
                yield from scan.blanks()
                char = yield from scan.peek()
            self._argue(lead)
            if char and char in "{[":
                yield from scan.take(char)
                self._argue(char)
                closing.append("}" if char == "{" else "]")
                lead, schema = "", None
            elif not (yield from self._bare_value(string=types_of(schema, root) == {"string"})):
                return False
            else:
                lead = ", "

    def _bare_value(self, *, string: bool) -> Incremental[bool]:
        """A string, number or word, as JSON; False if it breaks off. `string`: whether only a string is allowed."""
        scan, quote = self._scan, self._calls.quote
        whole = True
        if (yield from scan.take(quote)):
            scan.kept = None
            self._argue('"')
            whole = bool((yield from scan.until((quote,), lambda text: self._argue(json_text(text)[1:-1]))))
            self._argue('"' if whole else "")
        elif (yield from scan.peek()) == '"':
            scan.kept = None
            whole = yield from scan.value(self._argue)
        else:
            found = yield from scan.within(SHORT, ",", "}", "]")
            if found is None:
                return False
            word = found[0].strip()
            number = not string and _NUMBER.fullmatch(word)
            # Without quotes it is a string only where nothing else is allowed, by a model's mistake.
            self._argue(word if number else json_text(word if string else cast(word, None, {})))
        if not whole:
            scan.drop()  # perhaps the beginning of a quote
        return whole

    def _python(self) -> Incremental[bool]:
        """Python calls up to the bracket that closes their list."""
        scan, count = self._scan, self.count
        parts: list[str] = []
        name = yield from scan.word(_WORD, SHORT)
        yield from scan.blanks()
        if not name or (yield from scan.peek()) != "(":
            return False
        while (yield from scan.peek()) == "(" and (yield from scan.bracketed(parts.append)):
            parts.append((yield from scan.word(_NEXT, SHORT)))
        if not (yield from scan.take("]")):
            return False
        for called, arguments in calls_in(f"[{name}{''.join(parts)}]", self._schemas) or ():
            self._call(called)
            self._argue(json_text(arguments))
        return self.count > count


def _unquoted(text: str) -> str:
    """The JSON text in a JSON string, as some models write it; other text as it is."""
    if not text.startswith('"'):
        return text
    try:
        return paired(json.loads(text, strict=False))
    except ValueError:
        return text


def _bare(key: str, *quotes: str) -> str:
    """A key without the quotes around it, if it has some."""
    for quote in quotes:
        if len(key) >= 2 * len(quote) and key.startswith(quote) and key.endswith(quote):
            return key[len(quote) : len(key) - len(quote)]
    return key
