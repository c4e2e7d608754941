"""OpenAI's prompts: what a body has the model continue."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from headstart.api.body import validate
from headstart.api.generation import Generation
from headstart.api.openai_chat.schema import ChatRequest, CompletionRequest
from headstart.chat.messages import conversation_of
from headstart.chat.prompt_model import PromptModel
from headstart.chat.tenancy import Salting
from headstart.interfaces.conversation import Conversation
from headstart.prompt.builder import Prompt
from headstart.serving.prompt_maker import PromptMaker


def chat_of(body: ChatRequest, salting: Salting) -> Conversation:
    """The conversation that a body of /v1/chat/completions continues."""
    conversation = conversation_of(body, _salt(body, salting))
    return replace(conversation, choice=body.choice, format=next(iter(body.formats), None))


def prompts_of(body: CompletionRequest, prompts: PromptMaker, salting: Salting) -> Iterator[Prompt]:
    """The prompts of a body of /v1/completions. Raises what `PromptMaker.text` raises."""
    scored = bool(body.echo) and body.logprobs is not None
    use_reply_tokens = body.reuses and not scored
    salt = _salt(body, salting)
    for prompt in body.prompts:
        yield prompts.text(prompt, salt=salt, use_reply_tokens=use_reply_tokens)


def of_chat(model: PromptModel, value: dict[str, Any], salting: Salting) -> Prompt:
    """The prompt of POST /v1/chat/completions. Raises RequestError."""
    body = validate(ChatRequest, value)
    return model.reply_prompt(chat_of(body, salting), use_reply_tokens=body.reuses)[1]


def of_completion(model: PromptModel, value: dict[str, Any], salting: Salting) -> Prompt:
    """The first prompt of POST /v1/completions. Raises RequestError."""
    return next(prompts_of(validate(CompletionRequest, value), model.prompts, salting))


def _salt(body: Generation, salting: Salting) -> str:
    return salting(body.safety_identifier or body.user, body.cache_salt)
