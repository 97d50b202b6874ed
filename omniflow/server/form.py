"""Uploads: a body of type multipart/form-data, whose files go to disk while they come."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import BinaryIO, TypeVar

import msgspec
from python_multipart.multipart import parse_options_header
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request

from omniflow.errors import InvalidInputError
from omniflow.server.body import invalid_field
from omniflow.server.failures import MalformedBodyError

T = TypeVar("T")
_FORMS = ("multipart/form-data", "application/x-www-form-urlencoded")
_CHARSETS = frozenset({"utf-8", "utf8", "us-ascii", "iso-8859-1", "latin-1", "windows-1252"})
"""What a form may say of itself. To Starlette the charset is the name of any codec of Python's: some raise what nobody
catches ("undefined"), and what some make of bytes is no text ("unicode_escape": half a surrogate pair)."""
_MOST_FILES, _MOST_FIELDS, _MOST_FIELD_BYTES = 4, 64, 2**16


class Form:
    """Fields and files by name. Fields whose name ends in `[]` are lists, as OpenAI's clients write them."""

    def __init__(self, data: FormData, media_type: str) -> None:
        self._data = data
        self._media_type = media_type

    def read(self, type: type[T]) -> T:
        """The fields as a `type`; what is empty counts as left out.

        Raises InvalidInputError with the field's name; without one where the body is no form at all.
        """
        fields: dict[str, str | list[str]] = {}
        for name in self._data:
            texts = [value for value in self._data.getlist(name) if isinstance(value, str) and value]
            if texts:
                fields[name] = texts if name.endswith("[]") else texts[-1]
        if not self._data and self._media_type not in _FORMS:
            sent = self._media_type[:64] or "a body of no type"
            raise InvalidInputError(f"expected a form, of type multipart/form-data; {sent} came")
        try:
            return msgspec.convert(fields, type, strict=False)
        except msgspec.ValidationError as error:
            raise invalid_field(str(error), type) from error

    def file(self, name: str) -> BinaryIO:
        """The file called `name`, at its begin. Raises InvalidInputError where there is none, or an empty one."""
        found = self._data.get(name)
        if not isinstance(found, UploadFile):
            raise InvalidInputError(f"{name}: is required, as a file of a multipart/form-data body", param=name)
        if not found.size:
            raise InvalidInputError(f"{name}: is empty (0 bytes)", param=name)
        return found.file


@asynccontextmanager
async def read_form(request: Request) -> AsyncIterator[Form]:
    """The form that a request brings; a file of more than 1 MB lies on disk. On leaving, its files are gone.

    Raises MalformedBodyError for what is no such form; a body of another type is a form without fields.
    """
    _, options = parse_options_header(request.headers.get("content-type"))
    charset = options.get(b"charset", b"utf-8").decode("latin-1").lower()
    if charset not in _CHARSETS:
        raise MalformedBodyError(f"content-type: the charset {charset[:64]!r} is not taken; send the form in utf-8")
    try:
        data = await request.form(max_files=_MOST_FILES, max_fields=_MOST_FIELDS, max_part_size=_MOST_FIELD_BYTES)
    except HTTPException as error:
        raise MalformedBodyError(f"the body is not a valid form: {error.detail}") from error
    try:
        yield Form(data, request.headers.get("content-type", "").partition(";")[0].strip().lower())
    finally:
        await data.close()
