"""The machine of a replica, in numbers, and the fleet that is made of them.

What is modelled: a replica has slots. Of the prompts in slots the one with the least left is computed, and requests wait for a
slot.
While replies run, each prefill call is followed by a step of decoding, so prefill and decoding slow each other down. A prompt
waits for another one that computes its prefix. Blocks are kept in memory and on disk, the least recently used ones go first.
Fetches from the shared tier share one connection a replica, and are over before the request waits for a slot. What is evicted
while it waits is fetched once more. A router sees the reports of replicas late.

What is not: settling, checkpoints of models with state, blocks of replies, cancelled requests, faults. A trace has no blocks of
replies, so the tokens of a reply count as computed when they return in a prompt.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from headstart.fleet.router.curve import Curve
from headstart.fleet.router.reports import Speed


@dataclass(frozen=True, slots=True)
class Machine:
    """One replica.

    Attributes:
        speed: prefill curve, restoring and fetching.
        step: seconds of a decoding step with one reply.
        step_reply: seconds more for each further reply in the step.
        stall: seconds of a prefill call beside running replies.
        call: seconds of a prefill call while no reply runs. A prompt that gets a slot waits for the call or the decoding step
            that runs; its last tokens are a call of their own, so it also waits for a step. 0: prompts wait for neither.
        slots: conversations that are live at once.
        memory: tokens of the memory tier.
        disk: tokens of the disk tier.
        ageing: seconds of prefill that each second of waiting counts when the prompt with the least left is chosen, as in
            `serving.prefill`. None: prompts in slots take turns, one call each.
    """

    speed: Speed = field(default_factory=Speed)
    step: float = 0.02
    step_reply: float = 0.001
    stall: float = 0.25
    call: float = 0.0
    slots: int = 8
    memory: float = math.inf
    disk: float = 0.0
    ageing: float | None = 0.1

    @classmethod
    def of(cls, seconds_per_token: float, memory: float, *, disk: float = 0.0, slots: int = 8, stall: float = 0.25) -> Machine:
        """A usual machine that prefills a token in so many seconds.

        Attention doubles the seconds of a token at a depth of 50,000. A fetch takes a tenth of the prefill, restoring from
        memory a thousandth, from disk a hundredth.
        """
        curve = Curve(seconds_per_token, seconds_per_token / 50_000)
        speed = Speed(curve, seconds_per_token / 1000, seconds_per_token / 100, seconds_per_token / 10)
        step = 3 * seconds_per_token  # as measured with the bundled model
        step = max(step, 0.01)
        return cls(speed, step, step / 20, stall, slots=slots, memory=memory, disk=disk)


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """A fleet of equal machines.

    Attributes:
        shared: tokens of the shared tier; 0 for none.
        publish: seconds from the end of a prefill until its blocks are in the shared tier.
        interval: least seconds between two reports of a replica.
        delay: seconds that a report is on its way.
        passage: seconds of a request outside the replica's engine, for each token of the prompt: HTTP, JSON, the front.
        passage_least: the same for a request without a prompt.
        seed: for the routers that draw lots.
    """

    replicas: int
    machine: Machine
    shared: float = 0.0
    publish: float = 1.0
    interval: float = 0.1
    delay: float = 0.05
    passage: float = 0.0
    passage_least: float = 0.0
    seed: int = 0
