"""Recording: what a request leaves behind, for the next one of its conversation and for explanations.

Used from the engine thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from headstart.explain.history import History
from headstart.prompt.builder import Prompter
from headstart.serving.cache import Cache
from headstart.serving.expiry import Expiry
from headstart.serving.job import Job
from headstart.serving.request import Report
from headstart.serving.settle import Settling
from headstart.serving.slots import Slot
from headstart.serving.turn import ReturnedTurn, Turn


class Recording:
    """Records finished and cancelled jobs, and the turns that callers return. Text that is being deleted leaves no record."""

    def __init__(
        self,
        cache: Cache,
        slots: Sequence[Slot],
        prompter: Prompter,
        history: History,
        expiry: Expiry,
        settle: Settling,
        clock: Callable[[], float],
    ) -> None:
        self._cache = cache
        self._slots = slots
        self._prompter = prompter
        self._history = history
        self._expiry = expiry
        self._settle = settle
        self._clock = clock

    def finished(self, job: Job, slot: Slot) -> Turn | None:
        """The turn of a finished job, for `Runtime.remember`; None if it must leave no record."""
        if self._expiry.must_forget(slot, job.ticket.reports):
            return None
        prompt = job.request.prompt
        turn = job.turn(self._clock(), self._expiry.deletion_count, settles=self._settle.takes(prompt))
        slot.request_traits = turn.request_traits()
        self._history.remember(turn.record)  # before the caller can ask for an explanation
        conversation_fingerprint = self._history.conversation_fingerprint(prompt, self._prompter.template.source)
        if conversation_fingerprint is not None and job.request.params.reuse:
            self._cache.opened(job.chain, conversation_fingerprint)
        return turn

    def cancelled(self, job: Job, *, exact: bool) -> Report | None:
        """Remembers a cancelled job, so that it can be explained; None if it never had a slot, because nothing was planned."""
        if job.slot is None:
            return None
        now = self._clock()
        report = job.ticket.reports[job.choice] = replace(job.report(exact=exact, now=now), cancelled=True)
        if not self._expiry.must_forget(job.slot, job.ticket.reports):
            self._history.remember(job.turn(now, self._expiry.deletion_count, settles=False).record)
        return report

    def returned(self, returned: ReturnedTurn) -> None:
        """Records a turn with the message that its client will send back."""
        turn = returned.turn
        if self._expiry.must_forget_turn(turn):
            return
        traits = turn.request_traits(bool(returned.message.get("tool_calls")))
        for slot in self._slots:
            if tuple(slot.ids) == turn.ids:
                slot.request_traits = traits
        self._cache.replied(turn.ids, traits)
        for record in returned.learned:
            self._cache.keep_reply_tokens(turn.chain, record)
        self._history.returned(turn.record, returned.message)
        self._settle.add(returned)
