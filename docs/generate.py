"""Writes docs/cli.md and the man page from the command line, docs/library.md from the docstrings, and the dashboard of Grafana:
`make docs`.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import headstart
from headstart import errors
from headstart.explain.explain import Explanation
from headstart.interfaces.sampling import Sampling
from headstart.library import headstart as library
from headstart.output.parser import ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStart
from headstart.serving.request import Report

HERE = Path(__file__).parent
sys.path.append(str(HERE))

from command_tree import command_line, commands, default, is_argument, parameters, placeholder, plain  # noqa: E402
from dashboard import dashboard  # noqa: E402
from manual import manual  # noqa: E402


def reference_of_commands() -> str:
    """docs/cli.md."""
    group = command_line()
    lines = ["# Command line", "", "Made by `make docs`; `headstart COMMAND --help` and `man headstart` say the same.", ""]
    lines += [
        plain(group.help),
        "",
        "`headstart --install-completion` sets up your shell ([install.md](install.md#shell-completion)).",
        "",
    ]
    for name, command in commands(group):
        lines += [f"## headstart {name}", "", plain(command.help), ""]
        if shown := parameters(command):
            lines += ["| option | default | environment | what it does |", "|---|---|---|---|"]
            lines += [f"| {' | '.join(_row(parameter))} |" for parameter in shown]
            lines.append("")
        if command.epilog:
            lines += [plain(command.epilog), ""]
    return "\n".join(lines)


def _row(parameter: Any) -> Iterator[str]:
    words = [placeholder(parameter)] if is_argument(parameter) else [", ".join(parameter.opts), placeholder(parameter)]
    yield f"`{' '.join(word for word in words if word)}`".replace("|", "\\|")
    yield default(parameter)
    yield f"`{parameter.envvar}`" if parameter.envvar else ""
    yield plain(parameter.help or "")


# ── the library ──────────────────────────────────────────────────────────────────────────────────────────────────────

METHODS = ("chat", "complete", "achat", "acomplete", "warm", "close")
DELTAS = (TextDelta, ReasoningDelta, ToolCallStart, ToolCallDelta)
CLASSES = (library.Reply, Report, Explanation, library.Stream, library.AsyncStream, *DELTAS)
_SECTION = re.compile(r"(Args|Attributes|Raises):")
_ITEM = re.compile(r"    ([\w*][\w, *]*): (.*)")


def reference() -> str:
    """docs/library.md."""
    made = "Made by `make docs` from the docstrings. [cli.md](cli.md) has the command line, [http.md](http.md) HTTP."
    lines = ["# Library", "", made, "", *_text(library)]
    lines += _callable("headstart.open", headstart.open)
    lines += ["## headstart.Headstart", "", *_text(library.Headstart)]
    for name in METHODS:
        lines += _callable(name, getattr(library.Headstart, name), level=3)
    lines += ["## Options of chat and complete", "", *_options()]
    for one in CLASSES:
        lines += _class(one)
    for one in (headstart.Settings, headstart.Sampling):
        lines += _class(one)
    lines += ["## Errors", "", "All are exported by `headstart`.", "", "```", *_tree(), "```", ""]
    lines += ["An error's text names options as the library has them (`ctx=`); `with_flags` has the command line's words.", ""]
    return "\n".join(lines)


class _Plain(str):
    """An annotation that is shown as it was written."""

    def __repr__(self) -> str:
        return str(self)


def _callable(name: str, function: Callable[..., Any], level: int = 2) -> Iterator[str]:
    signature = inspect.signature(function)
    kept = [one.replace(annotation=_Plain(one.annotation)) for one in signature.parameters.values() if one.name != "self"]
    shown = signature.replace(parameters=kept, return_annotation=_Plain(signature.return_annotation))
    yield from (f"{'#' * level} {name}", "", "```python")
    prefix = "async def " if inspect.iscoroutinefunction(function) else "def "
    yield from _folded(f"{prefix}{name.rpartition('.')[2]}{shown}")
    yield from ("```", "", *_text(function))


def _folded(line: str) -> Iterator[str]:
    """A signature, one parameter a line if it is long."""
    if len(line) <= 110:
        yield line
        return
    head, _, rest = line.partition("(")
    inside, _, result = rest.rpartition(")")
    yield f"{head}("
    yield from (f"    {one}," for one in re.split(r", (?![^\[]*\])", inside))
    yield f"){result}"


def _class(kind: type) -> Iterator[str]:
    exported = kind.__name__ in headstart.__all__
    yield from (f"## {'headstart.' if exported else ''}{kind.__name__}", "")
    doc, sections = _parsed(kind)
    yield from doc
    if dataclasses.is_dataclass(kind):
        meanings = dict(_spread(sections.pop("Attributes", [])))
        fields = [(field.name, str(field.type), _default(field)) for field in dataclasses.fields(kind)]
        computed = {name: member for name, member in vars(kind).items() if isinstance(member, property)}
        fields += [(name, _returned(member), "") for name, member in computed.items()]
        meanings |= {name: inspect.getdoc(member) or meanings.get(name, "") for name, member in computed.items()}
        yield from _table(("name", "type", "default", "meaning"), ((n, t, d, meanings.get(n, "")) for n, t, d in fields))
    else:
        for name, member in inspect.getmembers(kind, lambda one: inspect.isfunction(one) or isinstance(one, property)):
            if not name.startswith("_"):
                said = " ".join((inspect.getdoc(member) or "").split())
                yield f"* `{name}{'' if isinstance(member, property) else '()'}`: {said}"
        yield ""
    yield from _sections(sections)


def _returned(member: property) -> str:
    return str(inspect.signature(member.fget).return_annotation) if member.fget else ""


def _default(field: Any) -> str:
    if field.default is not dataclasses.MISSING:
        return repr(field.default)
    return "" if field.default_factory is dataclasses.MISSING else repr(field.default_factory())


def _options() -> Iterator[str]:
    meanings = dict(_spread(_parsed(Sampling)[1]["Attributes"]))
    for kind in (library.Options, library.ChatOptions):
        meanings |= dict(_spread(_parsed(kind)[1]["Attributes"]))
    yield from _parsed(library.Options)[0]
    rows = []
    for name, annotation in library.ChatOptions.__annotations__.items():
        only = " Only of `chat` and `achat`." if name not in library.Options.__annotations__ else ""
        rows.append((name, getattr(annotation, "__forward_arg__", str(annotation)), meanings[name] + only))
    yield from _table(("name", "type", "meaning"), rows)


def _tree() -> Iterator[str]:
    _, _, tree = (inspect.getdoc(errors) or "").partition("\n\n")
    return iter(tree.splitlines())


def _text(thing: Any) -> Iterator[str]:
    doc, sections = _parsed(thing)
    yield from doc
    yield from _sections(sections)


def _sections(sections: dict[str, list[tuple[str, str]]]) -> Iterator[str]:
    for title, items in sections.items():
        yield from (f"{title}:", "", *(f"* `{name}`: {text}" for name, text in items), "")


def _parsed(thing: Any) -> tuple[list[str], dict[str, list[tuple[str, str]]]]:
    """A docstring's text, with its examples as code, and its sections: names and what is said of them."""
    lines: list[str] = []
    sections: dict[str, list[tuple[str, str]]] = {}
    current: list[tuple[str, str]] | None = None
    code = False
    for line in [*(inspect.getdoc(thing) or "").splitlines(), ""]:
        indented = line.startswith("    ")
        if found := _SECTION.fullmatch(line):
            current = sections.setdefault(found[1], [])
            continue
        if current is not None and indented:
            if item := _ITEM.fullmatch(line):
                current.append((item[1], item[2]))
            else:
                current[-1] = (current[-1][0], f"{current[-1][1]} {line.strip()}")
            continue
        if current is not None and line:
            current = None
        if current is None:
            if indented and not code:
                lines.append("```python")
            elif code and not indented and line:
                lines[-1:] = ["```", ""] if not lines[-1] else [lines[-1], "```", ""]
            code = indented or (code and not line)
            lines.append(line[4:] if code else line)
    while lines and not lines[-1]:
        lines.pop()
    return [*lines, *(["```"] if code else []), *([""] if lines else [])], sections


def _spread(items: Sequence[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """What is said of several names at once, for each of them."""
    for names, text in items:
        yield from ((name.strip(), text) for name in names.split(","))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for name, *cells, meaning in rows:
        shown = (f"`{cell}`" if cell else "" for cell in cells)
        said = [" ".join(cell.split()).replace("|", "\\|") for cell in (f"`{name}`", *shown, meaning)]
        yield f"| {' | '.join(said)} |"
    yield ""


PAGES = {
    "cli.md": reference_of_commands,
    "library.md": reference,
    "monitoring/dashboard.json": dashboard,
    "../packaging/headstart.1": manual,
}

if __name__ == "__main__":
    for page, made in PAGES.items():
        (HERE / page).write_text(made(), "utf-8")
