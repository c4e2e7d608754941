"""Explain: why a request computed what it computed.

The prompt is compared with the nearest earlier one: the one that shares the most leading tokens or, where hardly any are
shared, the one that has the most messages in common. Of all that may have kept tokens from being reused, what cost the most
of them is told.
"""

from __future__ import annotations

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
"""Tokens beside a block that may be computed again without a reason: what a tokenizer joins where a text goes on."""
RUN = 8
"""Tokens in a row that two prompts do not have in common by chance."""


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
    """A request as it came. `tenant`: "" if nobody knows who asks; `session`: a hint, "" for none."""

    root: BlockId
    prompt: Prompt
    reuse: bool = True
    tenant: str = ""
    session: str = ""


@dataclass(frozen=True, slots=True)
class CacheView:
    """What the cache had of it.

    Attributes:
        start: leading tokens that were not computed.
        known_kv: leading tokens whose KV is known, with or without a checkpoint.
        elsewhere: leading tokens that are known from another fingerprint.
        otherwise: tokens of an earlier prompt with the same beginning that was rendered by another template.
        characters: how many characters some tokens spell.
        pace: seconds of prefill a token; None if unknown.
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

    @property
    def slack(self) -> int:
        return self.block_size + SLACK


def nearest(records: Sequence[Record], tokens: Tokens) -> tuple[Record | None, int]:
    """The record that shares the most leading tokens, the latest of several, and how many."""
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
    """The record with the most messages in common, by characters; of several one of the same session, then the latest.

    None unless it has over `least` characters more in common than the record `than`.
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
        mark = common(record), asked.session != "" and record.session == asked.session
        if mark > most:
            best, most = record, mark
    return best


def explain(asked: RequestView, records: Sequence[Record], cached: CacheView) -> Explanation | None:
    """Why more of a request was computed than it newly brings; None if that is all that was.

    Args:
        records: earlier requests, the latest last. Only this tenant's own with this salt are looked at: who shares a key but
            not a salt must not learn what others ask by guessing it.
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
        return _explained(Explanation(Cause.FINGERPRINT if known else Cause.FIRST, recomputed=known), cached)
    return None


def compare(
    current: Prompt, previous: Prompt | Record, *, block_size: int, pace: float | None, characters: Callable[[Tokens], int]
) -> Explanation | None:
    """What a request would compute again right after another one, in a cache that forgets nothing."""
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
    """Whether the prompt goes on from one of `records`, and all that it does not share with another one is new to that one."""
    ended = (record.tokens for record in records if record.reply and len(record.tokens) <= shared)
    return any(common_prefix(tokens, prompt.tokens) == len(tokens) for tokens in ended)


def _of_kv(near: Record, cached: CacheView, lost: int) -> list[Explanation]:
    """Why `lost` tokens that were known were computed all the same."""
    cause = Cause.EVICTED
    if cached.exact and cached.start >= near.canonical // cached.block_size * cached.block_size:
        cause = Cause.DERIVED
    elif not cached.sliceable:
        cause = Cause.CHECKPOINT if cached.known_kv() - cached.start >= cached.block_size else cause
    else:
        # What is there all the same was cheaper to compute than to bring in.
        lost -= max(0, cached.known_kv() - cached.start)
    return [Explanation(cause, token=cached.start, recomputed=lost)] if lost >= cached.slack else []


def _of_text(prompt: Prompt, record: Record, cached: CacheView, recent: Sequence[Record] = ()) -> list[Explanation]:
    """What differs in the text, unless as much was reused as if that did not; or the same text in other tokens."""
    shared = common_prefix(prompt.tokens, record.tokens)
    if shared >= len(record.tokens) - 1:
        return []  # it goes on behind all of that, however its text is written
    there = difference(prompt, record, recent)
    from_reply_tokens = _from_reply_tokens(prompt, record, cached, shared, there)
    if from_reply_tokens is not None:
        return [from_reply_tokens]
    if there is None or (there.fresh and (there.begins or _goes_on(prompt, recent, shared))):
        return []  # another conversation has nothing of this one, nor a turn of what another one got for its own
    recomputed = _again(prompt, record, cached, shared, there)
    if recomputed and 0 < shared - cached.start < cached.slack:
        recomputed += shared - cached.start  # what is left of a block is computed again with what is behind it
    had = len(record.tokens) - min(shared, cached.start)
    recomputed = min(recomputed, had, len(prompt) - 1 - cached.start)
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
        )
    ]


def _again(prompt: Prompt, record: Record, cached: CacheView, shared: int, there: Difference) -> int:
    """Tokens that were computed although the earlier prompt had them too, but for the `shared` ones that both begin with."""
    had = overlap(prompt.tokens[shared:], record.tokens[shared:], RUN)
    if any(there.summary):
        begin, end = (max(0, _position(prompt, place, cached.characters) - shared) for place in there.summary)
        had[begin:end] = False
    return int(np.count_nonzero(had[max(0, cached.start - shared) :]))


def _position(prompt: Prompt, offset: int, characters: Callable[[Tokens], int]) -> int:
    """Tokens before a character of the text, about."""
    low, high = 0, len(prompt)
    while high - low > 1:
        middle = (low + high) // 2
        if (said := characters(prompt.tokens[low:middle])) <= offset:
            low, offset = middle, offset - said
        else:
            high = middle
    return low


def _from_reply_tokens(
    prompt: Prompt, record: Record, cached: CacheView, shared: int, there: Difference | None
) -> Explanation | None:
    """Whether the tokens part well before the texts do."""
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
