"""A simulated replica: fetches, waits for a slot, prefills, decodes.

Between two events all rates are constant, so a replica moves from event to event. See `machine` for what is modelled.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from itertools import takewhile

from headstart.fleet.router.chains import PromptChain, common_blocks
from headstart.fleet.router.reports import RUMOUR, BlockKey, Load, ReplicaReport, Tier
from headstart.fleet.router.slots import SlotTimes
from headstart.fleet.simulator.machine import Machine
from headstart.fleet.simulator.tiers import BlockLru

_SMALL = 1e-7


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """A request at a replica.

    Attributes:
        reply: tokens of the reply that are left.
        left: seconds of prefill that are left, from the start in a slot on; before that, what is expected.
        lent: leading blocks that another prompt has computed in its slot.
        started: when it got its slot.
        computed: tokens that were computed.
    """

    number: int
    chain: PromptChain
    arrived: float
    reply: float
    left: float = 0.0
    lent: int = 0
    computed: int = 0
    fetched: int = 0
    started: float = math.nan
    first_token: float = math.nan


@dataclass(slots=True)
class Changes:
    """What has changed since the last report. `tiers`: for each tier, whether a block came or left."""

    tiers: dict[Tier, dict[BlockKey, bool]] = field(default_factory=lambda: {tier: {} for tier in Tier})
    arrived: list[str] = field(default_factory=list)
    done: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Stepped:
    """The requests that got their first token, and those whose reply is complete."""

    prefilled: list[SimulatedRequest]
    replied: list[SimulatedRequest]


class Replica:
    """One replica. Call `advance` before anything else happens at a time, and `step` after it.

    Args:
        shared: the shared tier of the fleet.
        block_size: tokens of a block.
    """

    def __init__(self, name: str, machine: Machine, shared: BlockLru, block_size: int) -> None:
        self.name = name
        self.ongoing = 0
        self.busy = 0.0
        self._machine = machine
        self._curve = machine.speed.prefill
        self._shared = shared
        self._block_size = block_size
        self._memory = BlockLru(machine.memory // block_size)
        self._disk = BlockLru(machine.disk // block_size)
        self._now = 0.0
        self._fetches: list[tuple[float, int, SimulatedRequest, int]] = []
        self._connected = 0.0
        self._waiting: list[SimulatedRequest] = []
        self._prefilling: list[SimulatedRequest] = []
        self._decoding: list[SimulatedRequest] = []
        self._unpublished: list[SimulatedRequest] = []
        self._rumours: dict[BlockKey, float] = {}
        self._changes = Changes()
        self._sequence = 0
        self._slot_times = SlotTimes(machine.slots)

    # ── time ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def advance(self, now: float) -> None:
        """Moves on to a time that is not after the next event."""
        prefill, decode = self._rates()
        passed, self._now = now - self._now, now
        for job in self._served():
            self.busy += passed * prefill
            job.left -= passed * prefill
        for job in self._decoding:
            job.reply -= passed * decode

    def next_event(self) -> float:
        """When something happens next by itself."""
        prefill, decode = self._rates()
        times = [self._fetches[0][0]] if self._fetches else []
        served = self._served()
        times += [self._now + max(0.0, job.left) / prefill for job in served]
        times += [self._now + max(0.0, job.reply) / decode for job in self._decoding]
        if self._free_slots:
            for job in self._waiting:
                times += [
                    self._now + (other.left - goal) / prefill for other, _, goal in self._computing(job) if other in served
                ]
        return min(times, default=math.inf)

    def _served(self) -> list[SimulatedRequest]:
        """The prompts that are being computed: the one with the least left, or all in turns."""
        if self._machine.ageing is None or not self._prefilling:
            return self._prefilling
        return [min(self._prefilling, key=self._rank)]

    def _rank(self, job: SimulatedRequest) -> float:
        """The prompt with the least is computed first. Those that wait keep their places, because all of them age alike."""
        return job.left + (self._machine.ageing or 0.0) * job.arrived

    def _rates(self) -> tuple[float, float]:
        """Seconds of prefill in a second for each prompt that is being computed, and tokens in a second for each reply."""
        prompts, replies = len(self._served()), len(self._decoding)
        step = self._step(replies)
        call = self._machine.stall if prompts else 0.0
        return (call / (call + step) / prompts if prompts else 0.0), (1.0 / (call + step) if replies else 0.0)

    def _step(self, replies: int) -> float:
        return self._machine.step + self._machine.step_reply * (replies - 1) if replies else 0.0

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def arrive(self, job: SimulatedRequest) -> None:
        """A request has come. It first fetches what only the shared tier has, if that is faster than computing it."""
        self.ongoing += 1
        self._changes.arrived.append(str(job.number))
        own = self._local(job)
        job.left = self._curve.seconds(own * self._block_size, job.chain.tokens)
        if not self._fetch(job, own):
            self._waiting.append(job)

    def _fetch(self, job: SimulatedRequest, own: int) -> bool:
        """Begins to fetch what follows the first `own` blocks. False if there is nothing, or computing it is faster."""
        keys, size, speed = job.chain.keys, self._block_size, self._machine.speed
        whole = own + self._beyond(keys, own)
        missing = sum(1 for key in keys[own:whole] if not self._here(key))
        wait = max(0.0, self._connected - self._now)
        seconds = speed.round_trip + missing * size * (speed.fetch or 0.0)
        if whole == own or wait + seconds >= self._curve.seconds(own * size, whole * size):
            return False
        self._connected = self._now + wait + seconds
        job.fetched += missing * size
        job.left = self._curve.seconds(whole * size, job.chain.tokens)
        heapq.heappush(self._fetches, (self._connected, job.number, job, whole))
        return True

    def _beyond(self, keys: list[BlockKey], start: int) -> int:
        """The number of blocks from number `start` on that could be fetched, or are here."""
        if self._machine.speed.fetch is None or start == len(keys):
            return 0
        if keys[start] in self._rumours and keys[start] not in self._shared:
            del self._rumours[keys[start]]
            self._changes.tiers[Tier.SHARED][keys[start]] = False
        return sum(1 for _ in takewhile(lambda key: key in self._shared or self._here(key), keys[start:]))

    def _here(self, key: BlockKey) -> bool:
        return key in self._memory or key in self._disk

    def _local(self, job: SimulatedRequest) -> int:
        """The leading blocks in memory, on disk or lent."""
        keys = job.chain.keys
        start = max(job.lent, self._memory.leading(keys))
        return start + sum(1 for _ in takewhile(self._here, keys[start:]))

    def step(self) -> Stepped:
        """Does what is due now."""
        while self._fetches and self._fetches[0][0] <= self._now + _SMALL:
            _, _, job, blocks = heapq.heappop(self._fetches)
            keys = job.chain.keys[:blocks]
            self._keep(keys)
            self._shared.use(keys)
            self._rumour(keys)
            self._waiting.append(job)
        finished = [job for job in self._prefilling if job.left <= _SMALL]
        for job in finished:
            self._prefilling.remove(job)
            job.first_token = self._now
            self._changes.done.append(str(job.number))
            self._keep(job.chain.keys)
            self._unpublished.append(job)
            self._decoding.append(job)
        replied = [job for job in self._decoding if job.reply <= _SMALL]
        for job in replied:
            self._decoding.remove(job)
            self._slot_times.ended(self._now - job.started)
            self.ongoing -= 1
        self._admit()
        return Stepped(finished, replied)

    @property
    def _free_slots(self) -> int:
        return self._machine.slots - len(self._prefilling) - len(self._decoding)

    def _admit(self) -> None:
        for job in self._waiting[:]:
            if not self._free_slots:
                return
            for other, shared, goal in self._alike(job):
                if other.left <= goal + _SMALL:
                    job.lent = max(job.lent, shared)
            if not any(self._computing(job)):
                self._waiting.remove(job)
                if not self._fetch(job, self._local(job)):  # what was evicted while it waited is fetched once more
                    self._start(job)

    def _start(self, job: SimulatedRequest) -> None:
        keys, size, speed = job.chain.keys, self._block_size, self._machine.speed
        found = self._local(job)
        memory = sum(1 for key in keys[:found] if key in self._memory)
        job.computed = job.chain.tokens - found * size
        job.left = self._curve.seconds(found * size, job.chain.tokens)
        job.left += size * (memory * speed.memory + (found - memory) * speed.disk)
        job.left += self._interruption(job)
        self._keep(keys[:found])
        job.started = self._now
        self._prefilling.append(job)

    def _call(self) -> float:
        """Seconds of a prefill call."""
        return self._machine.stall if self._decoding else self._machine.call

    def _interruption(self, job: SimulatedRequest) -> float:
        """How much longer a prompt takes because calls are not interrupted, as seconds of its own prefill.

        It waits for half of the call that runs, if others than those before it are being computed, and for the decoding step
        between its two last calls. In turns it waits for half a call of each other prompt at least. As much as its own time of
        the others' is in the rates already.
        """
        others, step, call, left = self._prefilling, self._step(len(self._decoding)), self._call(), job.left
        if not self._machine.call:
            return 0.0
        if self._machine.ageing is None:
            waits = sum(min(other.left, max(left, call / 2)) - min(other.left, left) for other in others)
            return (waits + step) * call / (call + step) / (len(others) + 1)
        running = min(others, key=self._rank, default=job)
        waits = min(running.left, call / 2) if self._rank(running) > self._rank(job) else 0.0
        return (waits + step) * call / (call + step)

    def _alike(self, job: SimulatedRequest) -> list[tuple[SimulatedRequest, int, float]]:
        """The prompts in slots that share more with a request than the cache has, with the number of shared blocks, and the
        seconds of prefill that they have left when these are computed."""
        own, found = -1, []
        for other in (*self._prefilling, *self._decoding):
            shared = common_blocks(job.chain.keys, other.chain.keys)
            if shared:
                own = self._local(job) if own < 0 else own
                if shared > own:
                    found.append((other, shared, self._curve.seconds(shared * self._block_size, other.chain.tokens)))
        return found

    def _computing(self, job: SimulatedRequest) -> list[tuple[SimulatedRequest, int, float]]:
        """Those of `_alike` that are still computing what is shared."""
        return [one for one in self._alike(job) if one[0].left > one[2] + _SMALL]

    # ── tiers ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _keep(self, keys: list[BlockKey]) -> None:
        """Stores blocks in memory and on disk, or marks them as used."""
        for tier, blocks in ((Tier.MEMORY, self._memory), (Tier.DISK, self._disk)):
            added, evicted = blocks.use(keys)
            self._changes.tiers[tier].update(dict.fromkeys(added, True))
            self._changes.tiers[tier].update(dict.fromkeys(evicted, False))

    def publish(self) -> None:
        """Writes the blocks of the oldest prompt that was not written to the shared tier."""
        keys = self._unpublished.pop(0).chain.keys
        self._rumour(self._shared.use(keys)[0])

    def _rumour(self, keys: list[BlockKey]) -> None:
        for key in keys:
            self._rumours.pop(key, None)
            self._rumours[key] = self._now
        self._changes.tiers[Tier.SHARED].update(dict.fromkeys(keys, True))

    # ── reports ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def report(self) -> ReplicaReport:
        """What has changed since the last report, and the load now."""
        old = list(takewhile(lambda key: self._rumours[key] <= self._now - RUMOUR, self._rumours))
        for key in old:
            del self._rumours[key]
        self._changes.tiers[Tier.SHARED].update(dict.fromkeys(old, False))
        tiers = {tier: keys for tier, keys in self._changes.tiers.items() if keys}
        report = ReplicaReport(
            self.name,
            0,
            self._sequence,
            self._load(),
            {tier: [key for key, came in keys.items() if came] for tier, keys in tiers.items()},
            {tier: [key for key, came in keys.items() if not came] for tier, keys in tiers.items()},
            arrived=tuple(self._changes.arrived),
            done=tuple(self._changes.done),
            speed=self._machine.speed,
        )
        self._sequence += 1
        self._changes = Changes()
        return report

    def _load(self) -> Load:
        queue = [*self._waiting, *(job for _, _, job, _ in self._fetches)]
        return Load(
            prefills=tuple(max(0.0, job.left) for job in self._prefilling),
            queued=sum(job.left for job in queue),
            drag=self._step(len(self._decoding)) / self._machine.stall,
            hold=self._slot_times.hold(len(queue), self._free_slots),
            crowd=self._slot_times.crowd(self.ongoing),
            fetching=max(0.0, self._connected - self._now),
            call=self._call() if self._prefilling and self._machine.call else 0.0,
        )
