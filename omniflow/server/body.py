"""From the bytes of a request to a checked Struct: the only place where JSON of clients is read."""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec
from starlette.requests import Request

from omniflow.errors import InvalidInputError
from omniflow.server.failures import BodyTooLargeError, MalformedBodyError

T = TypeVar("T")

_AT_PATH = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")
_MISSING = re.compile(r"^Object missing required field `(?P<field>[^`]*)`")


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body. Raises BodyTooLargeError as soon as it is known to exceed `max_bytes`."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
    return bytes(body)


def decode_json(body: bytes, type: type[T]) -> T:
    """`body` as a `type`. Raises MalformedBodyError, or InvalidInputError whose `param` is the path of the field."""
    try:
        return msgspec.json.decode(body, type=type)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedBodyError(f"the body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise MalformedBodyError("the body is nested too deeply") from error


def _invalid(message: str) -> InvalidInputError:
    """msgspec says "Expected `str`, got `int` - at `$.messages[0].role`"; OpenAI wants the path as `param`."""
    at = _AT_PATH.search(message)
    path = at["path"] if at else ""
    text = message[: at.start()] if at else message
    missing = _MISSING.match(text)
    if missing:
        path = f"{path}.{missing['field']}" if path else missing["field"]
        text = "is required"
    return InvalidInputError(f"{path}: {text}" if path else text, param=path or None)


def _too_large(max_bytes: int) -> BodyTooLargeError:
    return BodyTooLargeError(f"the body is larger than {max_bytes} bytes, the most that this server takes")
