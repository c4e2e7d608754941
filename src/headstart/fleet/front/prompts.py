"""Prompts of the front: the chain of a request's prompt, as the replica will compute it.

The front renders and tokenises with the replicas' own code, and with a tokenizer that is loaded without the weights. What a
replica alone knows is missing here: tokens of replies that differ from the tokenizer's choice, and reasoning that the client
left out (both in fast mode only), and stored responses. From that reply on the two chains differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import structlog
from starlette.datastructures import Headers

from headstart.api import dialects
from headstart.api.auth import Key, Keys, offered_keys
from headstart.api.incoming import MAX_BODY
from headstart.api.paths import canonical
from headstart.chat import tenancy
from headstart.chat.normalize import check_rules
from headstart.chat.prompt_model import PromptModel
from headstart.config import Settings
from headstart.engines import registry
from headstart.engines.options import EngineOptions
from headstart.errors import RequestError, for_log
from headstart.fleet.model_card import ModelCard
from headstart.fleet.router.chains import PromptChain, chain_of
from headstart.interfaces.tokenizer import LoadedTokenizer
from headstart.prefix_cache.blocks import root_id
from headstart.prompt.builder import Prompt
from headstart.serving.prompt_maker import PromptMaker

_ANTHROPIC = "anthropic-version"
"""The header that all of Anthropic's clients send."""

log = structlog.get_logger("headstart.fleet")


class PromptReader:
    """Finds the chains of requests. Thread-safe.

    It keeps texts of prompts in memory, so that the next request of a conversation takes less time. If data expires, call
    `forget` every `expire` seconds.

    Args:
        settings: those of the replicas: `model`, `chat_template`, `reuse`, `overflow` and `expire` are used.
        keys: those of the replicas.
        isolate: as for the replicas: name of a policy in `tenancy.POLICIES`; None to choose by the number of keys.
        keep_noise: as for the replicas: names of rules in `normalize.RULES` to leave out.
        max_body: most bytes of a body.
        load: loads the tokenizer.

    Raises:
        ConfigError: no such policy or rule, the chat template is broken, or the model's engine cannot load a tokenizer alone.
        ModelError: the model file is missing, broken or unsupported.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        keys: Keys,
        isolate: str | None,
        keep_noise: Sequence[str],
        max_body: int = MAX_BODY,
        load: Callable[[EngineOptions], LoadedTokenizer] = registry.load_tokenizer,
    ) -> None:
        check_rules(keep_noise)
        self._policy = tenancy.policy_of(isolate, several=keys.several)
        self._keys = keys
        self._expire = settings.expire
        self._max_body = max_body
        self._tokenizer = load(settings.engine_options())
        try:
            self._model = PromptModel(PromptMaker.of(self._tokenizer, settings, ctx=0), keep_noise)
        except BaseException:
            self._tokenizer.close()
            raise

    def chain(self, card: ModelCard, path: str, headers: Mapping[str, str], body: bytes) -> PromptChain | None:
        """The chain of a request's prompt; of the first one if it has several. It takes milliseconds, and never raises.

        Args:
            card: of the replicas' model.
            path: the request's path, as the client wrote it; "" if it is not known. The body then shows what it is.
            headers: with the API key, best as Starlette's `Headers`.

        Returns: None if there is no prompt, or if a replica would refuse the request: its key or body, or a prompt that is too
            long. The name of the model, and grammars, are not checked here.
        """
        try:
            headers = headers if isinstance(headers, Headers) else Headers(headers)
            key = self._keys.find(offered_keys(headers)) if len(body) <= self._max_body else None
            prompt = None if key is None else self._prompt(card, key, path, headers, body)
        except RequestError:
            return None
        except Exception as error:  # a request may contain anything
            log.error("a prompt could not be read", error=for_log(error))
            return None
        if key is None or prompt is None:
            return None
        found = chain_of(root_id(card.fingerprint, prompt.salt), card.block_size, prompt.tokens, stateful=card.stateful)
        if self._policy.user and key.expire is not None:  # a replica learns a user's term from the user's first request
            return replace(found, source=None)
        return found

    def _prompt(self, card: ModelCard, key: Key, path: str, headers: Headers, body: bytes) -> Prompt | None:
        path = canonical(path.partition("?")[0]) if path else ""
        if not path and _ANTHROPIC in headers:
            path = "/v1/messages"
        salting = partial(tenancy.salt, self._policy, key.tenant)
        return dialects.prompt_of(path, body, self._model.limited(card.ctx), salting)

    @property
    def expire(self) -> float:
        """Seconds for which texts of prompts may be kept; infinite if there is no limit."""
        terms = [self._expire, *(key.expire for key in self._keys.all())]
        return min((term for term in terms if term is not None), default=math.inf)

    def forget(self) -> None:
        """Drops all texts of prompts. Later requests take longer."""
        self._model.forget()

    def close(self) -> None:
        """Frees the tokenizer, once no thread uses it. `chain` then returns None. Idempotent."""
        gate = self._model.prompts.gate
        if gate.shut():
            gate.wait()
            self._tokenizer.close()
