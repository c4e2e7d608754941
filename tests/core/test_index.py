"""Index and retention against a plain model of them."""

from __future__ import annotations

import math

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headstart.core.blocks import BlockId, Chain, as_tokens, block_id, common_prefix, root_id
from headstart.core.index import Entry, Index
from headstart.core.retention import POLICIES, Retention

GRID = 3
ROOT = root_id(b"model", "")
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=4 * GRID)
TIERS = st.sampled_from(["memory", "disk"])
HALF_LIFE = 100.0


def pieces_of(tokens: list[int]) -> list[Entry]:
    """All blocks of a token sequence and its open tail."""
    chain = Chain(ROOT, GRID, as_tokens(tokens))
    found = [
        Entry(piece, chain.parent_of(number), chain.block(number), number * GRID) for number, piece in enumerate(chain.ids)
    ]
    rest = as_tokens(tokens[len(found) * GRID :])
    if len(rest):
        parent = chain.parent_of(len(found))
        found.append(Entry(block_id(parent, rest), parent, rest, len(found) * GRID))
    return found


class IndexMachine(RuleBasedStateMachine):
    """`copies` says for each piece which tiers hold it, and how good."""

    def __init__(self) -> None:
        super().__init__()
        self.index = Index(GRID)
        self.copies: dict[BlockId, dict[str, bool]] = {}

    @rule(tokens=TOKENS, tier=TIERS, canonical=st.booleans(), data=st.data())
    def add(self, tokens: list[int], tier: str, canonical: bool, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(pieces_of(tokens)))
        known = self.copies.get(entry.id, {}).get(tier)
        better = known is None or (canonical and not known)
        assert self.index.wants(entry.id, tier, canonical=canonical) == better
        assert self.index.add(entry, tier, canonical=canonical) == better
        if better:
            self.copies.setdefault(entry.id, {})[tier] = canonical

    @precondition(lambda self: self.copies)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        piece = data.draw(st.sampled_from(sorted(self.copies)))
        tier = data.draw(st.sampled_from(sorted(self.copies[piece])))
        self.index.remove(piece, tier)
        del self.copies[piece][tier]
        if not self.copies[piece]:
            del self.copies[piece]

    @rule(tokens=TOKENS, canonical_only=st.booleans(), partial=st.booleans(), data=st.data())
    def match(self, tokens: list[int], canonical_only: bool, partial: bool, data: st.DataObject) -> None:
        limit = data.draw(st.integers(0, len(tokens)))
        chain = Chain(ROOT, GRID, as_tokens(tokens))
        found = self.index.match(chain, limit, canonical_only=canonical_only, partial=partial)

        def usable(piece: BlockId) -> bool:
            copies = self.copies.get(piece, {})
            return any(copies.values()) if canonical_only else bool(copies)

        whole = 0
        while whole < limit // GRID and usable(chain.ids[whole]):
            whole += 1
        assert [entry.id for entry in found.blocks] == list(chain.ids[:whole])
        rest = as_tokens(tokens[whole * GRID : limit])
        fitting = [
            common_prefix(entry.tokens, rest)
            for entry in self.index
            if entry.parent == chain.parent_of(whole) and usable(entry.id)
        ]
        assert found.take == (max(fitting, default=0) if partial else 0)
        assert (found.tail is None) == (found.take == 0)
        assert found.tokens <= limit
        if found.tail is not None:
            assert found.tail.tokens[: found.take].tobytes() == rest[: found.take].tobytes()
        canonical = [any(self.copies[entry.id].values()) for entry in found.blocks]
        assert found.canonical == ([*canonical, False].index(False)) * GRID

    @rule(tokens=TOKENS)
    def covered(self, tokens: list[int]) -> None:
        """What a piece makes superfluous: the known proper prefixes of it, nothing else."""
        piece = pieces_of(tokens)[-1]
        found = {bytes(entry.tokens) for entry in self.index.covered(piece.parent, piece.tokens)}
        expected = {
            bytes(entry.tokens)
            for entry in self.index
            if entry.parent == piece.parent
            and len(entry.tokens) < len(piece.tokens)
            and entry.tokens.tolist() == piece.tokens[: len(entry.tokens)].tolist()
        }
        assert found == expected

    @invariant()
    def agree(self) -> None:
        self.index.check()
        assert {entry.id: entry.copies for entry in self.index} == self.copies


