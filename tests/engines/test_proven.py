"""What an earlier load has proved: taken over where the engine still gives the same answer, and only there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny
from headstart.config import Settings
from headstart.engines import proven
from headstart.engines.llama import LlamaEngine
from headstart.engines.llama import identity as llama_identity
from headstart.engines.llama.engine import BLOCK_SIZE
from headstart.engines.options import EngineOptions
from headstart.engines.proof import most_tokens
from headstart.engines.proven import MEMO, STILL, Proven
from headstart.interfaces.engine import KVSegment, Logits
from headstart.interfaces.tokens import Bytes
from headstart.interfaces.traits import EngineProof, Traits
from headstart.testing.fake_engine import FakeEngine

TOKENS = np.random.default_rng(0).integers(0, 256, most_tokens(512)).astype(np.int32)
ANSWER = {True: BLOCK_SIZE + 3 * 8, False: BLOCK_SIZE + 2 * 8}
"""Tokens of the answer's prompts, by whether rows are all there is: a block, and the tail behind it, restored, and deep."""


def fake(kind: type[FakeEngine] = FakeEngine, **more: Any) -> FakeEngine:
    return kind(**{"slots": 2, "ctx": 2048, "block_size": BLOCK_SIZE, "batch": 512, **more})


def load(
    folder: Path | None, engine: FakeEngine | None = None, identity: bytes = b"it", anew: bool = False
) -> tuple[Traits, int]:
    """Of a new process: the traits, and how many tokens were computed for them."""
    engine = engine or fake()
    traits = Proven(folder, identity, anew).traits(engine, TOKENS, window=0)
    assert [engine.length(slot) for slot in range(engine.shape.slots)] == [0] * engine.shape.slots
    return traits, engine.prefilled


class Another(FakeEngine):
    """Gives other logits."""

    def logits(self, slot: int) -> Logits:
        return super().logits(slot) + np.float32(1)


class Forgetful(FakeEngine):
    """Does not get back what it moved."""

    def import_kv(self, slot: int, segments: Sequence[KVSegment]) -> None:
        super().import_kv(slot, [KVSegment(segment.data ^ np.uint8(1), segment.tokens, segment.take) for segment in segments])

    def import_checkpoint(self, slot: int, segments: Sequence[KVSegment], state: Bytes) -> None:
        super().import_checkpoint(slot, segments, state ^ np.uint8(1))


class Unsteady(FakeEngine):
    """Gives other rows each time, in calls of more than a grid; its answer is always the same."""

    def prefill(self, slot: int, tokens: Any, *, logits: bool) -> None:
        super().prefill(slot, tokens, logits=logits)
        if len(tokens) > BLOCK_SIZE:
            self._slots[slot].low[self.length(slot) - 1] ^= np.uint8(self.calls % 251 + 1)


@pytest.mark.parametrize("sliceable", [True, False])
def test_a_proof_is_made_once(tmp_path: Path, sliceable: bool) -> None:
    proved, computed = load(tmp_path, fake(sliceable=sliceable))
    assert STILL not in proved.notes
    again, still = load(tmp_path, fake(sliceable=sliceable))
    assert still == ANSWER[sliceable] < computed / 5
    assert again == replace(proved, notes=(*proved.notes, STILL))


def test_without_a_folder_it_is_made_every_time(tmp_path: Path) -> None:
    load(tmp_path)
    for _ in range(2):
        traits, computed = load(None)
        assert STILL not in traits.notes
        assert computed > 5 * ANSWER[True]


def test_what_was_remembered_can_be_proved_anew(tmp_path: Path) -> None:
    for _ in range(2):
        traits, computed = load(tmp_path, anew=True)
        assert STILL not in traits.notes
        assert computed > 5 * ANSWER[True]
    assert STILL in load(tmp_path)[0].notes


