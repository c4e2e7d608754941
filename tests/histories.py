"""Random histories of a chat server, and the oracle of exactness: a second engine that never saw them.

A history is what a few users do with one runtime: turns, edits of the last or a middle message, branches, regenerations and
aborted prompts. Meanwhile other slots reply, and the memory budget is too small for everything. The last requests of a history
are compared, byte for byte, with the second engine: it prefills the same tokens canonically into an empty slot, and decodes the
reply after them.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np

from harness import Answer, Messages, ask, assistant, submit, system, user
from headstart.interfaces.engine import Engine, Span, Step
from headstart.interfaces.sampling import GREEDY, Sampling
from headstart.interfaces.tokens import Tokens
from headstart.prefix_cache.entry import Entry
from headstart.prefix_cache.planner import next_call
from headstart.serving.job import token_logprob
from headstart.serving.request import Delta, Progress, Started
from headstart.serving.runtime import Runtime

WORDS = (
    "the of and to in is that for it as was with be by on not he his but at are this have from or had an they which one "
    "you were all her she there would their we him been has when who will no more if out so up said what its about than "
    "into them can only other time new some could these two may first then do any like my now over such our man me even"
).split()


USERS = 3
COMPARED = 9
"""Least tokens of a compared reply: the first comes from the prompt's logits, and eight are decoded."""
EVENTS = ("turn", "turn", "edit", "branch", "again")


def text(dice: random.Random, words: int) -> str:
    return " ".join(dice.choices(WORDS, k=words))


def cold_logits(engine: Engine, tokens: Tokens) -> bytes:
    """The bytes (float32) of the logits after `tokens`, computed without any cache."""
    engine.truncate(0, 0)
    at = 0
    while at < len(tokens):
        size = next_call(at, len(tokens), at, engine.shape.batch, engine.traits)
        engine.prefill(0, tokens[at : at + size], logits=at + size == len(tokens))
        at += size
    return engine.logits(0).tobytes()


def cold_logprobs(engine: Engine, reply: Sequence[int]) -> list[float]:
    """The log-probabilities of a reply's tokens, decoded one by one in the first slot, which has the logits for the first."""
    found = []
    for token in reply:
        found.append(token_logprob(engine.logits(0), token, 0, engine).logprob)
        engine.decode([Step(0, token)])
    return found


@dataclass
class Tally:
    """What happened in all histories so far.

    Attributes:
        restoring: histories in which a compared request restored at least two blocks from memory.
        wrong: compared requests whose logits differ from those of a cold run.
        wrong_replies: compared requests whose reply has a different log-probability somewhere.
        prompts: lengths of the compared prompts, in tokens.
        reused: tokens of these prompts that were not computed.
    """

    histories: int = 0
    compared: int = 0
    restoring: int = 0
    wrong: int = 0
    wrong_replies: int = 0
    prompts: list[int] = field(default_factory=list)
    reused: int = 0
    events: Counter[str] = field(default_factory=Counter)


    def __str__(self) -> str:
        wrong, long = self.wrong + self.wrong_replies, [length for length in self.prompts if length > 1_500]
        return (
            f"{self.histories} histories, {wrong} of {self.compared} wrong; {self.restoring} restored two blocks or more; "
            f"{len(long)} prompts of more than 1,500 tokens, up to {max(self.prompts, default=0)}; "
            f"{self.reused:,} of {sum(self.prompts):,} tokens reused"
        )


