"""The man page, from the help of the command line (`make docs` writes packaging/headstart.1)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from command_tree import command_line, commands, default, is_argument, parameters, placeholder, plain

from headstart.names import as_variable
from headstart.version import __version__

_INLINE = re.compile(r"`([^`]+)`|\*\*([^*]+)\*\*")
_ESCAPES = str.maketrans(
    {
        "\\": r"\(rs",
        "-": r"\-",
        "'": r"\(aq",
        "`": r"\(ga",
        "^": r"\(ha",
        "~": r"\(ti",
        "…": r"\&...",
        "—": r"\(em",
        "–": r"\(en",
    }
)
FILES = (
    (
        "~/.cache/headstart",
        "What is stored of conversations: the default of `--cache-dir`. On macOS it is `~/Library/Caches/headstart`. "
        "The variable `HEADSTART_CACHE_DIR` names another folder.",
    ),
    (
        "~/.local/state/headstart",
        "Results of proofs and digests of model files; no text of conversations. On macOS it is "
        "`~/Library/Application Support/headstart`. The variable `HEADSTART_STATE_DIR` names another folder.",
    ),
)
VARIABLES = (
    f"Most options can be set by a variable too, which their description names, like `{as_variable('memory_budget')}`. "
    "The command line wins. A variable that begins with `HEADSTART_` and that headstart does not know is reported."
)
EXITS = (
    ("0", "It did what was asked. A server: it was stopped by a signal."),
    ("1", "It failed, or a check has found a fault."),
    ("2", "It cannot work as it was called. One line on stderr says what to change."),
    ("130", "It was interrupted. A server: a second signal ended it at once."),
)


def manual() -> str:
    """The page headstart(1), for `man`."""
    group = command_line()
    lines = [
        r".\" Made by `make docs` from the help.",
        f'.TH HEADSTART 1 "" "headstart {__version__}" "User Commands"',
        *(".nh", ".ad l"),  # the name of an option or a variable is not divided
        *(".SH NAME", rf"headstart \- {_text('a chat server for local LLMs that never computes the same prompt twice')}"),
        *(".SH SYNOPSIS", r".B headstart", r".I COMMAND", r"[\fIOPTION\fR ...] [\fIARGUMENT\fR ...]"),
        *(".SH DESCRIPTION", *_paragraphs(f"{group.help}\n\n{group.epilog}")),
        *(".SH OPTIONS", *_parameters(group)),
        ".SH COMMANDS",
    ]
    for name, command in commands(group):
        lines += [f'.SS "{_text(f"headstart {name}")}"', _synopsis(name, command), ".PP", *_paragraphs(command.help)]
        lines += _parameters(command)
        lines += [".PP", *_paragraphs(command.epilog)] if command.epilog else []
    lines += [".SH ENVIRONMENT", *_paragraphs(VARIABLES)]
    lines += [".SH FILES"]
    for path, meaning in FILES:
        lines += [".TP", f"\\fI{_text(path)}\\fR", *_paragraph(meaning)]
    lines += [".SH EXIT STATUS"]
    for code, meaning in EXITS:
        lines += [".TP", f"\\fB{code}\\fR", *_paragraph(meaning)]
    return "\n".join([*lines, ""])


def _synopsis(name: str, command: Any) -> str:
    words = [f"\\fBheadstart {_text(name)}\\fR"]
    if any(not is_argument(one) for one in parameters(command)):
        words.append(r"[\fIOPTION\fR ...]")
    for one in parameters(command):
        if is_argument(one):
            shown = f"\\fI{_text(placeholder(one).strip('[]'))}\\fR{' ...' if one.nargs == -1 else ''}"
            words.append(shown if one.required else f"[{shown}]")
    return " ".join(words)


def _parameters(command: Any) -> Iterator[str]:
    for one in parameters(command):
        value = f"\\fI{_text(placeholder(one))}\\fR"
        names = value if is_argument(one) else ", ".join(f"\\fB{_text(name)}\\fR" for name in one.opts)
        yield from (".TP", names if is_argument(one) or not placeholder(one) else f"{names} {value}")
        facts = [f"default: {default(one)}"] if default(one) else []
        facts += [f"variable: `{_variable(one)}`"] if _variable(one) else []
        known = f" ({', '.join(facts)})" if facts else ""
        yield from _paragraph(plain(one.help or "") + known)


def _variable(parameter: Any) -> str:
    return parameter.envvar if isinstance(parameter.envvar, str) else ""


def _paragraphs(text: str) -> Iterator[str]:
    for number, paragraph in enumerate(plain(text).split("\n\n")):
        yield from (*([".PP"] if number else []), *_paragraph(paragraph))


def _paragraph(text: str) -> Iterator[str]:
    """Lines of a paragraph, with code and strong text in bold."""
    joined, shown, end = " ".join(text.split()), [], 0
    for found in _INLINE.finditer(joined):
        shown += [_text(joined[end : found.start()]), f"\\fB{_text(found[1] or found[2])}\\fR"]
        end = found.end()
    yield _guarded("".join([*shown, _text(joined[end:])]))


def _guarded(line: str) -> str:
    """A line that roff cannot take for a request."""
    return f"\\&{line}" if line.startswith((".", "'")) else line


def _text(text: str) -> str:
    """Text in which roff finds nothing to interpret."""
    return text.translate(_ESCAPES)
