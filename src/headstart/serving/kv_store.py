"""KV store: the stored entries. It keeps the index, retention, the memory tier and the way to disk consistent."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from headstart.explain.fingerprint import ConversationFingerprints
from headstart.interfaces.engine import Engine
from headstart.interfaces.tier import KV, STATE, EntryKind
from headstart.interfaces.tokens import BlockId
from headstart.prefix_cache.blocks import checkpoint_id
from headstart.prefix_cache.checkpoints import LOOSE, worth
from headstart.prefix_cache.entry import Entry
from headstart.prefix_cache.entry_places import EntryPlaces
from headstart.prefix_cache.eviction import Retention
from headstart.prefix_cache.expiry import Terms
from headstart.prefix_cache.index import Index
from headstart.prefix_cache.planner import Mode
from headstart.prefix_cache.quota import PinLimits
from headstart.prefix_cache.reuse_model import UNKNOWN_REQUEST
from headstart.prompt.reply_tokens import ReplyTokensMemo
from headstart.serving.barred import Barred
from headstart.serving.held_prefix import HeldPrefix
from headstart.serving.listener import Listener, NoListener
from headstart.serving.memory_budget import MemoryBudget
from headstart.serving.offload import Offload
from headstart.serving.pins import Pins
from headstart.serving.shared_offer import SharedOffer
from headstart.tiers.disk import Label
from headstart.tiers.disk_tier import DiskTier
from headstart.tiers.memory import Cell, Memory
from headstart.tiers.no_disk import NoDisk
from headstart.tiers.shared_tier import NoShared, SharedTier


class KvStore:
    """For the engine thread.

    Attributes:
        seconds: measured seconds of prefill per token; the scheduler sets it.
        counters: entries `saved`, `evicted`, `thinned` and `erased`; refusals as `skipped_<reason>`; faults as
            `fault_<reason>`.
        terms: how long entries may be kept, by the clock `wall`.
        wall: a clock in seconds since 1970.
        clock: a monotonic clock in seconds.
        listener: hears what is held and done.
        pins: entries that their owners have pinned.
        barred: entries that are being deleted.
    """

    def __init__(
        self,
        engine: Engine,
        memory: Memory,
        mode: Mode,
        clock: Callable[[], float],
        disk: DiskTier | None = None,
        shared: SharedTier | None = None,
        reply_tokens: ReplyTokensMemo | None = None,
        terms: Terms | None = None,
        wall: Callable[[], float] = time.time,
        tenant_memory: float = 1.0,
        listener: Listener | None = None,
    ) -> None:
        self.listener = NoListener() if listener is None else listener
        self.index = Index(engine.traits.block_size, self.listener)
        self.memory = memory
        memory.keep_places(EntryPlaces(self.index))
        self.disk = NoDisk() if disk is None else disk
        self.shared = NoShared() if shared is None else shared
        self.seconds = 1e-3
        self.counters: Counter[str] = Counter()
        self.clock = clock
        self.wall = wall
        self.terms = Terms() if terms is None else terms
        self.barred = Barred()
        self.conversation_fingerprints = ConversationFingerprints()
        self.retention = Retention(memory.name, self.index, self._saved_per_byte, by_owner=memory.quota.on)
        limits = PinLimits.of(tenant_memory, memory.budget, engine.shape.transfer_bytes)
        self.pins = Pins(self.index, memory, self.retention, self.disk, limits, self.listener.pinned)
        self._stateful = mode.traits.stateful
        self._kv_bytes_per_token = engine.shape.kv_bytes_per_token
        self._fingerprint = engine.fingerprint
        self.offload = Offload(
            self.index,
            memory,
            self.disk,
            ReplyTokensMemo() if reply_tokens is None else reply_tokens,
            self.conversation_fingerprints,
            self.label,
            self._stored,
            self.pins.found,
            self.pins.lost,
            self.pins.left,
            lambda label: not (label.key in self.barred or self.expired(label.owner, label.written)),
            self.barred,
            lambda: self.clock(),
        )
        self.shared_offer = SharedOffer(self.index, memory, self.shared, self.label, self.usable)
        self.memory_budget = MemoryBudget(
            self.index,
            memory,
            self.retention,
            self.offload,
            self.shared_offer,
            self.counters,
            self.pins,
            ctx=engine.shape.ctx,
            kv_bytes_per_token=engine.shape.kv_bytes_per_token,
            transfer_bytes=engine.shape.transfer_bytes,
            release=engine.release,
            keeps_on=self.disk.name,
        )

    def _saved_per_byte(self, entry: Entry) -> float:
        # The unit is the prefill of one token. Later tokens cost more, but counting that would rank the end of a long prompt
        # above the beginning of every other prompt.
        per_token = self._kv_bytes_per_token
        if entry.state:
            return worth(self.gap(entry), self.memory.state_bytes, per_token, protected=entry.protected)
        if not per_token:
            return 0.0
        return LOOSE / per_token if self._stateful else entry.length / self.memory.cell_bytes

    def gap(self, state: Entry) -> int:
        """Tokens between a checkpoint and the one before it on its chain: the prefill that it saves."""
        if state.gap:
            return state.gap
        block = self.index.get(state.parent)
        while block is not None and block.start:
            if self.marked(block.parent):
                return state.stop - block.start
            block = self.index.get(block.parent)
        return state.stop

    def marked(self, key: BlockId) -> bool:
        """Whether there is a checkpoint at the end of a block or open tail."""
        return self.index.checkpoint(key, canonical_only=False) is not None

    def publish(
        self, entry: Entry, cell: Cell, now: float, *, canonical: bool, size: int | None = None, computed: bool = True
    ) -> None:
        """Adds an entry, which is complete in its cell, to the index, and offers it to the lower tiers.

        Args:
            computed: whether this server computed it.
        """
        for shorter in () if entry.state else self.index.covered(entry.parent, entry.tokens):
            if not (shorter.holds or shorter.pinned or self.marked(shorter.id)):  # `thin` decides about tails with a checkpoint
                self.memory_budget.drop(shorter)
        if not self.index.add(entry, self.memory.name, canonical=canonical):
            self.memory.release(cell)
            return
        self.memory.commit(entry.id, cell, size)
        known = self.index.get(entry.id)
        assert known is not None
        known.gap, known.protected = entry.gap, entry.protected
        self.pins.came(known)
        self.retention.use(known, now, anew=True)
        self.counters["saved"] += 1
        self.offload.offer(known)
        if computed:
            self.shared_offer.computed(known)
        state = self.index.get(checkpoint_id(entry.id))
        if state is not None:  # it waited for its block
            self.offload.offer(state)

    def label(self, entry: Entry, canonical: bool) -> Label:
        """The description of an entry on disk."""
        tokens = tuple(entry.tokens.tolist())
        seconds = (self.gap(entry) if entry.state else len(tokens)) * self.seconds
        kind: EntryKind = STATE if entry.state else KV
        fingerprint, parent, start = self._fingerprint, entry.parent, entry.start
        return Label(entry.id, parent, fingerprint, start, tokens, canonical, seconds, kind, entry.written, entry.owner)

    def spent(self, entry: Entry) -> bool:
        """Whether the time of an entry is over, or a user has deleted everything of that time.

        What is still on disk after such a deletion was spared, because a pinned chain needs it, or is younger.
        """
        if self.expired(entry.owner, entry.written):
            return True
        if entry.written > self.terms.before or self._on_disk(self.index.get(entry.id)):
            return False
        return not (entry.state and self._stays(entry.parent))

    def _stays(self, last: BlockId) -> bool:
        """Whether all text up to a block or open tail is spared or younger. A checkpoint at its end is as old as the oldest."""
        block = self.index.get(last)
        while block is not None and (block.written > self.terms.before or self._on_disk(block)):
            if not block.start:
                return True
            block = self.index.get(block.parent)
        return False

    def _on_disk(self, entry: Entry | None) -> bool:
        return entry is not None and self.disk.name in entry.copies

    def usable(self, entry: Entry) -> bool:
        """Whether a request may load an entry: its time is not over, and nobody is deleting it, or what it follows."""
        hidden = entry.owner in self.barred.owners and self.disk.name not in entry.copies
        return not (hidden or entry.id in self.barred or entry.parent in self.barred or self.spent(entry))

    def expired(self, owner: bytes, written: float) -> bool:
        """Whether the time is over of what was written at a time."""
        return written <= self.terms.cut(owner, self.wall())

    def erase(self, entry: Entry) -> None:
        """Removes an entry from memory, with its ghost."""
        state = self.index.get(checkpoint_id(entry.id))
        self.memory_budget.drop(entry)
        self.retention.forget_ghosts([entry.id] if state is None else [entry.id, state.id])
        self.counters["erased"] += 1

    def forget_hints(self) -> Iterator[None]:
        """Forgets the fingerprints of conversations, and all ghosts, in pieces."""
        self.disk.keep(())
        yield from self.conversation_fingerprints.clearing()
        yield from self.retention.forget_all_ghosts()

    def _stored(self, key: BlockId) -> None:
        if self.pins.stored(key):
            self.disk.pin([key])
        if (request_traits := self.retention.request_traits(key)) != UNKNOWN_REQUEST:
            self.disk.replied([key], request_traits)

    def check(self, prefixes: Iterable[HeldPrefix] = ()) -> None:
        """Raises AssertionError if index, retention and memory disagree.

        Args:
            prefixes: all that jobs hold.
        """
        self.index.check()
        self.memory.check()
        name, writing, reading = self.memory.name, self.offload.writing, self.shared_offer.reading
        held = [entry for entry in self.index if name in entry.copies]
        assert len(held) == len(self.memory) == len(self.retention)
        assert all(entry.id in self.memory for entry in held)
        self.pins.check()
        needed = Counter(id(entry) for one in prefixes for entries in (one.here, one.brought) for entry in entries.values())
        for entry in self.index:
            assert entry.holds == (entry.id in writing) + (entry.id in reading) + needed[id(entry)]
