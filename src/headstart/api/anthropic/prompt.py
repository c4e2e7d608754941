"""Anthropic's prompts: what a body has the model continue."""

from __future__ import annotations

from typing import Any

from headstart.api.anthropic.conversation import conversation_of
from headstart.api.anthropic.schema import CountTokensRequest, MessagesRequest
from headstart.api.body import validate
from headstart.chat.prompt_model import PromptModel
from headstart.chat.tenancy import Salting
from headstart.interfaces.conversation import Conversation
from headstart.prompt.builder import Prompt


def messages_of(body: CountTokensRequest, salting: Salting) -> Conversation:
    """The conversation that a body of /v1/messages continues."""
    return conversation_of(body, salting(body.metadata.user_id if body.metadata is not None else None, body.cache_salt))


def of_messages(model: PromptModel, value: dict[str, Any], salting: Salting) -> Prompt:
    """The prompt of POST /v1/messages. Raises RequestError."""
    return model.reply_prompt(messages_of(validate(MessagesRequest, value), salting))[1]
