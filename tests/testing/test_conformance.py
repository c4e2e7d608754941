"""The conformance checks: engines that keep the contract pass all of them, and each check finds an engine that does not."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import SkipTest

import numpy as np
import pytest

from headstart.errors import EngineError
from headstart.interfaces.sampling import Sampling
from headstart.testing.conformance import CHECKS, BrokenPromise, EngineUnderTest
from headstart.testing.fake_engine import START, FakeEngine, FakeTokenizer

EVERY_CHECK = pytest.mark.parametrize("check", CHECKS, ids=str)
SMALL: dict[str, Any] = {"slots": 2, "ctx": 128}

VARIANTS: dict[str, dict[str, Any]] = {
    "sliceable": {},
    "one slot": {"slots": 1},
    "blocks of one token": {"block_size": 1},
    "without chunking": {"chunking": False},
    "tails fill blocks": {"least_filling": 4},
    "tails fill blocks, stateful": {"least_filling": 1, "sliceable": False},
    "not canonical": {"canonical": False},
    "decode is prefill": {"decode_is_prefill": True},
    "not movable": {"movable": False},
    "stateful": {"sliceable": False},
    "stateful, without chunking": {"sliceable": False, "chunking": False},
    "state only": {"sliceable": False, "kv_bytes_per_token": 0},
    "live only": {"sliceable": False, "movable": False},
    "words": {"tokenizer": FakeTokenizer(["word", " words", "lain"])},
}
QUICK: dict[str, Any] = {"prompts": 12, "cycles": 3}
SUBJECTS = {
    name: EngineUnderTest(lambda options=options: FakeEngine(**SMALL | options), **QUICK) for name, options in VARIANTS.items()
}


def test_the_lines_in_the_handbook_work() -> None:
    page = (Path(__file__).resolve().parents[2] / "CONTRIBUTING.md").read_text("utf-8")
    lines = page.split("The conformance checks", 1)[1].split("```python\n", 1)[1].split("```", 1)[0]
    assert len(lines.strip().replace("\n\n", "\n").splitlines()) == 3
    names: dict[str, Any] = {
        "pytest": pytest,
        "CHECKS": CHECKS,
        "EngineUnderTest": EngineUnderTest,
        "MyEngine": lambda: FakeEngine(**SMALL),
    }
    exec(lines, names)
    test = names["test_my_engine_conforms"]
    assert test.pytestmark[0].args == ("check", CHECKS)
    for check in CHECKS:
        with suppress(SkipTest):
            test(check)
    assert names["ENGINE"].engine.prefilled > 0


@EVERY_CHECK
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_fake_engine_conforms(variant: str, check: Any) -> None:
    if check.long and variant not in ("sliceable", "stateful", "decode is prefill"):
        pytest.skip("other variants show it")
    check(SUBJECTS[variant])


# ── engines that break one promise each ──────────────────────────────────────────────────────────────────────────────


class UnevenBatch(FakeEngine):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.shape = replace(self.shape, batch=60)


class CountsNoReply(FakeEngine):
    """The length is that of the prompt."""

    prompt = 0

    def prefill(self, slot: int, tokens: Any, *, logits: bool) -> None:
        super().prefill(slot, tokens, logits=logits)
        self.prompt = super().length(slot)

    def length(self, slot: int) -> int:
        return min(self.prompt, super().length(slot))


class DropsWhatDoesNotFit(FakeEngine):
    def prefill(self, slot: int, tokens: Any, *, logits: bool) -> None:
        super().prefill(slot, tokens[: self.shape.batch], logits=logits)


class SeesHalf(FakeEngine):
    """Every second token is taken for a zero."""

    def prefill(self, slot: int, tokens: Any, *, logits: bool) -> None:
        seen = np.array(tokens)
        seen[1::2] = 0
        super().prefill(slot, seen, logits=logits)


class KeepsItsState(FakeEngine):
    """A slot that is emptied keeps the state of its former content."""

    def truncate(self, slot: int, length: int) -> None:
        state = self._slots[slot].state_low
        super().truncate(slot, length)
        if not length:
            self._slots[slot].state_low = state


class Leaks(FakeEngine):
    """A prompt in one slot changes the KV of another."""

    def prefill(self, slot: int, tokens: Any, *, logits: bool) -> None:
        super().prefill(slot, tokens, logits=logits)
        if slot == 1:
            self._slots[0].low[0] += 1


class ClosesOnce(FakeEngine):
    def close(self) -> None:
        self._slots.pop()
        del self._logits


class WideLogits(FakeEngine):
    def logits(self, slot: int) -> Any:
        return super().logits(slot).astype(np.float64)


class ClaimsToFill(FakeEngine):
    """It says that any tail is computed as a whole block."""

    def fills_block(self, start: int, count: int) -> bool:
        return True


class SharesItsLogits(FakeEngine):
    """The logits are a view of the engine's own."""

    def logits(self, slot: int) -> Any:
        super().logits(slot)
        return self._logits[slot]


