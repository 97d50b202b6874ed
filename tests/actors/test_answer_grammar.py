from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.answer_grammar import MAX_CHARS, answer_grammar
from actors.tool_calls import CLOSE, OPEN, ToolCallParser
from actors.tool_format import HERMES
from omniflow.engine.grammar import Grammars, check_grammar
from omniflow.errors import InvalidInputError
from omniflow.media import Options, Tool
from tests.engine.tiny import BYTES_END, BYTES_VOCAB, byte_tokenizer

GRAMMARS = Grammars(byte_tokenizer().to_str(), BYTES_VOCAB, [BYTES_END])
END = torch.tensor([BYTES_END])

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
REFERRING = {"properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"], "$defs": {"n": {"enum": [1, 2]}}}
WEATHER = Tool("weather", parameters=json.dumps(CITY), strict=True)
WEATHER_LATER = Tool("weather_later", parameters=json.dumps(REFERRING), strict=True)
LOOSE = Tool("loose", parameters=json.dumps({**CITY, "not": {"maxProperties": 3}}))


def call(name: str, arguments: str) -> str:
    return f"{HERMES.opening(name)}{arguments}{HERMES.closing}"


PARIS = call("weather", '{"city": "Paris"}')
LATER = call("weather_later", '{"n": 2}')


@dataclass
class Read:
    """How far an answer went: `whole` where it may end there."""

    text: str
    whole: bool


def read(text: str, **options: object) -> Read:
    """`text` as far as a request with `options` lets a model write it."""
    grammar = answer_grammar(Options(**options), HERMES)
    assert grammar is not None
    for part in grammar.parts:
        check_grammar(part.text, part.what, part.param)
    GRAMMARS.compile(grammar.text, grammar.param)
    matcher = GRAMMARS.matcher(grammar.text)
    data = text.encode()
    for at, byte in enumerate(data):
        if not matcher.allowed(END)[byte]:
            return Read(data[:at].decode(errors="ignore"), False)
        matcher.advance(byte)
    return Read(text, bool(matcher.allowed(END)[BYTES_END]))


def takes(text: str, **options: object) -> bool:
    return read(text, **options) == Read(text, True)


def test_an_answer_is_free_where_nothing_is_asked_of_it() -> None:
    assert answer_grammar(Options(), HERMES) is None
    assert answer_grammar(Options(tools=(LOOSE,)), HERMES) is None
    assert answer_grammar(Options(tools=(WEATHER,), tool_choice="none"), HERMES) is None
    unreadable = Tool("f", parameters='{"multipleOf": 1000000, "type": "array"}')
    assert answer_grammar(Options(tools=(unreadable,)), HERMES) is None


@pytest.mark.parametrize("text", ['{"a": [1, null]}', "{}", '{\n  "ä": "\\n"\n}', '{"city":1}'])
def test_the_empty_schema_takes_any_object(text: str) -> None:
    assert takes(text, json_schema="{}")


@pytest.mark.parametrize("text", ["[]", "1", '"a"', "null", " {}", "{} ", "hello", '{"a": 1,}', "{'a': 1}"])
def test_the_empty_schema_takes_nothing_else(text: str) -> None:
    assert not takes(text, json_schema="{}")


def test_a_schema_is_followed() -> None:
    assert takes('{"city": "Paris"}', json_schema=json.dumps(CITY))
    assert not takes("{}", json_schema=json.dumps(CITY))
    assert not takes('{"city": 1}', json_schema=json.dumps(CITY))
    assert not takes('{"city": "Paris", "more": 1}', json_schema=json.dumps(CITY))
    assert takes("[1, 2]", json_schema='{"type": "array", "items": {"type": "integer"}}')
    assert takes('{"a": {"a": {}}}', json_schema='{"type": "object", "properties": {"a": {"$ref": "#"}}}')


@pytest.mark.parametrize("text", ["{\n\n", "{  ", "{\n" + 33 * " ", "{\t", '{"city":  '])
def test_blanks_cannot_go_on_for_ever(text: str) -> None:
    assert read(text, json_schema=json.dumps(CITY)).text != text
    assert read(text[:-1], json_schema=json.dumps(CITY)).text == text[:-1]


