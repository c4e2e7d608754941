"""Shared fetch: a request waits, without a slot, while the rest of its prompt arrives from the shared tier. Others run.

It stops waiting when everything has arrived, after a short time without progress (`STALL`), or when memory is full. Then it
computes from what has arrived (and `late_fetch` goes on asking). While it waits, what it has in memory is held. Used from the
engine thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from headstart.explain.causes import Cause
from headstart.explain.explain import NotFetched
from headstart.interfaces.engine import Engine
from headstart.interfaces.tier import STATE
from headstart.interfaces.tokens import BlockId, as_tokens, common_prefix
from headstart.prefix_cache.blocks import Chain, checkpoint_id, last_block_boundary
from headstart.prefix_cache.entry import Entry
from headstart.prefix_cache.quota import owner_of
from headstart.serving.admission import Admission
from headstart.serving.held_prefix import HeldPrefix
from headstart.serving.job import Job
from headstart.serving.kv_store import KvStore
from headstart.serving.landing import Copier, Landing
from headstart.serving.shared_audit import SharedAudit
from headstart.tiers.shared_tier import Arrival, Fetch, FetchRequest, Unfetched

STALL = 0.25
"""Seconds without progress after which a request no longer waits."""
SHARE = 0.5
"""Share of the memory budget up to which several requests may hold entries. Beyond it they take turns: each needs its
whole prompt in memory, and soon frees it again."""
CAUSES: Final[dict[Unfetched, Cause]] = {"failed": Cause.STORE, "slow": Cause.SLOWER}


class SharedFetch:
    """Fetches for waiting jobs.

    Args:
        stateful: whether KV is of use only up to a checkpoint.
        deletion_count: `Expiry.deletion_count`. What was asked for before it grew may have been deleted since.
        wake: wakes the scheduler. It is called on other threads.
    """

    def __init__(
        self,
        engine: Engine,
        store: KvStore,
        admission: Admission,
        audit: SharedAudit,
        *,
        stateful: bool,
        deletion_count: Callable[[], int],
        wake: Callable[[], None],
    ) -> None:
        self.deletion_count = deletion_count
        self._tier = store.shared
        self._store = store
        self._admission = admission
        self._audit = audit
        self._stateful = stateful
        self._wake = wake
        self._clock = store.clock
        self._fingerprint = engine.fingerprint
        self._kv_bytes = engine.traits.block_size * engine.shape.kv_bytes_per_token
        self._state_bytes = engine.shape.state_bytes
        self._movable = engine.traits.movable
        self._waiting: list[Job] = []
        self._holding: set[HeldPrefix] = set()  # those that hold something
        self._held = self._held_entries = 0  # bytes, and their number
        self._aloft = 0  # bytes of cells into which something is being copied
        self._copier = Copier(wake)

    def begin(self, job: Job) -> None:
        """Asks for what the job's prompt lacks. The job is then `parked`, unless the tier is off or has nothing for it."""
        if not self.serves(job):
            return
        if (other := self.bringing(job)) is not None:
            self.follow(job, other)
            return
        wanted = self.wanted(job.chain)
        fetch = None if wanted is None else self.fetch(wanted)
        if fetch is not None:
            job.deletion_count = self.deletion_count()
            self.wait(job, fetch)
        elif wanted is not None and self._tier.fetching(0) is None:
            job.not_fetched = NotFetched(Cause.STORE, 0)

    def serves(self, job: Job) -> bool:
        """Whether the tier may have something for a job."""
        return self._tier.on and self._movable and job.request.params.reuse

    def bringing(self, job: Job) -> Job | None:
        """Another job that fetches what this one lacks first."""
        others = [other for other in self._waiting if other.fetch is not None and other.root == job.root]
        lacking = self._first_lacking(job) if others else None
        return next((other for other in others if lacking in other.chain.ids), None)

    def wait(self, job: Job, fetch: Fetch) -> None:
        """Parks a job until this has arrived."""
        job.fetch = fetch
        self._waiting.append(job)
        self._pin_here(job)

    def follow(self, job: Job, other: Job) -> None:
        """Parks a job that lacks what another one fetches. That one holds what they share, and might wait for this one."""
        self._let_go(job)
        shared = common_prefix(job.chain.tokens, other.chain.tokens) // job.chain.block_size
        job.follows, job.last_common = other, job.chain.ids[shared - 1] if shared else b""
        self._waiting.append(job)

    def step(self) -> None:
        """Takes in what has arrived, and lets jobs go on that need not wait any longer."""
        for job in list(self._waiting):
            if job.follows is not None:
                if job.follows.fetch is None or self._has_come(job.last_common):
                    self._go_on(job)
                    self.begin(job)  # what it wants beyond the other's prompt
            elif job.fetch is not None:
                self._poll(job)

    def _has_come(self, last_common: BlockId) -> bool:
        """Whether the last block that a job shares with the one that it follows is in memory. Blocks come in their order.

        A model with state needs a checkpoint too, which is at the end of the other's prompt.
        """
        entry = None if self._stateful else self._store.index.get(last_common)
        return entry is not None and entry.canonical and self._store.memory.name in entry.copies

    def _poll(self, job: Job) -> None:
        assert job.fetch is not None
        if job.deletion_count != self.deletion_count():
            self._give_up(job, job.fetch)
            return
        if self.crowded and not self._has_turn(job) and not job.fetch.over:
            return
        self.land(job.chain, job.held)
        full, arrivals = False, [] if job.held.landings.crowded else job.fetch.take()
        if arrivals and not (job.held.brought or job.held.landings):
            self._admission.save_live(job.chain)
            self._pin_here(job)
        for arrival in arrivals:
            full = full or not self.keep(job.chain, job.held, arrival)
        self.land(job.chain, job.held)
        stalled = not (arrivals or job.held.landings) and self._clock() > job.fetch.progress + STALL
        if full or stalled:
            job.fetch.stop(stalled=stalled)
        if stalled:  # the others would only wait as long again
            for other in [other for other in self._waiting if other.follows is job]:
                self._go_on(other)
        if full or stalled or (job.fetch.over and not job.held.landings):
            self._go_on(job)

    def _give_up(self, job: Job, fetch: Fetch) -> None:
        """What comes may have been deleted. What the store still has is asked for again while the job computes."""
        fetch.stop()
        for arrival in fetch.take():
            arrival.free()
        self._drop(job.held)
        self._go_on(job)

    def _drop(self, held: HeldPrefix) -> None:
        """Throws away what is being copied."""
        for landing in held.landings.landed(wait=True):
            self._aloft -= self._size(landing.entry)
            self._store.memory.release(landing.cell)
            landing.arrival.free()

    @property
    def crowded(self) -> bool:
        """Whether those that wait hold so much that they take turns."""
        return self._held + self._aloft > SHARE * self._store.memory.budget

    def _has_turn(self, job: Job) -> bool:
        """Whether it is the first of those that still fetch, and all other prompts are loaded."""
        fetching = [one for one in self._waiting if one.fetch is not None]
        return job is fetching[0] and self._held_entries == sum(len(one.held) for one in fetching)

    def _pin_here(self, job: Job) -> None:
        """What a job fetches is of use only behind what is here."""
        memory = self._store.memory
        for entry in self._admission.restorable(job.chain):
            if not self._store.usable(entry):
                break
            if memory.name in entry.copies and entry.id not in job.held.here:
                self._hold(entry, job.held, job.held.here)

    def _hold(self, entry: Entry, held: HeldPrefix, among: dict[BlockId, Entry]) -> None:
        entry.holds += 1
        self._held_entries += 1
        self._held += self._size(entry)
        among[entry.id] = entry
        self._holding.add(held)

    def _unpin(self, entry: Entry) -> None:
        entry.holds -= 1
        self._held_entries -= 1
        self._held -= self._size(entry)

    def unpin(self, key: BlockId) -> None:
        """Takes the holds of all prefixes from an entry that must be deleted. Who waits for it computes it."""
        for held in self._holding:
            for among in (held.here, held.brought):
                if (entry := among.pop(key, None)) is not None:
                    self._unpin(entry)

    def _size(self, entry: Entry) -> int:
        return self._store.memory.size(STATE) if entry.state else self._store.memory.cell_bytes

    def _go_on(self, job: Job) -> None:
        self.land(job.chain, job.held, wait=True)
        fetch = job.fetch if job.follows is None else job.follows.fetch
        if fetch is not None and fetch.unfetched is not None:
            job.not_fetched = NotFetched(CAUSES[fetch.unfetched], fetch.there)
        job.fetch = job.follows = None
        self._waiting.remove(job)

    def end(self, jobs: Iterable[Job]) -> None:
        """These jobs have loaded what they use, or have ended."""
        for job in jobs:
            if job.fetch is not None:
                job.fetch.stop()
            if job in self._waiting:
                self._go_on(job)
            self._let_go(job)

    def _let_go(self, job: Job) -> None:
        """Frees what a job holds. What was brought for it counts as that."""
        job.fetched.update(job.held.brought)
        self.free(job.held)

    # ── for prefixes that no job waits for too (`shared_preload`) ────────────────────────────────────────────────────

    def fetch(self, wanted: FetchRequest) -> Fetch | None:
        """Begins to fetch. None if that is of no use now."""
        return self._tier.fetch(wanted, self._wake)

    def free(self, held: HeldPrefix) -> None:
        """Frees what is held. What is still being copied has no use any more."""
        self._drop(held)
        for among in (held.here, held.brought):
            for entry in among.values():
                self._unpin(entry)
            among.clear()
        self._holding.discard(held)

    def _first_lacking(self, job: Job) -> BlockId | None:
        number = self._admission.available(job.chain) // job.chain.block_size
        return job.chain.ids[number] if number < len(job.chain.ids) else None

    def wanted(self, chain: Chain) -> FetchRequest | None:
        """What a prompt lacks; None if it lacks nothing."""
        index, block_size = self._store.index, chain.block_size
        end = last_block_boundary(len(chain), block_size)
        blocks = range(self._admission.available(chain) // block_size, end // block_size)
        if not blocks:
            return None
        keys = [chain.ids[block] for block in blocks]
        if self._stateful:
            keys += map(checkpoint_id, keys[:])
        here = frozenset(key for key in keys if (entry := index.get(key)) is not None and entry.canonical)
        pace = self._admission.pace
        return FetchRequest(
            chain,
            blocks,
            here,
            self._fingerprint,
            owner_of(chain.root),
            self._stateful,
            self._kv_bytes,
            self._state_bytes,
            pace.prefill,
            pace.restore,
        )

    def keep(self, chain: Chain, held: HeldPrefix, arrival: Arrival) -> bool:
        """Begins to store an object of a chain in memory. False if there is no room."""
        before = len(held.landings)
        fits = self._keep(held, arrival)
        if len(held.landings) == before:
            arrival.free()
        return fits

    def _keep(self, held: HeldPrefix, arrival: Arrival) -> bool:
        label, store = arrival.label, self._store
        state = label.kind == STATE
        entry = Entry(
            label.key, label.parent, as_tokens(label.tokens), label.start, state=state, owner=label.owner, written=label.written
        )
        if entry.id in store.offload.writing:  # the disk is reading the cell of a derived version
            return True
        if not store.usable(entry) or not store.index.wants(entry.id, store.memory.name, canonical=True):
            return True
        budget, now = store.memory_budget, self._clock()
        written = len(store.shared_offer.reading) * store.memory.cell_bytes  # held until the tier has written it
        if self._held + self._aloft + written + self._size(entry) + budget.transfer(entry.stop) > store.memory.budget:
            return False  # what is held must leave room for the buffer by which it is loaded
        if (cell := budget.take(entry, now, needed=True)) is None:
            budget.skip("restore", 1)
            return False
        copied = self._copier.copy(arrival.payload, store.memory.cell(cell))
        held.landings.add(Landing(entry, cell, arrival, copied))
        self._aloft += self._size(entry)
        return True

    def land(self, chain: Chain, held: HeldPrefix, *, wait: bool = False) -> None:
        """Publishes what has been copied, and holds it."""
        store, now = self._store, self._clock()
        for landing in held.landings.landed(wait=wait):
            entry, arrival = landing.entry, landing.arrival
            self._aloft -= self._size(entry)
            wanted = store.index.wants(entry.id, store.memory.name, canonical=True) and self._follows(chain, entry)
            if entry.id in store.offload.writing or not (store.usable(entry) and wanted):
                store.memory.release(landing.cell)  # it was computed meanwhile, or deleted, or its time is over
                arrival.free()
                continue
            size = len(arrival.payload) if entry.state else None
            store.publish(entry, landing.cell, now, canonical=True, size=size, computed=False)
            known = store.index.get(entry.id)
            assert known is not None
            self._hold(known, held, held.brought)
            self._audit.fetched(chain, arrival)
            arrival.free()

    def _follows(self, chain: Chain, entry: Entry) -> bool:
        """Whether what a block follows is there. A deletion may have taken it while the block was on its way: then it would
        be of no use, and would name what was deleted. (Checkpoints come before their blocks.)
        """
        return entry.state or entry.parent == chain.root or self._store.index.get(entry.parent) is not None

    def close(self) -> None:
        """Ends the thread that copies."""
        self._copier.close()
