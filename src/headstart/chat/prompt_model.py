"""Prompt model: from a conversation to its canonical form and its prompt. No engine is needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from copy import copy
from dataclasses import replace
from typing import Self

from headstart.chat.normalize import RULES, Ground, normalise
from headstart.chat.reply_memory import ReplyMemory
from headstart.errors import InvalidRequest
from headstart.interfaces.conversation import Conversation
from headstart.prompt.builder import Prompt
from headstart.serving.prompt_maker import PromptMaker


class PromptModel:
    """Makes the prompts of conversations. Thread-safe.

    Args:
        keep_noise: names of rules in `normalize.RULES` to leave out. Exact mode also leaves out the rules that need memory.

    Attributes:
        reply_memory: the parts of replies that callers may not send back.
    """

    def __init__(self, prompts: PromptMaker, keep_noise: Collection[str] = ()) -> None:
        self.prompts = prompts
        self.reply_memory = ReplyMemory()
        exact = {rule.name for rule in RULES if rule.remembers} if prompts.reuse == "exact" else set()
        self._keep_noise = frozenset(keep_noise) | exact
        self._ground = Ground(prompts.prompter.template, self.reply_memory)

    def prompt(self, conversation: Conversation, *, use_reply_tokens: bool = True) -> tuple[Conversation, Prompt]:
        """A conversation in its canonical form, and its prompt.

        Raises what `PromptMaker.chat` raises, and InvalidRequest if two tools have the same name.
        """
        conversation = self.canonical(conversation)
        return conversation, self.prompts.chat(conversation, use_reply_tokens=use_reply_tokens)

    def reply_prompt(self, conversation: Conversation, *, use_reply_tokens: bool = True) -> tuple[Conversation, Prompt]:
        """The same for a conversation that the model answers. Raises InvalidRequest also if a tool to call does not exist."""
        _check(conversation)
        return self.prompt(conversation, use_reply_tokens=use_reply_tokens)

    def limited(self, ctx: int) -> Self:
        """The same for another context. Both share all memory."""
        other = copy(self)
        other.prompts = replace(self.prompts, ctx=ctx)
        return other

    def forget(self) -> None:
        """Drops all remembered texts, which only save time here."""
        self.prompts.prompter.clear()
        self.reply_memory.clear()

    def canonical(self, conversation: Conversation) -> Conversation:
        """The canonical form of a conversation. Raises InvalidRequest if two tools have the same name."""
        names = Counter(tool["function"]["name"] for tool in conversation.tools)
        if twice := next((name for name, times in names.items() if times > 1), None):
            raise InvalidRequest(f"Invalid 'tools': two have the name '{twice[:100]}'.", param="tools")
        return _prefilled(normalise(conversation, self._ground, self._keep_noise))

    def count(self, conversation: Conversation) -> int:
        """Tokens of a conversation's prompt, even if it does not fit: clients count in order to know when to compact."""
        conversation = self.canonical(conversation)
        with self.prompts.tokenizer_open():
            return len(self.prompts.prompter.chat(conversation))


def _prefilled(conversation: Conversation) -> Conversation:
    """A last message that the reply continues becomes `prefill`."""
    if not conversation.continues:
        return conversation
    *messages, last = conversation.messages
    if last.get("tool_calls") or not isinstance(last["content"], str):
        raise InvalidRequest("A message that the reply continues may contain only text.", param="messages")
    return replace(conversation, messages=tuple(messages), prefill=last["content"], continues=False)


def _check(conversation: Conversation) -> None:
    names = [tool["function"].get("name") for tool in conversation.tools]
    choice = conversation.choice
    for name in (choice.name, *(choice.allowed or ())):
        if name is not None and name not in names:
            raise InvalidRequest(f"Invalid 'tool_choice': there is no tool '{name[:100]}'.", param="tool_choice")
    if choice.mode == "required" and not names:
        raise InvalidRequest("Invalid 'tool_choice': a call is required, but there are no 'tools'.", param="tool_choice")
