"""GET /openapi.json: what this server takes and gives, written down from the very Structs that read and write it.

The document is of one server: it names the model that is served here, and has no route that the graph has no stages
for. What a schema cannot say (that base64 holds a sound, that an id is known) ends in a 400 or 404 with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from omniflow import __version__
from omniflow.server.chat_reply import Chunk, Completion
from omniflow.server.chat_request import ChatRequest
from omniflow.server.encoders import SPEECH_FORMATS
from omniflow.server.failures import ErrorReply
from omniflow.server.health import Health, Liveness, Readiness
from omniflow.server.models import Model, ModelList
from omniflow.server.schema_notes import FIELD_TEXTS, NARROWED, REFUSED, RULES, TAG_MAY_BE_LEFT_OUT
from omniflow.server.service import Service
from omniflow.server.speech import SpeechDelta, SpeechDone, SpeechRequest

_REFS = "#/components/schemas/{name}"
_EVENTS = "text/event-stream"
_JSON = "application/json"
_CALL_ERRORS = {
    400: "The request is not valid, or this model cannot do it: `param` names the field.",
    404: "No such model.",
    408: "The body did not come in time.",
    413: "The body is too large.",
    429: "Too much is asked for at once; `retry-after` says when to come back. Nothing of it ran.",
    500: "A bug. The log of the server has it under the `x-request-id`.",
    503: "Starting, draining, or a stage died; `x-should-retry` says whether to send it again.",
    504: "The deadline passed, which `x-request-timeout` (seconds) can set.",
}


class Operation(Struct, frozen=True, kw_only=True):
    """A method of a path. `replies`: shapes by media type, None where it is no JSON; `needs`: an input of the graph."""

    method: Literal["get", "post", "delete"]
    path: str
    name: str
    summary: str
    body: type[Struct] | None = None
    body_type: str = _JSON
    replies: Mapping[str, Any] = {}
    events: Any = None
    failures: Mapping[int, str] = {}
    failure_shape: Any = ErrorReply
    needs: str | None = None
    is_open: bool = False


OPERATIONS = (
    Operation(
        method="post",
        path="/v1/chat/completions",
        name="createChatCompletion",
        summary="Answer a conversation, in text or aloud, whole or as server-sent events.",
        body=ChatRequest,
        replies={_JSON: Completion, _EVENTS: None},
        events=Chunk,
        failures=_CALL_ERRORS,
        needs="chat",
    ),
    Operation(
        method="post",
        path="/v1/audio/speech",
        name="createSpeech",
        summary="Say a text: as a file, as bytes while they are made, or as server-sent events.",
        body=SpeechRequest,
        replies={**{format.media_type: None for format in SPEECH_FORMATS.values()}, _EVENTS: None},
        events=SpeechDelta | SpeechDone,
        failures=_CALL_ERRORS,
        needs="speech",
    ),
    Operation(
        method="get",
        path="/v1/models",
        name="listModels",
        summary="The models that are served.",
        replies={_JSON: ModelList},
    ),
    Operation(
        method="get",
        path="/v1/models/{model}",
        name="retrieveModel",
        summary="A served model.",
        replies={_JSON: Model},
        failures={404: "No such model."},
    ),
    Operation(
        method="get",
        path="/live",
        name="live",
        summary="Is the process worth keeping?",
        replies={_JSON: Liveness},
        failures={503: "The graph has failed for good."},
        failure_shape=Liveness,
        is_open=True,
    ),
    Operation(
        method="get",
        path="/ready",
        name="ready",
        summary="May requests be sent here?",
        replies={_JSON: Readiness},
        failures={503: "Not now: `reason` says why."},
        failure_shape=Readiness,
        is_open=True,
    ),
    Operation(
        method="get",
        path="/health",
        name="health",
        summary="What runs here, and how it is.",
        replies={_JSON: Health},
        failures={503: "It takes no requests: `reason` says why."},
        failure_shape=Health,
        is_open=True,
    ),
    Operation(
        method="get",
        path="/metrics",
        name="metrics",
        summary="Prometheus text.",
        replies={"text/plain": None},
    ),
    Operation(
        method="get",
        path="/openapi.json",
        name="openapi",
        summary="This document.",
        replies={_JSON: None},
        is_open=True,
    ),
)


async def openapi(service: Service, request: Request) -> Response:
    """The document."""
    return Response(msgspec.json.encode(document(service)), media_type=_JSON)


def document(service: Service) -> dict[str, Any]:
    """OpenAPI 3.1 of what `service` serves."""
    offered = [each for each in OPERATIONS if each.needs is None or each.needs in service.runtime.plan.inputs]
    paths: dict[str, dict[str, Any]] = {}
    for each in offered:
        paths.setdefault(each.path, {})[each.method] = _operation(each, service)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": f"omniflow: {service.model}",
            "version": __version__,
            "summary": "OpenAI-compatible. WebSocket routes, which OpenAPI has no words for, are not in here.",
        },
        "paths": paths,
        "components": {
            "schemas": _schemas(offered, service),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(each: Operation, service: Service) -> dict[str, Any]:
    is_open = each.is_open or (each.path == "/metrics" and not service.config.guard_metrics)
    needs_key = service.keys.required and not is_open
    failures = {status: _reply(text, {_JSON: each.failure_shape}) for status, text in each.failures.items()}
    if needs_key:
        failures[401] = _reply("No API key, or none that is known here.", {_JSON: ErrorReply})
    written: dict[str, Any] = {
        "operationId": each.name,
        "summary": each.summary,
        "responses": {
            "200": _reply("As asked for." if each.events else "It.", each.replies, each.events),
            **{str(status): failures[status] for status in sorted(failures)},
        },
        "security": [{"key": []}] if needs_key else [],
    }
    if each.body is not None:
        content = {each.body_type: {"schema": _ref(each.body)}}
        written["requestBody"] = {"required": True, "content": content}
    names = [part[1:-1] for part in each.path.split("/") if part.startswith("{")]
    if names:
        string = {"type": "string", "minLength": 1}
        written["parameters"] = [{"name": name, "in": "path", "required": True, "schema": string} for name in names]
    return written


def _reply(text: str, shapes: Mapping[str, Any], events: Any = None) -> dict[str, Any]:
    content = {media.split(";")[0]: _content(shape) for media, shape in shapes.items()}
    if events is not None:
        data = {"type": "string", "contentMediaType": _JSON, "contentSchema": _ref(events)}
        content[_EVENTS] = {"itemSchema": {"type": "object", "properties": {"data": data}, "required": ["data"]}}
    ids = {"x-request-id": {"description": "What the log knows it by.", "schema": {"type": "string"}}}
    return {"description": text, "headers": ids, "content": content}


def _content(shape: Any) -> dict[str, Any]:
    return {} if shape is None else {"schema": _ref(shape)}


def _ref(shape: Any) -> dict[str, Any]:
    """A reference to `shape`, or to each of a union of them."""
    (schema,), _ = msgspec.json.schema_components([shape], ref_template=_REFS)
    return schema


def _schemas(offered: list[Operation], service: Service) -> dict[str, Any]:
    """Every Struct by its name, with what their types cannot say, and the names that are served here."""
    shapes = [ErrorReply, *(shape for each in offered for shape in _shapes(each))]
    _, schemas = msgspec.json.schema_components(shapes, ref_template=_REFS)
    for name, schema in schemas.items():
        _note(name, schema)
    for each in offered:
        if each.body is not None and "model" in (fields := schemas[each.body.__name__]["properties"]):
            fields["model"] |= {"enum": [service.model, *sorted(service.aliases)]}
    return schemas


def _note(name: str, schema: dict[str, Any]) -> None:
    """Write into the schema of a Struct what `schema_notes` say of it."""
    fields: dict[str, dict[str, Any]] = schema.get("properties", {})
    for field, text in FIELD_TEXTS.get(name, {}).items():
        fields[field]["description"] = text
    for field, change in NARROWED.get(name, {}).items():
        fields[field] |= change
    for field in REFUSED.get(name, ()):
        fields[field] = {"type": "null", "default": None, "description": "Not taken."}
    if name in RULES:
        schema["allOf"] = RULES[name]
    if name in TAG_MAY_BE_LEFT_OUT:
        schema["required"].remove("type")


def _shapes(each: Operation) -> Iterator[Any]:
    yield from (shape for shape in (each.body, each.events, each.failure_shape, *each.replies.values()) if shape)
