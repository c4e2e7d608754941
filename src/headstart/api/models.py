"""Models: the models of this server, with the fields of both vendors, because they share the path."""

from __future__ import annotations

from datetime import UTC, datetime

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from headstart.api.openapi import ERRORS
from headstart.api.served_models import ServedModel
from headstart.api.service import Service, service_of

router = APIRouter()


@router.get("/v1/models", responses=ERRORS)
async def models(request: HttpRequest) -> Response:
    """Lists the models of this server."""
    service = service_of(request)
    service.ready()
    cards = [_card(service, model) for model in service.models.all()]
    ends = {"first_id": cards[0]["id"], "last_id": cards[-1]["id"]}
    return JSONResponse({"object": "list", "data": cards, "has_more": False, **ends})


@router.get("/v1/models/{model_id:path}", responses=ERRORS)
async def model(request: HttpRequest, model_id: str) -> Response:
    """Describes a model of this server."""
    service = service_of(request)
    service.ready()
    return JSONResponse(_card(service, service.models.find(model_id)))


def _card(service: Service, model: ServedModel) -> dict[str, object]:
    limit = None if model.ctx is None else model.ctx - 1
    return {
        "id": model.id,
        "object": "model",
        "created": service.created,
        "owned_by": "headstart",
        "type": "model",
        "display_name": model.id,
        "created_at": datetime.fromtimestamp(service.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "state": model.state,
        "max_input_tokens": limit,
        "max_tokens": limit,
        "aliases": list(model.aliases),
        "meta": dict(model.facts),
    }
