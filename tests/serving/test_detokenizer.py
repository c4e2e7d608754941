"""A reply delivers whole characters, never a part of a stop text, and knows which tokens it delivered."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headstart.serving.detokenizer import Detokenizer


def pieces(*parts: bytes) -> Detokenizer:
    return Detokenizer(lambda token: parts[token])


def run(reply: Detokenizer, count: int) -> list[str]:
    out = []
    for token in range(count):
        out.append(reply.push(token))
        if reply.stopped_by is not None:
            return out
    out.append(reply.end())
    return out


def test_a_character_split_over_tokens_is_held_back() -> None:
    euro = "€".encode()
    assert run(pieces(b"a", euro[:1], euro[1:2], euro[2:], b"b"), 5) == ["a", "", "", "€", "b", ""]


def test_a_reply_that_ends_inside_a_character_says_so() -> None:
    reply = pieces(b"a", "€".encode()[:2])
    assert "".join(run(reply, 2)) == "a\ufffd"
    assert reply.delivered() == [0]


def test_a_stop_text_across_tokens_is_never_delivered() -> None:
    reply = Detokenizer(lambda token: (b"hello E", b"N", b"D world")[token], ("END",))
    assert run(reply, 3) == ["hello ", "", ""]
    assert reply.stopped_by == "END"
    assert reply.text == "hello "
    assert reply.delivered() == []


def test_what_only_looked_like_a_stop_text_is_delivered() -> None:
    reply = Detokenizer(lambda token: (b"E", b"N", b"E", b"MY")[token], ("END",))
    assert "".join(run(reply, 4)) == "ENEMY"
    assert reply.delivered() == [0, 1, 2, 3]


def test_the_earliest_stop_text_wins() -> None:
    reply = Detokenizer(lambda token: b"one two three"[token : token + 1], ("three", "two"))
    assert "".join(run(reply, 13)) == "one "
    assert reply.stopped_by == "two"


@given(st.text(max_size=60), st.lists(st.text(min_size=1, max_size=4), max_size=3), st.integers(1, 5))
def test_streaming_equals_cutting_the_whole(text: str, stops: list[str], width: int) -> None:
    data = text.encode("utf-8", "ignore")
    text = data.decode()
    parts = [data[i : i + width] for i in range(0, len(data), width)]
    reply = Detokenizer(lambda token: parts[token], tuple(stops))
    delivered = "".join(run(reply, len(parts)))
    ends = [at for stop in stops if (at := text.find(stop)) >= 0]
    if not ends:
        assert delivered == text
    else:
        # Streaming decides at the first token that completes a stop text: one that begins later may end first.
        assert text.startswith(delivered)
        assert any(text[len(delivered) :].startswith(stop) for stop in stops)
        assert not any(stop in delivered for stop in stops)
    assert delivered == reply.text
    assert b"".join(parts[t] for t in reply.delivered()) == data[: sum(len(parts[t]) for t in reply.delivered())]
    assert len(b"".join(parts[t] for t in reply.delivered())) <= len(delivered.encode())
