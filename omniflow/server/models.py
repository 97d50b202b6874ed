"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from omniflow.server.service import Service


class Model(Struct, frozen=True):
    """A served model."""

    id: str
    created: int
    owned_by: Literal["omniflow"] = "omniflow"
    object: Literal["model"] = "model"


class ModelList(Struct, frozen=True):
    """All served models."""

    data: tuple[Model, ...]
    object: Literal["list"] = "list"


async def list_models(service: Service, request: Request) -> Response:
    """The one model that is served."""
    return _json(ModelList((Model(service.model, service.created),)))


async def get_model(service: Service, request: Request) -> Response:
    """The model by its id or an alias of it."""
    service.require_model(request.path_params["model"])
    return _json(Model(service.model, service.created))


def _json(body: Model | ModelList) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
