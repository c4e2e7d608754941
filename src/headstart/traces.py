"""Traces: recorded (or generated) requests as sequences of blocks, in the order of arrival.

| format | contents of a file |
|---|---|
| Mooncake | JSONL; `timestamp` in ms, `hash_ids` of 512 tokens, `input_length`, `output_length` |
| kv-cache-tester | JSON (or gzip); a session: `block_size`, `requests` with `t` in s, `in`, `out`, own `hash_ids` |
| text | JSONL; a session: `timestamp` in µs, `input` (the whole prompt), `output`; cut into blocks by characters |

In the form of kv-cache-tester, a request of the type `subagent` stands for a conversation that the agent has started. It has
`t` and its own `requests`, whose times count from the beginning of the file, or in some recordings from that `t`. They are a
session of their own, which begins when it did.

Sessions are recorded separately. They are replayed at the same time, so that they share a cache: each begins `every` seconds
after the one before, in the order of file names, and keeps its own time differences.
"""

from __future__ import annotations

import gzip
import json
import random
import zlib
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import xxhash

from headstart.errors import ConfigError
from headstart.interfaces.tokens import Tokens, as_tokens
from headstart.paths import is_folder

EVERY = 60.0
"""Seconds between the starts of two sessions."""
_MOONCAKE = 512
_TEXT = 64
_CHARACTERS = 4
"""Characters of text that count as a token."""


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """A request: its time of arrival (seconds), its full blocks, and the tokens of its prompt and its reply.

    `called`: whether the reply ended in a call; None if that was not recorded. `session`: number of its session; -1 if that was
    not recorded.
    """

    at: float
    blocks: Tokens
    prompt: int
    reply: int
    called: bool | None = None
    session: int = -1


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of arrival, with blocks of `block_size` tokens."""

    name: str
    block_size: int
    requests: tuple[TracedRequest, ...]

    @property
    def tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(request.prompt for request in self.requests)


def read(paths: Sequence[Path], *, block_size: int | None = None, every: float = EVERY, name: str | None = None) -> Trace:
    """Reads a trace: one file, a folder of sessions, or the files of several.

    Args:
        block_size: tokens of a block, a multiple of the recorded size; that size by default.
        every: seconds between the starts of two sessions.

    Raises:
        ConfigError: a file cannot be read, or is not a trace.
    """
    files = [file for path in paths for file in (sorted(_sessions(path)) if is_folder(path) else [path])]
    if not files:
        raise ConfigError(f"There is no trace in {', '.join(map(str, paths))}.")
    requests: list[TracedRequest] = []
    block_sizes: set[int] = set()
    numbers: Numbers = {}
    sessions = 0
    for number, file in enumerate(files):
        try:
            found, native, session = _read(file, number, numbers)
            begin = number * every - min(one.at for one in found) if session else 0.0
        except OSError as error:
            raise ConfigError(f"Cannot read {file}: {error.strerror or error}.") from error
        except RecursionError as error:
            raise ConfigError(f"{file} is not a trace: it is nested too deeply.") from error
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, EOFError, zlib.error) as error:
            why = f"it lacks {error}" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"
            raise ConfigError(f"{file} is not a trace: {why}; `headstart replay --help` names the forms.") from error
        block_sizes.add(native)
        requests += [replace(one, at=begin + one.at, session=sessions + one.session if session else -1) for one in found]
        sessions += 1 + max(one.session for one in found)
    if len(block_sizes) > 1:
        raise ConfigError("These traces have blocks of different sizes; replay them apart.")
    native = block_sizes.pop()
    wanted = block_size or native
    if wanted % native:
        raise ConfigError(f"This trace has blocks of {native} tokens; the block size must be a multiple of that, not {wanted}.")
    requests.sort(key=lambda request: request.at)
    return Trace(name or paths[0].name.split(".")[0], wanted, tuple(_coarser(requests, wanted // native)))


def _sessions(folder: Path) -> Iterator[Path]:
    return (path for path in folder.iterdir() if path.name.endswith((".json", ".json.gz", ".jsonl")))


def _coarser(requests: Iterable[TracedRequest], factor: int) -> Iterator[TracedRequest]:
    """Joins each `factor` blocks to one. An id depends on the blocks before it, so the last id stands for all."""
    for one in requests:
        yield replace(one, blocks=as_tokens(one.blocks[factor - 1 :: factor]))


Numbers = dict[Hashable, int]
"""The number of each block of all files, by its name there."""


def _read(file: Path, number: int, numbers: Numbers) -> tuple[list[TracedRequest], int, bool]:
    """The requests of a file, the size of its blocks, and whether it is one session, with sub-agents, counted from 0."""
    data = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()

    def local(at: float, prompt: int, reply: int, ids: Sequence[int], size: int) -> TracedRequest:
        """A request whose ids are valid only in this file."""
        blocks = [numbers.setdefault((number, int(one)), len(numbers)) for one in ids[: whole(prompt, size)]]
        return TracedRequest(float(at), as_tokens(blocks), int(prompt), int(reply))

    if file.name.endswith(".jsonl"):
        lines = [json.loads(line) for line in data.splitlines() if line.strip()]
        if "input" in lines[0]:
            return [replace(_text(line, numbers), session=0) for line in lines], _TEXT, True
        found = [
            local(line["timestamp"] / 1e3, line["input_length"], line["output_length"], line["hash_ids"], _MOONCAKE)
            for line in lines
        ]
        return found, _MOONCAKE, False
    session = json.loads(data)
    if (size := int(session["block_size"])) < 1:
        raise ValueError(f"its block_size is {size}")
    found = [
        replace(local(at, one["in"], one["out"], one["hash_ids"], size), called=_called(one.get("stop")), session=agent)
        for at, one, agent in _agents(session["requests"], 0.0, count())
    ]
    return found, size, True


def _agents(
    requests: Sequence[dict[str, Any]], begun: float, agents: Iterator[int]
) -> Iterator[tuple[float, dict[str, Any], int]]:
    """The requests of an agent and its sub-agents, each with its time and the number of its agent.

    Args:
        begun: when the agent began. Nothing happens before it, so an earlier first time is counted from it.
    """
    agent = next(agents)
    times = [float(one["t"]) for one in requests]
    shift = begun if times and min(times) < begun else 0.0
    for at, one in zip(times, requests, strict=True):
        if one.get("type") == "subagent":
            yield from _agents(one["requests"], shift + at, agents)
        else:
            yield shift + at, one, agent


def _called(stop: str | None) -> bool | None:
    return stop == "tool_use" if stop else None


def _text(line: dict[str, Any], numbers: Numbers) -> TracedRequest:
    text, reply = str(line["input"]), str(line["output"])
    step = _TEXT * _CHARACTERS
    digest, blocks = xxhash.xxh3_128(), []
    for start in range(0, whole(len(text), step) * step, step):
        digest.update(text[start : start + step].encode("utf-8", "surrogatepass"))
        blocks.append(numbers.setdefault(digest.digest(), len(numbers)))
    return TracedRequest(line["timestamp"] / 1e6, as_tokens(blocks), len(text) // _CHARACTERS, len(reply) // _CHARACTERS)


def whole(prompt: int, block_size: int) -> int:
    """The number of full blocks before the last token of a prompt. The tokens after them are always computed."""
    return max(0, (prompt - 1) // block_size)


def sample(seed: int = 0, seconds: int = 1800, block_size: int = 64) -> Trace:
    """A generated trace: chats, agents with tool loops, questions about documents, single requests."""
    dice = random.Random(seed)
    fresh = iter(range(1, 1 << 31))
    system = [next(fresh) for _ in range(12)]
    documents = [[next(fresh) for _ in range(dice.randint(30, 200))] for _ in range(40)]
    found: list[TracedRequest] = []
    session = -1

    def ask(at: float, blocks: list[int], reply: int) -> None:
        prompt = len(blocks) * block_size + dice.randint(1, block_size)
        found.append(TracedRequest(at, as_tokens(blocks), prompt, reply, session=session))

    at = 0.0
    while at < seconds:
        session += 1
        at += dice.expovariate(1 / 4)
        match dice.choices(("chat", "agent", "document", "once"), (4, 1, 4, 6))[0]:
            case "chat":
                blocks, now = [*system], at
                for _ in range(_turns(dice, 0.6)):
                    blocks += [next(fresh) for _ in range(dice.randint(1, 6))]
                    ask(now, blocks, dice.randint(100, 600))
                    now += 30 + dice.lognormvariate(4, 1)
            case "agent":
                blocks, now = [next(fresh) for _ in range(dice.randint(40, 200))], at
                for _ in range(_turns(dice, 0.93)):
                    blocks += [next(fresh) for _ in range(dice.randint(1, 12))]
                    tool = dice.random() < 0.85
                    ask(now, blocks, dice.randint(20, 120) if tool else dice.randint(200, 900))
                    now += 4 + dice.expovariate(1 / 6) if tool else 30 + dice.lognormvariate(5, 1)
            case "document":
                popular = int(len(documents) * dice.random() ** 3)
                ask(at, [*documents[popular], next(fresh)], dice.randint(4, 40))
            case "once":
                ask(at, [next(fresh) for _ in range(dice.randint(5, 120))], dice.randint(200, 900))
    return Trace("sample", block_size, tuple(sorted(found, key=lambda request: request.at)))


def _turns(dice: random.Random, more: float) -> int:
    turns = 1
    while dice.random() < more:
        turns += 1
    return turns
