"""Tools in requests: what may be called, what must be, and what the graph is told of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from omniflow.errors import InvalidInputError
from omniflow.media import Tool

Identifier = Annotated[
    str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$(?!\n)", description="1 to 64 letters of a-z or A-Z, digits, _ and -")
]
JsonObject = dict[str, Any]
_NO_PARAMETERS: JsonObject = {"type": "object", "properties": {}, "additionalProperties": False}
"""Of a function that says nothing of its parameters: it has none."""


class FunctionSpec(Struct, frozen=True):
    """A function; `parameters` is a JSON schema."""

    name: Identifier
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class FunctionTool(Struct, frozen=True, tag="function", tag_field="type"):
    """A function that the model may ask its caller to call."""

    function: FunctionSpec


class FunctionName(Struct, frozen=True):
    """A function by its name."""

    name: str


class NamedChoice(Struct, frozen=True, tag="function", tag_field="type"):
    """The one function to call."""

    function: FunctionName


class AllowedTools(Struct, frozen=True):
    """The functions of `tools` that may be called this time, or one of which must be."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedChoice], Meta(min_length=1)]


class AllowedChoice(Struct, frozen=True, tag="allowed_tools", tag_field="type"):
    """Some of the functions."""

    allowed_tools: AllowedTools


ToolChoice = Literal["none", "auto", "required"] | NamedChoice | AllowedChoice


class Tooling(Struct, frozen=True):
    """What `media.Options` say of tools. Without tools, nothing: whatever the model writes is then text."""

    tools: tuple[Tool, ...] = ()
    tool_choice: Literal["auto", "required"] = "auto"
    tool_name: str | None = None


def tooling(specs: Sequence[FunctionTool], choice: ToolChoice | None) -> Tooling:
    """What the graph is told. Raises InvalidInputError, naming `tools` or `tool_choice`, where the two do not fit."""
    tools = {each.function.name: tool_of(each.function, f"tools[{i}].function") for i, each in enumerate(specs)}
    if len(tools) < len(specs):
        raise InvalidInputError("tools: two of them have the same name", param="tools")
    if not tools and choice not in (None, "none", "auto"):
        raise InvalidInputError("tool_choice: there are no tools to choose from; send some", param="tool_choice")
    match choice:
        case "none":
            return Tooling()
        case "required":
            return Tooling(tuple(tools.values()), "required")
        case NamedChoice():
            name = choice.function.name
            return Tooling((_named(tools, name),), "required", name)
        case AllowedChoice():
            named = [_named(tools, each.function.name) for each in choice.allowed_tools.tools]
            return Tooling(tuple(named), choice.allowed_tools.mode)
    return Tooling(tuple(tools.values()))


def _named(tools: dict[str, Tool], name: str) -> Tool:
    if name not in tools:
        raise InvalidInputError(
            f"tool_choice: {name!r} is none of the tools, which are {', '.join(tools)}", param="tool_choice"
        )
    return tools[name]


def tool_of(spec: FunctionSpec, at: str) -> Tool:
    """A function as the graph takes it."""
    parameters = schema_text(spec.parameters if spec.parameters is not None else _NO_PARAMETERS, f"{at}.parameters")
    return Tool(spec.name, spec.description or "", parameters, bool(spec.strict))


def schema_text(schema: JsonObject, at: str) -> str:
    """A JSON schema as text. Raises InvalidInputError where it is nested too deeply."""
    try:
        return msgspec.json.encode(schema).decode()
    except RecursionError as error:
        raise InvalidInputError(f"{at}: is nested too deeply", param=at) from error
