"""The tokenizer."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from headstart.testing.conformance.driver import EngineUnderTest, expect

TEXTS = (
    "",
    "plain",
    "  spaces at both ends  ",
    "\n\nlines\n\n\tand tabs\n",
    "déjà vu — 日本語 🤷🏽‍♀️ \u200b end",
    "def f(x):\n    return {'a': [1, 2]}  # 1234567890",
)


def _bytes_of(subject: EngineUnderTest, tokens: list[int]) -> bytes:
    return b"".join(map(subject.engine.tokenizer.token_bytes, tokens))


def tokens_have_the_bytes_of_their_text(subject: EngineUnderTest) -> None:
    tokenizer = subject.engine.tokenizer
    for text in TEXTS:
        found = _bytes_of(subject, tokenizer.tokenize(text))
        expect(found == text.encode(), f"{text!r} becomes tokens that say {found!r}")


def the_vocabulary_is_consistent(subject: EngineUnderTest) -> None:
    tokenizer = subject.engine.tokenizer
    ids = {control.id for control in tokenizer.controls} | tokenizer.eog
    ids |= {tokenizer.bos.id} if tokenizer.bos else set()
    ids |= {token for text in TEXTS for token in tokenizer.tokenize(text)}
    outside = sorted(token for token in ids if not 0 <= token < tokenizer.n_vocab)
    expect(not outside, f"tokens {outside} are not below n_vocab, {tokenizer.n_vocab}")
    for control in tokenizer.controls:
        found = tokenizer.token_bytes(control.id)
        expect(found == control.text.encode(), f"token_bytes of the control token {control.text} is {found!r}")


def control_tokens_in_a_text_stay_text(subject: EngineUnderTest) -> None:
    tokenizer = subject.engine.tokenizer
    controls = {control.id for control in tokenizer.controls}
    for control in tokenizer.controls:
        text = f"a{control.text}b"
        tokens = tokenizer.tokenize(text)
        expect(not controls & set(tokens), f"tokenize makes a control token of the plain text {control.text}")
        expect(_bytes_of(subject, tokens) == text.encode(), f"{text!r} becomes tokens with other bytes")


def the_tokenizer_is_thread_safe(subject: EngineUnderTest) -> None:
    tokenizer = subject.engine.tokenizer
    texts = [f"{number} {text}" * 20 for number in range(40) for text in TEXTS]
    due = [tokenizer.tokenize(text) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(tokenizer.tokenize, texts))
    wrong = sum(one != other for one, other in zip(found, due, strict=True))
    expect(not wrong, f"{wrong} of {len(texts)} texts get other tokens when several threads use the tokenizer")
