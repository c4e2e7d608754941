"""Tokenizer of a model folder in Hugging Face's form: `tokenizer.json`, by the library `tokenizers` alone.

The chat template is in `chat_template.jinja`, or in `tokenizer_config.json`. The tokens that end a reply are in
`generation_config.json`, or in `config.json`; the tokenizer's own end token is always one of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headstart.engines.model_folder import read_json
from headstart.errors import ModelError
from headstart.interfaces.tokenizer import Control

_BYTE = re.compile(r"<0x([0-9A-F]{2})>\Z")
_SPACE = "▁"  # how SentencePiece writes a space
_PLAIN = re.compile(r"\w+|\W")
"""Words and signs. Some models have one of the vocabulary's as a control token, like `!` to fill batches up."""
_NEVER = -1e6  # score of a piece that every other way to write its text beats
_MARKER = re.compile(r"<\|.*\|>|<｜.*｜>|\[\|.*\|\]|<unused.*>|<pad>|<mask>|<2mass>|\[@BOS@\]")
"""Names that only control tokens have. Texts of replies have others: `<think>`, `<tool_call>`."""
_TURN = re.compile(
    r"[<\[](?:.*[^a-z])?(?:assistant|bot|human|inst|message|model|role|system|turn|user)(?:[^a-z].*)?[>\]]", re.I
)
"""Names of markers of turns. Other tokens can have them too, so the chat template must contain the token."""
_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class HFTokenizer:
    """Text ↔ tokens. Thread-safe.

    Args:
        folder: of the model.

    Raises:
        ModelError: a file is missing or broken, or a message could forge a control token.
    """

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        path = folder / "tokenizer.json"
        if not path.exists():
            raise ModelError(f"'{folder}' has no tokenizer.json, which headstart needs: choose a repository that has one.")
        form, options = read_json(path), read_json(folder / "tokenizer_config.json")
        _add_no_first_space(form.get("pre_tokenizer"))
        self.names = {name: text for name in _NAMES if (text := _text(options.get(name))) is not None}
        self.chat_template = _template(folder, options)
        added = [
            token for token in form.get("added_tokens") or () if isinstance(token, dict) and {"content", "id"} <= token.keys()
        ]
        eos = self.names.get("eos_token")
        self.eog = _ends(folder, next((token["id"] for token in added if token["content"] == eos), None))
        for token in added:  # before the library reads it: it finds all other added tokens in any text
            token["special"] = token.get("special") or self._is_control(token)
        self.controls: tuple[Control, ...] = tuple(
            Control(token["content"], token["id"], bool(token.get("lstrip")), bool(token.get("rstrip")))
            for token in added
            if token["special"]
        )
        try:
            _bar(form.get("model"), {control.text for control in self.controls})
            self._tokenizer = Tokenizer.from_str(json.dumps(form))
            # Training may have left these in the file. A prompt is neither cut nor filled up.
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            # Texts of control tokens in a message stay text.
            self._tokenizer.encode_special_tokens = True
            forged = {*self._forged(form["model"])}
        except Exception as error:  # the library has no exception of its own
            raise ModelError(f"'{path}' cannot be used ({error}).") from None
        for control in forged:
            turn = control.id in self.eog or control.text == self.names.get("bos_token")
            if turn or not _PLAIN.fullmatch(control.text):
                raise ModelError(
                    f"'{path}' cannot be used: it makes the control token {control.text!r} of plain text, so a message could "
                    "forge a turn. Choose another model."
                )
        self.controls = tuple(control for control in self.controls if control not in forged)
        by_text = {control.text: control for control in self.controls}
        bos = by_text.get(self.names.get("bos_token", ""))
        self.bos = bos if bos is not None and _adds_bos(form, options, bos) else None
        self._bytes = self._all_bytes(form)
        self.n_vocab = len(self._bytes)

    def tokenize(self, text: str) -> list[int]:
        text = text.encode("utf-8", "replace").decode()  # lone surrogates
        found: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return found

    def token_bytes(self, token: int) -> bytes:
        return self._bytes[token]

    def close(self) -> None:
        return

    def _is_control(self, token: dict[str, Any]) -> bool:
        """Whether an added token is a control token although the file does not say so. DeepSeek's `<｜User｜>` is one."""
        text = token["content"]
        named = token["id"] in self.eog or text == self.names.get("bos_token")
        turn = text in (self.chat_template or "") and _TURN.fullmatch(text) is not None
        return named or turn or _MARKER.fullmatch(text) is not None

    def _forged(self, model: dict[str, Any]) -> Iterator[Control]:
        """The control tokens that their plain text becomes. The one for unknown characters does no harm."""
        unknown = {model.get("unk_token"), model.get("unk_id")}
        for control in self.controls:
            # Some tokenizers add a space before a text, but none behind a line break.
            found = any(control.id in self.tokenize(before + control.text) for before in ("", "\n"))
            if found and unknown.isdisjoint((control.text, control.id)):
                yield control

    def _all_bytes(self, form: dict[str, Any]) -> list[bytes]:
        names: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        added = {token["id"] for token in form.get("added_tokens", ())}
        controls = {control.id for control in self.controls}
        level = _has(form.get("decoder"), "ByteLevel") or _has(form.get("pre_tokenizer"), "ByteLevel")
        found = [b""] * (max(names.values(), default=-1) + 1)
        for name, token in names.items():
            # Other added tokens have the text that the decoder makes of them: Gemma's runs of spaces are added ones.
            if token in controls or (level and token in added):
                found[token] = name.encode()
            elif level:
                found[token] = bytes(_BYTE_OF[letter] for letter in name if letter in _BYTE_OF)
            elif byte := _BYTE.match(name):
                found[token] = bytes([int(byte[1], 16)])
            else:
                found[token] = name.replace(_SPACE, " ").encode()
        return found


