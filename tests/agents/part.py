"""Part: the replies of a sensible model to the agents' task."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from headstart.prompt.builder import Prompt

FILE = "notes.txt"
NOTES = "walnut harbour lantern\nThe ferry leaves at noon.\n"
TASK = f"Read the file {FILE} and tell me its first word."
FOLLOW = "And what is its last word?"
FIRST = "The first word of the notes is walnut."
SECOND = "The last word of the notes is noon."
OTHER = "Name three colours that leaves have in autumn."
THIRD = "Red, yellow and brown."
TITLE = "Words of a note"
THOUGHT = "The notes are in a file, so I have to read it."

PATHS = ("file_path", "filePath", "path", "filename")
COMMANDS = ("cmd", "command")
READERS = ("Read", "read", "read_file", "read_note")
SHELLS = ("exec_command", "shell_command", "shell", "Bash", "bash")


def reply(prompt: Prompt) -> str:
    """Calls a tool that reads the file if the task needs it and it has not been read. Then it answers the question."""
    assert prompt.source is not None
    messages, tools = prompt.source.messages, prompt.source.tools or ()
    texts = [str(message.get("content")) for message in messages]
    if messages[-1].get("role") == "tool":
        return f"<think>\nNow I know it.\n</think>\n\n{FIRST}"
    for asked, answer in ((FOLLOW, SECOND), (OTHER, THIRD)):
        if tools and any(asked in text for text in texts[-3:]):
            return f"<think>\nThat I know.\n</think>\n\n{answer}"
    if not tools or not any(TASK in text for text in texts):
        return TITLE
    call = _call(tools, prompt.text)
    return f"<think>\n{THOUGHT}\n</think>\n\nI will read it.\n<tool_call>\n{json.dumps(call)}\n</tool_call>"


def _call(tools: Any, text: str) -> dict[str, Any]:
    functions = {tool["function"]["name"]: tool["function"] for tool in tools}
    for names, keys, value in ((READERS, PATHS, FILE), (SHELLS, COMMANDS, f"cat {FILE}")):
        for name in names:
            if name in functions:
                known = (functions[name].get("parameters") or {}).get("properties") or {}
                return {"name": name, "arguments": _arguments(known, keys, value)}
    raise AssertionError(f"no tool that reads among {sorted(functions)}")


def _arguments(known: Mapping[str, Any], keys: tuple[str, ...], value: str) -> dict[str, Any]:
    key = next(key for key in keys if key in known)
    return {key: value.split() if known[key].get("type") == "array" else value}
