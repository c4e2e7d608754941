"""Responses' prompts: what a body has the model continue."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headstart.api.body import validate
from headstart.api.openai_responses.items import ResponsesItem, Tools, messages_of, tools_of, whole
from headstart.api.openai_responses.schema import ResponsesInput, ResponsesRequest
from headstart.api.openai_responses.store import PREFIX, Responses, StoredResponse, identified
from headstart.chat.messages import effort
from headstart.chat.prompt_model import PromptModel
from headstart.chat.tenancy import Salting
from headstart.errors import InvalidRequest
from headstart.interfaces.conversation import Conversation, ToolChoice
from headstart.prompt.builder import Prompt


class ResponsesInputReader:
    """Reads the conversation of a body.

    Args:
        id: of the response that will answer it.

    Attributes:
        before: the response that it continues, or None.
        own: the items of the body itself.

    Raises:
        UnknownResponse: it continues a response, or refers to an item, that is not stored.
        InvalidRequest: it has nothing to answer.
    """

    def __init__(self, stored: Responses, salting: Salting, body: ResponsesInput, id: str = PREFIX) -> None:
        self.body = body
        self.salt = salting(body.safety_identifier or body.user, body.cache_salt)
        self.before: StoredResponse | None = None
        if body.previous_response_id is not None:
            self.before = stored.get(self.salt, body.previous_response_id, "previous_response_id")
        self.own = identified(self._items(stored), id)
        self.tools = tools_of(body.tools or ())

    def conversation(self) -> tuple[Conversation, Tools]:
        body = self.body
        messages = messages_of((*(self.before.context if self.before is not None else ()), *self.own))
        if body.instructions:
            messages.insert(0, {"role": "system", "content": body.instructions})
        if not messages:
            raise InvalidRequest("Missing 'input': there is nothing to answer.", param="input")
        conversation = Conversation(
            messages=tuple(messages),
            tools=self.tools.offered,
            choice=_choice(body.choice, self.tools),
            format=body.format,
            template_kwargs={**effort(body.effort), **(body.chat_template_kwargs or {})},
            salt=self.salt,
        )
        return conversation, self.tools

    def _items(self, stored: Responses) -> list[ResponsesItem]:
        given = self.body.input
        if given is None:
            return []
        if isinstance(given, str):
            return [{"type": "message", "role": "user", "content": given}]
        items = map(whole, given)
        return [stored.item(self.salt, item["id"]) if _refers(item) else item for item in items]


def _refers(item: ResponsesItem) -> bool:
    return "role" not in item and item.get("type") in (None, "item_reference")


def _choice(choice: ToolChoice, tools: Tools) -> ToolChoice:
    """A tool choice with full names. In the body, a tool in a namespace may have its short name."""

    def full(name: str) -> str:
        found = [known for known, called in tools.named.items() if called.name == name]
        return name if name in tools.named or len(found) != 1 else found[0]

    allowed = None if choice.allowed is None else tuple(map(full, choice.allowed))
    return replace(choice, name=None if choice.name is None else full(choice.name), allowed=allowed)


def of_response(model: PromptModel, value: dict[str, Any], salting: Salting) -> Prompt:
    """The prompt of POST /v1/responses, if it continues no stored response. Raises RequestError."""
    body = validate(ResponsesRequest, value)
    conversation, _ = ResponsesInputReader(Responses(), salting, body).conversation()
    return model.reply_prompt(conversation, use_reply_tokens=body.reuses)[1]
