"""Lines: replays a workload against a cache of KV and checkpoints, as a model with state needs it.

The cache is the real one without bytes: `blocks.Chain` makes the ids, `index.Index` matches them, `eviction.Retention` ranks
entries, and `checkpoints` says where checkpoints go and what they are worth (all in `headstart.prefix_cache`). A request begins
at the last checkpoint whose KV is complete. Turns settle before the next request arrives. Settling is not counted, because no
request waits for it. A trace without replies has no settled turns. There, the tokens of a reply are computed when the next
request contains them, for every placement alike.
"""

from __future__ import annotations

import math
from bisect import insort
from dataclasses import dataclass

from benchmarks.conversations import Text, Workload
from headstart.interfaces.tokens import as_tokens
from headstart.prefix_cache.blocks import Chain, block_id, checkpoint_id, last_block_boundary, root_id
from headstart.prefix_cache.checkpoints import LOOSE, Placement, protected_points, worth
from headstart.prefix_cache.entry import Entry
from headstart.prefix_cache.eviction import Retention
from headstart.prefix_cache.index import Index
from headstart.prefix_cache.reuse_model import RequestTraits

BLOCK_SIZE = 64
_ROOT = root_id(b"replay", "")
_TIER = "memory"


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model in bytes: a token's KV, and a checkpoint."""

    name: str
    kv_bytes_per_token: int
    state_bytes: int


@dataclass(frozen=True, slots=True)
class Line:
    """A text with its ids. `known`: the length of its longest common prefix with any earlier text, in tokens."""

    text: Text
    chain: Chain
    known: int


