"""Templates: chat templates that come with headstart, for models without one. Their names are those of llama-server."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Literal

from headstart.names import option

FALLBACK = "chatml"
"""The template of a model that has none."""

BUILT_IN: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "chatml": ("<|im_start|>", "<|im_end|>"),
        "command-r": ("<|START_OF_TURN_TOKEN|>", "<|CHATBOT_TOKEN|>"),
        "deepseek": ("<|EOT|>",),
        "deepseek2": (),
        "deepseek3": ("<｜User｜>", "<｜Assistant｜>"),
        "falcon3": ("<|system|>", "<|user|>", "<|assistant|>", "<|endoftext|>"),
        "gemma": ("<start_of_turn>", "<end_of_turn>"),
        "granite": ("<|start_of_role|>", "<|end_of_role|>"),
        "llama2": (),
        "llama3": ("<|start_header_id|>", "<|eot_id|>"),
        "llama4": ("<|header_start|>", "<|eot|>"),
        "mistral-v1": (),
        "mistral-v3": ("[INST]", "[AVAILABLE_TOOLS]"),
        "mistral-v3-tekken": (),
        "mistral-v7": ("[INST]", "[SYSTEM_PROMPT]"),
        "mistral-v7-tekken": (),
        "openchat": ("<|end_of_turn|>",),
        "phi3": ("<|user|>", "<|assistant|>", "<|end|>"),
        "phi4": ("<|im_start|>", "<|im_sep|>", "<|im_end|>"),
        "vicuna": (),
        "zephyr": (),
    }
)
"""For each template, the control tokens of models that were trained with it; empty if others have the same tokens."""


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """The Jinja text of a chat template, and where it comes from.

    Attributes:
        origin: `model` (from its GGUF), `built-in`, `file`, or `none` (the model has none, and the user chose none).
        name: of a built-in template, else "".
    """

    source: str
    origin: Literal["model", "built-in", "file", "none"]
    name: str = ""

    @property
    def as_json(self) -> dict[str, str | None]:
        """The fields that clients see."""
        return {"origin": self.origin, "name": self.name or None}

    def described(self, controls: Iterable[str]) -> str:
        """One line for people, with placeholders for options (`names`).

        Args:
            controls: the texts of the model's control tokens.
        """
        if self.origin == "none":
            likely = guess(controls)
            remedy = f"its tokens look like those of {likely}" if likely else "`headstart serve --help` lists the built-in ones"
            other = f"choose another with {option('chat_template')} ({remedy})"
            return f"none in the model: conversations are written as ChatML; {other}"
        return {"model": "the model's own", "file": "of a file", "built-in": f"{self.name} (built-in)"}[self.origin]


def built_in(name: str) -> ChatTemplate:
    """The built-in template with this name. Raises KeyError."""
    if name not in BUILT_IN:
        raise KeyError(name)
    return ChatTemplate(_text(name), "built-in", name)


def of_model(source: str | None) -> ChatTemplate:
    """The model's own template, or `FALLBACK`."""
    return ChatTemplate(_text(FALLBACK), "none", FALLBACK) if source is None else ChatTemplate(source, "model")


def guess(controls: Iterable[str]) -> str | None:
    """The built-in template whose control tokens the model has. If several fit, the one with the most of them."""
    known = frozenset(controls)
    fitting = [name for name, controls in BUILT_IN.items() if controls and known.issuperset(controls)]
    return max(fitting, key=lambda name: len(BUILT_IN[name]), default=None)


def near(name: str) -> str:
    """Help for an unknown name: the most similar built-in name, and all names."""
    close = difflib.get_close_matches(name.lower(), BUILT_IN, 1, 0.5)
    meant = f"did you mean {close[0]}? " if close else ""
    return f"{meant}Built in are {', '.join(BUILT_IN)}"


@cache
def _text(name: str) -> str:
    return (files("headstart") / "data" / "templates" / f"{name}.jinja").read_text("utf-8")
