"""Models: the served model, with the fields of both vendors, because they share the path."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import PurePath

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from headstart.api.openapi import ERRORS
from headstart.api.service import Service, service_of

router = APIRouter()


@router.get("/v1/models", responses=ERRORS)
async def models(request: HttpRequest) -> Response:
    """Lists the served model."""
    card = _card(service_of(request))
    return JSONResponse({"object": "list", "data": [card], "has_more": False, "first_id": card["id"], "last_id": card["id"]})


@router.get("/v1/models/{model_id:path}", responses=ERRORS)
async def model(request: HttpRequest, model_id: str) -> Response:
    """Describes the served model."""
    service = service_of(request)
    service.ready()
    service.check_model(model_id)
    return JSONResponse(_card(service))


def _card(service: Service) -> dict[str, object]:
    runtime = service.ready()
    path = runtime.settings.model
    # Only the operator may see where files are: in /props.
    details = {name: value for name, value in runtime.engine.facts.details.items() if name != "path"}
    if details.get("lora"):
        details["lora"] = PurePath(details["lora"]).name
    return {
        "id": service.model_id,
        "object": "model",
        "created": service.created,
        "owned_by": "headstart",
        "type": "model",
        "display_name": service.model_id,
        "created_at": datetime.fromtimestamp(service.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": runtime.ctx - 1,
        "max_tokens": runtime.ctx - 1,
        "aliases": [name for name in service.aliases if name != path or PurePath(path).name == path],
        "meta": {
            "n_ctx": runtime.ctx,
            "n_vocab": runtime.engine.tokenizer.n_vocab,
            "chat_template": runtime.chat_template.as_json,
            **details,
        },
    }
