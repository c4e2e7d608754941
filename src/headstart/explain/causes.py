"""Causes: why tokens were computed again, what other servers call each reason, and how to avoid it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from headstart.names import OptionText, option

Where = Literal["tools", "system", "messages", "template"]
"""The part of a request in which two prompts differ first. `template`: what the chat template adds around the others."""


class Cause(StrEnum):
    """Why tokens of a prompt were computed again. `CAUSES` has the meaning of each."""

    MODEL = "model_changed"
    TEMPLATE = "template_changed"
    TOOLS = "tools_changed"
    SYSTEM = "system_changed"
    MESSAGE = "message_changed"
    COMPACTED = "context_compacted"
    REASONING = "reasoning_stripped"
    REPLY_TOKENS = "reply_tokens_differ"
    EVICTED = "evicted"
    SLOWER = "slower_to_restore"
    STORE = "store_failed"
    CHECKPOINT = "no_checkpoint"
    DERIVED = "derived"
    SALT = "salt_differs"
    FINGERPRINT = "fingerprint_changed"
    FIRST = "first_time"
    DISABLED = "disabled"


@dataclass(frozen=True, slots=True)
class Meaning:
    """The names of a cause in other APIs, and its texts for people.

    Attributes:
        reason: the broader class of the cause, in `headstart.reason`.
        anthropic: `type` in Anthropic's `diagnostics.cache_miss_reason`.
        responses: in OpenAI's `prompt_cache_diagnostics`, the `reason` of a `cache_miss`, or another `type`.
        what: what happened.
    """

    reason: str
    anthropic: str
    responses: str
    what: str
    _hint: str

    @property
    def hint(self) -> OptionText:
        """How to avoid it. `str` names options as the library does, `with_flags` as the command line does."""
        return OptionText(self._hint)


CAUSES: dict[Cause, Meaning] = {
    Cause.MODEL: Meaning(
        "fingerprint",
        "model_changed",
        "model_changed",
        "The request names another model.",
        "Use one model for a conversation: a model cannot use the KV of another.",
    ),
    Cause.TEMPLATE: Meaning(
        "diverged",
        "unavailable",
        "input_changed",
        "The template renders the same messages to other text: it is another template, has other options, or writes the date.",
        f"Use one {option('chat_template')}, and send the same chat_template_kwargs in every request of a conversation.",
    ),
    Cause.TOOLS: Meaning(
        "diverged",
        "tools_changed",
        "tools_changed",
        "A tool was added, removed, moved or changed. Tools come before all messages.",
        "Send the same tools in the same order in every request. To disable a tool, use tool_choice instead of leaving it out.",
    ),
    Cause.SYSTEM: Meaning(
        "diverged",
        "system_changed",
        "input_changed",
        "The system prompt differs.",
        "Keep changing text (dates, status, file lists) out of the system prompt. Put it into the latest user message.",
    ),
    Cause.MESSAGE: Meaning(
        "diverged",
        "messages_changed",
        "input_changed",
        "A message differs from the one that was sent or answered before.",
        "Append to a conversation instead of editing it, and send replies back unchanged.",
    ),
    Cause.COMPACTED: Meaning(
        "diverged",
        "messages_changed",
        "context_compacted",
        "The history was shortened: replaced by a summary, cut, or stripped of old tool results.",
        f"Compact rarely and much at a time, or load the model with a larger {option('ctx')}.",
    ),
    Cause.REASONING: Meaning(
        "diverged",
        "messages_changed",
        "input_changed",
        "The client or the chat template removed the reasoning of an earlier reply.",
        f"Send reasoning_content back if the client can. Otherwise use {option('settle', 'on')}, and leave the engine idle "
        "for a moment between turns.",
    ),
    Cause.REPLY_TOKENS: Meaning(
        "diverged",
        "unavailable",
        "unavailable",
        "The text is the same, but the model produced other tokens for it than the tokenizer chooses.",
        f"Use {option('settle', 'on')}: an idle server then computes a turn again with the tokenizer's own tokens.",
    ),
    Cause.EVICTED: Meaning(
        "evicted",
        "unavailable",
        "unavailable",
        "It was cached, and has been evicted.",
        f"Raise {option('memory_budget')} or {option('disk_budget')}, or pin the conversation (headstart cache pin).",
    ),
    Cause.SLOWER: Meaning(
        "slower",
        "unavailable",
        "unavailable",
        "It is cached. To restore it would have taken longer than to compute it, by the measured speeds.",
        f"Nothing to do: both speeds are measured all the time. If it happens often, put {option('cache_dir')} on a faster "
        f"disk, or raise {option('memory_budget')}.",
    ),
    Cause.STORE: Meaning(
        "store",
        "unavailable",
        "unavailable",
        "The shared store has it, or may have it. The store failed, or did not answer in time.",
        f"See the log and headstart doctor {option('shared')}: a store that is dead or hangs is asked again after a while.",
    ),
    Cause.CHECKPOINT: Meaning(
        "state",
        "unavailable",
        "unavailable",
        "This model's state cannot be truncated, and there was no checkpoint at that position.",
        "Mark the end of the repeated part (cache_control, prompt_cache_breakpoint): a checkpoint is taken there.",
    ),
    Cause.DERIVED: Meaning(
        "derived",
        "unavailable",
        "unavailable",
        "Exact mode does not use KV from decoding, and the turn had not been settled yet.",
        f"Use {option('settle', 'on')} and leave the engine idle for a moment between turns, or load the model with "
        f"{option('reuse', 'fast')}.",
    ),
    Cause.SALT: Meaning(
        "cold",
        "unavailable",
        "prompt_cache_key_changed",
        "The two requests have different values of cache_salt.",
        "Send one cache_salt for all requests that may share: requests with different salts never do.",
    ),
    Cause.FINGERPRINT: Meaning(
        "fingerprint",
        "model_changed",
        "model_changed",
        "It was computed before, but with other weights, another engine or other settings.",
        "Serve the same file with the same options, or compute ahead of time with the new settings (headstart warm).",
    ),
    Cause.FIRST: Meaning(
        "cold",
        "previous_message_not_found",
        "comparison_response_not_found",
        "Nothing like it was found, neither on disk nor among the latest requests since the server started.",
        "Nothing to do: the next request that begins like this one is faster. headstart warm computes prompts ahead of time.",
    ),
    Cause.DISABLED: Meaning(
        "disabled",
        "unavailable",
        "unavailable",
        "The request asked for a full computation (cache_prompt: false, or log-probabilities of the prompt).",
        "Leave cache_prompt out.",
    ),
}