def test_more_slots_that_decode_together_are_proved_again(tmp_path: Path) -> None:
    """Where decoding is not prefill they are decoded one by one, and their number does not matter."""
    for joined in (True, False):
        load(tmp_path, fake(decode_is_prefill=joined))
        assert STILL in load(tmp_path, fake(decode_is_prefill=joined, slots=1))[0].notes
        assert (STILL in load(tmp_path, fake(decode_is_prefill=joined, slots=4))[0].notes) is not joined
        assert STILL in load(tmp_path, fake(decode_is_prefill=joined, slots=4))[0].notes


def test_what_it_depends_on_decides(tmp_path: Path) -> None:
    load(tmp_path)
    assert STILL not in load(tmp_path, identity=b"another")[0].notes
    assert STILL in load(tmp_path)[0].notes


@pytest.mark.parametrize("sliceable", [True, False])
@pytest.mark.parametrize("kind", [Another, Forgetful])
def test_another_answer_is_proved_anew(tmp_path: Path, kind: type[FakeEngine], sliceable: bool) -> None:
    load(tmp_path, fake(sliceable=sliceable))
    traits, computed = load(tmp_path, fake(kind, sliceable=sliceable))
    assert STILL not in traits.notes
    assert computed > 2 * ANSWER[sliceable]
    assert traits.canonical == (kind is Another)


def test_other_weights_are_proved_anew_and_then_remembered(tmp_path: Path) -> None:
    load(tmp_path)
    for expected in (False, True):
        assert (STILL in load(tmp_path, fake(seed=1))[0].notes) == expected


@pytest.mark.parametrize("kind", [Forgetful, Unsteady])
def test_what_failed_is_tried_again(tmp_path: Path, kind: type[FakeEngine]) -> None:
    for _ in range(2):
        traits, _ = load(tmp_path, fake(kind))
        assert not traits.canonical
        assert STILL not in traits.notes
    assert not (tmp_path / MEMO).exists()


