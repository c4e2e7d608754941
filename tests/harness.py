"""What tests of the runtime share: a caller that waits, a script of messages, and the oracle of what must be computed."""

from __future__ import annotations

import queue
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headstart.interfaces.engine import GREEDY, Engine, Logits, Sampling
from headstart.interfaces.tokens import Tokens, common_prefix
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
    """One finished request. `text` and `finish` are those of choice 0."""

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
    """A request under way."""

    def __init__(self, runtime: Runtime, request: Request) -> None:
        self.request = request
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.seen: list[Event] = []
        self.handle: Handle = runtime.submit(request, self.events.put)

    def next(self, timeout: float = 60.0) -> Event:
        event = self.events.get(timeout=timeout)
        self.seen.append(event)
        return event

    def until(self, kind: type, timeout: float = 60.0) -> Event:
        while True:
            event = self.next(timeout)
            if isinstance(event, kind):
                return event
            assert not isinstance(event, Failed), event.error

    def answer(self, timeout: float = 120.0) -> Answer:
        finishes: dict[int, Finished] = {}
        while len(finishes) < self.request.choices:
            event = self.next(timeout)
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Finished):
                finishes[event.choice] = event
        texts = dict.fromkeys(range(self.request.choices), "")
        logits = None
        for event in self.seen:
            if isinstance(event, Delta):
                texts[event.choice] += event.text
            if isinstance(event, Started) and event.choice == 0:
                logits = event.logits
        return Answer(texts, finishes, self.request.prompt.tokens, logits, self.seen)


def check(runtime: Runtime) -> None:
    """Ends the engine's thread, then compares index, retention and memory: until then it settles and saves what is idle."""
    runtime.scheduler.close()
    runtime.cache.store.check()


def speak_plainly(engine: Engine) -> Engine:
    """Has a model say ASCII only, the likeliest first. Of random weights' half characters no client can send anything back."""
    pieces = [engine.tokenizer.token_bytes(token) for token in range(engine.tokenizer.n_vocab)]
    hidden = {control.id for control in engine.tokenizer.controls} - engine.tokenizer.eog
    plain = [token in engine.tokenizer.eog or (piece.isascii() and piece.strip() != b"") for token, piece in enumerate(pieces)]
    mask = np.array([0.0 if good and token not in hidden else -np.inf for token, good in enumerate(plain)], np.float32)
    engine.sample = lambda slot, sampler: int((engine.logits(slot) + mask).argmax())  # type: ignore[method-assign]
    return engine


def submit(runtime: Runtime, messages: Messages, *, salt: str = "", sampling: Sampling = GREEDY, **options: Any) -> Pending:
    options.setdefault("max_tokens", 16)
    return Pending(runtime, Request(runtime.chat_prompt(talk(messages, salt=salt)), sampling=sampling, **options))


def ask(runtime: Runtime, messages: Messages, **options: Any) -> Answer:
    return submit(runtime, messages, **options).answer()


@dataclass
class Oracle:
    """What an infinite cache would compute: O, the prompt minus its longest common prefix with any earlier prompt + reply."""

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
