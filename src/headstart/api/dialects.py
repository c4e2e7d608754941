"""Dialects: finds the dialect of a body, and reads its conversation, its prompt, or what routes it to a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from headstart.api.anthropic import prompt as anthropic
from headstart.api.anthropic.schema import CountTokensRequest
from headstart.api.body import load, validate
from headstart.api.framing import SSE
from headstart.api.generation import TemplateRequest
from headstart.api.llama_server import prompt as llama
from headstart.api.ollama import prompt as ollama
from headstart.api.ollama.routing import chat_routing, generate_routing
from headstart.api.ollama.schema import OllamaChatRequest, OllamaGenerateRequest
from headstart.api.openai_chat import prompt as openai
from headstart.api.openai_responses import prompt as responses
from headstart.api.openai_responses.schema import ResponsesInput
from headstart.api.openai_responses.store import Responses
from headstart.api.routing import BodyRouting
from headstart.chat.messages import conversation_of as openai_conversation
from headstart.chat.prompt_model import PromptModel
from headstart.chat.tenancy import Salting
from headstart.interfaces.conversation import Conversation
from headstart.prompt.builder import Prompt

_OLLAMA = frozenset({"options", "format", "think", "raw"})
"""Fields that only Ollama's bodies have."""
_BLOCKS = frozenset({"tool_use", "tool_result", "thinking", "redacted_thinking", "document"})

Reader = Callable[[PromptModel, dict[str, Any], Salting], Prompt]
"""The prompt of a body; the first one if it has several. Raises RequestError."""

READERS: Mapping[str, Reader] = MappingProxyType(
    {
        "/v1/chat/completions": openai.of_chat,
        "/v1/completions": openai.of_completion,
        "/api/chat": ollama.of_chat,
        "/api/generate": ollama.of_generate,
        "/v1/messages": anthropic.of_messages,
        "/v1/responses": responses.of_response,
        "/completion": llama.of_completion,
        "/completions": llama.of_completion,
    }
)
"""How the body of each route becomes a prompt, for all routes that answer one with a reply."""

ROUTINGS: Mapping[str, Callable[[Mapping[str, Any]], BodyRouting]] = MappingProxyType(
    {"/api/chat": chat_routing, "/api/generate": generate_routing}
)
"""What routes the body of a route, where that is more than a `stream` which asks for server-sent events."""


def prompt_of(path: str, data: bytes, model: PromptModel, salting: Salting) -> Prompt | None:
    """The prompt that a route makes of a body; the first one if it makes several. None if the route makes none.

    A response that continues a stored one is unknown here.

    Args:
        path: the canonical path (`paths.canonical`) of the route; "" if it is not known, which the body then shows.

    Raises:
        RequestError: the body cannot be served.
    """
    if path:
        reader = READERS.get(path)
        return reader(model, load(data), salting) if reader is not None else None
    value = load(data)
    return READERS[_route_of(value)](model, value, salting)


def routing_of(path: str, body: Mapping[str, Any]) -> BodyRouting:
    """What must be known of a body before a model has read it.

    Args:
        path: the canonical path of the route.
        body: it may be wrong in any way; the model's own process says so.
    """
    routing = ROUTINGS.get(path)
    if routing is not None:
        return routing(body)
    return BodyRouting(SSE if path in READERS and body.get("stream") is True else None)


def conversation_of(body: Mapping[str, Any], salting: Salting, stored: Responses) -> Conversation:
    """The conversation in a body for any endpoint. Raises InvalidRequest."""
    value = dict(body)
    if _continues_items(body):
        return responses.ResponsesInputReader(stored, salting, validate(ResponsesInput, value)).conversation()[0]
    if _is_ollama(body):
        if "messages" in body:
            return ollama.chat_of(validate(OllamaChatRequest, value), salting)
        return ollama.generate_of(validate(OllamaGenerateRequest, value), salting)
    if _is_anthropic(body):
        return anthropic.messages_of(validate(CountTokensRequest, value), salting)
    salt = body.get("cache_salt")
    return openai_conversation(validate(TemplateRequest, value), salting(None, salt if isinstance(salt, str) else None))


def _route_of(body: Mapping[str, Any]) -> str:
    """The route that a body is for."""
    if _continues_items(body):
        return "/v1/responses"
    if _is_ollama(body):
        return "/api/chat" if "messages" in body else "/api/generate"
    if "prompt" in body and "messages" not in body:
        return "/completion"  # its prompts include those of /v1/completions
    return "/v1/messages" if _is_anthropic(body) else "/v1/chat/completions"


def _continues_items(body: Mapping[str, Any]) -> bool:
    return "input" in body or "previous_response_id" in body


def _is_ollama(body: Mapping[str, Any]) -> bool:
    """Whether the body has a field that only Ollama's bodies have, or a prompt with a system prompt."""
    if not _OLLAMA.isdisjoint(body) or ("prompt" in body and "system" in body):
        return True
    messages = (message for message in _listed(body.get("messages")) if isinstance(message, Mapping))
    return any("tool_name" in message or "thinking" in message for message in messages)


def _is_anthropic(body: Mapping[str, Any]) -> bool:
    """Whether the body has a field that only Anthropic's bodies have: `system`, `input_schema`, or a type of block."""
    tools, messages = ([item for item in _listed(body.get(key)) if isinstance(item, Mapping)] for key in ("tools", "messages"))
    if "system" in body or any("input_schema" in tool for tool in tools):
        return True
    blocks = [block for message in messages for block in _listed(message.get("content")) if isinstance(block, Mapping)]
    return any(block.get("type") in _BLOCKS for block in blocks)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