@dataclass(frozen=True, slots=True)
class Lines:
    """A workload with its ids.

    Attributes:
        block_size: tokens of a block in `chain`; 1 if the trace has hashes of blocks in place of tokens.
        blocks: number of different blocks.
        ends: number of blocks that no other block continues.
    """

    name: str
    block_size: int
    lines: tuple[Line, ...]
    blocks: int
    ends: int


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a placement with a workload.

    Attributes:
        prompt: tokens of all requests.
        optimum: tokens that an infinite cache of KV would compute.
        computed: tokens that were computed.
        held: checkpoints at the end.
        most: most checkpoints on one line.
    """

    prompt: int
    optimum: int
    computed: int
    held: int
    most: int


def prepare(workload: Workload) -> Lines:
    """The chains of a workload, and what an infinite cache would have of each."""
    unit = workload.texts[0].unit
    block_size = BLOCK_SIZE if unit == 1 else 1
    index, found = Index(block_size), []
    for text in workload.texts:
        chain = Chain(_ROOT, block_size, as_tokens(text.units.repeat(max(1, unit // BLOCK_SIZE))))
        match = index.match(chain, len(chain), canonical_only=True, partial=True)
        found.append(Line(text, chain, match.tokens * (BLOCK_SIZE // block_size)))
        for number in range(len(match.blocks), len(chain.ids)):
            index.add(_block(chain, number), _TIER, canonical=True)
        tail = chain.block(len(chain.ids))
        if len(tail):
            parent = chain.parent_of(len(chain.ids))
            index.add(Entry(block_id(parent, tail), parent, tail, len(chain.ids) * block_size), _TIER, canonical=True)
    ids = {piece for line in found for piece in line.chain.ids}
    parents = {line.chain.parent_of(number) for line in found for number in range(len(line.chain.ids))}
    return Lines(workload.name, block_size, tuple(found), len(ids), len(ids - parents))


def replay(lines: Lines, placement: Placement, shape: Shape, budget: float = math.inf) -> Result:
    """Replays a workload. `budget`: bytes for KV and checkpoints together."""
    cache = _Cache(lines.block_size, placement, shape, budget)
    prompt = optimum = computed = most = 0
    for line in lines.lines:
        start = cache.serve(line)
        most = max(most, cache.on_line)
        if line.text.waited:
            length = line.text.length
            prompt += length
            optimum += length - min(line.known, length - 1)
            computed += length - start
    return Result(prompt, optimum, computed, len(cache), most)


class _Cache:
    """Index and retention as the server uses them. `on_line`: number of checkpoints on the line that was served last."""

    def __init__(self, block_size: int, placement: Placement, shape: Shape, budget: float) -> None:
        self.on_line = 0
        self._placement = placement
        self._shape = shape
        self._left = budget
        self._index = Index(block_size)
        self._worth: dict[bytes, float] = {}
        self._states: dict[bytes, Entry] = {}
        self._retention = Retention(_TIER, self._index, self._saved_per_byte)

    def __len__(self) -> int:
        return len(self._states)

    def serve(self, line: Line) -> int:
        """Computes the missing part of a text. Returns where it begins, in tokens."""
        chain, now = line.chain, line.text.at
        known, siblings = self._retention.seen(chain.ids)
        rows = list(self._index.match(chain, len(chain), canonical_only=True, partial=False).blocks)
        branch = len(rows) * BLOCK_SIZE
        start = max((point for point in self._held(chain, line.text.length) if point <= branch), default=0)
        for entry in rows:
            entry.holds += 1
            self._retention.use(entry, now)
        if start:
            self._retention.use(self._states[chain.ids[start // BLOCK_SIZE - 1]], now)
        for number in range(len(rows), len(chain.ids)):
            entry = _block(chain, number)
            if not self._admit(entry, now):
                for refused in range(number, len(chain.ids)):
                    self._retention.refuse(_block(chain, refused), now)
                break
            entry.holds += 1
            rows.append(entry)
        self._mark(line, start, branch, len(rows) * BLOCK_SIZE)
        request_traits = RequestTraits.of(
            len(chain.ids), new=line.text.length - known * BLOCK_SIZE, siblings=siblings, reply=-1
        )
        self._retention.replied([*chain.ids, *map(checkpoint_id, chain.ids)], request_traits)
        for entry in rows:
            entry.holds -= 1
        return start

    def _mark(self, line: Line, start: int, branch: int, limit: int) -> None:
        """Takes the checkpoints of a prefill, as far as the KV reaches, and thins the line."""
        length, chain = line.text.length, line.chain
        firmly = protected_points(length, BLOCK_SIZE, branch, line.text.landmarks)
        held = self._held(chain, length)
        stay = self._staying(line, held)
        for point in self._placement.points(start, length, BLOCK_SIZE, branch, line.text.landmarks):
            if point <= limit and chain.ids[point // BLOCK_SIZE - 1] not in self._states:
                before = stay if point in firmly else held
                gap = point - next((other for other in reversed(before) if other < point), 0)
                if self._take(chain, point, gap, line.text.at, firmly=point in firmly):
                    insort(held, point)
                    stay = self._staying(line, held) if point in firmly else stay
        held = self._held(chain, length)
        gone = self._placement.surplus(held, last_block_boundary(length, BLOCK_SIZE), self._staying(line, held))
        for point in gone:
            self._drop(self._states[chain.ids[point // BLOCK_SIZE - 1]])
        self.on_line = len(held) - len(gone)

    def _held(self, chain: Chain, length: int) -> list[int]:
        """Positions of the checkpoints on a line, ascending."""
        ids = chain.ids[: last_block_boundary(length, BLOCK_SIZE) // BLOCK_SIZE]
        return [number * BLOCK_SIZE + BLOCK_SIZE for number, piece in enumerate(ids) if piece in self._states]

    def _staying(self, line: Line, held: list[int]) -> list[int]:
        """The positions in `held` that stay, however the line grows."""
        marks = {mark // BLOCK_SIZE * BLOCK_SIZE for mark in (line.text.landmarks.anchor, line.text.landmarks.turn)}
        return [
            point for point in held if point in marks or self._index.is_branch_point(line.chain.ids[point // BLOCK_SIZE - 1])
        ]

    def _take(self, chain: Chain, point: int, gap: int, now: float, *, firmly: bool) -> bool:
        block = _block(chain, point // BLOCK_SIZE - 1)
        entry = Entry(checkpoint_id(block.id), block.id, block.tokens, block.start, state=True)
        self._worth[entry.id] = worth(gap, self._shape.state_bytes, self._shape.kv_bytes_per_token, protected=firmly)
        if self._admit(entry, now):
            return True
        self._retention.refuse(entry, now)
        return False

    def _saved_per_byte(self, entry: Entry) -> float:
        return self._worth[entry.id] if entry.state else LOOSE / self._shape.kv_bytes_per_token

    def _bytes(self, entry: Entry) -> int:
        return self._shape.state_bytes if entry.state else BLOCK_SIZE * self._shape.kv_bytes_per_token

    def _admit(self, entry: Entry, now: float) -> bool:
        while self._left < self._bytes(entry):
            victim = self._retention.victim()
            if victim is None or not self._retention.outranks(entry, victim, now):
                return False
            self._evict(victim)
        self._index.add(entry, _TIER, canonical=True)
        self._retention.use(entry, now)
        self._left -= self._bytes(entry)
        if entry.state:
            self._states[entry.parent] = entry
        return True

    def _evict(self, entry: Entry) -> None:
        """Evicts an entry. With a line's last checkpoint, the KV that only this checkpoint made useful goes too."""
        self._drop(entry)
        before = self._index.get(entry.parent) if entry.state else None
        while before is not None and not before.holds and self._retention.is_leaf(before.id):
            after, before = before, self._index.get(before.parent)
            self._drop(after)

    def _drop(self, entry: Entry) -> None:
        self._retention.forget(entry)
        self._index.remove(entry.id, _TIER)
        self._left += self._bytes(entry)
        if entry.state:
            del self._states[entry.parent]


def _block(chain: Chain, number: int) -> Entry:
    return Entry(chain.ids[number], chain.parent_of(number), chain.block(number), number * chain.block_size)
