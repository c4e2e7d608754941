"""Recorded conversations as texts that are prefilled, turn by turn: what there is of the traffic in a folder."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.conversations import EVERY, PAUSE, Chat, Message, Text, Workload, ordered, spoken, talk
from headstart.interfaces.landmarks import Landmarks
from headstart.interfaces.tokens import as_tokens
from headstart.traces import read

CHARACTERS = 4
"""Of text, for a token."""
CONTEXT = 200_000
"""Tokens of the longest session of a coding agent; longer ones are several that were put together."""
REQUESTS = 2_000
"""Taken of a trace of single requests."""


def recorded(data: Path) -> Iterator[Workload]:
    """What there is of the recorded traffic."""
    readers: dict[str, Callable[[Path], Workload]] = {
        "taubench/gpt-4o-airline.json": _taubench,
        "oasst/en_100_tree.jsonl": _oasst,
        "claude-code": _agents,
        "miniswe": lambda folder: _traced(folder, "miniswe"),
        "mooncake/conversation_trace.jsonl": lambda file: _traced(file, "Mooncake conversation"),
        "mooncake/synthetic_trace.jsonl": lambda file: _traced(file, "Mooncake synthetic"),
    }
    return (read_it(data / place) for place, read_it in readers.items() if (data / place).exists())


class _Spelling:
    """Numbers for pieces of text: the same for the same."""

    def __init__(self) -> None:
        self._known: dict[str, int] = {}

    def __call__(self, text: str) -> list[int]:
        pieces = (text[start : start + CHARACTERS] for start in range(0, len(text), CHARACTERS))
        return [self._known.setdefault(piece, -1 - len(self._known)) for piece in pieces]


def _taubench(file: Path) -> Workload:
    """Chats with tools, under one system prompt."""
    spell = _Spelling()

    def message(one: dict[str, Any]) -> Message:
        calls = one.get("tool_calls") or []
        body = (one.get("content") or "") + "".join(json.dumps(call["function"]) for call in calls)
        return Message(one["role"], spell(body), calls=bool(calls))

    chats = [tuple(map(message, one["traj"])) for one in json.loads(file.read_text())]
    return ordered("taubench", (text for number, chat in enumerate(chats) for text in spoken(chat, number * EVERY)))


def _oasst(file: Path) -> Workload:
    """Trees of short chats: each reply is asked for, then all that was said to it."""
    spell = _Spelling()

    def walk(node: dict[str, Any], chat: Chat, clock: Iterator[float]) -> Iterator[Text]:
        role = "user" if node["role"] == "prompter" else "assistant"
        chat = (*chat, Message(role, spell(node["text"])))
        if role == "assistant":
            yield from talk(chat, next(clock))
        for reply in node["replies"]:
            yield from walk(reply, chat, clock)

    trees = [json.loads(line)["prompt"] for line in file.read_text().splitlines()]
    clocks = (count(number * EVERY, PAUSE) for number in range(len(trees)))
    return ordered("oasst", (text for tree, clock in zip(trees, clocks, strict=True) for text in walk(tree, (), clock)))


def _agents(folder: Path) -> Workload:
    """Sessions of a coding agent: hashes of blocks, but it is known where the system prompt ends."""
    texts: list[Text] = []
    numbers: dict[tuple[int, int], int] = {}
    for number, file in enumerate(sorted(folder.glob("*.json.gz"))):
        session = json.loads(gzip.decompress(file.read_bytes()))
        size, anchor = session["block_size"], session["tool_tokens"] + session["system_tokens"]
        if max(one["in"] for one in session["requests"]) > CONTEXT:
            continue
        for one in session["requests"]:
            length = one["in"]
            units = [numbers.setdefault((number, block), len(numbers)) for block in one["hash_ids"][: length // size]]
            landmarks = Landmarks(anchor if anchor < length else 0, 0, length)
            texts.append(Text(as_tokens(units), size, length, landmarks, number * EVERY + one["t"]))
    return ordered("coding agents", texts)


def _traced(path: Path, name: str) -> Workload:
    """A trace that says nothing of messages."""
    trace = read([path])
    texts = (
        Text(one.blocks, trace.block_size, one.prompt, Landmarks(header=one.prompt), one.at)
        for one in trace.requests[:REQUESTS]
    )
    return Workload(name, tuple(texts))
