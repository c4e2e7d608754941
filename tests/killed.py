"""Servers that are killed: conversations over HTTP, load, and what is on disk then."""

from __future__ import annotations

import random
import sqlite3
import threading
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from headstart.tiers.disk.format import checksum, decode, header_size

Messages = list[dict[str, str]]
WORDS = "the house water garden letter market window bridge captain summer winter travel music paper stone river".split()


def text(seed: int, words: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=words))


def post(url: str, messages: Messages, **options: Any) -> dict[str, Any]:
    body = {"messages": messages, "max_tokens": 24, "temperature": 0, **options}
    found: dict[str, Any] = httpx.post(f"{url}/chat/completions", json=body, timeout=120).raise_for_status().json()
    return found


def known_objects(folder: Path) -> int:
    """Objects with a row in the catalogue. One that has none yet is found after a crash, but not before the first request."""
    with closing(sqlite3.connect(folder / "index.sqlite")) as db:
        return int(db.execute("SELECT COUNT(*) FROM objects").fetchone()[0])


def check_objects(folder: Path) -> set[bytes]:
    """The keys of all objects but checkpoints, which are thinned out; each must be whole, whatever interrupted its making."""
    keys = set()
    for path in (folder / "objects").iterdir():
        data = np.frombuffer(path.read_bytes(), np.uint8)
        header = decode(data[: header_size(data[:32].tobytes())].tobytes(), len(data))
        assert checksum(data[header.at :]) == header.checksum
        assert path.stem == header.label.key.hex()
        if header.label.kind != "state":
            keys.add(header.label.key)
    return keys


class Load:
    """Three clients that ask without a pause, until their server is gone: for something new, or again for what they know.

    Attributes:
        sent: the prompts, in their order; what a kill interrupts is among the last.
    """

    def __init__(self, url: str, seed: int) -> None:
        self.sent: list[Messages] = []
        self._url, self._dice, self._lock = url, random.Random(seed), threading.Lock()
        self._threads = [threading.Thread(target=self._ask) for _ in range(3)]
        for thread in self._threads:
            thread.start()

    def _ask(self) -> None:
        with httpx.Client(timeout=60) as http, suppress(httpx.TransportError):
            while True:
                with self._lock:
                    if self.sent and self._dice.random() < 0.3:
                        chat = self._dice.choice(self.sent)
                    else:
                        words = text(self._dice.getrandbits(60), self._dice.randint(20, 400))
                        self.sent.append(chat := [{"role": "user", "content": words}])
                    body = {"messages": chat, "max_tokens": self._dice.randint(1, 12), "temperature": 0}
                http.post(f"{self._url}/chat/completions", json=body).raise_for_status()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(60)