class MixesSlots(FakeEngine):
    """Logits come in the order of the steps, and are taken for those of the slots in ascending order."""

    def decode(self, steps: Any) -> None:
        super().decode(steps)
        self._logits = dict(zip(sorted(self._logits), [self._logits[step.slot] for step in steps], strict=True))


class SamplesInPlace(FakeEngine):
    """Bans a token that was drawn in the engine's own logits."""

    def sample(self, slot: int, sampler: Any) -> int:
        token = super().sample(slot, sampler)
        self._logits[slot][token] = -np.inf
        return token


class NeverGreedy(FakeEngine):
    def sampler(self, sampling: Sampling, grammar: Any = None) -> Any:
        return super().sampler(replace(sampling, temperature=50.0, top_k=0, min_p=0, top_p=1), grammar)


class ForgetsItsSeed(FakeEngine):
    def sampler(self, sampling: Sampling, grammar: Any = None) -> Any:
        return super().sampler(replace(sampling, seed=None), grammar)


class ClosesSamplersOnce(FakeEngine):
    def sampler(self, sampling: Sampling, grammar: Any = None) -> Any:
        sampler = super().sampler(sampling, grammar)
        sampler.close = lambda: delattr(sampler, "_seen")  # type: ignore[method-assign]
        return sampler


class Drifts(FakeEngine):
    """No call gives the same logits as the one before."""

    def _predict(self, slot: Any) -> Any:
        return super()._predict(slot) + np.float32(self.calls)


class Claims(FakeEngine):
    """Has the traits of `options`, and claims others."""

    def __init__(self, claimed: dict[str, bool], **options: Any) -> None:
        super().__init__(**options)
        self.real, self.claimed = self.traits, claimed
        self.traits = replace(self.traits, **claimed)

    def _kernels(self, start: int, count: int) -> list[bytes]:
        claimed, self.traits = self.traits, self.real
        try:
            return super()._kernels(start, count)
        finally:
            self.traits = claimed


class RoundsImports(FakeEngine):
    """The last bit of imported KV is lost."""

    def _put(self, held: Any, segments: Any) -> None:
        super()._put(held, segments)
        held.low[:] &= 0xFE


class Wanders(FakeEngine):
    """Decoding depends on whether the KV before was imported."""

    imported_into: frozenset[int] = frozenset()

    def _put(self, held: Any, segments: Any) -> None:
        super()._put(held, segments)
        self.imported_into |= {id(held)}

    def decode(self, steps: Any) -> None:
        super().decode(steps)
        for step in steps:
            if id(self._slots[step.slot]) in self.imported_into:
                self._logits[step.slot] = self._logits[step.slot] + np.float32(1e-4)


class DecodesInBatches(FakeEngine):
    """Claims that decoding is prefill, which holds for a batch of one."""

    def decode(self, steps: Any) -> None:
        super().decode(steps)
        for step in steps[: len(steps) - 1]:
            self._slots[step.slot].low[self.length(step.slot) - 1] ^= 1


class TruncatesOneTooMany(FakeEngine):
    """Off by one, except where nothing is to be left or cut."""

    def truncate(self, slot: int, length: int) -> None:
        super().truncate(slot, max(0, length - (length < self.length(slot))))


class TruncatesTheOldest(FakeEngine):
    """The length is right; what is kept are the last tokens."""

    def truncate(self, slot: int, length: int) -> None:
        held, before = self._slots[slot], self.length(slot)
        super().truncate(slot, length)
        held.high[:length] = held.high[before - length : before].copy()


class ReversesSegments(FakeEngine):
    def import_kv(self, slot: int, segments: Any) -> None:
        super().import_kv(slot, segments[::-1])


class IgnoresTake(FakeEngine):
    def import_kv(self, slot: int, segments: Any) -> None:
        super().import_kv(slot, [replace(one, take=one.tokens) for one in segments])


class TakesTheLast(FakeEngine):
    """Of a segment of which fewer tokens are to be taken, the last ones are."""

    def _put(self, held: Any, segments: Any) -> None:
        super()._put(held, segments)
        at = 0
        for one in segments:
            high = one.data[: one.tokens * self._width].reshape(-1, self._width)[one.tokens - one.take : one.tokens]
            held.high[at : at + one.take] = high
            at += one.take