@dataclass
class Lab:
    """A runtime under test and a cold engine of the same model.

    Attributes:
        words: approximate words of a system prompt; messages have up to a sixth of that.
        owners: number of groups of system prompts (one prompt for each user) in all histories together.
        compared: number of requests at the end of each history that are compared.
        longest: most tokens of a reply.
    """

    runtime: Runtime
    cold: Engine
    words: int = 150
    owners: int = 6
    compared: int = 1
    longest: int = 8
    tally: Tally = field(default_factory=Tally)

    def run(self, seed: int) -> None:
        """Runs one history and compares its last requests."""
        dice = random.Random(seed)
        # All histories share a few system prompts, so each returns, and may have been evicted meanwhile.
        owner = random.Random(dice.randrange(self.owners))
        prompts = [text(owner, owner.randint(self.words * 7 // 8, self.words)) for _ in range(USERS)]
        chats: list[Messages] = [[system(prompt), user(self._message(dice))] for prompt in prompts]
        dice.shuffle(chats)
        restored = 0
        for step in range(USERS + self.compared):
            # Mostly the conversation that waited longest. There are more of them than slots, so its KV has left its slot.
            chat = chats.pop(-1 if step >= USERS and dice.random() < 0.06 else 0)
            if len(chat) > 2:
                event = "branch" if len(chat) > 7 else dice.choice(EVENTS)
                if event == "branch":
                    chats.append(chat)
                chat = self._changed(dice, chat, event)
            if dice.random() < 0.15:
                self._abort(dice, chat)
            if step < USERS:
                self._ask(dice, chat)
            else:
                restored = max(restored, self._compare(dice, chat))
            chats.append(chat)
        self.tally.histories += 1
        self.tally.restoring += restored >= 2 * self.runtime.engine.traits.block_size

    def _message(self, dice: random.Random) -> str:
        return text(dice, dice.randint(1, max(2, self.words // 6)))

    def _changed(self, dice: random.Random, chat: Messages, event: str) -> Messages:
        """The conversation to send after the user's next event."""
        self.tally.events[event] += 1
        asked = [number for number, message in enumerate(chat) if message["role"] == "user"]
        if event == "turn":
            return [*chat, user(self._message(dice))]
        if event == "again":
            return chat[:-1]
        changed = user(self._message(dice))
        if event == "edit":
            at = dice.choice(asked)
            return [*chat[:at], changed, *chat[at + 1 : -1]]
        return [*chat[: dice.choice(asked)], changed]

    def _ask(self, dice: random.Random, chat: Messages, compared: bool = False) -> Answer:
        sampling = GREEDY if dice.random() < 0.5 else Sampling(seed=dice.randrange(1000))
        length = dice.randint(1, self.longest)
        if compared:
            sampling, length = replace(sampling, logprobs=0), max(length, COMPARED)
        answer = ask(self.runtime, chat, sampling=sampling, max_tokens=length, ignore_eos=length > 8, keep_logits=compared)
        chat.append(assistant(answer.text))
        return answer

    def _abort(self, dice: random.Random, chat: Messages) -> None:
        """A client disconnects, at once or during prefill or reply."""
        self.tally.events["abort"] += 1
        pending = submit(self.runtime, [*chat, user(self._message(dice))], max_tokens=50, ignore_eos=True)
        kind = dice.choice([None, Progress, Started])
        if kind is not None:
            while not isinstance(pending.next(), kind | Started):
                pass
        pending.handle.cancel()

    @contextmanager
    def _neighbour(self, dice: random.Random) -> Iterator[None]:
        """Sometimes another slot is in the middle of a reply."""
        if dice.random() < 0.5:
            yield
            return
        self.tally.events["neighbour"] += 1
        other = submit(self.runtime, [user(self._message(dice))], max_tokens=200, ignore_eos=True)
        other.until(Started)
        yield
        other.handle.cancel()

    def _compare(self, dice: random.Random, chat: Messages) -> int:
        with self._neighbour(dice):
            answer = self._ask(dice, chat, compared=True)
        assert answer.logits is not None
        self.tally.compared += 1
        self.tally.wrong += answer.logits.tobytes() != cold_logits(self.cold, answer.prompt)
        said = [one for event in answer.events if isinstance(event, Delta) for one in event.logprobs]
        assert len(said) >= COMPARED
        self.tally.wrong_replies += [one.logprob for one in said] != cold_logprobs(self.cold, [one.token for one in said])
        report = answer.report
        assert report.prompt == report.live + report.restored + report.computed
        self.tally.events["live"] += report.live > 0
        self.tally.prompts.append(report.prompt)
        self.tally.reused += report.live + report.restored
        return report.restored


def canonical_chains(runtime: Runtime) -> list[list[Entry]]:
    """All known chains of canonical blocks, from the root to the last canonical block."""
    index = runtime.cache.index
    blocks = {entry.id: entry for entry in index if entry.canonical and len(entry.tokens) == index.block_size}
    chains = []
    for last in set(blocks) - {entry.parent for entry in blocks.values()}:
        chain, piece = [], blocks.get(last)
        while piece is not None:
            chain.append(piece)
            piece = blocks.get(piece.parent)
        if chain[-1].start == 0:
            chains.append(chain[::-1])
    return chains


def cold_blocks(engine: Engine, chain: list[Entry]) -> list[bytes]:
    """The KV of each block of `chain`, computed without any cache."""
    engine.truncate(0, 0)
    tokens = np.concatenate([entry.tokens for entry in chain])
    for at in range(0, len(tokens), engine.shape.batch):
        engine.prefill(0, tokens[at : at + engine.shape.batch], logits=False)
    rows = [np.empty(len(entry.tokens) * engine.shape.kv_bytes_per_token, np.uint8) for entry in chain]
    engine.export_kv(0, [Span(entry.start, entry.stop, data) for entry, data in zip(chain, rows, strict=True)])
    return [data.tobytes() for data in rows]
