"""Formats: how a family of models writes reasoning and tool calls, as data.

A *marker* is a text that delimits something, such as `<tool_call>` or `</think>`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ToolCallSyntax = Literal["object", "list", "named", "xml", "python", "keyed", "channels"]


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The markers around reasoning. Newlines directly inside and after them are not part of the reasoning."""

    open: str
    close: str

    @property
    def ending(self) -> str:
        """The text that ends open reasoning, as templates write it."""
        return f"\n{self.close}\n\n"


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """How tool calls are written. An empty marker means that there is none.

    Attributes:
        syntax: `object` a JSON object with name and arguments; `list` a JSON list of such; `named` a name, `separator` and
            JSON arguments; `xml` a name and parameters between markers; `python` a list of Python calls; `keyed` a name and
            an object with bare keys, whose strings stand between two of `quote`, without escapes; `channels` messages to a
            recipient, as gpt-oss writes them.
        begin, finish: around all calls of a reply; around each of them if `each`.
        open, close: around each call; around all of them where they are a list. Without `open`, a call can only be what a
            reply begins with, and is known by its shape.
        name, arguments: the keys of an `object`, as the template writes them.
        prefix, separator: of a `named` call: before its name, and between name and arguments. A `keyed` one has a prefix too.
        name_pattern: a regular expression for the text in place of the name; its group is the function's name.
        name_end, key, key_end, value_end: of an `xml` call: what follows its name; around the name of a parameter; after
            its value.
        blank: what the template writes on the inner sides of `open` and `close`; in `xml`, around a value.
        between: what it writes between two calls.
    """

    syntax: ToolCallSyntax
    begin: str = ""
    open: str = ""
    close: str = ""
    finish: str = ""
    name: str = "name"
    arguments: str = "arguments"
    prefix: str = ""
    separator: str = ""
    name_pattern: str = r"\s*(.*?)\s*"
    name_end: str = ""
    key: str = ""
    key_end: str = ""
    value_end: str = ""
    quote: str = ""
    blank: str = ""
    between: str = ""
    each: bool = False

    @property
    def written(self) -> tuple[str, ...]:
        """The markers that every reply with a call contains. Without `open`, a template may omit `begin` and `finish`."""
        around = (self.begin, self.finish) if self.open else ()
        return tuple(marker for marker in (*around, self.open, self.separator, self.close) if marker)

    @property
    def markers(self) -> tuple[str, ...]:
        """All markers; they may be control tokens of the model."""
        parts = (self.begin, self.open, self.prefix, self.separator, self.key, self.key_end, self.value_end, self.close)
        return tuple(dict.fromkeys(marker.strip() for marker in (*parts, self.quote, self.finish) if marker.strip()))


@dataclass(frozen=True, slots=True)
class Family:
    """How a family of models writes a reply.

    Attributes:
        calls: how it calls tools; None if it cannot.
        reasoning: the markers of reasoning; None if it does not reason, or if `channels` cover it.
        extra: further control tokens that the parser needs.
        adapted: whether the template has no tools, so that calls and results are written as text (`prompt/adaptation`).
    """

    name: str
    calls: ToolCallFormat | None = None
    reasoning: ReasoningFormat | None = None
    extra: tuple[str, ...] = ()
    adapted: bool = False

    @property
    def visible(self) -> tuple[str, ...]:
        """The control tokens that must stay in a reply's text, because the parser needs them."""
        reasoning = (self.reasoning.open, self.reasoning.close) if self.reasoning else ()
        return tuple(dict.fromkeys((*reasoning, *(self.calls.markers if self.calls else ()), *self.extra)))

    def opened(self, prompt: str) -> bool:
        """Whether a prompt ends inside reasoning, so that the reply begins with reasoning."""
        return self.reasoning is not None and prompt.rstrip().endswith(self.reasoning.open)
