"""Responses that go from one process of a model to the next."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from headstart.api.openai_responses.handover import Deletions, Handover, pack, restore
from headstart.api.openai_responses.store import PREFIX, Responses, StoredResponse, UnknownResponse, identified, item_id

KNOWN: Deletions = (5.0, 2)


def never(salt: str, written: float) -> float:
    return math.inf


def id_of(number: int) -> str:
    return f"{PREFIX}{number:032x}"


def answer(store: Responses, number: int, before: int | None = None, *, salt: str = "", now: float = 10.0) -> None:
    """Stores a response that continues another one."""
    id = id_of(number)
    own = identified([{"type": "message", "role": "user", "content": f"question {number} \ud83d é"}], id)
    output = {"type": "message", "id": item_id("message", id, "0"), "role": "assistant", "content": [{"text": f"{number}"}]}
    response: dict[str, Any] = {"id": id, "output": [output], "metadata": {}}
    store.put(salt, StoredResponse.of(response, own, None if before is None else store.get(salt, id_of(before)), now))


def tree() -> Responses:
    """Two conversations, one of which branches."""
    store = Responses()
    answer(store, 0)
    answer(store, 1, 0)
    answer(store, 2, 1)
    answer(store, 3, 1)
    answer(store, 4, salt="other", now=20.0)
    store.get("", id_of(0))
    return store


def moved(handed: Handover, deletions: Deletions | None = KNOWN, due: float = -1.0) -> Responses:
    store = Responses()
    restore(store, handed, deletions, lambda _, written: written <= due)
    return store


def shown(store: Responses) -> list[Any]:
    return [(salt, json.dumps(one.response), one.input, one.context, one.written, one.size) for salt, one in store.all()]


def test_all_comes_back_in_its_order_and_shared_lines_are_counted_once() -> None:
    before = tree()
    after = moved(pack(before, KNOWN, never))
    assert shown(after) == shown(before)
    assert after._stored.used == before._stored.used
    answer(after, 5, 2)
    assert len(after.get("", id_of(5)).context) == 8


def test_a_line_goes_on_after_its_earlier_responses_were_forgotten() -> None:
    store = tree()
    for number in (0, 1):
        store.drop("", id_of(number))
    after = moved(pack(store, KNOWN, never))
    assert shown(after) == shown(store)
    assert after._stored.used == store._stored.used
    with pytest.raises(UnknownResponse):
        after.get("", id_of(1))


@pytest.mark.parametrize("deletions", [None, (5.0, 3), (6.0, 2)])
def test_nothing_comes_back_after_a_deletion_that_the_process_did_not_see(deletions: Deletions | None) -> None:
    assert shown(moved(pack(tree(), KNOWN, never), deletions)) == []
    assert pack(tree(), None, never) == Handover()


def test_what_is_due_neither_stays_nor_comes_back() -> None:
    handed = pack(tree(), KNOWN, lambda _, written: written + 100.0)
    assert handed.ends == 110.0
    left = handed.without(115.0)
    assert [one.ends for one in left.conversations] == [120.0]
    assert [salt for salt, *_ in shown(moved(left))] == ["other"]
    assert [salt for salt, *_ in shown(moved(handed, due=10.0))] == ["other"]
    assert "question" not in repr(handed)