class Appends(FakeEngine):
    """Nothing is removed where nothing is imported."""

    def import_kv(self, slot: int, segments: Any) -> None:
        if segments:
            super().import_kv(slot, segments)


class OwnWeights(FakeEngine):
    """Each instance computes something else, under one fingerprint."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._key = os.urandom(32)


class WritesTooMuch(FakeEngine):
    def export_kv(self, slot: int, spans: Any) -> None:
        super().export_kv(slot, spans)
        for span in spans:
            span.data[-1] = 0


class StatesThatFade(FakeEngine):
    """A state that is imported comes out with other bytes."""

    def import_checkpoint(self, slot: int, segments: Any, state: Any) -> None:
        super().import_checkpoint(slot, segments, state)
        self._slots[slot].state_high = self._slots[slot].state_high[::-1]


class RewindsHalf(FakeEngine):
    """The state stays that of the later tokens."""

    def rewind(self, slot: int, length: int, state: Any) -> None:
        later = self._slots[slot].state_low
        super().rewind(slot, length, state)
        self._slots[slot].state_low = later


class TakesAnyCheckpoint(FakeEngine):
    def _check_state(self, state: Any, length: int) -> None:
        state[:4].view("<u4")[0] = length


class KeepsTheSlot(FakeEngine):
    """A rewind that is refused leaves the slot as it was."""

    def rewind(self, slot: int, length: int, state: Any) -> None:
        held = self._slots[slot]
        kept = held.length, held.state_low, held.state_high
        try:
            super().rewind(slot, length, state)
        except EngineError:
            held.length, held.state_low, held.state_high = kept
            raise


class Shouts(FakeTokenizer):
    def tokenize(self, text: str) -> list[int]:
        return super().tokenize(text.upper())


class NamesNothing(FakeTokenizer):
    """Control tokens have no bytes."""

    def token_bytes(self, token: int) -> bytes:
        return b"" if token in {control.id for control in self.controls} else super().token_bytes(token)


class FindsControls(FakeTokenizer):
    """Makes control tokens of their texts."""

    def tokenize(self, text: str) -> list[int]:
        begin, found, end = text.partition(START.text)
        return super().tokenize(begin) + ([START.id, *super().tokenize(end)] if found else [])


class OneAtATime(FakeTokenizer):
    """Keeps the text that it is at in itself."""

    def tokenize(self, text: str) -> list[int]:
        self.text = text
        time.sleep(0)
        return super().tokenize(self.text)


class IgnoresGrammars(FakeEngine):
    def sampler(self, sampling: Sampling, grammar: Any = None) -> Any:
        return super().sampler(sampling)


class AcceptsAnyGrammar(FakeEngine):
    def check_grammar(self, grammar: Any, param: str | None = None) -> Any:
        return grammar


class NamesNoParameter(FakeEngine):
    def check_grammar(self, grammar: Any, param: str | None = None) -> Any:
        return super().check_grammar(grammar)


class SharesConstraints(FakeEngine):
    """All samplers of a grammar have one place in it."""

    def sampler(self, sampling: Sampling, grammar: Any = None) -> Any:
        sampler = super().sampler(sampling, grammar)
        self.shared = getattr(self, "shared", {})
        sampler._constraint = self.shared.setdefault(grammar, sampler._constraint)
        return sampler


class ChecksOneAtATime(FakeEngine):
    """Answers with the grammar that it was asked for last."""

    def check_grammar(self, grammar: Any, param: str | None = None) -> Any:
        self.last = grammar
        time.sleep(0.001)
        return super().check_grammar(self.last, param)


class IgnoresImports(FakeEngine):
    """Keeps what was exported to itself, and takes that for what is imported."""

    def export_kv(self, slot: int, spans: Any) -> None:
        super().export_kv(slot, spans)
        held = self._slots[slot]
        self.kept = held.high.copy(), held.low.copy()

    def _put(self, held: Any, segments: Any) -> None:
        super()._put(held, segments)
        held.high[:], held.low[:] = self.kept


class IgnoresStates(FakeEngine):
    """The same of checkpoints."""

    def export_checkpoint(self, slot: int, out: Any) -> int:
        size = super().export_checkpoint(slot, out)
        self.kept = out[:size].copy()
        return size

    def _set_state(self, held: Any, state: Any) -> None:
        super()._set_state(held, self.kept)


class PadsStates(FakeEngine):
    """What is missing of a checkpoint is filled up."""

    def import_checkpoint(self, slot: int, segments: Any, state: Any) -> None:
        due = 4 + 4 + self._state_high(sum(one.take for one in segments))
        super().import_checkpoint(slot, segments, np.pad(state, (0, max(0, due - len(state)))))


class FailsEverywhere(FakeEngine):
    """A call that fails empties all slots."""

    def prefill(self, slot: int, tokens: Any, *, logits: bool) -> None:
        try:
            super().prefill(slot, tokens, logits=logits)
        except EngineError:
            for other in range(self.shape.slots):
                self.truncate(other, 0)
            raise


class ExactInTheSmall(FakeEngine):
    """The numbers of a call depend on where it ends, behind more tokens than most checks compute."""

    def _kernels(self, start: int, count: int) -> list[bytes]:
        return super()._kernels(start, count) if start + count <= 64 else [b"ends at %d" % (start + count)] * count


class LosesABit(FakeEngine):
    """Of what is imported."""

    def _put(self, held: Any, segments: Any) -> None:
        super()._put(held, segments)
        held.low[0] ^= 1


class RestoresNothing(FakeEngine):
    """Refuses to import, which no other check may notice: a fault of the cache is a miss."""

    def import_kv(self, slot: int, segments: Any) -> None:
        self.truncate(slot, 0)
        raise EngineError("not today")


class Hoards(FakeEngine):
    """Keeps a buffer of each prompt."""

    hoard: list[bytes] = []  # noqa: RUF012

    def prefill(self, slot: int, tokens: Any, *, logits: bool) -> None:
        super().prefill(slot, tokens, logits=logits)
        if logits:
            self.hoard.append(b"x" * (4 << 20))


class KeepsWeights(FakeEngine):
    hoard: list[bytes] = []  # noqa: RUF012

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.hoard.append(b"x" * (8 << 20))


class KeepsThreads(FakeEngine):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        threading.Thread(target=ENOUGH.wait, args=(60,), daemon=True).start()


class KeepsFiles(FakeEngine):
    files: list[Any] = []  # noqa: RUF012

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.files.append(open(os.devnull))  # noqa: SIM115


ENOUGH = threading.Event()


@pytest.fixture(autouse=True, scope="module")
def _let_go() -> Iterator[None]:
    """What the engines above keep."""
    yield
    ENOUGH.set()
    Hoards.hoard.clear()
    KeepsWeights.hoard.clear()
    for file in KeepsFiles.files:
        file.close()


STATEFUL = {"sliceable": False}
WRONG: list[tuple[str, Any, dict[str, Any]]] = [
    ("sizes_fit_together", UnevenBatch, {}),
    ("lengths_follow_the_calls", CountsNoReply, {}),
    ("calls_that_do_not_fit_are_refused", DropsWhatDoesNotFit, {}),
    ("every_token_counts", SeesHalf, {}),
    ("an_emptied_slot_is_as_new", KeepsItsState, STATEFUL),
    ("slots_do_not_disturb_each_other", Leaks, {}),
    ("closing_twice_is_fine", ClosesOnce, {}),
    ("logits_have_their_shape", WideLogits, {}),
    ("logits_are_a_copy", SharesItsLogits, {}),
    ("each_slot_has_its_own_logits", MixesSlots, {}),
    ("sampling_leaves_the_logits_alone", SamplesInPlace, {}),
    ("greedy_takes_the_most_likely_token", NeverGreedy, {}),
    ("a_seed_repeats_its_draws", ForgetsItsSeed, {}),
    ("samplers_close_twice", ClosesSamplersOnce, {}),
    ("the_same_calls_give_the_same_bits", Drifts, {}),
    ("prefill_may_span_blocks", Claims, {"claimed": {"chunking": True}, "chunking": False}),
    ("a_call_may_end_with_a_tail_that_fills_a_block", ClaimsToFill, {"least_filling": 8}),
    ("restored_kv_continues_with_the_same_bits", RoundsImports, {}),
    ("restored_kv_continues_with_the_same_bits", RoundsImports, STATEFUL),
    ("decoding_does_not_depend_on_where_kv_came_from", Wanders, {}),
    ("decoding_does_not_depend_on_where_kv_came_from", RewindsHalf, STATEFUL),
    ("decoded_kv_is_that_of_prefill", Claims, {"claimed": {"decode_is_prefill": True}}),
    ("decoded_kv_is_that_of_prefill", DecodesInBatches, {"decode_is_prefill": True}),
    ("truncation_works_at_any_token", TruncatesOneTooMany, {}),
    ("truncation_keeps_the_kv_before_it", TruncatesTheOldest, {}),
    ("imported_kv_comes_out_again", ReversesSegments, {}),
    ("imported_kv_comes_out_again", WritesTooMuch, {}),
    ("segments_are_taken_in_part", IgnoresTake, {}),
    ("segments_are_taken_in_part", TakesTheLast, {}),
    ("an_import_replaces_what_was_there", Appends, {}),
    ("engines_of_one_fingerprint_share_kv", OwnWeights, {}),
    ("imported_checkpoints_come_out_again", StatesThatFade, STATEFUL),
    ("a_rewound_slot_continues_with_the_same_bits", RewindsHalf, STATEFUL),
    ("a_checkpoint_of_another_length_is_refused", TakesAnyCheckpoint, STATEFUL),
    ("a_checkpoint_of_another_length_is_refused", KeepsTheSlot, STATEFUL),
    ("tokens_have_the_bytes_of_their_text", FakeEngine, {"tokenizer": Shouts()}),
    ("the_vocabulary_is_consistent", FakeEngine, {"tokenizer": NamesNothing()}),
    ("control_tokens_in_a_text_stay_text", FakeEngine, {"tokenizer": FindsControls()}),
    ("the_tokenizer_is_thread_safe", FakeEngine, {"tokenizer": OneAtATime()}),
    ("replies_follow_their_grammar", IgnoresGrammars, {}),
    ("broken_grammars_are_refused", AcceptsAnyGrammar, {}),
    ("broken_grammars_are_refused", NamesNoParameter, {}),
    ("samplers_of_one_grammar_are_separate", SharesConstraints, {}),
    ("grammars_are_checked_in_several_threads", ChecksOneAtATime, {}),
    ("changed_kv_changes_the_logits", IgnoresImports, {}),
    ("a_changed_checkpoint_changes_the_logits", IgnoresStates, STATEFUL),
    ("a_checkpoint_that_was_cut_short_is_refused", PadsStates, STATEFUL),
    ("a_failed_call_leaves_other_slots_alone", FailsEverywhere, {}),
    ("claims_are_proved", ExactInTheSmall, {}),
    ("claims_are_proved", ExactInTheSmall, STATEFUL),
    ("warm_answers_are_cold_ones", LosesABit, {}),
    ("warm_answers_are_cold_ones", RestoresNothing, {}),
    ("answers_are_right_beside_failing_calls", KeepsItsState, STATEFUL),
    ("slots_keep_no_memory_of_what_was_emptied", Hoards, {}),
    ("closing_frees_what_loading_took", KeepsWeights, {}),
    ("closing_frees_what_loading_took", KeepsThreads, {}),
    ("closing_frees_what_loading_took", KeepsFiles, {}),
]
"""The check that finds it, an engine, its options."""


@pytest.mark.parametrize(("name", "kind", "options"), WRONG, ids=lambda value: getattr(value, "__name__", None))
def test_a_broken_promise_is_found(name: str, kind: Any, options: dict[str, Any]) -> None:
    check = next(check for check in CHECKS if str(check) == name)
    with pytest.raises(BrokenPromise) as broken:
        check(EngineUnderTest(lambda: kind(**SMALL | options), **QUICK))
    assert all(trait in str(broken.value) for trait in check.traits)


ENDS_BADLY = """
import atexit, os
from headstart.testing.fake_engine import FakeEngine