def test_a_schema_cannot_lift_what_is_promised() -> None:
    schema = {"type": "object", "not": {}, "x-guidance": {"lenient": True}}
    with pytest.raises(InvalidInputError, match="not") as raised:
        read("{}", json_schema=json.dumps(schema))
    assert raised.value.param == "response_format"
    blanks = {"type": "array", "x-guidance": {"whitespace_pattern": r"\s*"}}
    assert not takes("[\n\n\n]", json_schema=json.dumps(blanks))


def test_a_required_call_is_one_of_a_tool_that_there_is_and_follows_its_schema() -> None:
    options = {"tools": (WEATHER, WEATHER_LATER), "tool_choice": "required"}
    assert takes(PARIS, **options)
    assert takes(LATER, **options)
    assert read("Sure", **options).text == ""
    assert read(call("weather", '{"city": 3}'), **options).text == f'{HERMES.opening("weather")}{{"city": '
    assert read(call("weather_late", "{}"), **options).text == f'{HERMES.begin}\n{{"name": "weather_late'
    assert not read(PARIS[:-1], **options).whole


def test_calls_may_be_many_unless_one_is_asked_for() -> None:
    tools = (WEATHER, WEATHER_LATER)
    two = f"{PARIS}\n{LATER}"
    assert takes(two, tools=tools, tool_choice="required")
    assert read(two, tools=tools, tool_choice="required", parallel_tool_calls=False).text == PARIS
    assert read(two, tools=tools, tool_choice="required", tool_name="weather").text == PARIS
    assert (
        read(LATER, tools=tools, tool_choice="required", tool_name="weather").text
        == f'{HERMES.begin}\n{{"name": "weather'
    )
    assert not takes("\n".join([PARIS] * 17), tools=tools, tool_choice="required")


def test_in_free_text_calls_of_strict_tools_are_held_to_their_schemas() -> None:
    tools = (WEATHER, WEATHER_LATER)
    assert takes("Hello, 3 < 4 <tool> {}", tools=tools)
    assert takes("", tools=tools)
    assert takes(f"Let me see. {PARIS}\n{LATER}\nDone.", tools=tools)
    assert read(f"Hm {call('weather', '{}')}", tools=tools).text == f"Hm {HERMES.opening('weather')}{{"
    assert read(f"Hm {call('other', '{}')}", tools=tools).text == f'Hm {HERMES.begin}\n{{"name": "'
    assert not read(f"Hm {HERMES.begin}", tools=tools).whole
    assert takes(f"{call('loose', '{}')}", tools=(LOOSE,), tool_choice="required") is False


def test_json_or_calls_where_both_are_asked_for() -> None:
    options = {"tools": (WEATHER,), "json_schema": "{}"}
    assert takes('{"a": 1}', **options)
    assert takes(PARIS, **options)
    assert read("Hello", **options).text == ""
    assert takes('{"a": 1}', **options, tool_choice="none")
    assert read(PARIS, **options, tool_choice="none").text == ""
    assert read('{"a": 1}', **options, tool_choice="required").text == ""


def test_a_tool_that_is_not_strict_ignores_what_cannot_be_followed_and_keeps_the_rest() -> None:
    options = {"tools": (LOOSE,), "tool_choice": "required"}
    assert takes(call("loose", '{"city": "Paris"}'), **options)
    assert not takes(call("loose", '{"city": 1}'), **options)


@pytest.mark.parametrize(
    "parameters", ["{}", '{"type": "object"}', '{"type": ["object", "null"]}', '{"anyOf": [{}, {"type": "object"}]}']
)
def test_arguments_are_always_an_object(parameters: str) -> None:
    options = {"tools": (Tool("f", parameters=parameters),), "tool_choice": "required"}
    assert takes(call("f", '{"a": [1]}'), **options)
    assert not takes(call("f", "null"), **options)
    assert not takes(call("f", "[]"), **options)


