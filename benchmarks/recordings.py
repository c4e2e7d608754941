"""Recordings: the recorded conversations in a folder, as prefilled texts, turn by turn."""

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
"""Characters of text that count as a token."""
CONTEXT = 200_000
"""Most tokens of a coding agent's session. Longer recordings are several sessions."""
REQUESTS = 2_000
"""Requests that are taken from a trace of single requests."""


def recorded(data: Path) -> Iterator[Workload]:
    """The workloads of all recordings in the folder."""
    readers: dict[str, Callable[[Path], Workload]] = {
        "taubench/gpt-4o-airline.json": _taubench,
        "oasst/en_100_tree.jsonl": _oasst,
        "claude-code": _agents,
        "miniswe": lambda folder: _traced(folder, "miniswe"),
        "mooncake/conversation_trace.jsonl": lambda file: _traced(file, "Mooncake conversation"),
        "mooncake/synthetic_trace.jsonl": lambda file: _traced(file, "Mooncake synthetic"),
    }
    return (read_it(data / place) for place, read_it in readers.items() if (data / place).exists())


class _Numbering:
    """Numbers for the parts of a text. Equal parts have equal numbers."""

    def __init__(self) -> None:
        self._known: dict[str, int] = {}

    def __call__(self, text: str) -> list[int]:
        parts = (text[start : start + CHARACTERS] for start in range(0, len(text), CHARACTERS))
        return [self._known.setdefault(part, -1 - len(self._known)) for part in parts]


def _taubench(file: Path) -> Workload:
    """Chats with tools, under one system prompt."""
    numbers = _Numbering()

    def message(one: dict[str, Any]) -> Message:
        calls = one.get("tool_calls") or []
        body = (one.get("content") or "") + "".join(json.dumps(call["function"]) for call in calls)
        return Message(one["role"], numbers(body), calls=bool(calls))

    chats = [tuple(map(message, one["traj"])) for one in json.loads(file.read_text())]
    return ordered("taubench", (text for number, chat in enumerate(chats) for text in spoken(chat, number * EVERY)))


def _oasst(file: Path) -> Workload:
    """Trees of short chats: each reply is requested, and then all answers to it."""
    numbers = _Numbering()

    def walk(node: dict[str, Any], chat: Chat, clock: Iterator[float]) -> Iterator[Text]:
        role = "user" if node["role"] == "prompter" else "assistant"
        chat = (*chat, Message(role, numbers(node["text"])))
        if role == "assistant":
            yield from talk(chat, next(clock))
        for reply in node["replies"]:
            yield from walk(reply, chat, clock)

    trees = [json.loads(line)["prompt"] for line in file.read_text().splitlines()]
    clocks = (count(number * EVERY, PAUSE) for number in range(len(trees)))
    return ordered("oasst", (text for tree, clock in zip(trees, clocks, strict=True) for text in walk(tree, (), clock)))


def _agents(folder: Path) -> Workload:
    """Sessions of a coding agent. They have hashes of blocks, and the end of the system prompt."""
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
    """A trace without messages."""
    trace = read([path])
    texts = (
        Text(one.blocks, trace.block_size, one.prompt, Landmarks(header=one.prompt), one.at)
        for one in trace.requests[:REQUESTS]
    )
    return Workload(name, tuple(texts))
