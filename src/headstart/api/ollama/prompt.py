"""Ollama's prompts: what a body has the model continue."""

from __future__ import annotations

from typing import Any

from headstart.api.body import validate
from headstart.api.ollama.conversation import conversation_of, generate_conversation
from headstart.api.ollama.schema import OllamaBody, OllamaChatRequest, OllamaGenerateRequest
from headstart.chat.prompt_model import PromptModel
from headstart.chat.tenancy import Salting
from headstart.errors import InvalidRequest
from headstart.interfaces.conversation import Conversation
from headstart.prompt.builder import Prompt
from headstart.serving.prompt_maker import PromptMaker


def chat_of(body: OllamaChatRequest, salting: Salting) -> Conversation:
    """The conversation that a body of /api/chat continues. Raises InvalidRequest if it has no messages."""
    if not body.messages:
        raise InvalidRequest("Invalid 'messages': there are none to answer.", param="messages")
    return conversation_of(body, _salt(body, salting))


def generate_of(body: OllamaGenerateRequest, salting: Salting) -> Conversation:
    """The conversation that a body of /api/generate continues. Raises InvalidRequest if it has no prompt."""
    if not body.prompt:
        raise InvalidRequest("Invalid 'prompt': there is none to answer.", param="prompt")
    return generate_conversation(body, _salt(body, salting))


def raw_of(body: OllamaGenerateRequest, prompts: PromptMaker, salting: Salting) -> Prompt:
    """The text that a body of /api/generate with `raw` continues. Raises what `PromptMaker.text` raises."""
    return prompts.text(body.prompt or "", salt=_salt(body, salting))


def of_chat(model: PromptModel, value: dict[str, Any], salting: Salting) -> Prompt:
    """The prompt of POST /api/chat. Raises RequestError."""
    return model.reply_prompt(chat_of(validate(OllamaChatRequest, value), salting))[1]


def of_generate(model: PromptModel, value: dict[str, Any], salting: Salting) -> Prompt:
    """The prompt of POST /api/generate. Raises RequestError."""
    body = validate(OllamaGenerateRequest, value)
    if body.raw and body.prompt:
        return raw_of(body, model.prompts, salting)
    return model.reply_prompt(generate_of(body, salting))[1]


def _salt(body: OllamaBody, salting: Salting) -> str:
    return salting(None, body.cache_salt)
