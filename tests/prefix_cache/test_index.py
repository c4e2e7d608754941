"""The index against a plain model of it."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from effort import examples
from headstart.interfaces.tokens import BlockId, as_tokens, common_prefix
from headstart.prefix_cache.blocks import Chain
from headstart.prefix_cache.index import Entry, Index
from small_blocks import BLOCK_SIZE, ROOT, TOKENS, entries_of

TIERS = st.sampled_from(["memory", "disk"])


class Heard:
    """A listener. `copies`: what it was told, in the form of `IndexMachine.copies`."""

    def __init__(self) -> None:
        self.copies: dict[BlockId, dict[str, bool]] = {}

    def added(self, entry: Entry, tier: str) -> None:
        assert self.copies.get(entry.id, {}).get(tier) in (None, False), "told twice"
        self.copies.setdefault(entry.id, {})[tier] = entry.copies[tier]

    def removed(self, entry: Entry, tier: str) -> None:
        del self.copies[entry.id][tier]
        if not self.copies[entry.id]:
            del self.copies[entry.id]


class IndexMachine(RuleBasedStateMachine):
    """`copies` says for each entry which tiers hold it, and how good."""

    def __init__(self) -> None:
        super().__init__()
        self.heard = Heard()
        self.index = Index(BLOCK_SIZE, self.heard)
        self.copies: dict[BlockId, dict[str, bool]] = {}

    @rule(tokens=TOKENS, tier=TIERS, canonical=st.booleans(), data=st.data())
    def add(self, tokens: list[int], tier: str, canonical: bool, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(entries_of(tokens)))
        known = self.copies.get(entry.id, {}).get(tier)
        better = known is None or (canonical and not known)
        assert self.index.wants(entry.id, tier, canonical=canonical) == better
        assert self.index.add(entry, tier, canonical=canonical) == better
        if better:
            self.copies.setdefault(entry.id, {})[tier] = canonical

    @precondition(lambda self: self.copies)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.copies)))
        tier = data.draw(st.sampled_from(sorted(self.copies[key])))
        self.index.remove(key, tier)
        del self.copies[key][tier]
        if not self.copies[key]:
            del self.copies[key]

    @rule(tokens=TOKENS, canonical_only=st.booleans(), partial=st.booleans(), data=st.data())
    def match(self, tokens: list[int], canonical_only: bool, partial: bool, data: st.DataObject) -> None:
        limit = data.draw(st.integers(0, len(tokens)))
        chain = Chain(ROOT, BLOCK_SIZE, as_tokens(tokens))
        found = self.index.match(chain, limit, canonical_only=canonical_only, partial=partial)

        def usable(key: BlockId) -> bool:
            copies = self.copies.get(key, {})
            return any(copies.values()) if canonical_only else bool(copies)

        whole = 0
        while whole < limit // BLOCK_SIZE and usable(chain.ids[whole]):
            whole += 1
        assert [entry.id for entry in found.blocks] == list(chain.ids[:whole])
        rest = as_tokens(tokens[whole * BLOCK_SIZE : limit])
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
        assert found.canonical == ([*canonical, False].index(False)) * BLOCK_SIZE

    @rule(tokens=TOKENS)
    def covered(self, tokens: list[int]) -> None:
        """What an entry makes superfluous: the known proper prefixes of it, nothing else."""
        longer = entries_of(tokens)[-1]
        found = {bytes(entry.tokens) for entry in self.index.covered(longer.parent, longer.tokens)}
        expected = {
            bytes(entry.tokens)
            for entry in self.index
            if entry.parent == longer.parent
            and len(entry.tokens) < len(longer.tokens)
            and entry.tokens.tolist() == longer.tokens[: len(entry.tokens)].tolist()
        }
        assert found == expected

    @invariant()
    def agree(self) -> None:
        self.index.check()
        assert {entry.id: entry.copies for entry in self.index} == self.copies
        assert self.heard.copies == self.copies


TestIndex = IndexMachine.TestCase
TestIndex.settings = examples(60, stateful_step_count=30)
