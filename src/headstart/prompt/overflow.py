"""Overflow: which messages `--overflow truncate` drops when a conversation is longer than the context.

The oldest whole exchanges are dropped. An *exchange* is a user message with everything up to the next user message. When a
request exceeds the limit, exchanges are dropped until half of the limit is free, so that the following requests need no further
cut: their prompts begin with the same tokens and hit the cache.

Example: the limit is 3,000 tokens. The tenth request has 3,100. The oldest exchanges go until 1,500 tokens or fewer are left.
The next requests drop the same exchanges, until one of them exceeds 3,000 again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from blake3 import blake3

from headstart.interfaces.conversation import Message
from headstart.lru import Lru


@dataclass(frozen=True, slots=True)
class TruncatedHistory:
    """The messages that are left, and the number of dropped ones."""

    messages: tuple[Message, ...]
    dropped: int

    def standing(self, head: int, breakpoints: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """The breakpoints of the messages that are left, with new message numbers. The first `head` messages keep theirs."""
        left = [(number, at) for number, at in breakpoints if not head <= number < head + self.dropped]
        return [(number if number < head else number - self.dropped, at) for number, at in left]


def exchanges(messages: Sequence[Message]) -> list[list[Message]]:
    """Groups messages into exchanges. The messages before the first user message are the first group."""
    groups: list[list[Message]] = [[]]
    previous = None
    for message in messages:
        role = message.get("role")
        if role == "user" and previous != "user":
            groups.append([])
        groups[-1].append(message)
        previous = role
    return groups


class TruncationMemo(Lru[bytes, tuple[int, int]]):
    """Results for histories, by their digests. So a turn computes only the result of its own request."""

    def __init__(self, limit: int = 16_384) -> None:
        super().__init__(limit)


FRAME = 64
"""Most tokens that a template adds around a message."""


def truncate_history(
    messages: Sequence[Message],
    count: Callable[[Sequence[Message]], int],
    limit: int,
    known: TruncationMemo | None = None,
    root: bytes = b"",
) -> TruncatedHistory:
    """Drops the oldest exchanges of a conversation.

    It replays the requests of the history from the first one on. Each time a request exceeds `limit` tokens, the oldest
    exchanges are dropped until it has at most `limit / 2`. The last exchange always stays. The result depends on the messages
    only, and a longer history drops the same messages first. So the next turn hits the cache.

    Args:
        count: returns the tokens of a prompt. It is called only where a request can exceed the limit: a message has at most
            as many tokens as bytes, plus `FRAME`.
        known: results for earlier requests. They save time and change no result.
        root: distinguishes different `count` and `limit` in `known`.
    """
    known = TruncationMemo() if known is None else known
    head, *turns = exchanges(messages)
    starts = [len(head)]
    for turn in turns:
        starts.append(starts[-1] + len(turn))
    begin, end = len(head), starts.pop()
    requests = [at for at in range(begin, end) if messages[at].get("role") == "assistant"] + [end]
    texts = [ascii(message).encode() for message in messages]  # a template may escape what is not ASCII
    histories: list[bytes] = []
    digest, at = blake3(root), 0
    for request in requests:
        for text in texts[at:request]:
            digest.update(blake3(text).digest())
        histories.append(digest.digest())
        at = request

    def part(of: int, request: int) -> list[Message]:
        return [*head, *messages[starts[of] : request]]

    first, bound, done = 0, limit + 1, 0  # exchanges from `first` on are kept; they have at most `bound` tokens
    for number in range(len(requests) - 1, -1, -1):
        if (found := known.get(histories[number])) is not None:
            (first, bound), done = found, number + 1
            break
    for number in range(done, len(requests)):
        request = requests[number]
        if number:
            bound += sum(len(text) + FRAME for text in texts[requests[number - 1] : request])
        last = bisect_left(starts, request) - 1
        if bound > limit and first < last:
            bound = count(part(first, request))
            if bound > limit:
                fits = range(first + 1, last)
                first += 1 + bisect_left(fits, True, key=lambda of: count(part(of, request)) <= limit // 2)
        known.put(histories[number], (first, bound))
    dropped = starts[first] - begin if starts else 0
    return TruncatedHistory((*head, *messages[begin + dropped :]), dropped)