@settings(max_examples=25, deadline=None)
@given(name=st.text(min_size=1, max_size=8), text=st.text(st.characters(exclude_characters="\x7f"), max_size=8))
def test_any_name_is_written_and_read_as_it_is(name: str, text: str) -> None:
    arguments = json.dumps({"city": text}, ensure_ascii=False)
    answer = call(name, arguments)
    assert takes(answer, tools=(Tool(name, parameters=WEATHER.parameters),), tool_choice="required")
    pieces = ToolCallParser("r").push(answer)
    assert [piece.call.name for piece in pieces if piece.call and piece.call.name] == [name]
    assert json.loads("".join(piece.call.arguments for piece in pieces if piece.call)) == {"city": text}


KEYWORDS = [
    "type", "properties", "required", "items", "prefixItems", "enum", "const", "anyOf", "allOf", "oneOf", "$ref",
    "$defs", "minimum", "maximum", "multipleOf", "pattern", "patternProperties", "additionalProperties", "minItems",
    "maxLength", "format", "not", "x-guidance", "a",
]  # fmt: skip
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(["object", "string", "integer", "#", "#/$defs/a", "date", "^a*$", "(", "\ud83d\ude00\x00"]),
)


@settings(max_examples=150, deadline=None)
@given(
    st.recursive(
        VALUES,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYWORDS), inner, max_size=4),
        max_leaves=12,
    )
)
def test_whatever_is_given_as_a_schema_is_taken_or_refused(schema: object) -> None:
    try:
        read("", json_schema=json.dumps(schema))
        read("", tools=(Tool("f", parameters=json.dumps(schema), strict=True),))
        read("", tools=(Tool("f", parameters=json.dumps(schema)),), tool_choice="required")
    except InvalidInputError as error:
        assert error.param in ("response_format", "tools")


def test_the_detokenizer_looks_for_what_the_grammar_writes() -> None:
    assert (HERMES.begin, HERMES.end) == (OPEN, CLOSE)


@pytest.mark.parametrize(
    ("options", "param", "message"),
    [
        ({"json_schema": "{"}, "response_format", "the schema cannot be read: "),
        ({"json_schema": "[" * 10_000}, "response_format", "the schema cannot be read: "),
        ({"json_schema": "[1]"}, "response_format", "the schema must be a JSON object"),
        ({"json_schema": '{"type": "text"}'}, "response_format", "the schema cannot be followed: Invalid type: text"),
        (
            {"json_schema": '{"if": {}}'},
            "response_format",
            r'the schema cannot be followed: Unimplemented keys: \["if"\]',
        ),
        ({"json_schema": '{"$ref": "https://example.com/a"}'}, "response_format", "example.com/a"),
        ({"json_schema": '{"$ref": "#/$defs/a"}'}, "response_format", "'/.defs/a' does not exist"),
        ({"json_schema": '{"multipleOf": 10001}'}, "response_format", "multipleOf.*these are 10001"),
        ({"json_schema": '{"allOf": [{"multipleOf": 0.0001}, {"multipleOf": 9999}]}'}, "response_format", "99990000"),
        ({"json_schema": '{"enum": ["%s"]}' % ("x" * MAX_CHARS)}, "response_format", "131072 characters together"),
        (
            {"json_schema": json.dumps({"patternProperties": {f"^{n}": {} for n in range(33)}})},
            "response_format",
            "32 patternProperties in all; this one has 33",
        ),
        (
            {"tools": (WEATHER, Tool("f", parameters="no", strict=True))},
            "tools",
            "the parameters of the tool 'f' cannot be read",
        ),
        (
            {"tools": (Tool("f", parameters='{"type": "array"}', strict=True),)},
            "tools",
            "must be the schema of an object",
        ),
        (
            {"tools": (WEATHER, Tool("f", parameters='{"properties": {"a": {"uniqueItems": true}}}', strict=True))},
            "tools",
            r"the parameters of the tool 'f' cannot be followed: Unimplemented keys: \[\"uniqueItems\"\]",
        ),
        (
            {
                "tools": tuple(
                    Tool(str(n), parameters=f'{{"allOf": [{{"multipleOf": {n}}}]}}', strict=True) for n in (5001, 5003)
                )
            },
            "tools",
            "these are 10004",
        ),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"tool_choice": "required", "tools": (WEATHER,), "tool_name": "g"}, "tool_choice", "no tool is named 'g'"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(options: dict[str, object], param: str, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message) as raised:
        read("", **options)
    assert raised.value.param == param
