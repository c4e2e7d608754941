"""Whatever is wrong with a sealed object is a miss with a reason, and never reaches the buffer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headstart.interfaces.tokens import Bytes
from headstart.tiers.disk import Label, Note
from headstart.tiers.shared.envelope import (
    PAYLOAD,
    OpenedSeal,
    SealError,
    open_bytes,
    open_note,
    open_placed,
    open_sealed,
    seal,
    seal_bytes,
    seal_note,
    sealed_with,
)
from headstart.tiers.shared.keys import Cipher, FleetKeys, SealKey
from headstart.tiers.shared.names import ObjectNames
from headstart.tiers.shared.store import Blob, Placed
from tiers_shared import OTHER, OWNER

FLEET = FleetKeys(b"n" * 32, (b"1" * 32,))
WRITER = b"server 1"
NAMES = ObjectNames(FLEET.name_key)
quick = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(params=["blake3", "aes-256-gcm"])
def keys(request: pytest.FixtureRequest) -> tuple[SealKey, ...]:
    cipher: Cipher = request.param
    return FLEET.derived("test", OWNER, cipher)


@pytest.fixture
def name(label: Label) -> str:
    return NAMES.of(OWNER, "kv", label.key)


@pytest.fixture
def sealed(name: str, label: Label, payload: Bytes, keys: tuple[SealKey, ...]) -> Blob:
    return seal(name, label, payload, keys[0], WRITER)


def why(name: str, blob: Blob, label: Label, keys: tuple[SealKey, ...], size: int = 10_000) -> str:
    out = np.zeros(size, np.uint8)
    with pytest.raises(SealError) as caught:
        open_sealed(name, blob, label, out, keys)
    assert not out.any()
    return caught.value.reason


def test_what_was_sealed_is_opened(name: str, sealed: Blob, label: Label, payload: Bytes, keys: tuple[SealKey, ...]) -> None:
    out = np.zeros_like(payload)
    assert open_sealed(name, sealed, label, out, keys) == OpenedSeal(label, len(payload), WRITER.hex())
    assert (out == payload).all()
    assert sealed_with(sealed) == keys[0].id


def test_a_checkpoint_may_be_smaller_than_its_buffer(
    state_label: Label, label: Label, payload: Bytes, keys: tuple[SealKey, ...]
) -> None:
    name = NAMES.of(OWNER, "state", state_label.key)
    blob = seal(name, state_label, payload, keys[0], WRITER)
    out = np.zeros(len(payload) + 5, np.uint8)
    assert open_sealed(name, blob, state_label, out, keys).size == len(payload)
    assert (out == [*payload, 0, 0, 0, 0, 0]).all()
    assert why(name, blob, state_label, keys, len(payload) - 1) == "other"


def test_kv_must_fill_its_buffer(name: str, sealed: Blob, label: Label, keys: tuple[SealKey, ...]) -> None:
    assert why(name, sealed, label, keys, 10_001) == why(name, sealed, label, keys, 9_999) == "other"


def placed(blob: Blob, out: Bytes) -> Placed:
    """As `SharedStore.get_into` does it."""
    if len(blob) <= PAYLOAD + len(out):
        return Placed(blob, blob[:0])
    out[:] = np.frombuffer(blob[PAYLOAD : PAYLOAD + len(out)], np.uint8)
    return Placed(blob[:PAYLOAD], blob[PAYLOAD + len(out) :])


@quick
@given(at=st.integers(0, 10_000), flip=st.integers(0, 255))
def test_an_object_in_its_place_is_opened_like_any_other(
    name: str, sealed: Blob, label: Label, payload: Bytes, keys: tuple[SealKey, ...], at: int, flip: int
) -> None:
    bad = bytearray(sealed)
    bad[-1 - at % len(bad) if at % 2 else at % len(bad)] ^= flip
    for space in (len(payload), len(payload) - 1, len(payload) + 1, 2 * len(payload)):
        apart, whole = np.zeros(space, np.uint8), np.zeros(space, np.uint8)
        found: list[object] = []
        for call in (
            lambda: open_sealed(name, memoryview(bad), label, whole, keys),  # noqa: B023
            lambda: open_placed(name, placed(memoryview(bad), apart), label, apart, keys),  # noqa: B023
        ):
            try:
                found.append(call())
            except SealError as error:
                found.append(error.reason)
        assert found[0] == found[1]
        assert isinstance(found[0], OpenedSeal) == (not flip and space == len(payload))
        if isinstance(found[0], OpenedSeal):
            assert (apart == payload).all()


def test_a_checkpoint_in_its_place_may_be_smaller(state_label: Label, payload: Bytes, keys: tuple[SealKey, ...]) -> None:
    name = NAMES.of(OWNER, "state", state_label.key)
    blob = seal(name, state_label, payload, keys[0], WRITER)
    for more in (0, 1, 100, 10_000):
        out = np.zeros(len(payload) + more, np.uint8)
        assert open_placed(name, placed(blob, out), state_label, out, keys).size == len(payload)
        assert (out[: len(payload)] == payload).all()


def test_derived_kv_is_never_sealed(name: str, label: Label, payload: Bytes, keys: tuple[SealKey, ...]) -> None:
    with pytest.raises(ValueError, match="derived"):
        seal(name, replace(label, canonical=False), payload, keys[0], WRITER)


@quick
@given(at=st.integers(0, 10_000), flip=st.integers(1, 255))
def test_any_changed_byte_is_a_miss(
    name: str, sealed: Blob, label: Label, keys: tuple[SealKey, ...], at: int, flip: int
) -> None:
    bad = bytearray(sealed)
    bad[at % len(bad)] ^= flip
    assert why(name, memoryview(bad), label, keys) in {"foreign", "newer", "swapped", "truncated", "unknown_key", "tag"}


@quick
@given(size=st.integers(0, 10_000))
def test_a_truncated_object_is_a_miss(name: str, sealed: Blob, label: Label, keys: tuple[SealKey, ...], size: int) -> None:
    assert why(name, sealed[: size % len(sealed)], label, keys) == "truncated"
    assert why(name, memoryview(bytes(sealed) + bytes(size + 1)), label, keys) == "truncated"


@given(st.binary(max_size=200))
def test_foreign_bytes_are_a_miss(blob: bytes) -> None:
    label = Label(b"k" * 32, b"p" * 32, b"f" * 32, 0, (), True)
    keys = FLEET.derived("test", OWNER, "blake3")
    assert why("name", memoryview(blob), label, keys) in {"truncated", "foreign"}


def test_each_wrong_object_has_its_reason(
    name: str, sealed: Blob, label: Label, payload: Bytes, keys: tuple[SealKey, ...]
) -> None:
    other = replace(label, key=b"o" * 32)
    elsewhere = NAMES.of(OWNER, "kv", other.key)
    assert why(elsewhere, sealed, other, keys) == "swapped"
    assert why(NAMES.of(OWNER, "state", label.key), sealed, label, keys) == "swapped"
    assert why(NAMES.of(OTHER, "kv", label.key), sealed, label, keys) == "swapped"
    assert why(name, sealed, label, FLEET.derived("test", OTHER, keys[0].cipher)) == "unknown_key"
    assert why(name, sealed, label, ()) == "unknown_key"
    # A member of the fleet who errs, or lies about what the bytes are:
    assert why(name, seal(name, other, payload, keys[0], WRITER), label, keys) == "other"
    assert why(name, seal(name, replace(label, fingerprint=b"g" * 32), payload, keys[0], WRITER), label, keys) == "other"
    assert why(name, seal_bytes(name, b"nothing", keys[0], WRITER), label, keys) == "corrupt"


def test_a_key_of_the_same_id_with_another_cipher_opens_nothing(
    name: str, sealed: Blob, label: Label, keys: tuple[SealKey, ...]
) -> None:
    crossed: Cipher = "blake3" if keys[0].cipher == "aes-256-gcm" else "aes-256-gcm"
    assert why(name, sealed, label, (replace(keys[0], cipher=crossed),)) == "tag"
    assert why(name, sealed, label, (replace(keys[0], secret=b"x" * 32),)) == "tag"


def test_an_error_names_the_writer_and_nothing_of_the_content(
    name: str, label: Label, payload: Bytes, keys: tuple[SealKey, ...]
) -> None:
    bad = bytearray(seal(name, label, payload, keys[0], WRITER))
    bad[-1] ^= 1
    with pytest.raises(SealError) as caught:
        open_sealed(name, memoryview(bad), label, payload, keys)
    assert caught.value.writer == WRITER.hex()
    assert str(caught.value) == "tag: it is not what was sealed"


def test_encryption_hides_tokens_and_tagging_does_not(name: str, label: Label, payload: Bytes) -> None:
    shown = {}
    for cipher in ("blake3", "aes-256-gcm"):
        blob = bytes(seal(name, label, payload, FLEET.derived("test", OWNER, cipher)[0], WRITER))  # type: ignore[arg-type]
        shown[cipher] = b'"tokens"' in blob, bytes(payload[:64]) in blob
    assert shown == {"blake3": (True, True), "aes-256-gcm": (False, False)}


def test_one_entry_is_encrypted_differently_each_time(
    name: str, label: Label, payload: Bytes, keys: tuple[SealKey, ...]
) -> None:
    blobs = {bytes(seal(name, label, payload, keys[0], WRITER)) for _ in range(3)}
    assert len(blobs) == (1 if keys[0].cipher == "blake3" else 3)


@quick
@given(key=st.binary(max_size=70), block=st.binary(max_size=33), value=st.binary(max_size=300))
def test_notes_and_bytes_come_back(keys: tuple[SealKey, ...], key: bytes, block: bytes, value: bytes) -> None:
    note, name = Note(key, block, value), NAMES.of(OWNER, "note", key)
    blob = seal_note(name, note, keys[0], WRITER)
    assert open_note(name, blob, key, keys) == note
    assert open_bytes(name, seal_bytes(name, value, keys[0], WRITER), keys) == value
    with pytest.raises(SealError, match="another note"):
        open_note(name, blob, key + b"x", keys)
    with pytest.raises(SealError, match="unknown_key"):
        open_note(name, blob, key, FLEET.derived("test", OTHER, keys[0].cipher))
