"""Dialects: finds the dialect of a body, and reads its conversation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request as HttpRequest

from headstart.api.anthropic import conversation as anthropic_conversation
from headstart.api.anthropic import routes as anthropic
from headstart.api.anthropic.schema import CountTokensRequest
from headstart.api.body import parse
from headstart.api.generation import TemplateRequest
from headstart.api.openai_responses import routes as responses
from headstart.api.openai_responses.schema import ResponsesInput
from headstart.api.service import Service
from headstart.chat.messages import conversation_of as openai_conversation
from headstart.interfaces.conversation import Conversation

_BLOCKS = frozenset({"tool_use", "tool_result", "thinking", "redacted_thinking", "document"})


def conversation_of(service: Service, request: HttpRequest, body: Mapping[str, Any]) -> Conversation:
    """The conversation in a body for any endpoint. Raises InvalidRequest."""
    data = json.dumps(body).encode()
    if "input" in body or "previous_response_id" in body:
        return responses.ResponsesInputReader(service, request, parse(ResponsesInput, data)).conversation()[0]
    if _is_anthropic(body):
        parsed = parse(CountTokensRequest, data)
        return anthropic_conversation.conversation_of(parsed, anthropic.salt_of(service, request, parsed))
    chat = parse(TemplateRequest, data)
    salt = body.get("cache_salt")
    return openai_conversation(chat, service.salt(request, None, salt if isinstance(salt, str) else None))


def _is_anthropic(body: Mapping[str, Any]) -> bool:
    """Whether the body has a field that only Anthropic's bodies have: `system`, `input_schema`, or a type of block."""
    tools, messages = ([item for item in _listed(body.get(key)) if isinstance(item, Mapping)] for key in ("tools", "messages"))
    if "system" in body or any("input_schema" in tool for tool in tools):
        return True
    blocks = [block for message in messages for block in _listed(message.get("content")) if isinstance(block, Mapping)]
    return any(block.get("type") in _BLOCKS for block in blocks)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