class EndsBadly(FakeEngine):
    def close(self):
        atexit.register(os._exit, 3)
"""


@pytest.mark.slow  # three processes
def test_a_process_that_ends_badly_is_found(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(ENDS_BADLY)
    check = next(check for check in CHECKS if str(check) == "processes_end_with_code_0")
    with pytest.raises(BrokenPromise, match="a process with the engine left closed ends with code 3"):
        check(EngineUnderTest(FakeEngine, name=str(tmp_path / "bad.py")))


def test_every_check_was_seen_to_fail() -> None:
    assert {name for name, _, _ in WRONG} | {"processes_end_with_code_0"} == set(map(str, CHECKS))


def test_what_is_not_claimed_is_not_checked() -> None:
    subject = EngineUnderTest(lambda: Drifts(**SMALL, canonical=False))
    check = next(check for check in CHECKS if str(check) == "the_same_calls_give_the_same_bits")
    with pytest.raises(SkipTest, match="does not claim the trait canonical"):
        check(subject)


def test_what_an_engine_raises_is_told_with_the_promise() -> None:
    engine = FakeEngine(**SMALL)
    engine.fail_next("import")
    check = next(check for check in CHECKS if str(check) == "imported_kv_comes_out_again")
    with pytest.raises(BrokenPromise, match="sliceable and movable, but EngineError was raised: injected: import"):
        check(EngineUnderTest(lambda: engine))
