"""What a field of a request takes, in words: msgspec's errors name the wrong value alone, or show a regex."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from msgspec import inspect

_STEP = re.compile(r"\[[^\]]*\]|[^.\[\]]+")


def words_at(type: Any, path: str) -> list[str]:
    """Those that the field at `path` ("messages[0].role") of a `type` takes; none where it takes other things."""
    return sorted(
        {
            str(value)
            for each in _types_at(type, path)
            for member in _members(each)
            if isinstance(member, inspect.LiteralType)
            for value in member.values
        }
    )


def rule_at(type: Any, path: str) -> str | None:
    """What the field at `path` of a `type` takes, in the words of its `Meta.description`; None where it has none."""
    described = [meta.extra_json_schema or {} for each in _types_at(type, path) for meta in _metadata(each)]
    return next((schema["description"] for schema in described if "description" in schema), None)


def _types_at(type: Any, path: str) -> list[inspect.Type]:
    found = [inspect.type_info(type)]
    for step in _STEP.findall(path):
        found = [inner for each in found for member in _members(each) for inner in _within(member, step)]
    return found


def _metadata(type: inspect.Type) -> Iterator[inspect.Metadata]:
    match type:
        case inspect.UnionType():
            for each in type.types:
                yield from _metadata(each)
        case inspect.Metadata():
            yield type
            yield from _metadata(type.type)


def _members(type: inspect.Type) -> Iterator[inspect.Type]:
    """The types that a value may have."""
    match type:
        case inspect.UnionType():
            for each in type.types:
                yield from _members(each)
        case inspect.Metadata():
            yield from _members(type.type)
        case _:
            yield type


def _within(type: inspect.Type, step: str) -> Iterator[inspect.Type]:
    """What is one step further in."""
    match type:
        case inspect.StructType():
            if step == type.tag_field and type.tag is not None:
                yield inspect.LiteralType((type.tag,))
            yield from (field.type for field in type.fields if field.encode_name == step)
        case inspect.ListType() if step.startswith("["):
            yield type.item_type
        case inspect.DictType():
            yield type.value_type
