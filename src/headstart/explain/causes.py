"""Causes: why tokens were computed that could have been reused, what each is called elsewhere, and how to avoid it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from headstart.names import Spelled, option

Where = Literal["tools", "system", "messages", "template"]
"""The part of a request in which two prompts part. `template`: what the chat template adds around the other three."""


class Cause(StrEnum):
    """Why a prompt could not be reused; see `CAUSES` for what each means."""

    MODEL = "model_changed"
    TEMPLATE = "template_changed"
    TOOLS = "tools_changed"
    SYSTEM = "system_changed"
    MESSAGE = "message_changed"
    COMPACTED = "context_compacted"
    REASONING = "reasoning_stripped"
    SPELLED = "spelled_otherwise"
    EVICTED = "evicted"
    CHECKPOINT = "no_checkpoint"
    DERIVED = "derived"
    SALT = "salt_differs"
    FINGERPRINT = "fingerprint_changed"
    FIRST = "first_time"
    DISABLED = "disabled"


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a cause is called by others, and says to people.

    Attributes:
        reason: the coarser word that `headstart.reason` has had from the beginning.
        anthropic: `type` of `diagnostics.cache_miss_reason`.
        responses: `reason` of a `cache_miss` in `prompt_cache_diagnostics`, or the `type` of another of its forms.
        what: what happened.
    """

    reason: str
    anthropic: str
    responses: str
    what: str
    _mend: str

    @property
    def mend(self) -> Spelled:
        """How to avoid it: as a text the library's words, `with_flags` the command line's."""
        return Spelled(self._mend)


CAUSES: dict[Cause, Meaning] = {
    Cause.MODEL: Meaning(
        "fingerprint",
        "model_changed",
        "model_changed",
        "The request names another model.",
        "Keep one model for a conversation; what one has computed is of no use to another.",
    ),
    Cause.TEMPLATE: Meaning(
        "diverged",
        "unavailable",
        "input_changed",
        "The same messages are rendered otherwise: by another template, with other options, or with a date of its own.",
        f"Keep one {option('chat_template')}, and send the same chat_template_kwargs in every request of a conversation.",
    ),
    Cause.TOOLS: Meaning(
        "diverged",
        "tools_changed",
        "tools_changed",
        "The tools are not the same: one was added, removed, moved or described otherwise. They come before all messages.",
        "Send the same tools in the same order in every request; withhold one with tool_choice rather than by leaving it out.",
    ),
    Cause.SYSTEM: Meaning(
        "diverged",
        "system_changed",
        "input_changed",
        "The system prompt differs.",
        "Keep what changes (dates, status, file lists) out of it: say it in the latest user message instead.",
    ),
    Cause.MESSAGE: Meaning(
        "diverged",
        "messages_changed",
        "input_changed",
        "A message differs from what was sent or answered before.",
        "Append to a conversation instead of editing it, and send replies back exactly as they came.",
    ),
    Cause.COMPACTED: Meaning(
        "diverged",
        "messages_changed",
        "context_compacted",
        "The history was shortened: replaced by a summary, cut, or emptied of old tool results.",
        f"Compact seldom and much at a time, or load the model with a larger {option('ctx')}, so that the client need not.",
    ),
    Cause.REASONING: Meaning(
        "diverged",
        "messages_changed",
        "input_changed",
        "The reasoning of an earlier reply is no longer part of it: the client or the chat template removed it.",
        f"Send reasoning_content back where the client can; else leave {option('settle', 'on')} and the engine a moment "
        "between turns.",
    ),
    Cause.SPELLED: Meaning(
        "diverged",
        "unavailable",
        "unavailable",
        "The text is the same, but the model had written it with other tokens than the tokenizer would.",
        f"Leave {option('settle', 'on')}: a turn is then computed with the tokenizer's own tokens while the server is idle.",
    ),
    Cause.EVICTED: Meaning(
        "evicted",
        "unavailable",
        "unavailable",
        "It was known, but had to make room.",
        f"Give {option('memory_budget')} or {option('disk_budget')} more, or pin what should stay (headstart cache pin).",
    ),
    Cause.CHECKPOINT: Meaning(
        "state",
        "unavailable",
        "unavailable",
        "This model's state cannot be cut, and no checkpoint of it lay there.",
        "Mark the end of what repeats (cache_control, prompt_cache_breakpoint): a checkpoint is taken there.",
    ),
    Cause.DERIVED: Meaning(
        "derived",
        "unavailable",
        "unavailable",
        "Exact mode does not use what was computed while replying, and the turn was not settled yet.",
        f"Leave {option('settle', 'on')} and the engine a moment between turns, or load the model with "
        f"{option('reuse', 'fast')}.",
    ),
    Cause.SALT: Meaning(
        "cold",
        "unavailable",
        "prompt_cache_key_changed",
        "The two requests have different cache_salts.",
        "Keep one cache_salt for all that may share; nothing is ever shared between two.",
    ),
    Cause.FINGERPRINT: Meaning(
        "fingerprint",
        "model_changed",
        "model_changed",
        "It is known only as computed by other weights, another engine or other settings.",
        "Serve the same file with the same options, or warm the new set-up ahead of time (headstart warm).",
    ),
    Cause.FIRST: Meaning(
        "cold",
        "previous_message_not_found",
        "comparison_response_not_found",
        "Nothing like it is known: neither kept on disk nor among the latest requests since the server started.",
        "Nothing to mend: the next request that begins like this one is faster. headstart warm computes ahead of time.",
    ),
    Cause.DISABLED: Meaning(
        "disabled",
        "unavailable",
        "unavailable",
        "The request asked to compute everything (cache_prompt: false, or log-probabilities of the prompt).",
        "Leave cache_prompt out.",
    ),
}
