"""llama-server's prompts: what a body has the model continue."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from headstart.api.body import validate
from headstart.api.llama_server.schema import LlamaRequest
from headstart.chat.prompt_model import PromptModel
from headstart.chat.tenancy import Salting
from headstart.prompt.builder import Prompt
from headstart.serving.prompt_maker import PromptMaker


def prompts_of(body: LlamaRequest, prompts: PromptMaker, salting: Salting) -> Iterator[Prompt]:
    """The prompts of a body of /completion. Raises what `PromptMaker.text` raises."""
    salt = salting(body.safety_identifier or body.user, body.cache_salt)
    for given in body.prompts:
        yield _prompt(prompts, given, salt, use_reply_tokens=body.reuses)


def of_completion(model: PromptModel, value: dict[str, Any], salting: Salting) -> Prompt:
    """The first prompt of POST /completion. Raises RequestError."""
    return next(prompts_of(validate(LlamaRequest, value), model.prompts, salting))


def _prompt(prompts: PromptMaker, given: str | Sequence[str | int], salt: str, *, use_reply_tokens: bool) -> Prompt:
    if isinstance(given, str) or all(isinstance(part, int) for part in given):
        return prompts.text(given, salt=salt, use_reply_tokens=use_reply_tokens)  # type: ignore[arg-type]
    tokens: list[int] = []
    for part in given:
        tokens += _tokens(prompts, part, salt, first=not tokens) if isinstance(part, str) else [part]
    return prompts.text(tokens, salt=salt)


def _tokens(prompts: PromptMaker, text: str, salt: str, *, first: bool) -> list[int]:
    """The tokens of a text in a list of texts and tokens. Only the first text gets the BOS token."""
    with prompts.tokenizer_open() as tokenizer:
        tokens: list[int] = prompts.prompter.text(text, salt=salt, use_reply_tokens=False).tokens.tolist()
        added = tokenizer.bos is not None and not text.startswith(tokenizer.bos.text)
        return tokens[1:] if added and not first else tokens
