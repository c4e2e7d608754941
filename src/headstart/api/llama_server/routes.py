"""llama-server's route for completions: POST /completion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from headstart.api.body import parse
from headstart.api.encoder import Encoder
from headstart.api.framing import frame
from headstart.api.generation import params_of, wanted_beside
from headstart.api.handler import answer
from headstart.api.llama_server.prompt import prompts_of
from headstart.api.llama_server.schema import LlamaRequest
from headstart.api.openapi import ERRORS, STREAMED, takes
from headstart.api.route import Route
from headstart.api.scores import token_scores
from headstart.api.service import Service
from headstart.api.understood import Understood
from headstart.api.usage import timings_so_far
from headstart.chat.reply_builder import ReplyBuilder
from headstart.interfaces.sampling import Sampling
from headstart.observe.report import Summary, summarise
from headstart.output.parser import ReplyDelta, TextDelta
from headstart.serving.request import Progress, Request, TokenLogprob
from headstart.serving.runtime import Runtime

router = APIRouter(route_class=Route)


@router.post("/completion", openapi_extra=takes(LlamaRequest), responses={**ERRORS, **STREAMED})
@router.post("/completions", openapi_extra=takes(LlamaRequest), responses={**ERRORS, **STREAMED})
async def completion(request: HttpRequest) -> Response:
    """Continues texts or tokens, in llama-server's format."""
    return await answer(request, _completion)


def _completion(service: Service, runtime: Runtime, request: HttpRequest, data: bytes) -> Understood:
    body = parse(LlamaRequest, data)
    service.check_model(body.model)
    scored = body.n_probs or (0 if body.return_tokens else None)  # token ids come with the log-probabilities
    limit = body.n_predict if body.n_predict is not None else body.max_tokens
    wanted = params_of(body, runtime.sampling, scored, limit)
    wanted = replace(wanted, choices=body.n_cmpl or wanted.choices)
    requests = [Request(prompt, wanted) for prompt in prompts_of(body, runtime.prompts, service.salting(request))]
    if body.format is not None:
        grammar = service.chat.plain_grammar(body.format)
        requests = [replace(made, grammar=grammar) for made in requests]
    return Understood(body, requests, LlamaEncoder(service.model_id, requests, body), bool(body.stream))


class LlamaEncoder(Encoder):
    """/completion."""

    def __init__(self, model: str, requests: Sequence[Request], body: LlamaRequest) -> None:
        super().__init__(requests, None, **wanted_beside(body))
        self._model = model
        self._prompts = [request.prompt.text for request in requests]
        self._scores = bool(body.n_probs)
        self._tokens = bool(body.return_tokens)
        self._settings = _settings(body, requests[0])

    def begin(self, builder: ReplyBuilder) -> bytes:
        return b""

    def more(self, builder: ReplyBuilder, deltas: Sequence[ReplyDelta], logprobs: Sequence[TokenLogprob]) -> bytes:
        text = "".join(delta.text for delta in deltas if isinstance(delta, TextDelta))
        return frame(self._part(builder, text, logprobs))

    def progress(self, builder: ReplyBuilder, event: Progress, seconds: float) -> bytes:
        if not self.wants_progress:
            return super().progress(builder, event, seconds)
        state = {"total": event.total, "cache": event.cached, "processed": event.done, "time_ms": round(1e3 * seconds)}
        return frame({**self._base(builder, "", ()), "tokens_evaluated": event.done, "prompt_progress": state})

    def finish(self, builder: ReplyBuilder, summary: Summary) -> bytes:
        return frame({**self._result(builder), "content": "", "tokens": []})

    def close(self, summary: Summary) -> bytes:
        return b""

    def whole(self, summary: Summary) -> dict[str, Any] | list[dict[str, Any]]:
        results = []
        for builder in self.builders:
            result = self._result(builder)
            if self._scores:
                result["completion_probabilities"] = token_scores(builder.logprobs, ids=True)
            results.append(result)
        return results[0] if len(results) == 1 else results

    def _base(self, builder: ReplyBuilder, text: str, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        return {
            "index": builder.index,
            "content": text,
            "tokens": [item.token for item in logprobs] if self._tokens else [],
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": builder.tokens,
        }

    def _part(self, builder: ReplyBuilder, text: str, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        assert builder.report is not None
        part = {**self._base(builder, text, logprobs), "tokens_evaluated": builder.report.prompt}
        if self._scores:
            part["completion_probabilities"] = token_scores(logprobs, ids=True)
        if self.timed:
            part["timings"] = timings_so_far(builder, self.seconds)
        return part

    def _result(self, builder: ReplyBuilder) -> dict[str, Any]:
        report = builder.report
        assert report is not None
        summary = summarise([[report]])
        return {
            **self._base(builder, builder.text, builder.logprobs),
            "stop": True,
            "model": self._model,
            "tokens_predicted": report.completion,
            "tokens_evaluated": report.prompt,
            "generation_settings": self._settings,
            "prompt": self._prompts[builder.index // self.width],
            "has_new_line": "\n" in builder.text,
            "truncated": False,
            "stop_type": _stop_type(builder),
            "stopping_word": builder.stopped_by or "",
            "tokens_cached": report.cached,
            **self.account(summary),
        }


def _stop_type(builder: ReplyBuilder) -> str:
    if builder.stopped_by is not None:
        return "word"
    return "limit" if builder.finish == "length" else "eos"


def _settings(body: LlamaRequest, request: Request) -> dict[str, Any]:
    """`generation_settings`."""
    sampling: Sampling = request.params.sampling
    names = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "presence_penalty", "frequency_penalty")
    return {
        **{name: getattr(sampling, name) for name in names},
        "seed": -1 if sampling.seed is None else sampling.seed,
        "n_predict": -1 if request.params.max_tokens is None else request.params.max_tokens,
        "stop": list(request.params.stop),
        "ignore_eos": request.params.ignore_eos,
        "n_probs": body.n_probs or 0,
        "stream": bool(body.stream),
        "timings_per_token": bool(body.timings_per_token),
    }
