"""The contract of a tokenizer: text to tokens and back, and which tokens control the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Control:
    """A control token, such as `<|im_end|>`. Its text in a rendered prompt always means the token, never plain text.

    Attributes:
        lstrip, rstrip: whether the tokenizer removes white space on that side of the token.
    """

    text: str
    id: int
    lstrip: bool = False
    rstrip: bool = False


class Tokenizer(Protocol):
    """Text ↔ tokens. Thread-safe."""

    @property
    def n_vocab(self) -> int: ...
    @property
    def bos(self) -> Control | None:
        """The token that every prompt must begin with; None if the model needs none."""

    @property
    def controls(self) -> tuple[Control, ...]: ...
    @property
    def eog(self) -> frozenset[int]:
        """Tokens that end a reply."""

    @property
    def chat_template(self) -> str | None:
        """The model's own Jinja chat template."""

    @property
    def names(self) -> dict[str, str]:
        """`bos_token`, `eos_token`, … for chat templates."""

    def tokenize(self, text: str) -> list[int]:
        """Tokens of plain text. The texts of control tokens stay plain text, and nothing is added at either end.

        The result is the same as directly after a control token.
        """

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a token's text; for a control token, the bytes of its name."""


class LoadedTokenizer(Tokenizer, Protocol):
    """A tokenizer that was loaded without its model. It gives the same tokens."""

    def close(self) -> None:
        """Frees it. Nobody may use it any more. Idempotent."""
