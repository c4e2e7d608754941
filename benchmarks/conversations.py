"""Conversations as prefilled texts, and generated conversations in which clients change the history."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

from headstart.interfaces.landmarks import Landmarks
from headstart.interfaces.tokens import Tokens, as_tokens

EVERY, PAUSE = 60.0, 10.0
"""Seconds between the starts of two conversations, and between two requests of one conversation."""


@dataclass(frozen=True, slots=True)
class Text:
    """A prefilled text.

    Attributes:
        units: its tokens; or its blocks of `unit` tokens, if the trace has only blocks.
        length: in tokens.
        at: time in seconds.
        waited: whether a request waits for it. A settled conversation is computed when idle.
    """

    units: Tokens
    unit: int
    length: int
    landmarks: Landmarks
    at: float = 0.0
    waited: bool = True


@dataclass(frozen=True, slots=True)
class Workload:
    """Texts in the order of arrival."""

    name: str
    texts: tuple[Text, ...]


@dataclass(frozen=True, slots=True)
class Message:
    """One message, in tokens. `thought`: reasoning, which the next user's message removes from the prompt."""

    role: str
    body: Sequence[int]
    thought: Sequence[int] = ()
    calls: bool = False


Chat = tuple[Message, ...]

_ROLES = {"system": 2, "user": 4, "assistant": 5, "tool": 6}
_OPEN, _CLOSE, _LINE, _THINK, _THOUGHT = 1, 7, 3, 8, 9


def render(chat: Chat, following: str, at: float) -> Text:
    """The text of a chat up to the header of the following message. If that is the assistant's, it is a request's prompt."""
    users = [number for number, one in enumerate(chat) if one.role == "user"]
    last = len(chat) if following == "user" else max(users, default=-1)
    tokens: list[int] = []
    ends: list[int] = []
    for number, one in enumerate(chat):
        tokens += _OPEN, _ROLES[one.role], _LINE
        if one.thought and number > last:
            tokens += _THINK, _LINE, *one.thought, _THOUGHT, _LINE
        tokens += *one.body, _CLOSE, _LINE
        ends.append(len(tokens))
    tokens += _OPEN, _ROLES[following], _LINE
    if following == "assistant" and any(one.thought for one in chat):
        tokens += _THINK, _LINE
    anchor = ends[0] if chat[0].role == "system" else 0
    landmarks = Landmarks(anchor, ends[users[-1]] if users else 0, ends[-1])
    return Text(as_tokens(tokens), 1, len(tokens), landmarks, at, following == "assistant")


def talk(chat: Chat, at: float) -> Iterator[Text]:
    """The request for the last message of a chat, and the text that is settled afterwards."""
    yield render(chat[:-1], "assistant", at)
    yield render(chat, "tool" if chat[-1].calls else "user", at)


def spoken(chat: Chat, at: float, begin: int = 0) -> Iterator[Text]:
    """All requests of a chat whose reply is message `begin` or a later one."""
    for number in range(begin, len(chat)):
        if chat[number].role == "assistant":
            at += PAUSE
            yield from talk(chat[: number + 1], at)


def ordered(name: str, texts: Iterable[Text]) -> Workload:
    return Workload(name, tuple(sorted(texts, key=lambda text: text.at)))


class Speaker:
    """Generates new text."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self._words = count(100)

    def words(self, low: int, high: int) -> list[int]:
        """Between `low` and `high` tokens; the logarithm of their number is uniformly distributed."""
        return [next(self._words) for _ in range(round(low * (high / low) ** self.dice.random()))]

    def exchange(self, user: int = 500) -> Chat:
        return Message("user", self.words(10, user)), Message("assistant", self.words(30, 800))

    def chat(self, system: Sequence[int], low: int, high: int) -> Chat:
        said = (self.exchange() for _ in range(self.dice.randint(low, high)))
        return (Message("system", system), *(one for pair in said for one in pair))

    def loop(self) -> Chat:
        """A user's message, a few tool calls with results, and the answer. Calls and answer have reasoning."""
        said = [Message("user", self.words(10, 300))]
        for _ in range(self.dice.randint(1, 12)):
            said += (
                Message("assistant", self.words(20, 100), self.words(50, 600), calls=True),
                Message("tool", self.words(30, 3000)),
            )
        return (*said, Message("assistant", self.words(50, 600), self.words(50, 600)))


def edits(seed: int = 1) -> Workload:
    """Chats in which a user sometimes edits a message in the middle, and continues from there."""
    speaker, texts = Speaker(seed), list[Text]()
    system = speaker.words(400, 400)
    for number in range(40):
        at = number * EVERY
        chat = speaker.chat(system, 4, 40)
        texts += spoken(chat, at)
        for _ in range(3):
            at += 500.0
            cut = 1 + 2 * speaker.dice.randrange((len(chat) - 1) // 2)
            chat = (*chat[:cut], *speaker.exchange(), *speaker.exchange())
            texts += spoken(chat, at, cut)
    return ordered("a middle message edited", texts)


def systems(seed: int = 2) -> Workload:
    """After every tenth chat, a line of the system prompt changes."""
    speaker, texts = Speaker(seed), list[Text]()
    system = speaker.words(6000, 6000)
    for number in range(100):
        if number % 10 == 9:
            place = speaker.dice.randrange(len(system) - 10)
            system = [*system[:place], *speaker.words(10, 10), *system[place + 10 :]]
        texts += spoken(speaker.chat(system, 1, 12), number * EVERY)
    return ordered("a line of the system prompt changed", texts)


def documents(seed: int = 3) -> Workload:
    """Several questions about one document, each in its own chat."""
    speaker, texts = Speaker(seed), list[Text]()
    system = speaker.words(200, 200)
    for number in range(40):
        document = speaker.words(2000, 40000)
        for question in range(speaker.dice.randint(2, 6)):
            (user, *rest), more = speaker.exchange(100), speaker.exchange(100)
            user = replace(user, body=[*document, *user.body])
            texts += spoken((Message("system", system), user, *rest, *more), number * EVERY + question * 100)
    return ordered("a document, other questions", texts)


def regenerates(seed: int = 4) -> Workload:
    """The last reply or an earlier one is regenerated, and the chat continues from the new one."""
    speaker, texts = Speaker(seed), list[Text]()
    system = speaker.words(400, 400)
    for number in range(40):
        at = number * EVERY
        chat = speaker.chat(system, 2, 30)
        texts += spoken(chat, at)
        for _ in range(3):
            at += 500.0
            back = 2 * min(int(speaker.dice.expovariate(1)), len(chat) // 2 - 1)
            chat = (*chat[: len(chat) - 1 - back], Message("assistant", speaker.words(30, 800)), *speaker.exchange())
            texts += spoken(chat, at, len(chat) - 3)
    return ordered("a reply asked for again", texts)


def loops(seed: int = 5) -> Workload:
    """Tool loops. Their reasoning is stripped at the next user's message."""
    speaker, texts = Speaker(seed), list[Text]()
    system = speaker.words(5000, 5000)
    for number in range(40):
        said = [one for _ in range(speaker.dice.randint(1, 5)) for one in speaker.loop()]
        texts += spoken((Message("system", system), *said), number * EVERY)
    return ordered("tool loops with reasoning", texts)


def generated() -> list[Workload]:
    return [edits(), systems(), documents(), regenerates(), loops()]
