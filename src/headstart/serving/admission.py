"""Admission: chooses the slot of a job, and loads the planned entries into it before the prefill.

Used from the engine thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from headstart.explain.explain import CacheView, Explanation, RequestView
from headstart.explain.fingerprint import ConversationFingerprint
from headstart.explain.history import History
from headstart.interfaces.engine import Engine
from headstart.interfaces.tokens import common_prefix
from headstart.prefix_cache.blocks import Chain
from headstart.prefix_cache.checkpoints import LATTICE, protected_points
from headstart.prefix_cache.entry import Entry
from headstart.prefix_cache.planner import Costs, Mode, Plan, keepable, known, plan, restorable
from headstart.serving.cache import Cache
from headstart.serving.job import Job
from headstart.serving.kv_restore import Restored
from headstart.serving.slots import Slot

MISSES = 4
"""After so many failed restores, a request no longer uses the cache."""


OUTLIER = 4
"""A restore counts as at most so many times as slow as restores were: machines stall."""


@dataclass(slots=True)
class Pace:
    """Measured seconds per token, smoothed. `prefill` is 0 until the first call.

    A restore that looks too slow is not planned, so nothing would ever show that it is not. Therefore each prompt that is
    computed for this reason makes restores look faster (`passed_over`).
    """

    prefill: float = 0.0
    restore: float = 1e-6

    def prefilled(self, seconds: float, tokens: int) -> None:
        cost = seconds / tokens
        self.prefill = _smooth(self.prefill, cost) if self.prefill else cost

    def restored(self, seconds: float, tokens: int) -> None:
        self.restore = _smooth(self.restore, min(seconds / tokens, OUTLIER * self.restore))

    def passed_over(self) -> None:
        """A prompt is computed although entries have it."""
        self.restore *= 0.8

    def tokens(self, seconds: float) -> int:
        """The number of tokens that can be prefilled in `seconds`; 0 if the pace is not known yet."""
        return int(seconds / self.prefill) if self.prefill else 0

    def saved(self, live: int, restored: int) -> float:
        """Seconds of prefill that cached tokens save, less what restoring them takes; 0 if the pace is not known yet."""
        return max(0.0, (live + restored) * self.prefill - restored * self.restore) if self.prefill else 0.0

    @property
    def costs(self) -> Costs:
        return Costs(self.prefill or 1e-3, self.restore)


class Admission:
    """Plans jobs, and loads plans into slots."""

    def __init__(
        self,
        engine: Engine,
        cache: Cache,
        slots: Sequence[Slot],
        mode: Mode,
        history: History,
        template: str,
        clock: Callable[[], float],
    ) -> None:
        self.pace = Pace()
        self._engine = engine
        self._cache = cache
        self._slots = slots
        self._mode = mode
        self._history = history
        self._template = template
        self._clock = clock

    # ── waiting ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def must_wait(self, job: Job, running: Sequence[Job]) -> bool:
        """Whether another job is computing a longer prefix of this prompt than the cache has."""
        traits = self._mode.traits
        if not job.request.params.reuse or not traits.movable:
            return False
        if job.waits_for is not None:
            other, goal = job.waits_for
            if other.prefilling and other.slot is not None and len(other.slot) < goal:
                return True
            job.waits_for = None
        others = [other for other in running if other.prefilling and other.root == job.root and other.request.params.reuse]
        best = self.available(job.chain) if others else 0
        for other in others:
            shared = min(common_prefix(other.chain.tokens, job.chain.tokens), len(job.chain) - 1)
            shared = shared // traits.block_size * traits.block_size
            assert other.slot is not None
            if shared > best and shared > len(other.slot) // traits.block_size * traits.block_size:
                job.waits_for = other, shared
                if traits.stateful:
                    other.points, other.protected = (*other.points, shared), other.protected | {shared}
                return True
        return False

    def restorable(self, chain: Chain) -> Sequence[Entry]:
        """The stored entries that a prompt could begin with: blocks, and perhaps a checkpoint."""
        found = restorable(self._cache.index, chain, self._mode)
        return (*found.entries, *([] if found.state is None else [found.state]))

    def available(self, chain: Chain) -> int:
        """Tokens of a prompt that need no computation: they are live in a slot, or stored."""
        index = self._cache.index
        kept = max(keepable(slot.view(), chain, index, self._mode).tokens for slot in self._slots)
        return max(kept, restorable(index, chain, self._mode).tokens)

    def loadable(self, chain: Chain) -> int:
        """The same, without entries that must not be loaded any more: they are being deleted, or their time is over."""
        found, usable = restorable(self._cache.index, chain, self._mode), self._cache.store.usable
        entries = [*takewhile(usable, found.entries)]
        whole = len(entries) == len(found.entries) and (found.state is None or usable(found.state))
        kept = max(keepable(slot.view(), chain, self._cache.index, self._mode).tokens for slot in self._slots)
        if whole:
            return max(kept, found.tokens)
        return kept if found.state is not None or not entries else max(kept, entries[-1].stop)

    # ── starting ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def start(self, job: Job, *, hurry: float | None) -> bool:
        """Gives a free slot to a job and loads the plan into it. False if the caller must try again.

        Args:
            hurry: seconds that a read from disk may take while replies are running; None for no limit.
        """
        if job.request.params.reuse:
            self._publish_for(job)
        choice = self._choose(job)
        if hurry is not None and not self._cache.kv_restore.prefetch(choice, hurry):
            return False
        job.started = job.started or self._clock()
        job.sampler = self._engine.sampler(job.sampling(self._engine), job.request.grammar)
        slot = self._slots[choice.slot]
        branch = 0
        if self._mode.traits.stateful and job.request.params.reuse:
            branch = known(job.chain, self._cache.index, [slot.view() for slot in self._slots])
        if choice.keep < len(slot):
            self._cache.kv_save.save(slot, spare=choice.entries)
            choice = self._choose(job, only=slot)  # the save may have added or evicted entries
        job.slot = slot
        slot.busy = True
        if choice.passed_over:
            self.pace.passed_over()
        restored = self.load(job.chain, choice)
        if restored is None:
            job.misses += 1  # the bad entry has left the index: plan again without it
            return False
        job.plan, job.tiers = restored.plan, self._with_shared(job, restored)
        job.before = min(job.before, job.plan.start)  # the rest of it is lost, and computed again
        job.explanation, job.explained = self._explain(job, job.plan.start, choice.passed_over), self._history.explains
        job.seen = self._cache.seen(job.chain, job.plan)
        self._cache.hit(job.chain, job.plan)
        if self._mode.traits.stateful:
            block_size, landmarks = self._mode.traits.block_size, job.request.prompt.landmarks
            job.points = LATTICE.points(job.plan.start, len(job.chain), block_size, branch, landmarks)
            job.protected = protected_points(len(job.chain), block_size, branch, landmarks)
        slot.begin(job.started, job.request_traits(), self._cache.store.wall())
        return True

    def _with_shared(self, job: Job, restored: Restored) -> dict[str, int]:
        """The restored tokens of each tier. What the shared tier brought for this job was in memory for a moment only.

        Unless it was evicted to the disk since, and has come from there.
        """
        came = (job.fetched | job.held.brought.keys()) - self._cache.prefetch.fetched
        if not came:
            return restored.tiers
        start, memory = restored.plan.start, self._cache.memory.name
        brought = sum(min(one.stop, start) - one.start for one in restored.plan.restore if one.id in came)
        return {**restored.tiers, memory: restored.tiers.get(memory, 0) - brought, self._cache.shared.name: brought}

    def load(self, chain: Chain, choice: Plan) -> Restored | None:
        """Loads a plan into its slot, or less of it if memory is short. None if an entry is bad; the slot is then empty.

        Raises what the engine raises. The slot is then empty too.
        """
        try:
            return self._load(self._slots[choice.slot], chain, choice)
        except Exception:
            self.empty(self._slots[choice.slot])
            raise

    def _load(self, slot: Slot, chain: Chain, choice: Plan) -> Restored | None:
        restored: Restored | None = Restored(choice, {})
        if choice.entries:
            begun = self._clock()
            restored = self._cache.kv_restore.restore(slot, chain, choice)
            if restored is not None and restored.plan.restored:
                seconds = self._clock() - begun
                self.pace.restored(seconds, restored.plan.start)
                self._cache.store.listener.restored(restored.tiers, seconds)
        elif choice.keep < len(slot) and choice.keep:
            self._engine.truncate(slot.number, choice.keep)
            slot.truncate(choice.keep)
        if restored is None or not restored.plan.start:
            self.empty(slot)
            slot.assign(chain, 0, 0)
        return restored

    def empty(self, slot: Slot) -> None:
        """Empties a slot. If the engine cannot do it, nothing that it holds is saved."""
        slot.truncate(0)
        slot.dirty = False
        self._engine.truncate(slot.number, 0)

    def save_live(self, chain: Chain) -> None:
        """Copies to memory what a slot holds of a prompt beyond memory. What is restored replaces all of a slot, so it cannot
        be joined with what is live."""
        found = restorable(self._cache.index, chain, self._mode).tokens
        for slot in self._slots:
            if keepable(slot.view(), chain, self._cache.index, self._mode).tokens > found:
                slot.dirty = True  # it may have been saved, and evicted since
                self._cache.kv_save.save(slot, needed=True)

    def _choose(self, job: Job, only: Slot | None = None) -> Plan:
        reuse = job.request.params.reuse and job.misses < MISSES
        return self.choose(job.chain, self._mode_of(job), only=only, reuse=reuse)

    def _mode_of(self, job: Job) -> Mode:
        return replace(self._mode, settles=self._mode.settles and job.request.settles)

    def choose(self, chain: Chain, mode: Mode, *, only: Slot | None = None, reuse: bool = True) -> Plan:
        """The cheapest plan. With `only`, it uses that slot, free or not."""
        slots = [slot.view() for slot in self._slots] if only is None else [replace(only.view(), free=True)]
        chosen = plan(chain, self._cache.index, slots, self.pace.costs, mode, reuse=reuse)
        assert chosen is not None
        return chosen

    def _publish_for(self, job: Job) -> None:
        """Saves the KV of slots that hold more of the prompt than memory, unless the job can simply continue in them."""
        index, mode = self._cache.index, self._mode_of(job)
        found = restorable(index, job.chain, mode).tokens
        for slot in self._slots:
            if slot.dirty:
                kept = keepable(slot.view(), job.chain, index, mode).tokens
                if kept > found and (slot.busy or kept < len(slot)):
                    self._cache.kv_save.save(slot, needed=True)

    # ── explaining ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _explain(self, job: Job, start: int, passed_over: int) -> Explanation | None:
        """Why the request computes more than its new tokens. `passed_over`: see `Plan`."""
        request, traits, token_bytes = job.request, self._mode.traits, self._engine.tokenizer.token_bytes
        asked = RequestView(job.root, request.prompt, request.params.reuse, request.tenant, request.session)
        cached = CacheView(
            start,
            traits.block_size,
            self._mode.exact,
            traits.sliceable,
            known_kv=lambda: self._known_kv(job),
            elsewhere=lambda: self._cache.elsewhere(job.chain, request.prompt.salt),
            otherwise=lambda: self._cache.otherwise(ConversationFingerprint.of(request.prompt, self._template)),
            characters=lambda tokens: len(b"".join(map(token_bytes, tokens.tolist())).decode("utf-8", "replace")),
            pace=self.pace.prefill or None,
            passed_over=passed_over,
            not_fetched=job.not_fetched,
        )
        return self._history.explain(asked, cached)

    def _known_kv(self, job: Job) -> int:
        """Leading tokens whose KV is stored, with or without a checkpoint."""
        if not self._mode.traits.movable:
            return 0 if self._mode.traits.sliceable else len(job.chain)
        return self._cache.index.match(job.chain, len(job.chain) - 1, canonical_only=self._mode.exact, partial=False).tokens

    def shared(self, slot: Slot) -> list[int]:
        """For each other slot of the same root, the length of the prefix that it shares with this one."""
        others = (other for other in self._slots if other is not slot and other.root == slot.root)
        return [common_prefix(other.tokens, slot.tokens) for other in others]


def _smooth(old: float, new: float) -> float:
    return 0.7 * old + 0.3 * new
