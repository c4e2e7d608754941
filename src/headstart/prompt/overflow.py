"""Slide: what `--overflow slide` keeps of a conversation that has outgrown the context."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from blake3 import blake3

from headstart.interfaces.conversation import Message
from headstart.lru import Lru


@dataclass(frozen=True, slots=True)
class TruncatedHistory:
    """What `--overflow slide` kept of a conversation."""

    messages: tuple[Message, ...]
    dropped: int

    def standing(self, head: int, breakpoints: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Those breakpoints whose messages are left, by the messages' new numbers; the first `head` have kept theirs."""
        left = [(number, at) for number, at in breakpoints if not head <= number < head + self.dropped]
        return [(number if number < head else number - self.dropped, at) for number, at in left]


def exchanges(messages: Sequence[Message]) -> list[list[Message]]:
    """Groups messages into user-led exchanges; what precedes the first user message is the first group."""
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
    """Where the replay of a history stands, by a digest of that history: each turn then replays only its own request."""

    def __init__(self, limit: int = 16_384) -> None:
        super().__init__(limit)


FRAME = 64
"""Most tokens that a template puts around a message."""


def truncate_history(
    messages: Sequence[Message],
    count: Callable[[Sequence[Message]], int],
    limit: int,
    known: TruncationMemo | None = None,
    root: bytes = b"",
) -> TruncatedHistory:
    """Replays the history from its first turn and, whenever a request of it exceeded `limit` tokens, drops its oldest whole
    exchanges (tool calls with their results) until it is at most `limit / 2`. The last exchange always stays.

    A pure function of the messages, and what it drops now it also drops when the conversation has gone on (each request
    is seen as it was made, without the reply that it had yet to get): so the next turn hits again. A request is counted
    only where it can exceed the limit: a message has no more tokens than bytes, but for its frame.

    Args:
        known: results of earlier replays, to go on from; they change no result.
        root: tells apart what `count` and `limit` stand for in `known`.
    """
    known = TruncationMemo() if known is None else known
    head, *turns = exchanges(messages)
    starts = [len(head)]
    for turn in turns:
        starts.append(starts[-1] + len(turn))
    begin, end = len(head), starts.pop()
    requests = [at for at in range(begin, end) if messages[at].get("role") == "assistant"] + [end]
    said = [ascii(message).encode() for message in messages]  # a template may escape what is not ASCII
    histories: list[bytes] = []
    digest, at = blake3(root), 0
    for request in requests:
        for text in said[at:request]:
            digest.update(blake3(text).digest())
        histories.append(digest.digest())
        at = request

    def part(of: int, request: int) -> list[Message]:
        return [*head, *messages[starts[of] : request]]

    first, bound, done = 0, limit + 1, 0  # kept from exchange `first` on: at most `bound` tokens
    for number in range(len(requests) - 1, -1, -1):
        if (found := known.get(histories[number])) is not None:
            (first, bound), done = found, number + 1
            break
    for number in range(done, len(requests)):
        request = requests[number]
        if number:
            bound += sum(len(text) + FRAME for text in said[requests[number - 1] : request])
        last = bisect_left(starts, request) - 1
        if bound > limit and first < last:
            bound = count(part(first, request))
            if bound > limit:
                fits = range(first + 1, last)
                first += 1 + bisect_left(fits, True, key=lambda of: count(part(of, request)) <= limit // 2)
        known.put(histories[number], (first, bound))
    dropped = starts[first] - begin if starts else 0
    return TruncatedHistory((*head, *messages[begin + dropped :]), dropped)
