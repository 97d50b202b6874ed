"""GET /openapi.json: what this server takes and gives, written down from the very Structs that read and write it.

The document is of one server: it names the model that is served here, and has no route that the graph has no stages
for. What a schema cannot say (that base64 holds a sound, that an id is known) ends in a 400 or 404 with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from omniflow import __version__
from omniflow.server.failures import ErrorReply
from omniflow.server.operations import EVENTS, FORM, JSON, OPERATIONS, Operation
from omniflow.server.schema_notes import FIELD_TEXTS, NARROWED, NOT_FETCHED, REFUSED, RULES, TAG_MAY_BE_LEFT_OUT
from omniflow.server.service import STOCK_VOICES, Service

_REFS = "#/components/schemas/{name}"


async def openapi(service: Service, request: Request) -> Response:
    """The document."""
    return Response(msgspec.json.encode(document(service)), media_type=JSON)


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
    failures = {status: _reply(text, {JSON: each.failure_shape}) for status, text in each.failures.items()}
    if needs_key:
        failures[401] = _reply("No API key, or none that is known here.", {JSON: ErrorReply})
    responses = {str(status): failures[status] for status in sorted(failures)}
    if each.replies:
        responses = {"200": _reply("As asked for.", each.replies, each.events)} | responses
    written: dict[str, Any] = {
        "operationId": each.name,
        "summary": each.summary,
        "responses": responses,
        "security": [{"key": []}] if needs_key else [],
    }
    if each.body is not None:
        written["requestBody"] = {"required": True, "content": {each.body_type: {"schema": _ref(each.body)}}}
    names = [part[1:-1] for part in each.path.split("/") if part.startswith("{")]
    if names:
        string = {"type": "string", "minLength": 1}
        written["parameters"] = [{"name": name, "in": "path", "required": True, "schema": string} for name in names]
    return written


def _reply(text: str, shapes: Mapping[str, Any], events: Any = None) -> dict[str, Any]:
    content = {media.split(";")[0]: _content(shape) for media, shape in shapes.items()}
    if events is not None:
        data = {"type": "string", "contentMediaType": JSON, "contentSchema": _ref(events)}
        content[EVENTS] = {"itemSchema": {"type": "object", "properties": {"data": data}, "required": ["data"]}}
    ids = {"x-request-id": {"description": "What the log knows it by.", "schema": {"type": "string"}}}
    return {"description": text, "headers": ids, "content": content}


def _content(shape: Any) -> dict[str, Any]:
    if isinstance(shape, tuple):
        return {"schema": {"anyOf": [_ref(each) for each in shape]}}
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
        _note(name, schema, NARROWED if service.config.remote_media else NARROWED | NOT_FETCHED)
    _name_voices(schemas, service)
    _tell_of_recordings(schemas, service)
    for each in offered:
        if each.body is None:
            continue
        schema = schemas[each.body.__name__]
        if "model" in schema["properties"]:
            schema["properties"]["model"] |= {"enum": [service.model, *sorted(service.aliases)]}
        if each.body_type == FORM:
            schemas[each.body.__name__] = _form(schema, each.file)
    return schemas


def _name_voices(schemas: dict[str, Any], service: Service) -> None:
    """Where the voices are known, say them. An item of a batch may have another: that is an error of its own."""
    learned = {voice.name for voice in service.learned.named()}
    known = sorted({voice.name for voice in service.voices} | learned | STOCK_VOICES)
    named = {"enum": known}, {"type": "object", "properties": {"id": {"enum": known}}, "required": ["id"]}
    for name in ("SpeechRequest", "AudioOptions"):
        if service.voices and name in schemas:
            schemas[name]["properties"]["voice"] |= {"anyOf": [*named, {"type": "null"}]}


def _tell_of_recordings(schemas: dict[str, Any], service: Service) -> None:
    """Where the graph learns no voices, nobody sends a recording; an item of a batch that does has an error."""
    if "voice" not in service.runtime.plan.inputs and "SpeechRequest" in schemas:
        nothing = {"type": "null", "description": "Not taken: this model learns no voices."}
        schemas["SpeechRequest"]["properties"] |= {"ref_audio": nothing, "ref_text": nothing}


def _form(schema: dict[str, Any], file: str) -> dict[str, Any]:
    """The schema of a form: it has a file, and no null, for what is left out is not there."""
    fields: dict[str, Any] = {file: {"type": "string", "format": "binary", "description": "A sound file."}}
    for name, field in schema["properties"].items():
        kinds = [kind for kind in field.get("anyOf", ()) if kind != {"type": "null"}]
        plain = {key: value for key, value in field.items() if key not in ("anyOf", "default")}
        fields[name] = plain | kinds[0] if kinds else field
    return schema | {"properties": fields, "required": [file, *schema["required"]]}


def _note(name: str, schema: dict[str, Any], narrowed: Mapping[str, dict[str, dict[str, Any]]]) -> None:
    """Write into the schema of a Struct what `schema_notes` say of it."""
    fields: dict[str, dict[str, Any]] = schema.get("properties", {})
    for field, text in FIELD_TEXTS.get(name, {}).items():
        fields[field]["description"] = text
    for field, change in narrowed.get(name, {}).items():
        fields[field] |= change
    for field in REFUSED.get(name, ()):
        nothing = fields[field] | {"maxItems": 0} if fields[field].get("type") == "array" else {"type": "null"}
        fields[field] = nothing | {"description": "Not taken."}
    if name in RULES:
        schema["allOf"] = RULES[name]
    if name in TAG_MAY_BE_LEFT_OUT:
        schema["required"].remove("type")


def _shapes(each: Operation) -> Iterator[Any]:
    for shape in (each.body, each.events, each.failure_shape, *each.replies.values()):
        yield from shape if isinstance(shape, tuple) else [shape] if shape is not None else []
