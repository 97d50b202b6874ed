"""The grammar of an answer: what the options of a request hold a model to."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, NamedTuple

import msgspec

from actors.tool_format import ToolFormat
from omniflow.errors import InvalidInputError
from omniflow.media import Options, Tool

MAX_CHARS = 1 << 17
"""Of all schemas of a request together: OpenAI takes 120,000."""
MAX_CALLS = 16
"""In one answer that has to consist of calls, so that it ends."""
MAX_STATES = 10_000
"""Of the automata that the `multipleOf` of a request become: 10,000 take 30 ms to compile, 1,000,000 take 5 s."""
MAX_PATTERNS = 32
"""Of `patternProperties` in a request: each is compared with each, 32 take up to 0.3 s to compile, 200 up to 2 s."""
BLANKS = r"( |\n {0,32})"
"""White space that may stand between two tokens of JSON: a model that likes blanks cannot go on with them for ever."""

_RESPONSE = "response_format"


class Part(NamedTuple):
    """A schema of a request, what its author calls it, and the field that it came in."""

    schema: dict[str, Any]
    what: str
    param: str
    lenient: bool = False
    """True where keywords that cannot be followed are ignored."""

    @property
    def rule(self) -> str:
        """What stands for this schema in a grammar."""
        # What a schema says of llguidance itself is not its author's to say: it could lift what is promised here.
        schema = {**self.schema, "x-guidance": {"whitespace_pattern": BLANKS, "lenient": self.lenient}}
        return f"%json {msgspec.json.encode(schema).decode()}"

    @property
    def text(self) -> str:
        """A grammar of this schema alone."""
        return _grammar(f"start: {self.rule}")


class AnswerGrammar(NamedTuple):
    """A grammar (omniflow/engine/grammar.py), the schemas that it is made of, and the field that asks for it."""

    text: str
    parts: tuple[Part, ...]
    param: str


def answer_grammar(options: Options, tool_format: ToolFormat) -> AnswerGrammar | None:
    """What an answer to a request with `options` has to be; None where it is free.

    With `tool_choice` "required" it consists of calls. With `json_schema` it is such JSON, or calls where there are
    tools. Otherwise, where a tool is strict, it is text in which calls follow the schemas of their tools. Keywords that
    cannot be followed are ignored in the schemas of tools that are not strict.

    Raises InvalidInputError for what is no schema, and for a choice that the tools do not have.
    """
    tools = _callable(options)
    schema, must_call = options.json_schema, options.tool_choice == "required"
    if schema is None and not must_call and not any(tool.strict for tool in tools):
        return None
    calls = [_arguments(tool) for tool in tools]
    many = options.parallel_tool_calls and options.tool_name is None
    if must_call:
        return _joined("tools", "calls", calls, _called(tools, calls, many, tool_format))
    if schema is None:
        return _joined("tools", "text", calls, _in_text(tools, calls, many, tool_format))
    answer = Part(_object(schema, "the schema", _RESPONSE), "the schema", _RESPONSE)
    lines = [f"answer: {answer.rule}"]
    if not tools:
        return _joined(_RESPONSE, "answer", [answer], lines)
    lines += _called(tools, calls, many, tool_format)
    return _joined(_RESPONSE, "answer | calls", [answer, *calls], lines)


def _joined(param: str, start: str, parts: list[Part], lines: list[str]) -> AnswerGrammar:
    _refuse_the_slow(param, parts)
    text = _grammar(f"start: {start}", *lines)
    if len(text) > MAX_CHARS:
        raise InvalidInputError(
            f"the schemas of a request may have {MAX_CHARS} characters together; these have {len(text)}", param=param
        )
    return AnswerGrammar(text, tuple(parts), param)


def _grammar(*lines: str) -> str:
    return "\n".join(["%llguidance {}", *lines, ""])


def _called(tools: list[Tool], calls: list[Part], many: bool, tool_format: ToolFormat) -> list[str]:
    """The rule `calls`: nothing but calls, at least one."""
    begin = _literal(tool_format.begin)
    more = f' ("\\n" {begin} call){{0,{MAX_CALLS - 1}}}' if many else ""
    return [f"calls: {begin} call{more}", *_call(tools, calls, tool_format)]


def _in_text(tools: list[Tool], calls: list[Part], many: bool, tool_format: ToolFormat) -> list[str]:
    """The rule `text`: any text, in which what begins a call goes on as one."""
    return [
        f"text: (begun call){'*' if many else '?'} ANYTHING",
        f"begun[lazy]: ANYTHING {_literal(tool_format.begin)}",
        r"ANYTHING: /(.|\n)*/",
        *_call(tools, calls, tool_format),
    ]


def _call(tools: list[Tool], calls: list[Part], tool_format: ToolFormat) -> list[str]:
    """The rule `call`: a call after what begins it. Arguments are schemas of their own, so that "#/$defs" is theirs."""
    lines = ["call: " + " | ".join(f"call_{number}" for number in range(len(tools)))]
    for number, (tool, arguments) in enumerate(zip(tools, calls, strict=True)):
        opening = tool_format.opening(tool.name).removeprefix(tool_format.begin)
        lines.append(f"call_{number}: {_literal(opening)} {arguments.rule} {_literal(tool_format.closing)}")
    return lines


def _callable(options: Options) -> list[Tool]:
    """The tools that this request lets a model call."""
    if options.tool_choice == "none":
        return []
    if options.tool_choice == "auto":
        return list(options.tools)
    chosen = [tool for tool in options.tools if options.tool_name in (None, tool.name)]
    if not chosen:
        missing = f"no tool is named {options.tool_name!r}" if options.tool_name else "there are no tools"
        raise InvalidInputError(f"tool_choice wants a call, but {missing}", param="tool_choice")
    return chosen


def _arguments(tool: Tool) -> Part:
    what = f"the parameters of the tool {tool.name!r}"
    schema = _object(tool.parameters, what, "tools")
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise InvalidInputError(f'{what} must be the schema of an object: "type": "object"', param="tools")
    return Part({**schema, "type": "object"}, what, "tools", lenient=not tool.strict)


def _object(text: str, what: str, param: str) -> dict[str, Any]:
    """The schema in `text`; an empty one takes any object."""
    try:
        schema = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidInputError(f"{what} cannot be read: {error}", param=param) from error
    if not isinstance(schema, dict):
        raise InvalidInputError(f"{what} must be a JSON object", param=param)
    return schema or {"type": "object"}


def _refuse_the_slow(param: str, parts: list[Part]) -> None:
    """Raise InvalidInputError for what llguidance's own limits do not stop from compiling for seconds or hours."""
    states = num_patterns = 0
    for part in parts:
        members = list(_members(part.schema))
        states += _common_multiple([value for name, value in members if name == "multipleOf" and _is_number(value)])
        num_patterns += sum(len(value) for name, value in members if name == "patternProperties" and _is_object(value))
    if states > MAX_STATES:
        raise InvalidInputError(
            f"the multipleOf of a request (in each schema the least common multiple of all, without its decimal point) "
            f"may be {MAX_STATES} together; these are {states}",
            param=param,
        )
    if num_patterns > MAX_PATTERNS:
        raise InvalidInputError(
            f"a request may have {MAX_PATTERNS} patternProperties in all; this one has {num_patterns}", param=param
        )


def _members(value: Any) -> Iterator[tuple[str, Any]]:
    """Every member of every object in a JSON value."""
    if isinstance(value, dict):
        yield from value.items()
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from _members(each)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value != 0


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _common_multiple(numbers: list[float]) -> int:
    """Of numbers, all written with as many decimals as the longest has, and without the point; 0 of none."""
    decimals = [Decimal(str(abs(number))).normalize() for number in numbers]
    places = max((-int(decimal.as_tuple().exponent) for decimal in decimals), default=0)
    return math.lcm(*(int(decimal.scaleb(max(places, 0))) for decimal in decimals)) if decimals else 0


def _literal(text: str) -> str:
    return json.dumps(text)  # escapes all but printable ASCII: Lark knows no raw DEL
