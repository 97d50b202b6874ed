"""Tools for models whose chat template knows none: what they are told of them, and how calls read in a conversation."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from actors.tool_format import HERMES
from omniflow.errors import InvalidInputError
from omniflow.media import Tool, ToolCall

MAX_DEPTH = 100
"""Levels of JSON that are taken; Python's own limit is 1000 calls, of which each level takes some."""
HOW_TO_CALL = (
    "You can call the functions below; each line between <tools> and </tools> describes one as JSON.\n"
    "<tools>\n{tools}\n</tools>\n"
    "To call a function, write its name and its arguments like this:\n{example}"
)


class Turn(NamedTuple):
    """One turn of a conversation, all in text."""

    role: str
    text: str
    calls: tuple[ToolCall, ...] = ()
    call_id: str | None = None


def described(tool: Tool) -> dict[str, Any]:
    """A tool as chat templates get it, by the convention of Hugging Face transformers: the form of OpenAI's API.

    Raises InvalidInputError where its parameters are not JSON.
    """
    try:
        parameters = _decoded(tool.parameters)
    except msgspec.DecodeError as error:
        raise InvalidInputError(f"the parameters of tool {tool.name!r} are not JSON: {error}", param="tools") from error
    function = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": function}


def arguments_of(call: ToolCall) -> Any:
    """What a call was made with; the text itself where it is not JSON: a model may have written anything."""
    try:
        return _decoded(call.arguments)
    except msgspec.DecodeError:
        return call.arguments


def _decoded(text: str) -> Any:
    """Raises DecodeError for what is no JSON, and for what is nested deeper than templates could follow."""
    try:
        value = msgspec.json.decode(text)
    except RecursionError as error:
        raise msgspec.DecodeError("it is nested too deeply") from error
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [child for each in level for child in _children(each)]
        if not level:
            return value
    raise msgspec.DecodeError(f"it is nested deeper than {MAX_DEPTH} levels")


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def in_plain_turns(turns: Iterable[Turn], tools: Sequence[Tool]) -> list[Turn]:
    """The conversation without calls and tools of its own: they have become text of system, assistant and user."""
    plain = [_plain(turn) for turn in turns]
    if not tools:
        return plain
    example = _call("the function", {"an argument": "its value"})
    how = HOW_TO_CALL.format(tools="\n".join(_json(described(tool)) for tool in tools), example=example)
    if plain and plain[0].role == "system":
        return [Turn("system", f"{plain[0].text}\n\n{how}"), *plain[1:]]
    return [Turn("system", how), *plain]


def _plain(turn: Turn) -> Turn:
    if turn.role == "tool":
        return Turn("user", f"<tool_response>\n{turn.text}\n</tool_response>")
    markup = [_call(call.name, arguments_of(call)) for call in turn.calls]
    return Turn(turn.role, "\n".join([turn.text, *markup] if turn.text else markup or [""]))


def _call(name: str, arguments: Any) -> str:
    return HERMES.opening(name) + _json(arguments) + HERMES.closing


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
