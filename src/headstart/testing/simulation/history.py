"""History: what happens in one run, as events that a seed makes. Fewer events make a history too."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Literal

from headstart.testing.simulation.faults import CRASHES, DISK_FAULTS, ENGINE_FAULTS, MEETS, STATE_FAULTS, STORE_FAULTS

What = Literal[
    "ask",
    "abort",
    "fault",
    "clock",
    "pin",
    "unpin",
    "delete",
    "list",
    "erase slot",
    "term",
    "restart",
    "second",
    "space",
    "rm",
    "verify",
    "gc",
]
HOWS = ("turn", "turn", "turn", "turn", "edit", "edit last", "branch", "again", "retry", "style")
"""How a conversation goes on."""
TENDING: tuple[What, ...] = ("verify", "gc")
"""What operators do with the folder while servers use it."""
TAILS = 100
"""The size of events that concern open tails too."""
REQUESTS = 29, 33
"""Fewest and most requests of a history, without floods at its end."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The server, its model and its limits.

    Attributes:
        memory: cells for KV.
        objects: objects that fit on disk.
        share: largest share of a tenant in memory and on disk.
        mixed: whether every second server has other options.
        foreign: whether every second server has another model.
        model: stands for its weights.
        templates: whether every second server has another chat template.
        template: which one.
        shared: the kind of shared store; "" for none.
        encrypt: whether it has a key for each tenant.
        store: objects that fit into it.
        apart: whether the second server is on another machine, and has no disk.
        disk: whether a server has one.
        fills: from how many tokens on a tail is computed as a whole block; 0 for never.
        pieces: whether a few objects are handled as many are, in pieces (`install.IN_PIECES`).
    """

    mode: Literal["fast", "exact"] = "fast"
    stateful: bool = False
    any_cut: bool = False
    slots: int = 2
    memory: int = 60
    objects: int = 40
    tenants: int = 3
    transfer: int = 0
    settle: bool = True
    explain: bool = True
    expire: float | None = None
    share: float = 1.0
    queue: int = 64
    stall: float = 0.25
    mixed: bool = False
    foreign: bool = False
    model: int = 0
    templates: bool = False
    template: int = 0
    shared: Literal["", "valkey", "s3"] = ""
    encrypt: bool = False
    store: int = 1000
    apart: bool = False
    disk: bool = True
    fills: int = 0
    pieces: bool = False

    def of_server(self, number: int, name: str) -> Setup:
        """The options of a server, the first of which has number 1. The limits of the folder are the same for all."""
        if self.apart and name == "second":
            return replace(self, disk=False)
        if number % 2:
            return self
        other = replace(self, model=int(self.foreign), template=int(self.templates))
        if not self.mixed:
            return other
        mode: Literal["fast", "exact"] = "fast" if self.mode == "exact" else "exact"
        memory = self.memory + 24 if self.memory < 50 else self.memory // 2
        return replace(other, mode=mode, memory=memory, slots=1 + self.slots % 4, settle=not self.settle)


@dataclass(frozen=True, slots=True)
class Happening:
    """Something that happens at a time. Which fields mean something depends on `what`.

    Attributes:
        who: the tenant.
        talk: the tenant's conversation.
        how: how the conversation goes on, or the kind of fault.
        size: words of a message, calls that a fault skips, seconds, or bytes.
        seed: decides the words.
        reply: most tokens of the reply.
    """

    at: float
    what: What
    who: int = 0
    talk: int = 0
    how: str = ""
    size: int = 0
    seed: int = 0
    reply: int = 6


@dataclass(frozen=True, slots=True)
class Scenario:
    """A seed, which decides the order of tasks, with the events. See `of`."""

    seed: int
    setup: Setup = field(default_factory=Setup)
    events: tuple[Happening, ...] = ()

    @classmethod
    def of(cls, seed: int) -> Scenario:
        """The history of a seed."""
        dice = random.Random(seed)
        beside = random.Random(f"shared {seed}")  # of its own: histories without a shared store are what they were
        setup = _with_store(beside, _setup(dice))
        setup = replace(setup, pieces=_chance(f"pieces {seed}", 0.3), templates=_chance(f"templates {seed}", 0.15))
        asks = _asks(dice, setup)
        events = [*asks, *_trouble(dice, setup, asks[-1].at), *_wishes(dice, setup, asks)]
        if setup.shared:
            events += _store_trouble(beside, asks[-1].at)
        if setup.apart:
            events.append(Happening(1.0, "second"))
        events += _second_answers(random.Random(f"second answers {seed}"), asks)
        rounded = (replace(event, at=round(event.at, 4)) for event in events)  # as they are printed
        return cls(seed, setup, tuple(sorted(rounded, key=lambda event: event.at)))

    def only(self, events: tuple[Happening, ...]) -> Scenario:
        return replace(self, events=events)


def _chance(of: str, share: float) -> bool:
    """True in this share of histories. With dice of its own, so histories are otherwise what they were."""
    return random.Random(of).random() < share


def _setup(dice: random.Random) -> Setup:
    stateful = dice.random() < 0.35
    return Setup(
        mode=dice.choice(["fast", "exact"]),
        stateful=stateful,
        any_cut=dice.random() < 0.25,
        slots=dice.randint(1, 4),
        memory=dice.choice([dice.randint(12, 30), dice.randint(20, 60), dice.randint(60, 120)]),
        objects=dice.choice([dice.randint(6, 30), dice.randint(30, 120), dice.randint(80, 200)]),
        tenants=dice.randint(3, 4),
        transfer=dice.choice([0, 0, 256, 1024]),
        settle=dice.random() < 0.7,
        explain=dice.random() < 0.6,
        expire=dice.choice([None, None, None, 40.0, 200.0]),
        share=dice.choice([1.0, 1.0, 0.3, 0.6]),
        queue=dice.choice([64, 64, 6]),
        stall=dice.choice([0.25, 0.02]),
        mixed=dice.random() < 0.3,
        foreign=dice.random() < 0.15,
        fills=dice.choice([0, 1, 4]),
    )


def _with_store(dice: random.Random, setup: Setup) -> Setup:
    if dice.random() < 0.6:
        return setup
    kind: Literal["valkey", "s3"] = dice.choice(["valkey", "valkey", "s3"])
    store, apart, encrypt = dice.choice([20, 100, 1000]), dice.random() < 0.6, dice.random() < 0.3
    return replace(setup, shared=kind, encrypt=encrypt, store=store, apart=apart)


def _store_trouble(dice: random.Random, last: float) -> list[Happening]:
    """Faults of the shared store, until `last`."""
    calm = dice.random() < 0.2
    kinds = [dice.choice(STORE_FAULTS) for _ in range(0 if calm else dice.randint(2, 12))]
    return [Happening(dice.random() * last, "fault", how=kind, size=dice.choice([0, 0, 1, 3, 10])) for kind in kinds]


def _ask(dice: random.Random, setup: Setup, at: float) -> Happening:
    how, size = dice.choice(HOWS), dice.randint(1, 20)
    return Happening(
        at, "ask", dice.randrange(setup.tenants), dice.randrange(3), how, size, dice.randrange(1 << 30), dice.randint(1, 12)
    )


def _second_answers(dice: random.Random, asks: list[Happening]) -> list[Happening]:
    """Some requests are sent again for another reply, and one of the replies is deleted. Short ones differ in the open tail
    only, so the blocks before it stay."""
    events = list[Happening]()
    for ask in dice.sample([one for one in asks if one.what == "ask"], 4) if dice.random() < 0.15 else ():
        at, seed = ask.at + 1.0 + dice.random(), dice.randrange(1 << 30)
        events.append(replace(ask, at=at, how="again", seed=seed, reply=dice.randint(1, 3)))
        events.append(Happening(at + dice.random() * 3.0, "delete", ask.who, ask.talk, size=TAILS))
    return events


def _asks(dice: random.Random, setup: Setup) -> list[Happening]:
    """Requests, and what their callers do to them."""
    events, now = list[Happening](), 0.5
    wanted, asked = dice.randint(*REQUESTS), 0
    while asked < wanted:
        asked += 1
        event = _ask(dice, setup, now)
        events.append(event)
        if dice.random() < 0.12:
            events.append(Happening(now + dice.random() * dice.choice([0.05, 0.5, 2.0]), "abort", event.who, event.talk))
        if dice.random() < 0.04:  # a flood
            for _ in range(dice.randint(4, 9)):
                asked += 1
                events.append(replace(event, at=now, talk=dice.randrange(3), how="flood", seed=dice.randrange(1 << 30)))
        now += dice.choice([0.0, 0.05, 0.3, 2.0, 10.0]) * dice.random()
    return events


def _trouble(dice: random.Random, setup: Setup, last: float) -> list[Happening]:
    """Faults, crashes, and what operators do, mostly before the `last` request."""
    events = list[Happening]()
    span = last + 5.0
    calm = dice.random() < 0.1

    def at() -> float:
        return dice.random() * span

    engine = [kind for kind in ENGINE_FAULTS if setup.stateful or kind not in STATE_FAULTS]
    for _ in range(0 if calm else dice.randint(10, 40)):
        kind = dice.choice(engine if dice.random() < 0.35 else DISK_FAULTS)
        # The first read of an object is that of its header.
        skip = dice.choice([0, 1, 1, 2, 3, 5] if MEETS[kind] == ("read",) else [0, 0, 0, 1, 3, 10, 30])
        events.append(Happening(at(), "fault", how=kind, size=skip))
    for _ in range(0 if calm else dice.choice([0, 1, 1, 2, 3])):
        kind = dice.choice([*CRASHES])
        events.append(Happening(at(), "fault", how=kind, size=dice.choice([0, 1, 3, 10, 30, 90])))
    if dice.random() < 0.5:
        stop = at()
        events.append(Happening(stop, "restart", seed=dice.randrange(1 << 30)))
        events += [_ask(dice, setup, stop + dice.random() * 0.3) for _ in range(dice.randint(0, 2))]
    if dice.random() < 0.3:
        start = at()
        events.append(Happening(start, "second"))
        if dice.random() < 0.5:
            events.append(Happening(start + dice.random() * 15, "second", how="stop"))
    if dice.random() < 0.2:
        events.append(Happening(at(), "clock", size=dice.choice([-4000, -30, 30, 4000])))
    if dice.random() < 0.15:
        events.append(Happening(at(), "space", size=dice.choice([33, 34, 80]) << 20))
    for _ in range(dice.choice([dice.randint(0, 7), dice.randint(0, 7), dice.randint(10, 25)])):
        what: What = dice.choice(["pin", "pin", "unpin", "delete", "delete", "delete", "list", "erase slot", "term"])
        events.append(Happening(at(), what, dice.randrange(setup.tenants), dice.randrange(3), size=dice.choice([20, TAILS])))
    for _ in range(dice.choice([0, 0, 0, 0, 1, 2])):
        events.append(Happening(at(), "rm", size=dice.choice([0, 0, 5, 15])))
    if dice.random() < 0.3:
        events.append(Happening(at(), dice.choice(TENDING), size=dice.choice([5, 20, 200])))
    return events


def _wishes(dice: random.Random, setup: Setup, asks: list[Happening]) -> list[Happening]:
    """Chains are deleted just after their replies, after objects were damaged, or beside a second server. Owners pin all that
    they have, and unpin or delete some of it."""
    events = list[Happening]()
    if dice.random() < 0.15:
        start = dice.choice(asks[5:20]).at
        events.append(Happening(start, "restart", seed=dice.randrange(1 << 30)))
        events += [Happening(start, "fault", how=dice.choice(["bit_rot", "cut"]), size=dice.choice([1, 2])) for _ in range(3)]
        events += [Happening(ask.at + 1.0, "delete", ask.who, ask.talk) for ask in dice.sample(asks[20:], 5)]
    if dice.random() < 0.3:
        for ask in dice.sample(asks, 4):
            events.append(Happening(ask.at + dice.random() * dice.choice([0.5, 3.0]), "delete", ask.who, ask.talk))
    if dice.random() < 0.3:
        for who in dice.sample(range(setup.tenants), 2):
            for talk in range(3):
                later: tuple[What, ...] = dice.choice([(), ("pin",), ("unpin",), ("delete",)])
                for what in ("pin", *later):
                    events.append(Happening(5.0 + dice.random() * 30.0, what, who, talk, size=dice.choice([20, TAILS])))
    if dice.random() < 0.15:  # two servers have parts of the same conversations
        events.append(Happening(1.0, "second"))
        for ask in dice.sample(asks[8:], 6):
            events.append(Happening(ask.at + dice.random() * dice.choice([0.3, 3.0]), "delete", ask.who, ask.talk))
    return events
