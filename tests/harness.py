"""Helpers for tests of the runtime: a caller that waits, scripted conversations, and an oracle of what must be computed."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headstart.interfaces.conversation import Message
from headstart.interfaces.engine import Engine, Logits
from headstart.interfaces.generation import GenerationParams
from headstart.interfaces.sampling import GREEDY, Sampling
from headstart.interfaces.tokens import Tokens, common_prefix
from headstart.prompt.builder import Prompt
from headstart.serving.request import Delta, Event, Failed, Finished, Report, Request, Started
from headstart.serving.runtime import Handle, Runtime
from talks import talk

Messages = list[dict[str, Any]]


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


@dataclass(frozen=True)
class Answer:
    """One finished request. `text` and `finish` belong to choice 0."""

    texts: dict[int, str]
    finishes: dict[int, Finished]
    prompt: Tokens
    logits: Logits | None
    events: list[Event]

    @property
    def text(self) -> str:
        return self.texts[0]

    @property
    def finish(self) -> Finished:
        return self.finishes[0]

    @property
    def report(self) -> Report:
        return self.finishes[0].report


class Pending:
    """A running request. `returns` makes the message that comes back from the reply's text; None for that text itself."""

    def __init__(self, runtime: Runtime, request: Request, returns: Callable[[str], Message] | None = None) -> None:
        self.runtime = runtime
        self.request = request
        self.returns = returns
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.seen: list[Event] = []
        self.handle: Handle = runtime.submit(request, self.events.put)

    def next(self, timeout: float = 60.0) -> Event:
        event = self.events.get(timeout=timeout)
        self.seen.append(event)
        if isinstance(event, Finished) and event.turn is not None:
            self.runtime.remember(event.turn, self.returns(event.turn.reply) if self.returns is not None else None)
        return event

    def until(self, kind: type, timeout: float = 60.0) -> Event:
        while True:
            event = self.next(timeout)
            if isinstance(event, kind):
                return event
            assert not isinstance(event, Failed), event.error

    def answer(self, timeout: float = 120.0) -> Answer:
        finishes: dict[int, Finished] = {}
        while len(finishes) < self.request.params.choices:
            event = self.next(timeout)
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Finished):
                finishes[event.choice] = event
        texts = dict.fromkeys(range(self.request.params.choices), "")
        logits = None
        for event in self.seen:
            if isinstance(event, Delta):
                texts[event.choice] += event.text
            if isinstance(event, Started) and event.choice == 0:
                logits = event.logits
        return Answer(texts, finishes, self.request.prompt.tokens, logits, self.seen)


def check(runtime: Runtime) -> None:
    """Checks that index, retention and memory agree. It first ends the engine thread, which otherwise settles and saves."""
    runtime.scheduler.close()
    runtime.cache.store.check()


def speak_plainly(engine: Engine) -> Engine:
    """Makes a model reply with ASCII only, the likeliest first. Random weights also give parts of UTF-8 characters, which no
    client can send back."""
    pieces = [engine.tokenizer.token_bytes(token) for token in range(engine.tokenizer.n_vocab)]
    hidden = {control.id for control in engine.tokenizer.controls} - engine.tokenizer.eog
    plain = [token in engine.tokenizer.eog or (piece.isascii() and piece.strip() != b"") for token, piece in enumerate(pieces)]
    mask = np.array([0.0 if good and token not in hidden else -np.inf for token, good in enumerate(plain)], np.float32)
    engine.sample = lambda slot, sampler: int((engine.logits(slot) + mask).argmax())  # type: ignore[method-assign]
    return engine


def request_of(prompt: Prompt, sampling: Sampling = GREEDY, **options: Any) -> Request:
    """`options`: fields of `GenerationParams` and of `Request`."""
    params = {name: options.pop(name) for name in [*options] if name in GenerationParams.__dataclass_fields__}
    return Request(prompt, GenerationParams(sampling, **params), **options)


def submit(runtime: Runtime, messages: Messages, *, salt: str = "", sampling: Sampling = GREEDY, **options: Any) -> Pending:
    options.setdefault("max_tokens", 16)
    returns = options.pop("returns", None)
    return Pending(runtime, request_of(runtime.chat_prompt(talk(messages, salt=salt)), sampling, **options), returns)


def ask(runtime: Runtime, messages: Messages, **options: Any) -> Answer:
    return submit(runtime, messages, **options).answer()


@dataclass
class Oracle:
    """The optimum O: the tokens that an infinite cache would compute. That is the prompt without its longest common prefix with
    any earlier prompt and reply."""

    seen: list[Tokens] = field(default_factory=list)

    def cost(self, prompt: Tokens) -> int:
        return len(prompt) - max((common_prefix(prompt, earlier) for earlier in self.seen), default=0)

    def learn(self, answer: Answer) -> None:
        for finish in answer.finishes.values():
            self.seen.append(np.concatenate([answer.prompt, np.array(finish.tokens, dtype=np.int32)]))

    def learn_tokens(self, tokens: Iterable[int]) -> None:
        self.seen.append(np.array(list(tokens), dtype=np.int32))


def converse(runtime: Runtime, oracle: Oracle, messages: Messages, text: str, **options: Any) -> tuple[Answer, int]:
    """Adds a user turn and its reply to `messages`; returns the answer and its O."""
    messages.append(user(text))
    prompt = runtime.chat_prompt(talk(messages)).tokens
    expected = oracle.cost(prompt)
    answer = ask(runtime, messages, **options)
    oracle.learn(answer)
    messages.append(assistant(answer.text))
    return answer, expected
