"""How options are named: each surface spells them, and no text names a flag by itself that the library has too."""

from __future__ import annotations

import ast
import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

import headstart
from headstart.cli.main import app
from headstart.explain.causes import CAUSES
from headstart.interfaces.host_memory import HostMemory
from headstart.memory_plan import fit
from headstart.names import as_argument, as_flag, option, unknown

SOURCE = Path(headstart.__file__).parent
FIELDS = {field.name for field in dataclasses.fields(headstart.Settings)}


def test_each_surface_spells_an_option() -> None:
    text = f"Lower {option('ctx')} or {option('drain')}, use {option('kv_type', 'q8_0')}."
    assert as_flag(text) == "Lower --ctx or --drain-seconds, use --kv-type q8_0."
    assert as_argument(text) == 'Lower ctx= or drain=, use kv_type="q8_0".'
    assert as_flag("nothing of the kind") == "nothing of the kind"
    error = headstart.ConfigError(text)
    assert (str(error), error.with_flags) == (as_argument(text), as_flag(text))
    assert headstart.InvalidRequest(text).message == as_argument(text)


def test_flags_exist_on_the_command_line() -> None:
    command = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    flags = {flag for parameter in command.params for flag in parameter.opts}
    for name in FIELDS - {"model", "state_dir"}:  # the latter is HEADSTART_STATE_DIR, there and in the library
        assert as_flag(option(name)) in flags


def test_options_that_are_named_exist() -> None:
    """In the sources: `option("…")` names a field of Settings."""
    named = set()
    for path in SOURCE.rglob("*.py"):
        named |= (
            set(re.findall(r"""\boption\(["']([a-z_]+)["']""", path.read_text("utf-8"))) if path.name != "names.py" else set()
        )
    assert named
    assert named <= FIELDS - {"state_dir"}, "that has no flag"


def test_no_text_names_a_flag_that_the_library_has_too() -> None:
    """Neither an error nor a line of the log; what only the command line and HTTP say may."""
    flags = re.compile("|".join(f"{flag}(?![a-z-])" for flag in map(as_flag, map(option, FIELDS))))
    for path in sorted(SOURCE.rglob("*.py")):
        if path.relative_to(SOURCE).parts[0] in ("api", "cli", "names.py"):
            continue
        nodes = [*ast.walk(ast.parse(path.read_text("utf-8")))]
        docs = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
                assert not flags.search(node.value), f"{path}:{node.lineno}"


def test_a_log_is_spelled_by_whoever_set_it_up() -> None:
    """A program that uses the library sees its arguments; `headstart serve` shows flags."""
    made = (
        "import logging\n"
        "from headstart.names import OptionText, option\n"
        "{setup}"
        "logging.getLogger('headstart.x').warning('%s is small: %s', 'it', OptionText('give more ' + option('disk_budget')))\n"
    )
    server = "from headstart.observe import logs\nlogs.configure()\n"
    for setup, said in (("", "give more disk_budget="), (server, "give more --disk-budget")):
        done = subprocess.run([sys.executable, "-c", made.format(setup=setup)], capture_output=True, text=True, check=True)
        assert f"it is small: {said}" in done.stderr


def test_what_avoids_a_miss_is_spelled_too() -> None:
    for meaning in CAUSES.values():
        assert "--" not in str(meaning.hint)
        assert "\x02" not in meaning.hint.with_flags + str(meaning.hint)


def test_too_little_memory_names_what_to_lower() -> None:
    with pytest.raises(headstart.ConfigError) as caught:
        fit(HostMemory(1 << 30, 1 << 40, 0, 1000), trained=4096, ctx=None, slots=None, reserve=1 << 30)
    assert 'Lower memory_budget=, ctx= or slots=, use kv_type="q8_0"' in str(caught.value)
    assert "Lower --memory-budget, --ctx or --slots, use --kv-type q8_0" in caught.value.with_flags


def test_what_was_meant() -> None:
    assert unknown("option", {"ctx"}, ["ctx"]) is None
    assert unknown("option", {"n_ctx"}, ["ctx", "slots"]) == "There is no option n_ctx: did you mean ctx?"
    assert unknown("setting", {"q"}, ["ctx", "slots"]) == "There is no setting q: there are ctx, slots."
