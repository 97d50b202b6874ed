"""From the bytes of a request to a checked Struct: the only place where JSON of clients is read."""

from __future__ import annotations

import re
from typing import TypeVar

import anyio
import msgspec
from starlette.requests import Request

from omniflow.config import ServerConfig
from omniflow.errors import InvalidInputError
from omniflow.server.failures import BodyTimeoutError, BodyTooLargeError, MalformedBodyError

T = TypeVar("T")

_BYTES_PER_S = 16 * 1024
"""A body may take a second more for each so many bytes."""

_AT_PATH = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")
_MISSING = re.compile(r"^Object missing required field `(?P<field>[^`]*)`")


async def read_body(request: Request, config: ServerConfig) -> bytes:
    """The whole body. Raises BodyTooLargeError as soon as it is known to be too large, BodyTimeoutError where it comes
    too slowly: a client that sends a byte now and then would hold its place for ever.
    """
    max_bytes = config.max_body_bytes
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    started_s = anyio.current_time()
    try:
        with anyio.fail_after(config.body_s) as scope:
            async for piece in request.stream():
                body += piece
                if len(body) > max_bytes:
                    raise _too_large(max_bytes)
                scope.deadline = started_s + config.body_s + len(body) / _BYTES_PER_S
    except TimeoutError:
        raise BodyTimeoutError(
            f"{len(body)} bytes of the body came in {anyio.current_time() - started_s:.0f} s; "
            f"expected it whole within {config.body_s:g} s, or more than {_BYTES_PER_S} bytes a second"
        ) from None
    return bytes(body)


def decode_json(body: bytes, type: type[T]) -> T:
    """`body` as a `type`. Raises MalformedBodyError, or InvalidInputError whose `param` is the path of the field."""
    try:
        return msgspec.json.decode(body, type=type)
    except msgspec.ValidationError as error:
        raise invalid_field(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedBodyError(f"the body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise MalformedBodyError("the body is nested too deeply") from error


def invalid_field(message: str, *, within: str = "") -> InvalidInputError:
    """msgspec says "Expected `str`, got `int` - at `$.messages[0].role`"; OpenAI wants the path as `param`.

    `within`: the path of what was read, where that is a part of something.
    """
    at = _AT_PATH.search(message)
    path = ".".join(part for part in (within, at["path"] if at else "") if part)
    text = message[: at.start()] if at else message
    missing = _MISSING.match(text)
    if missing:
        path = f"{path}.{missing['field']}" if path else missing["field"]
        text = "is required"
    return InvalidInputError(f"{path}: {text}" if path else text, param=path or None)


def _too_large(max_bytes: int) -> BodyTooLargeError:
    return BodyTooLargeError(f"the body is larger than {max_bytes} bytes, the most that this server takes")
