"""Conformance: checks that an engine keeps the contract of `interfaces/engine.py`, and the traits that it claims.

Who writes an engine runs them with pytest in three lines:

    ENGINE = EngineUnderTest(MyEngine)

    @pytest.mark.parametrize("check", CHECKS, ids=str)
    def test_my_engine_conforms(check): check(ENGINE)

`MyEngine` is any function that loads the engine. Choose a small context: one check fills it. A promise that belongs to a trait
is checked only if the engine claims the trait. Otherwise the check raises `unittest.SkipTest`, which pytest shows as skipped.
A broken promise raises `BrokenPromise`, an AssertionError that names the trait. Nothing here needs pytest.

Or without a line: `pytest --engine my_engine` (`testing/plugin.py`).

    basics, logits, text, grammars       the contract
    exactness, moving, checkpoints       bits, in a few blocks
    whole                                bits: the proof of `engines/proof.py`, and random prompts through headstart's runtime
    faults                               calls that fail, and bytes that were changed
    leaks, processes                     what is left when an engine, or its process, has ended
"""

from __future__ import annotations

from headstart.testing.conformance import (
    basics,
    checkpoints,
    exactness,
    faults,
    grammars,
    leaks,
    logits,
    moving,
    processes,
    text,
    whole,
)
from headstart.testing.conformance.driver import BrokenPromise, ConformanceCheck, EngineUnderTest

__all__ = ["CHECKS", "BrokenPromise", "ConformanceCheck", "EngineUnderTest"]

CHECKS = (
    ConformanceCheck(basics.sizes_fit_together),
    ConformanceCheck(basics.lengths_follow_the_calls),
    ConformanceCheck(basics.calls_that_do_not_fit_are_refused),
    ConformanceCheck(basics.every_token_counts),
    ConformanceCheck(basics.an_emptied_slot_is_as_new, ("canonical",)),
    ConformanceCheck(basics.slots_do_not_disturb_each_other, ("canonical",), slots=2),
    ConformanceCheck(basics.closing_twice_is_fine),
    ConformanceCheck(logits.logits_have_their_shape),
    ConformanceCheck(logits.logits_are_a_copy),
    ConformanceCheck(logits.each_slot_has_its_own_logits, slots=2),
    ConformanceCheck(logits.sampling_leaves_the_logits_alone),
    ConformanceCheck(logits.greedy_takes_the_most_likely_token),
    ConformanceCheck(logits.a_seed_repeats_its_draws),
    ConformanceCheck(logits.samplers_close_twice),
    ConformanceCheck(exactness.the_same_calls_give_the_same_bits, ("canonical",)),
    ConformanceCheck(exactness.prefill_may_span_blocks, ("canonical", "chunking")),
    ConformanceCheck(exactness.a_call_may_end_with_a_tail_that_fills_a_block, ("canonical", "chunking")),
    ConformanceCheck(exactness.restored_kv_continues_with_the_same_bits, ("canonical", "movable")),
    ConformanceCheck(exactness.decoding_does_not_depend_on_where_kv_came_from, ("canonical", "decode_exact")),
    ConformanceCheck(exactness.decoded_kv_is_that_of_prefill, ("decode_is_prefill",)),
    ConformanceCheck(moving.truncation_works_at_any_token, ("sliceable",)),
    ConformanceCheck(moving.truncation_keeps_the_kv_before_it, ("sliceable", "movable")),
    ConformanceCheck(moving.imported_kv_comes_out_again, ("sliceable", "movable")),
    ConformanceCheck(moving.segments_are_taken_in_part, ("sliceable", "movable")),
    ConformanceCheck(moving.an_import_replaces_what_was_there, ("sliceable", "movable")),
    ConformanceCheck(moving.engines_of_one_fingerprint_share_kv, ("canonical", "movable")),
    ConformanceCheck(checkpoints.imported_checkpoints_come_out_again, ("stateful",)),
    ConformanceCheck(checkpoints.a_rewound_slot_continues_with_the_same_bits, ("canonical", "stateful")),
    ConformanceCheck(checkpoints.a_checkpoint_of_another_length_is_refused, ("stateful",)),
    ConformanceCheck(text.tokens_have_the_bytes_of_their_text),
    ConformanceCheck(text.the_vocabulary_is_consistent),
    ConformanceCheck(text.control_tokens_in_a_text_stay_text),
    ConformanceCheck(text.the_tokenizer_is_thread_safe),
    ConformanceCheck(grammars.replies_follow_their_grammar),
    ConformanceCheck(grammars.broken_grammars_are_refused),
    ConformanceCheck(grammars.samplers_of_one_grammar_are_separate),
    ConformanceCheck(grammars.grammars_are_checked_in_several_threads),
    ConformanceCheck(faults.changed_kv_changes_the_logits, ("canonical", "movable")),
    ConformanceCheck(faults.a_changed_checkpoint_changes_the_logits, ("canonical", "stateful")),
    ConformanceCheck(faults.a_checkpoint_that_was_cut_short_is_refused, ("stateful",)),
    ConformanceCheck(faults.a_failed_call_leaves_other_slots_alone, ("canonical",), slots=2),
    ConformanceCheck(whole.claims_are_proved, ("canonical", "movable"), long=True),
    ConformanceCheck(whole.warm_answers_are_cold_ones, ("exact", "movable"), long=True),
    ConformanceCheck(whole.answers_are_right_beside_failing_calls, ("exact", "movable"), long=True),
    ConformanceCheck(leaks.slots_keep_no_memory_of_what_was_emptied, long=True),
    ConformanceCheck(leaks.closing_frees_what_loading_took, long=True),
    ConformanceCheck(processes.processes_end_with_code_0, long=True),
)
"""Every promise that is checked, once."""
