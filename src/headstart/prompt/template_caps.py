"""Template capabilities: what a chat template can do. They are found by rendering test conversations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headstart.errors import InvalidRequest
from headstart.interfaces.conversation import Message, Tool
from headstart.prompt.chat_template import Template

_SEEN, _OTHER = "headstart_probe", "headstart_other"
_USER: Message = {"role": "user", "content": "?"}
_TOOL = {
    "type": "function",
    "function": {"name": _SEEN, "description": "?", "parameters": {"type": "object", "properties": {}}},
}


def capabilities(template: Template) -> dict[str, bool]:
    """`chat_template_caps` with llama-server's names. A refused conversation counts as not supported."""

    def call(name: str, arguments: Any) -> dict[str, Any]:
        return {"id": "call00000", "type": "function", "function": {"name": name, "arguments": arguments}}

    def writes(messages: Sequence[Message], *sought: str, tools: Sequence[Tool] = ()) -> bool:
        try:
            text = template.render(messages, tools=tools, generation=False)
        except InvalidRequest:
            return False
        return all(name in text for name in sought)

    def reply(**fields: Any) -> Message:
        return {"role": "assistant", "content": "", **fields}

    one, two = call(_SEEN, {}), call(_OTHER, {})
    return {
        "supports_string_content": writes([{"role": "user", "content": _SEEN}], _SEEN),
        "supports_typed_content": writes([{"role": "user", "content": [{"type": "text", "text": _SEEN}]}], _SEEN)
        and not writes([{"role": "user", "content": [{"type": "text", "text": _SEEN}]}], "'type'"),
        "supports_system_role": writes([{"role": "system", "content": _SEEN}, _USER], _SEEN),
        "supports_tools": writes([_USER], _SEEN, tools=[_TOOL]),
        "supports_tool_calls": writes([_USER, reply(tool_calls=[one])], _SEEN),
        "supports_parallel_tool_calls": writes([_USER, reply(tool_calls=[one, two])], _SEEN, _OTHER),
        "supports_object_arguments": writes([_USER, reply(tool_calls=[call(_OTHER, {"key": _SEEN})])], _SEEN),
        "supports_preserve_reasoning": writes([_USER, reply(content="!", reasoning_content=_SEEN), _USER], _SEEN),
    }
