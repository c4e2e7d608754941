"""Memory and disk evict alike: the same history gives the same victims in the same order (`prefix_cache/eviction_order`)."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from effort import examples
from headstart.interfaces.tokens import as_tokens
from headstart.prefix_cache.entry import Entry
from headstart.prefix_cache.eviction import Retention
from headstart.prefix_cache.index import Index
from headstart.prefix_cache.quota import NoQuota, OwnerLimits, Quota
from headstart.prefix_cache.reuse_model import RequestTraits, ReuseModel
from headstart.tiers.disk.catalog import Catalog
from headstart.tiers.disk.format import Label

SIZE = 4096
OWNERS = st.sampled_from(["ann", "bob", "cyd"])
PATHS = st.text("ab", min_size=1, max_size=4)
SAVES = {"a": 1.0, "b": 3.0}


def label(owner: str, path: str) -> Label:
    """The block at the end of a path: each letter is a block, and says how many seconds it saves."""
    key, parent = (sha256(f"{owner} {one}".encode()).digest() for one in (path, path[:-1]))
    tokens = tuple(path[-1].encode() * 8)
    return Label(key, parent, b"f" * 32, 8 * (len(path) - 1), tokens, True, SAVES[path[-1]], owner=owner.encode().ljust(8))


class SameOrderMachine(RuleBasedStateMachine):
    """One history for both tiers. The clock stands still only during a request."""

    @initialize()
    def start(self) -> None:
        self.now = 1000.0
        self.index = Index(8)
        self.saves: dict[bytes, float] = {}
        self.memory = Retention("memory", self.index, lambda entry: self.saves[entry.id] / SIZE)
        self.folder = TemporaryDirectory()
        self.disk = Catalog(Path(self.folder.name) / "index.sqlite")
        self.disk._db.execute("PRAGMA synchronous=OFF")

    @rule(owner=OWNERS, path=PATHS, wait=st.floats(0, 5000))
    def request(self, owner: str, path: str, wait: float) -> None:
        """A prompt: its blocks are used, those before others first; new ones are stored."""
        self.now += wait
        for end in range(1, len(path) + 1):
            block = label(owner, path[:end])
            entry = self.index.get(block.key)
            if entry is None:
                self.saves[block.key] = block.seconds
                entry = Entry(block.key, block.parent, as_tokens(list(block.tokens)), block.start, owner=block.owner)
                self.index.add(entry, "memory", canonical=True)
                self.disk.add([(block, SIZE)], self.now)
            else:
                self.disk.use([(block.key, self.now)])
            self.memory.use(entry, self.now)

    @rule(owner=OWNERS, path=PATHS, reply=st.integers(-1, 1000), called=st.none() | st.booleans())
    def replied(self, owner: str, path: str, reply: int, called: bool | None) -> None:
        keys = [label(owner, path[:end]).key for end in range(1, len(path) + 1)]
        traits = RequestTraits.of(len(keys), new=8 * reply, siblings=reply % 5 - 1, reply=reply, called=called)
        self.memory.replied(keys, traits)
        self.disk.replied([(key, traits) for key in keys])

    @rule(owner=OWNERS, path=PATHS, pinned=st.booleans())
    def pin(self, owner: str, path: str, pinned: bool) -> None:
        entry = self.index.get(label(owner, path).key)
        if entry is None or (not pinned and any(child.holds for child in self.index.children(entry.id))):
            return  # what a pinned object needs stays pinned on disk
        entry.holds = int(pinned)
        (self.disk.pin if pinned else self.disk.unpin)([entry.id])

    @rule(count=st.integers(1, 8), most=st.none() | st.integers(0, 6))
    def evict(self, count: int, most: int | None) -> None:
        """Room for `count` entries, without a quota or with one of `most`."""
        in_memory, on_disk = (self.limits(most) for _ in range(2))
        for entry in self.index:
            in_memory.hold(entry.owner, SIZE)
        self.learn()
        gone: list[bytes] = []
        while len(gone) < count and (victim := self.memory.victim(in_memory.over())) is not None:
            in_memory.hold(victim.owner, -SIZE)
            self.memory.forget(victim)
            self.index.remove(victim.id, "memory")
            gone.append(victim.id)
        rows = self.disk.victims((), count * SIZE, self.now, on_disk)
        event(f"evicted {len(gone)}, quota {most is not None}")
        assert [row.label.key for row in rows] == gone
        assert in_memory.over() == on_disk.over()
        self.disk.remove(gone, self.now)

    @staticmethod
    def limits(most: int | None) -> OwnerLimits:
        return NoQuota() if most is None else Quota(most * SIZE)

    def learn(self) -> None:
        """The disk learns from all its counts whenever it evicts; memory now and then, from where it stood. So here it does
        what the disk does.
        """
        model = ReuseModel()
        model.counts = self.memory._reuse.counts
        model.learn([*self.index, *(stats for _, stats in self.memory._ghosts.items())], self.now)
        self.memory._reuse, self.memory._now, self.memory._learned = model, self.now, self.now
        self.memory._learning = None
        for entry in self.index:
            self.memory._push(entry)
        self.disk.ranks._reuse = ReuseModel()
        self.disk.ranks.learn(self.now)

    @invariant()
    def the_same_is_known(self) -> None:
        if hasattr(self, "disk"):
            assert {entry.id for entry in self.index} == self.disk.keys()
            assert (self.memory._reuse.counts == self.disk.ranks.counts()).all()
            assert self.disk.ghosts([*self.memory._ghosts]) == {*self.memory._ghosts}

    def teardown(self) -> None:
        if hasattr(self, "disk"):
            self.disk.close()
            self.folder.cleanup()


TestSameOrder = SameOrderMachine.TestCase
TestSameOrder.settings = examples(60, stateful_step_count=30)