def _bar(model: Any, controls: set[str]) -> None:
    """Keeps control tokens out of the plain texts of a Unigram model. They are pieces of it, with the best score of all."""
    if isinstance(model, dict) and model.get("type") == "Unigram":
        for piece in model["vocab"]:
            if piece[0] in controls:
                piece[1] = _NEVER


def _add_no_first_space(part: Any) -> None:
    """Lets a part of a tokenizer add no space before a prompt's first text only: `tokenize` is for text behind a control token.

    `always` and the normalizer `Prepend` stay: they add a space behind each control token.
    """
    if not isinstance(part, dict):
        return
    if part.get("type") == "Metaspace":
        adds = part.pop("add_prefix_space", True)  # of older files; the library wants both to say the same
        if part.get("prepend_scheme") == "first" or not adds:
            part["prepend_scheme"] = "never"
    for child in part.get("pretokenizers") or ():
        _add_no_first_space(child)


def _has(part: Any, kind: str) -> bool:
    if isinstance(part, dict):
        return part.get("type") == kind or any(_has(child, kind) for child in part.values())
    return isinstance(part, list) and any(_has(child, kind) for child in part)


def _text(token: Any) -> str | None:
    """A token in tokenizer_config.json: its text, or an object that has it."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _adds_bos(form: dict[str, Any], options: dict[str, Any], bos: Control) -> bool:
    """Whether prompts begin with the token: the post-processor decides, or an option if there is none."""
    if "add_bos_token" in options:
        return bool(options["add_bos_token"])
    return json.dumps(bos.text) in json.dumps(form.get("post_processor"))


def _ends(folder: Path, eos: int | None) -> frozenset[int]:
    found = {eos} if eos is not None else set[int]()
    for name in ("generation_config.json", "config.json"):
        ends = read_json(folder / name).get("eos_token_id")
        if ends is not None:
            return frozenset(found | set(ends if isinstance(ends, list) else [ends]))
    return frozenset(found)


def _template(folder: Path, options: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text("utf-8")
    found = options.get("chat_template")
    if isinstance(found, list):  # several with names
        named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _byte_letters() -> dict[str, int]:
    """The letters by which byte-level BPE writes bytes (GPT-2): printable ones stand for themselves, others are moved up."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    moved = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + number): byte for number, byte in enumerate(moved)}


_BYTE_OF = _byte_letters()