class RetentionMachine(RuleBasedStateMachine):
    """One tier under retention, beside a second tier that retention must not look at."""

    @initialize(policy=st.sampled_from(sorted(POLICIES)))
    def start(self, policy: str) -> None:
        self.policy = policy
        self.now = 0.0
        self.index = Index(GRID)
        self.retention = Retention("memory", self.index, self.saved, policy, HALF_LIFE)
        self.uses: dict[BlockId, list[float]] = {}
        self.ghosts: dict[BlockId, list[float]] = {}

    @staticmethod
    def saved(entry: Entry) -> float:
        return 1.0 + entry.start / GRID + len(entry.tokens)

    def rank(self, entry: Entry) -> float:
        uses = self.uses[entry.id]
        heat = math.log2(sum(2.0 ** (at / HALF_LIFE) for at in uses))
        return {"value": heat + math.log2(self.saved(entry)), "lfu": heat, "lru": uses[-1]}[self.policy]

    def known(self, piece: BlockId) -> Entry:
        entry = self.index.get(piece)
        assert entry is not None
        return entry

    def evictable(self) -> list[Entry]:
        held = [self.known(piece) for piece in self.uses]
        parents = {entry.parent for entry in held}
        return [entry for entry in held if entry.id not in parents and not entry.pins]

    @rule(tokens=TOKENS, wait=st.floats(0, 300), shadow=st.booleans())
    def use_chain(self, tokens: list[int], wait: float, shadow: bool) -> None:
        """A conversation is saved or hit: the pieces of its chain, ancestors first."""
        self.now += wait
        for piece in pieces_of(tokens):
            self.index.add(piece, "memory", canonical=True)
            if shadow:
                self.index.add(piece, "disk", canonical=True)
            self.retention.use(self.known(piece.id), self.now)
            self.uses.setdefault(piece.id, self.ghosts.pop(piece.id, [])).append(self.now)

    @rule(tokens=TOKENS)
    def refuse(self, tokens: list[int]) -> None:
        """A piece is not let in; its use counts when it comes again."""
        piece = pieces_of(tokens)[-1].id
        if piece not in self.uses:
            self.retention.refuse(piece, self.now)
            self.ghosts.setdefault(piece, []).append(self.now)

    @precondition(lambda self: self.uses)
    @rule(data=st.data(), pins=st.integers(0, 2))
    def pin(self, data: st.DataObject, pins: int) -> None:
        self.known(data.draw(st.sampled_from(sorted(self.uses)))).pins = pins

    @rule(count=st.integers(1, 5))
    def evict(self, count: int) -> None:
        for _ in range(count):
            eligible = self.evictable()
            victim = self.retention.victim()
            if not eligible:
                assert victim is None
                return
            assert victim in eligible, "pinned, or something hangs on it"
            lowest = min(self.rank(entry) for entry in eligible)
            assert math.isclose(self.rank(victim), lowest, abs_tol=1e-9)
            self.retention.forget(victim)
            self.index.remove(victim.id, "memory")
            self.ghosts[victim.id] = self.uses.pop(victim.id)

    @rule(tokens=TOKENS)
    def outranks(self, tokens: list[int]) -> None:
        eligible = self.evictable()
        newcomer = pieces_of(tokens)[-1]
        if not eligible or newcomer.id in self.uses:
            return
        self.uses[newcomer.id] = [*self.ghosts.get(newcomer.id, []), self.now]
        mine = self.rank(newcomer)
        del self.uses[newcomer.id]
        for victim in eligible:
            if not math.isclose(mine, self.rank(victim), abs_tol=1e-9):
                assert self.retention.outranks(newcomer, victim, self.now) == (mine > self.rank(victim))

    @invariant()
    def agree(self) -> None:
        if hasattr(self, "uses"):
            self.index.check()
            assert len(self.retention) == len(self.uses)
            victim = self.retention.victim()
            assert victim == self.retention.victim(), "asking changes nothing"


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestRetention = RetentionMachine.TestCase
TestRetention.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
