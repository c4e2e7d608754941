"""Eviction: which entry of the full memory tier is dropped next (in the order of `eviction_order`), and which one is admitted.

An entry that was evicted, or was not admitted, leaves a *ghost*: the record of its uses. When the entry comes again, its
earlier uses still count. So a new entry that is used often is admitted in the end, and one large prompt that is used once never
is.

Ranks change with time. They are computed again in rounds, the lowest first. A look for a victim goes on by `HAND` entries, like
the hand of a clock, so no call looks at all of them; the hand moves again `PAUSE` later. In a small tier, one call ranks all
leaves. There is at most one round a second. It begins with learning, if the reuse model has enough new data. An entry is ranked
again before it is evicted.

A rank is at most as old as two rounds: a leaf may be near the beginning of one and near the end of the next. That error is
small, because a rank depends on the logarithm of the age: see decisions/2026-11-24-ranks-by-a-hand.md.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from headstart.interfaces.tokens import BlockId
from headstart.prefix_cache.entry import Entry
from headstart.prefix_cache.eviction_order import EvictionOrder
from headstart.prefix_cache.ghosts import Ghosts
from headstart.prefix_cache.index import Index
from headstart.prefix_cache.reuse_model import UNKNOWN_REQUEST, RequestTraits, ReuseHistory, ReuseModel, ReuseStats
from headstart.prefix_cache.reuse_sample import SAMPLE, ReuseSample

GHOSTS, ENTRIES_PER_GHOST = 1 << 15, 2
"""Most ghosts: this many, or one for so many entries in the tier, whichever is more."""
STALE = 1.0
"""Least seconds from one round to the next."""
HAND, PAUSE = 64, 0.005
"""Leaves that are ranked again in a look for a victim, until the round is over, and least seconds until the hand goes on again:
the victims of one call of the engine share a move."""
AT_ONCE = 1024
"""Most leaves that are ranked again in one call, which takes a millisecond."""
TRIES = 8
"""Most leaves that are ranked again because they seem to go next."""
NUMBERS = 1 << 14
"""Different numbers that entries share, after which a round begins with none."""
ASIDE = 16
"""Leaves that could not go, of which each look for a victim asks whether they can go now."""


class Retention:
    """What the memory tier keeps and evicts. Times are seconds of one clock that never goes back.

    It writes the part of each `Entry` that says how the entry was used. So an index has one `Retention`.

    Args:
        saved_per_byte: tokens of prefill that an entry saves, per byte that it occupies.
        by_owner: whether victims of some owners are asked for.
    """

    def __init__(self, tier: str, index: Index, saved_per_byte: Callable[[Entry], float], *, by_owner: bool = True) -> None:
        self._tier = tier
        self._index = index
        self._saved = saved_per_byte
        self._reuse = ReuseModel()
        self._count = 0  # entries in the tier
        self._ghosts = Ghosts()
        self._apart: dict[BlockId, int] = {}  # number of entries that follow an id which is not in the tier, such as a root
        self._sample = ReuseSample(self._everything)
        self._round: Iterator[None] | None = None
        self._order: EvictionOrder[Entry] = EvictionOrder(by_owner=by_owner)
        self._now = 0.0
        self._round_began = self._moved = 0.0
        self._numbers: dict[float, float] = {}  # one object for equal numbers, of which there are few: each takes 24 bytes

    def _value(self, key: BlockId, stats: ReuseHistory, now: float) -> float:
        """The rank of an entry: the lowest is evicted first."""
        return self._reuse.value(stats, now)

    def __len__(self) -> int:
        return self._count

    def seen(self, ids: Sequence[BlockId]) -> tuple[int, int]:
        """How many of the first ids of a chain were ever used in this tier, and how many different entries have followed the
        last of these; -1 if none was used.
        """
        known = 0
        for key in ids:
            if self._index.get(key) is None and key not in self._ghosts:
                break
            known += 1
        last = self._history(ids[known - 1]) if known else None
        return known, -1 if not known else 0 if last is None else last.children

    def use(self, entry: Entry, now: float, *, anew: bool = False) -> None:
        """Counts a use of a stored entry. The first use admits it to the tier. Callers count a hit for all ancestors too.

        Args:
            anew: compute again what the entry saves, because it may have changed.
        """
        self._now = now
        known = self._index.get(entry.id)
        if known is None:
            return
        if known.uses:
            if not known.followers:
                self._order.remove(known)
            self._reuse.returned(known, now)
            known.last = now
            known.uses += 1
        else:
            self._admit(known, now)
            anew = True
        if anew:
            saved = self._saved(known)
            known.saved_per_byte = self._numbers.setdefault(saved, saved)
        if not known.followers:
            self._push(known)

    def _admit(self, entry: Entry, now: float) -> None:
        stats = self._revived(entry, now)
        if stats is None:
            entry.last, entry.uses, entry.request_traits, entry.children = now, 1, UNKNOWN_REQUEST, 0
        else:
            entry.last, entry.uses = stats.last, stats.uses
            entry.request_traits, entry.children = stats.request_traits, stats.children
        entry.followers = self._apart.pop(entry.id, 0)
        self._count += 1
        if self._count > SAMPLE:
            self._sample.put(entry.id, entry)
        self._follow(entry.parent, 1)

    def replied(self, keys: Iterable[BlockId], request_traits: RequestTraits) -> None:
        """Sets the traits of the request that has used these entries last."""
        for key in keys:
            entry = self._index.get(key)
            if entry is not None and entry.uses:
                entry.request_traits = request_traits
                if not entry.followers:
                    self._push(entry)

    def request_traits(self, key: BlockId) -> RequestTraits:
        """The traits that `replied` has set."""
        entry = self._in_tier(key)
        return UNKNOWN_REQUEST if entry is None else entry.request_traits

    def last_use(self, key: BlockId) -> float | None:
        """When an entry of the tier was used last. May be called on any thread."""
        entry = self._in_tier(key)
        return None if entry is None else entry.last

    def uses(self, key: BlockId) -> int | None:
        """How often an entry of the tier was used. May be called on any thread."""
        entry = self._in_tier(key)
        return None if entry is None else entry.uses

    def soon(self, count: int, owners: Collection[bytes] = ()) -> list[Entry]:
        """About the next entries to be evicted, in order. May be called on any thread.

        Args:
            owners: those above their quota. Their entries go first.
        """
        return [entry for entry in self._order.soon(count, owners) if self._may_go(entry)]

    def is_leaf(self, key: BlockId) -> bool:
        """Whether an entry has no children in the tier."""
        entry = self._in_tier(key)
        return not (self._apart.get(key) if entry is None else entry.followers)

    def keep(self, entry: Entry) -> None:
        """An entry of the tier is `kept` from now on."""
        self._order.remove(entry)

    def release(self, entry: Entry) -> None:
        """An entry of the tier is no longer `kept`."""
        self._push(entry)

    def outranks(self, newcomer: Entry, victim: Entry, now: float, request_traits: RequestTraits = UNKNOWN_REQUEST) -> bool:
        """Whether `newcomer`, if admitted now, would rank at least as high as `victim`."""
        stats = self._ghosts.get(newcomer.id) or ReuseStats(0.0, now, 0)
        stats.use(now)
        stats.saved_per_byte, stats.request_traits = self._saved(newcomer), request_traits
        return self._value(newcomer.id, stats, now) >= self._value(victim.id, victim, now)

    def refuse(self, entry: Entry, now: float, request_traits: RequestTraits = UNKNOWN_REQUEST) -> None:
        """Counts the use of an entry that was not admitted. If the tier has an older copy of it, that one is used."""
        if self._in_tier(entry.id) is not None:
            self.use(entry, now)
            return
        self._now = now
        stats = self._revived(entry, now) or ReuseStats(0.0, now, 1)
        stats.request_traits = request_traits
        self._add_ghost(entry.id, stats)

    def forget(self, entry: Entry) -> None:
        """Removes an entry that has left the tier; its ghost stays."""
        if not entry.uses:
            return
        self._order.remove(entry)
        self._count -= 1
        self._sample.discard(entry.id)
        self._add_ghost(entry.id, entry)
        if entry.followers:
            self._apart[entry.id] = entry.followers
        entry.uses = entry.followers = 0
        parent = self._follow(entry.parent, -1)
        if parent is not None:
            self._push(parent)

    def forget_ghosts(self, keys: Iterable[BlockId]) -> None:
        """Drops the ghosts of these entries, because their text was deleted."""
        for key in keys:
            stats = self._ghosts.pop(key)
            if stats is not None:
                self._lose(key, stats)

    def forget_all_ghosts(self) -> Iterator[None]:
        """Drops all ghosts, in pieces."""
        for dropped in self._ghosts.clearing():
            for key, stats in dropped:
                self._lose(key, stats)
            yield

    def victim(self, owners: Collection[bytes] = ()) -> Entry | None:
        """The entry to evict next; None if none may go. Does not remove it: call `forget`.

        Args:
            owners: if one of their entries may be evicted, it is one of theirs.
        """
        due = len(self._order) <= AT_ONCE or self._now - self._moved >= PAUSE
        if due and (self._round or self._now - self._round_began >= STALE):
            self._moved = self._now
            self._move_hand()
        if self._order.any_aside:
            self._return(self._order.aside(ASIDE))
        found = self._lowest(owners) if self._round else self._order.lowest(owners, self._may_go)
        if found is None and self._return(self._order.aside()):
            found = self._lowest(owners)
        return found

    def _lowest(self, owners: Collection[bytes]) -> Entry | None:
        """The entry that goes next. While ranks may be old, its own is computed again. If it rose, another may go first."""
        entry = self._order.lowest(owners, self._may_go)
        for _ in range(TRIES if self._round else 0):
            if entry is None or (rank := self._rank(entry)) <= (entry.rank or 0.0):
                break
            self._order.push(entry, rank)
            entry = self._order.lowest(owners, self._may_go)
        return entry

    def _move_hand(self) -> None:
        """A bounded part of the work that ranks need."""
        if self._round is None:
            self._round, self._round_began = self._ranking(), self._now
            if len(self._numbers) > NUMBERS:
                self._numbers.clear()
        if self._round and next(self._round, self._round) is self._round:
            self._round = None

    def _ranking(self) -> Iterator[None]:
        """A round, in steps: learning if it is due, then ranking all leaves again."""
        if self._reuse.due:
            sample, weight = self._sample.drawn(self._count, len(self._ghosts))
            yield from self._reuse.learning(sample, self._now, weight, self._ghosts.sampled(weight))
        if len(self._order) <= AT_ONCE:
            self._order.renew_all(self._rank)
            return
        while self._order.renew(HAND, self._rank):
            yield

    def _everything(self) -> Iterator[tuple[BlockId, ReuseHistory]]:
        """The entries in the tier: leaves and what is before them. Those that only kept entries follow are left out.

        The tier may change meanwhile: some may be left out then.
        """
        passed, get = set[BlockId](), self._index.get
        for leaf in self._order:
            entry: Entry | None = leaf
            while entry is not None and entry.uses and (key := entry.id) not in passed:
                passed.add(key)
                yield key, entry
                entry = get(entry.parent)

    def _return(self, entries: Iterable[Entry]) -> bool:
        """Puts leaves into the order again that may go now. Whether there are any."""
        found = [entry for entry in entries if self._may_go(entry)]
        for entry in found:
            self._push(entry)
        return bool(found)

    def _in_tier(self, key: BlockId) -> Entry | None:
        entry = self._index.get(key)
        return entry if entry is not None and entry.uses else None

    def _may_go(self, entry: Entry) -> bool:
        return not entry.needed and self._tier in entry.copies

    def _revived(self, entry: Entry, now: float) -> ReuseStats | None:
        """The history of an entry that is used now, with this use; its ghost is removed. None if this is the first use."""
        stats = self._ghosts.pop(entry.id)
        if stats is None:
            # What is at position 0 follows a root, and roots have no history.
            if entry.start and not entry.state and entry.length == self._index.block_size:
                self._add_child(entry.parent)
            return None
        self._reuse.returned(stats, now)
        stats.use(now)
        return stats

    def _history(self, key: BlockId) -> Entry | ReuseStats | None:
        """How an entry was used, which is in the tier or has a ghost."""
        return self._in_tier(key) or self._ghosts.get(key)

    def _add_child(self, key: BlockId) -> None:
        """Another entry follows this one for the first time."""
        history = self._history(key)
        if history is not None:
            history.children += 1
            if not isinstance(history, Entry):
                self._ghosts.replace(key, history)

    def _add_ghost(self, key: BlockId, history: ReuseHistory) -> None:
        self._reuse.left()
        for dropped, ghost in self._ghosts.put(key, history, max(GHOSTS, self._count // ENTRIES_PER_GHOST)):
            self._lose(dropped, ghost)

    def _lose(self, key: BlockId, ghost: ReuseStats) -> None:
        """A ghost is dropped."""
        self._reuse.lost(ghost, self._now)

    def _rank(self, entry: Entry) -> float:
        rank = self._value(entry.id, entry, self._now)
        return self._numbers.setdefault(rank, rank)

    def _push(self, entry: Entry) -> None:
        """Puts an entry into the order, if it is a leaf that may be evicted."""
        if not (entry.followers or entry.pinned):
            self._order.push(entry, self._rank(entry))

    def _follow(self, parent: BlockId, count: int) -> Entry | None:
        """Counts an entry that follows `parent` in the tier, or (-1) does no longer. Returns the parent, if it is there."""
        entry = self._index.get(parent)
        if entry is not None and entry.uses:
            entry.followers += count
            if entry.followers == 1:
                self._order.remove(entry)
            return entry
        if followers := self._apart.get(parent, 0) + count:
            self._apart[parent] = followers
        else:
            del self._apart[parent]
        return None