def test_a_proof_that_fails_takes_back_what_was_remembered(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load(tmp_path)
    assert not load(tmp_path, fake(Forgetful))[0].canonical
    assert "proved again" in caplog.text
    assert STILL not in load(tmp_path)[0].notes


@pytest.mark.parametrize(
    "spoil",
    [
        lambda entry: entry.pop("check"),
        lambda entry: entry.update(check=7),
        lambda entry: entry.pop("traits"),
        lambda entry: entry["traits"].update(notes=7),
        lambda entry: entry["traits"].update(decode_is_prefill=True),
        lambda entry: entry.clear(),
    ],
)
def test_a_spoilt_entry_is_none(tmp_path: Path, spoil: Any) -> None:
    load(tmp_path)
    known = json.loads((tmp_path / MEMO).read_text())
    spoil(next(iter(known.values())))
    (tmp_path / MEMO).write_text(json.dumps(known))
    assert STILL not in load(tmp_path)[0].notes
    assert STILL in load(tmp_path)[0].notes


@pytest.mark.parametrize(
    "garbage", [b"", b"[]", b"\xff", b'{"x": 1}', b"{", b'{"%s": 1}' % b"it".hex().encode(), b"[" * 200_000]
)
def test_a_spoilt_memo_is_none(tmp_path: Path, garbage: bytes) -> None:
    (tmp_path / MEMO).write_bytes(garbage)
    assert STILL not in load(tmp_path)[0].notes
    assert STILL in load(tmp_path)[0].notes


def test_a_memo_that_cannot_be_written_is_no_fault(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for _ in range(2):
        traits, _ = load(tmp_path / "file")
        assert traits.canonical
        assert STILL not in traits.notes


def test_the_memo_is_bounded_and_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proven, "_MOST", 6)
    for number in range(8):
        load(tmp_path, identity=bytes([number]))
    assert len(json.loads((tmp_path / MEMO).read_text())) == 6
    assert (tmp_path / MEMO).stat().st_mode & 0o077 == 0
    assert STILL in load(tmp_path, identity=bytes([7]))[0].notes
    assert STILL not in load(tmp_path, identity=bytes([0]))[0].notes


def test_of_a_real_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots and context are as they may, beyond what a proof sees of them; so is the mode, and whether there is a disk tier."""

    model = tiny.write(tmp_path / "shallow.gguf", layers=1)

    def still(anew: bool = False, **more: Any) -> bool:
        given = {"ctx": 2304, "slots": 2, "threads": 1, "state_dir": tmp_path, **more}
        engine = LlamaEngine.load(Settings(model=str(model), **given).engine_options(), anew=anew)
        traits, fingerprint = engine.traits, engine.fingerprint
        engine.close()
        assert traits.exact
        seen.add((fingerprint, traits.block_size, traits.chunking, traits.decode_is_prefill))
        return STILL in traits.notes

    seen: set[tuple[bytes, int, bool, bool]] = set()
    assert not still()
    assert still()
    joint = any(joint for *_, joint in seen)  # some builds decode several replies in one call with the bits of prefill
    assert still(slots=4, ctx=2560) is not joint, "that is proved for all slots"
    assert still(reuse="exact")
    assert still(cache_dir=tmp_path / "disk")
    assert not still(anew=True)
    assert not still(slots=1)
    assert not still(ctx=1024)
    assert not still(state_dir=tmp_path / "another")
    assert len(seen) == 1
    assert not still(kv_type="q8_0")
    assert not still(threads=2)
    assert still()
    monkeypatch.setattr(llama_identity, "devices", lambda: ["a card"])
    assert [still(), still()] == [False, True], "another machine, which is remembered too"
    monkeypatch.setenv("GGML_SOMETHING", "1")
    assert not still()
    monkeypatch.setenv("LLAMA_ATTN_ROT_DISABLE", "1")  # how quantised KV is stored
    assert not still()


def test_a_proof_that_was_handed_over_needs_no_sample_unless_something_has_changed(tmp_path: Path) -> None:
    engine = fake()
    handed = [EngineProof(b"it".hex(), Traits(BLOCK_SIZE, notes=("by another process",)), engine.shape.slots)]
    assert Proven(tmp_path, b"it", False, handed).traits(engine, TOKENS, window=0) == handed[0].traits
    assert Proven(None, b"it", False, handed).traits(engine, TOKENS, window=0) == handed[0].traits
    assert engine.prefilled == 0
    for identity, anew in ((b"other", False), (b"it", True)):
        again = fake()
        traits = Proven(tmp_path, identity, anew, handed).traits(again, TOKENS, window=0)
        assert again.prefilled > 0
        assert "by another process" not in traits.notes


def test_a_proof_of_decoding_that_was_handed_over_holds_for_no_more_slots(tmp_path: Path) -> None:
    """Fault: a model that was loaded with two slots, then with four, decoded four replies in a call that was proved for two."""
    slots, traits = fake().shape.slots, Traits(BLOCK_SIZE, decode_is_prefill=True, notes=("by another process",))
    for proved, holds in ((slots, True), (slots - 1, False)):
        engine = fake()
        found = Proven(None, b"it", False, [EngineProof(b"it".hex(), traits, proved)]).traits(engine, TOKENS, window=0)
        assert (found == traits, engine.prefilled == 0) == (holds, holds)


@pytest.mark.slow
def test_an_engine_says_what_a_later_process_need_not_prove(tmp_path: Path, tiny_model: Path) -> None:
    options = EngineOptions(str(tiny_model), ctx=512, slots=1, threads=1, state_dir=tmp_path)
    first = LlamaEngine.load(options)
    proofs, traits = first.proofs, first.traits
    first.close()
    assert [proof.traits for proof in proofs] == [traits]
    second = LlamaEngine.load(replace(options, proofs=proofs))
    assert (second.traits, second.proofs) == (traits, proofs)
    second.close()
    assert STILL not in traits.notes
