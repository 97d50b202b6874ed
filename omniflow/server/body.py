"""From the bytes of a request to a checked Struct: the only place where JSON of clients is read."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import anyio
import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Message, Receive

from omniflow.config import ServerConfig
from omniflow.errors import InvalidInputError
from omniflow.server.failures import BodyTimeoutError, BodyTooLargeError, MalformedBodyError
from omniflow.server.words import rule_at, words_at

T = TypeVar("T")

_BYTES_PER_S = 16 * 1024
"""A body may take a second more for each so many bytes."""

_AT_PATH = re.compile(r" - at `\$\.?(?P<path>[^`]*?)(?:\[\.\.\.\])?`$")
"""msgspec writes `[...]` for the value of some key."""
_MISSING = re.compile(r"^Object missing required field `(?P<field>[^`]*)`")
_NO_SUCH_WORD = ("Invalid enum value", "Invalid value")


class Intake:
    """`receive` of a request whose body may neither be too large nor come too slowly.

    Raises BodyTooLargeError as soon as the body is known to be too large, BodyTimeoutError where it comes too slowly: a
    client that sends a byte now and then would hold its place for ever.
    """

    def __init__(self, headers: Headers, receive: Receive, config: ServerConfig) -> None:
        self._receive = receive
        self._max_bytes = config.max_body_bytes
        self._body_s = config.body_s
        self._started_s = anyio.current_time()
        self._num_bytes = 0
        declared = headers.get("content-length", "")
        self._refused = declared.isdecimal() and int(declared) > self._max_bytes

    async def __call__(self) -> Message:
        """The next piece of the body."""
        if self._refused:
            raise _too_large(self._max_bytes)
        allowed_s = self._body_s + self._num_bytes / _BYTES_PER_S
        try:
            with anyio.fail_after(self._started_s + allowed_s - anyio.current_time()):
                message = await self._receive()
        except TimeoutError:
            raise BodyTimeoutError(
                f"{self._num_bytes} bytes of the body came in {anyio.current_time() - self._started_s:.0f} s; "
                f"expected it whole within {self._body_s:g} s, or more than {_BYTES_PER_S} bytes a second"
            ) from None
        self._num_bytes += len(message.get("body", b""))
        if self._num_bytes > self._max_bytes:
            raise _too_large(self._max_bytes)
        return message


async def read_body(request: Request) -> bytes:
    """The whole body of a request that comes through an `Intake`, which may refuse it."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
    return bytes(body)


def decode_json(body: bytes, type: type[T]) -> T:
    """`body` as a `type`. Raises MalformedBodyError, or InvalidInputError whose `param` is the path of the field."""
    try:
        return _decode(body, type)
    except msgspec.ValidationError as error:
        raise invalid_field(str(error), type) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedBodyError(f"the body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise MalformedBodyError("the body is nested too deeply") from error


def _decode(body: bytes, type: type[T]) -> T:
    """To JSON, 7.0 is an integer; to msgspec it is not. So where a number has the wrong type, it gets a second look."""
    try:
        return msgspec.json.decode(body, type=type)
    except msgspec.ValidationError as error:
        if "got `float`" not in str(error):
            raise
        return msgspec.json.decode(msgspec.json.encode(_without_points(msgspec.json.decode(body))), type=type)


def _without_points(value: Any) -> Any:
    match value:
        case dict():
            return {key: _without_points(each) for key, each in value.items()}
        case list():
            return [_without_points(each) for each in value]
        case float() if value.is_integer() and abs(value) < 2**63:
            return int(value)
    return value


def invalid_field(message: str, type: Any, *, within: str = "") -> InvalidInputError:
    """msgspec says "Expected `str`, got `int` - at `$.messages[0].role`"; OpenAI wants the path as `param`.

    `type` is what was to be read, and `within` the path to that, where it is a part of something.
    """
    at = _AT_PATH.search(message)
    inner = at["path"] if at else ""
    path = ".".join(part for part in (within, inner) if part)
    text = message[: at.start()] if at else message
    if text.startswith(_NO_SUCH_WORD) and (words := words_at(type, inner)):
        text += f"; expected one of {', '.join(words)}"
    if "matching regex" in text and (rule := rule_at(type, inner)):
        text = f"expected {rule}"
    missing = _MISSING.match(text)
    if missing:
        path = f"{path}.{missing['field']}" if path else missing["field"]
        text = "is required"
    return InvalidInputError(f"{path}: {text}" if path else text, param=path or None)


def _too_large(max_bytes: int) -> BodyTooLargeError:
    return BodyTooLargeError(f"the body is larger than {max_bytes} bytes, the most that this server takes")
