"""Explain: why a request computed tokens again that an earlier request had computed.

The prompt is compared with the nearest earlier prompt. That is the one with the most leading tokens in common or, if hardly any
are shared, the one with the most messages in common. If there are several causes, the one with the most tokens is returned.

Example: the system prompt has the date in it. On the next day, all tokens after the date are computed again. The cause is
`system_changed`, with the position of the date and both texts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from headstart.explain.causes import CAUSES, Cause, Meaning, Where
from headstart.explain.diff import Difference, difference
from headstart.explain.overlap import overlap
from headstart.explain.record import Record, key_of
from headstart.interfaces.tokens import BlockId, Tokens, common_prefix
from headstart.prompt.builder import Prompt

SLACK = 8
"""Tokens, in addition to a block, that may be computed again without a cause: a tokenizer can join tokens where a text
continues.
"""
RUN = 8
"""A common run of this many tokens is no coincidence."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why tokens were computed that could have been reused.

    Attributes:
        cause: the kind of reason (docs/explain.md lists them).
        meaning: what the cause means, and what it is called elsewhere.
        message: index of the first message that differs; None where no message does.
        where: the part of the request in which the texts part; None if they do not.
        character: of the first difference, in that message's content or else in the rendered text.
        token: the first one that was not reused for this reason.
        before: up to 20 characters of common text right before the difference.
        current, previous: 40 characters from there, of this prompt and of the earlier one.
        quoted: when the earlier prompt was first stored, in seconds since 1970; infinite if nothing of it is quoted.
        recomputed: about how many tokens were computed that could have been reused but for this.
        seconds: what these took, by the measured speed of prefill; None as long as nothing was measured.
    """

    cause: Cause
    message: int | None = None
    where: Where | None = None
    character: int = 0
    token: int = 0
    before: str = ""
    current: str = ""
    previous: str = ""
    recomputed: int = 0
    seconds: float | None = None
    quoted: float = math.inf

    @property
    def meaning(self) -> Meaning:
        return CAUSES[self.cause]

    @property
    def hint(self) -> str:
        """How to avoid it, as the library says it."""
        return str(self.meaning.hint)

    @property
    def diverged_at(self) -> dict[str, Any] | None:
        """The first difference, as `headstart.diverged_at` has it; None if the texts do not part."""
        if self.where is None:
            return None
        return {"message": self.message, "character": self.character, "current": self.current, "previous": self.previous}


@dataclass(frozen=True, slots=True)
class RequestView:
    """A request, as `explain` sees it. `tenant`: "" if unknown; `session`: a hint, "" for none."""

    root: BlockId
    prompt: Prompt
    reuse: bool = True
    tenant: str = ""
    session: str = ""


@dataclass(frozen=True, slots=True)
class NotFetched:
    """That the shared store was not waited for any longer.

    Attributes:
        cause: why.
        there: tokens up to which the store said that it has the prompt; 0 if it has not answered.
    """

    cause: Cause
    there: int


@dataclass(frozen=True, slots=True)
class CacheView:
    """What the cache contained when a request came.

    Attributes:
        start: leading tokens that were not computed.
        known_kv: returns the leading tokens whose KV is stored, with or without a checkpoint.
        elsewhere: returns the leading tokens that are stored under another fingerprint.
        otherwise: returns the tokens of an earlier prompt with the same messages and another template.
        characters: returns the number of characters of some tokens.
        pace: seconds of prefill per token; None if unknown.
        passed_over: tokens from `start` on that are stored, and were computed because to restore them would take longer.
        not_fetched: why the shared store was not waited for; None if it brought what it has.
    """

    start: int
    block_size: int
    exact: bool
    sliceable: bool
    known_kv: Callable[[], int]
    elsewhere: Callable[[], int]
    otherwise: Callable[[], int]
    characters: Callable[[Tokens], int]
    pace: float | None = None
    passed_over: int = 0
    not_fetched: NotFetched | None = None

    @property
    def slack(self) -> int:
        return self.block_size + SLACK


def nearest(records: Sequence[Record], tokens: Tokens) -> tuple[Record | None, int]:
    """The record with the most leading tokens in common, the latest of several, and the number of these tokens."""
    best, shared = None, 0
    for record in reversed(records):
        other = record.tokens
        if len(other) <= shared or shared >= len(tokens) or other[shared] != tokens[shared]:
            continue  # cannot share more than the best so far
        length = common_prefix(other, tokens)
        if length > shared:
            best, shared = record, length
    return best, shared


def alike(records: Sequence[Record], asked: RequestView, than: Record | None, least: int) -> Record | None:
    """The record with the most messages in common, by characters. Of equals, one of the same session, then the latest.

    None unless it has more than `least` characters more in common than the record `than`.
    """
    source = asked.prompt.source
    if source is None:
        return None
    sizes = {key_of(message): len(str(message.get("content") or "")) for message in source.messages}
    current = frozenset(sizes)
    new = current - than.known if than is not None else current

    def common(record: Record) -> int:
        return sum(sizes[key] for key in current & record.known)

    best, most = None, (common(than) + least if than is not None else least, True)
    for record in reversed(records):
        if new.isdisjoint(record.known):
            continue  # then it has no more than `than` has
        likeness = common(record), asked.session != "" and record.session == asked.session
        if likeness > most:
            best, most = record, likeness
    return best


def explain(asked: RequestView, records: Sequence[Record], cached: CacheView) -> Explanation | None:
    """Why more of a request was computed than its new text; None if only new text was computed.

    Args:
        records: earlier requests, the latest last. Only those of the same tenant and salt are compared: a caller must not find
            out what others have sent.
    """
    mine = [record for record in records if record.root == asked.root and record.tenant == asked.tenant]
    near, shared = nearest(mine, asked.prompt.tokens)
    length, start = len(asked.prompt), cached.start
    lost = min(shared, length - 1) - start
    if not asked.reuse:
        return _explained(Explanation(Cause.DISABLED, recomputed=max(0, lost)), cached)
    found: list[Explanation] = []
    if near is not None and lost >= cached.slack:
        found += _of_kv(near, cached, lost)
    if cached.not_fetched is not None:
        found = _of_store(found, cached.not_fetched, cached, min(length - 1, cached.not_fetched.there) - start)
    if length - max(start, shared) >= SLACK:
        least = cached.slack if shared >= min(SLACK, length) else 0
        other = alike(mine, asked, near, least)
        for record in (near, other) if other is not near else (near,):
            if record is not None:
                found += _of_text(asked.prompt, record, cached, mine)
    if found:
        most = max(found, key=lambda one: one.recomputed)
        new = most.where is not None and most.recomputed < cached.slack and _goes_on(asked.prompt, mine, most.token)
        return None if new else _explained(most, cached)
    if start >= length - 1 or (near is not None and shared >= max(SLACK, length // 2)):
        return None
    if (known := min(cached.otherwise(), length - 1) - start) > 0:
        return _explained(Explanation(Cause.TEMPLATE, token=start, recomputed=known), cached)
    if start < cached.block_size:
        known = cached.elsewhere()
        unknown = Cause.FIRST if cached.not_fetched is None else cached.not_fetched.cause
        return _explained(Explanation(Cause.FINGERPRINT if known else unknown, recomputed=known), cached)
    return None


def compare(
    current: Prompt, previous: Prompt | Record, *, block_size: int, pace: float | None, characters: Callable[[Tokens], int]
) -> Explanation | None:
    """The explanation of what `current` would compute again directly after `previous`, with an infinite cache."""
    shared = common_prefix(current.tokens, previous.tokens)
    record = previous
    if not isinstance(record, Record):
        record = Record(b"", record.text, record.tokens, len(record), source=record.source, salt=record.salt)
    start = 0 if current.salt != previous.salt else shared // block_size * block_size
    cached = CacheView(start, block_size, False, True, _nothing, _nothing, _nothing, characters, pace)
    if current.salt != previous.salt:
        return _explained(Explanation(Cause.SALT, recomputed=shared), cached)
    found = _of_text(current, record, cached)
    return _explained(found[0], cached) if found else None


def _nothing() -> int:
    return 0


def _explained(found: Explanation, cached: CacheView) -> Explanation:
    return found if cached.pace is None else replace(found, seconds=found.recomputed * cached.pace)


def _goes_on(prompt: Prompt, records: Sequence[Record], shared: int) -> bool:
    """Whether the prompt continues one of `records`, within its first `shared` tokens."""
    ended = (record.tokens for record in records if record.reply and len(record.tokens) <= shared)
    return any(common_prefix(tokens, prompt.tokens) == len(tokens) for tokens in ended)


def _of_kv(near: Record, cached: CacheView, lost: int) -> list[Explanation]:
    """Why `lost` tokens were computed although an earlier prompt had them."""
    slower = min(lost, cached.passed_over)
    start, lost = cached.start + slower, lost - slower
    cause = Cause.EVICTED
    if cached.exact and start >= near.canonical // cached.block_size * cached.block_size:
        cause = Cause.DERIVED
    elif not cached.sliceable:
        cause = Cause.CHECKPOINT if cached.known_kv() - start >= cached.block_size else cause
    else:
        lost -= max(0, cached.known_kv() - start)  # it is still stored
    found = Explanation(Cause.SLOWER, token=cached.start, recomputed=slower), Explanation(cause, token=start, recomputed=lost)
    return [one for one in found if one.recomputed >= cached.slack]


def _of_store(found: list[Explanation], rest: NotFetched, cached: CacheView, there: int) -> list[Explanation]:
    """`found`, where the shared store may have what was evicted here. `there`: tokens after the cached ones that it has."""
    evicted = sum(one.recomputed for one in found if one.cause is Cause.EVICTED)
    tokens = max(evicted, there)
    others = [one for one in found if one.cause is not Cause.EVICTED]
    return [*others, Explanation(rest.cause, token=cached.start, recomputed=tokens)] if tokens >= cached.slack else others


def _of_text(prompt: Prompt, record: Record, cached: CacheView, recent: Sequence[Record] = ()) -> list[Explanation]:
    """The first difference in the text, if it cost tokens; or the same text in other tokens."""
    shared = common_prefix(prompt.tokens, record.tokens)
    if shared >= len(record.tokens) - 1:
        return []  # the prompt continues after all tokens of the record
    there = difference(prompt, record, recent)
    from_reply_tokens = _from_reply_tokens(prompt, record, cached, shared, there)
    if from_reply_tokens is not None:
        return [from_reply_tokens]
    if there is None or (there.fresh and (there.begins or _goes_on(prompt, recent, shared))):
        return []  # another conversation, or the next turn of one
    recomputed = _again(prompt, record, cached, shared, there)
    if recomputed and 0 < shared - cached.start < cached.slack:
        recomputed += shared - cached.start  # the rest of the block is computed again too
    known = len(record.tokens) - min(shared, cached.start)
    recomputed = min(recomputed, known, len(prompt) - 1 - cached.start)
    if recomputed < cached.slack and cached.start > shared:
        return []
    return [
        Explanation(
            there.cause,
            there.message,
            there.where,
            there.character,
            shared,
            there.before,
            there.current,
            there.previous,
            max(0, recomputed),
            quoted=record.written if there.previous else math.inf,
        )
    ]


def _again(prompt: Prompt, record: Record, cached: CacheView, shared: int, there: Difference) -> int:
    """Tokens that were computed although the earlier prompt has them too, after the `shared` leading ones."""
    known = overlap(prompt.tokens[shared:], record.tokens[shared:], RUN)
    if any(there.summary):
        begin, end = (max(0, _position(prompt, place, cached.characters) - shared) for place in there.summary)
        known[begin:end] = False
    return int(np.count_nonzero(known[max(0, cached.start - shared) :]))


def _position(prompt: Prompt, offset: int, characters: Callable[[Tokens], int]) -> int:
    """The approximate number of tokens before a character of the text."""
    low, high = 0, len(prompt)
    while high - low > 1:
        middle = (low + high) // 2
        if (length := characters(prompt.tokens[low:middle])) <= offset:
            low, offset = middle, offset - length
        else:
            high = middle
    return low


def _from_reply_tokens(
    prompt: Prompt, record: Record, cached: CacheView, shared: int, there: Difference | None
) -> Explanation | None:
    """The explanation if the tokens differ well before the texts do; otherwise None."""
    least = cached.slack
    same = there.offset if there is not None else min(len(prompt.text), len(record.text))
    expected = same * len(prompt) // max(1, len(prompt.text))
    if expected - max(shared, cached.start) < least or shared >= len(record.tokens) - 2 or shared >= len(prompt) - 2:
        return None
    at = cached.characters(prompt.tokens[:shared])
    behind = max(1, len(prompt.text) - at)
    recomputed = round((same - at) * (len(prompt) - shared) / behind)
    if recomputed < least:
        return None
    return Explanation(Cause.REPLY_TOKENS, token=shared, recomputed=min(recomputed, len(prompt) - 1 - cached.start))
