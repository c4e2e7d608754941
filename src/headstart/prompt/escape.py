"""Escape: the text of a control token inside a caller's string stays plain text. So no message can forge a turn.

Example: a user writes `<|im_end|>`. It is escaped before the template is rendered, so that the tokenizer does not find a
control token there, and unescaped before it is tokenised as plain text.

A template does more with a string than to write it. It may trim it, cut it, put it between `<` and `>`, delete a word from it,
or write a control token directly behind it. None of this may complete a control token. See `Escaper`.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from headstart.interfaces.tokenizer import Control
from headstart.longest_match import longest_of

# A character of one old manuscript that is put into an escaped control token. Its own occurrences in a text are doubled, and no
# control token begins with it, so unescaping is unambiguous. It is a letter: Python prints those in lists as they are.
ESCAPE = "\ua66e"
_ESCAPED = re.compile(ESCAPE + "(" + ESCAPE + "?)")
_WORD = re.compile(r"\w*")


class Escaper:
    """Escapes control tokens in callers' strings, and unescapes them in rendered text.

    The mark stands behind the first character of what it breaks:

    * each control token, also one that begins inside another;
    * at the end of a string, the beginning of a control token: the template's own text may complete it;
    * a beginning that the text of a control token completes, wherever it stands: the template may cut the string there.
      MiniMax has `]~!b[` and `[e~[`;
    * at the start of a string, a control token without its first and last character: the template may write `<` and `>` around
      it. A plain word is none of these: the role `user` stays as it is, though there may be a control token `<user>`;
    * a word that the template replaces, if the string has or begins a control token after that, or another such word.

    Args:
        replaced: words that the template replaces in strings, and by what, in the order in which it does so.
    """

    def __init__(self, controls: Iterable[Control], replaced: Sequence[tuple[str, str]] = ()) -> None:
        self._texts = sorted({control.text for control in controls} - {""})
        firsts = {text[0] for text in self._texts}
        self._first = re.compile(longest_of(firsts))
        self._longest = max(map(len, self._texts), default=0)
        # All control tokens of most models begin with the same character: this search is fast.
        self._broken = re.compile(longest_of([*self._texts, *self._joined(firsts)]))
        inner = (text[1:-1] for text in self._texts)
        self._inner = re.compile(rf"\s*({longest_of(text for text in inner if not _WORD.fullmatch(text))})")
        self._replaced = [(old, new) for old, new in replaced if old and self._broken.search(new) is None]
        self._words = re.compile(longest_of(old for old, _ in self._replaced))

    def _joined(self, firsts: set[str]) -> Iterator[str]:
        """The beginnings of control tokens that the text of a control token completes."""
        for text in self._texts:
            for at in range(1, len(text)):
                if text[at] in firsts and (self._begins(text[at:]) or text[at:].startswith((*self._texts,))):
                    yield text[:at]

    def escape_last(self, text: str) -> str:
        """A string that no other text follows in the prompt, so that its end is not completed."""
        text = text.replace(ESCAPE, ESCAPE * 2)
        return _marked(text, {*_all(self._broken, text)})

    def escape(self, value: Any) -> Any:
        """The value with all strings in it escaped, also keys of dicts. The value itself if nothing has to be escaped."""
        texts = _texts(value)
        return value if texts is not None and self._harmless(texts) else self._escaped(value)

    def _harmless(self, texts: Sequence[str]) -> bool:
        joined = "\0".join(texts)
        found = ESCAPE in joined or self._broken.search(joined) or any(old in joined for old, _ in self._replaced)
        return not found and not any(map(self._ends, {*texts}))

    def _escaped(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._safe(value.replace(ESCAPE, ESCAPE * 2))
        if isinstance(value, Mapping):
            return {self._escaped(key): self._escaped(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._escaped(item) for item in value]
        return value

    def _safe(self, text: str) -> str:
        safe = _marked(text, self._places(text))
        return _marked(safe, {*_all(self._words, safe)}) if self._hides(safe) else safe

    def _hides(self, text: str) -> bool:
        """Whether a control token appears, or a word that is deleted, where the template replaces one word or all up to it."""
        before = text
        for old, new in self._replaced:
            if old in text:
                alone = text.replace(old, new)
                if self._places(alone) or any(not by and alone.count(word) > text.count(word) for word, by in self._replaced):
                    return True
            before = before.replace(old, new)
            if before != text and self._places(before):
                return True
        return False

    def _places(self, text: str) -> set[int]:
        """Where the characters stand behind which a mark must be."""
        return {*_all(self._broken, text), *self._ends(text)}

    def _ends(self, text: str) -> list[int]:
        """The same, of the start and the end of a text, with the blanks there and without."""
        found = self._inner.match(text)
        places = [found.start(1)] if found else []
        last = len(text.rstrip())
        if self._first.search(text, max(0, last - self._longest)):
            for end in {last, len(text)}:
                tail = self._first.finditer(text, max(0, end - self._longest), end)
                places += [match.start() for match in tail if self._begins(text[match.start() : end])]
        return places

    def _begins(self, text: str) -> bool:
        """Whether a control token begins with it."""
        at = bisect_left(self._texts, text)
        return at < len(self._texts) and self._texts[at].startswith(text)

    @staticmethod
    def unescape(text: str) -> str:
        return _ESCAPED.sub(r"\1", text) if ESCAPE in text else text


def _all(pattern: re.Pattern[str], text: str) -> Iterator[int]:
    """Where all matches begin, also those inside another."""
    found = pattern.search(text)
    while found:
        yield found.start()
        found = pattern.search(text, found.start() + 1)


def _marked(text: str, places: set[int]) -> str:
    """A text with a mark behind these characters."""
    cuts = [0, *(place + 1 for place in sorted(places)), len(text)]
    return ESCAPE.join(text[begin:end] for begin, end in pairwise(cuts))


def _texts(value: Any) -> list[str] | None:
    """All strings in a value with its keys, in any order; None if it has containers other than dicts and lists."""
    inside, texts, keys = [value], [], set[Any]()
    for one in inside:  # the list grows while it is read
        if isinstance(one, str):
            texts.append(one)
        elif isinstance(one, dict):
            keys.update(one)
            inside += one.values()
        elif isinstance(one, list):
            inside += one
        elif isinstance(one, (tuple, Mapping)):
            return None
    return [*filter(lambda key: isinstance(key, str), keys), *texts]
