from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.tool_calls import ToolCallParser
from omniflow.media import ToolCall, ToolCallDelta

SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=5)


def call(name: str, arguments: object) -> str:
    return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def parsed(text: str, sizes: list[int] | None = None, parallel: bool = True) -> tuple[str, list[ToolCall]]:
    """The text and the calls of an answer that came in pieces of `sizes`; every character was accounted for."""
    parser = ToolCallParser("req_1", parallel=parallel)
    pieces, at, turn = [], 0, 0
    while at < len(text):
        size = sizes[turn % len(sizes)] if sizes else len(text)
        pieces += parser.push(text[at : at + size])
        at, turn = at + size, turn + 1
    pieces += parser.end()
    assert "".join(piece.raw for piece in pieces) == text
    calls: list[ToolCall] = []
    for delta in (piece.call for piece in pieces if piece.call):
        if delta.index == len(calls):
            assert delta.id is not None and delta.name is not None
            calls.append(ToolCall(delta.id, delta.name, delta.arguments))
        else:
            assert delta.index == len(calls) - 1 and delta.id is None and delta.name is None
            last = calls.pop()
            calls.append(ToolCall(last.id, last.name, last.arguments + delta.arguments))
    return "".join(piece.text for piece in pieces), calls


WORDS = st.text('ab <>/{}"\\_tol\n', max_size=12).filter(lambda text: "<tool_call>" not in text)
VALUES = st.recursive(
    st.none() | st.integers() | st.text(max_size=6) | st.sampled_from(["</tool_call>", '"}', "<tool_call>", "\\"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
CALLS = st.lists(
    st.tuples(st.sampled_from(["weather", 'a"b', "ü"]), st.dictionaries(st.text(max_size=3), VALUES, max_size=3)),
    max_size=3,
)


@given(WORDS, CALLS, SIZES)
def test_however_it_is_cut_text_and_calls_come_out_whole(
    text: str, asked: list[tuple[str, dict[str, object]]], sizes: list[int]
) -> None:
    found, calls = parsed(text + "".join(call(name, arguments) for name, arguments in asked), sizes)
    assert found == (text.rstrip() if asked else text)
    assert [(each.name, json.loads(each.arguments)) for each in calls] == asked
    assert len({each.id for each in calls}) == len(calls)


@given(st.text('<tol_cal>/{}"nameargut: ,\n', max_size=40), SIZES)
def test_nothing_is_lost_and_cutting_changes_nothing(text: str, sizes: list[int]) -> None:
    assert parsed(text, sizes) == parsed(text)


def test_arguments_stream() -> None:
    parser = ToolCallParser("req_1")
    pieces = [piece for char in call("f", {"a": "b"}) for piece in parser.push(char)]
    deltas = [piece.call for piece in pieces if piece.call]
    assert deltas[0] == ToolCallDelta(0, "", deltas[0].id, "f")
    assert [delta.arguments for delta in deltas[1:]] == list('{"a": "b"}')


def test_text_before_a_call_does_not_wait_for_it() -> None:
    parser = ToolCallParser("req_1")
    assert [piece.text for piece in parser.push("One moment. <tool")] == ["One moment."]
    assert [piece.text for piece in parser.push("box>")] == [" <toolbox>"]


def test_text_around_calls() -> None:
    assert parsed("Let me look.\n" + call("a", {}) + "\n" + call("b", {}) + "\nDone.")[0] == "Let me look.\nDone."
    assert parsed("\n" + call("a", {}) + "\n\nDone.")[0] == "Done."
    assert parsed(call("a", {}) + " \n")[0] == ""


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('{"name": "f"}', "{}"),
        ('{"arguments": {"a": 1}, "name": "f"}', '{"a": 1}'),
        ('{"name": "f", "arguments": null}', "{}"),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', '{"a": 1}'),
        ('{"name": "f", "id": 3, "arguments": {"a": 12345678901234567890123}}', '{"a": 12345678901234567890123}'),
    ],
)
@pytest.mark.parametrize("closed", [True, False])
def test_other_ways_to_write_a_call(written: str, arguments: str, closed: bool) -> None:
    text, calls = parsed(f"<tool_call>{written}" + "</tool_call>" * closed, [3])
    assert text == "" and [(each.name, each.arguments) for each in calls] == [("f", arguments)]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call> is how",
        "<tool_call>{name",
        '<tool_call>{"name": 5',
        '<tool_call>{"name": "f", "param',
        "a <too",
        "<tool_call>{}</tool_call>",
        '<tool_call>{"name": 5, "arguments": {}}</tool_call> after',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "no json"}</tool_call>',
        '<tool_call>{"name": "f", "a": ' + "[" * 5000 + "</tool_call>",
        "</tool_call>",
    ],
)
def test_markup_that_is_no_call_is_text(text: str) -> None:
    assert parsed(text, [7]) == (text, [])


@pytest.mark.parametrize("before", ["", "Well."])
@pytest.mark.parametrize("sizes", [[1], [100]])
def test_an_answer_that_is_cut_inside_a_call_shows_no_half_of_it(before: str, sizes: list[int]) -> None:
    written = call("get_weather", {"city": "Paris"})
    shown = len('<tool_call>\n{"name": "get_weather", "arguments": ')
    for end in range(len("<tool_"), len(written)):
        text, calls = parsed(before + " " * bool(before) + written[:end], sizes)
        assert text == before
        assert len(calls) == (end > shown)
        assert all('{"city": "Paris"}'.startswith(each.arguments) for each in calls)


def test_an_answer_that_ends_inside_the_arguments_has_given_them() -> None:
    text, (only,) = parsed('<tool_call>{"name": "f", "arguments": {"city": "Par')
    assert text == "" and only.arguments == '{"city": "Par'


@pytest.mark.parametrize(
    "end", ["", "}", "}\n</tool", "}}\n</tool_call>", "</tool_call>", "}</tool_call>", "}\n<tool_", '}<tool_call>{"na']
)
def test_sloppy_ends(end: str) -> None:
    text, (only,) = parsed('<tool_call>{"name": "f", "arguments": {"a": 1}' + end, [1])
    assert (text, only.arguments) == ("", '{"a": 1}')


def test_a_forgotten_end_is_no_obstacle_to_the_next_call() -> None:
    text, calls = parsed('<tool_call>{"name": "f", "arguments": {}}\n' + call("g", {"b": 2}), [4])
    assert text == "" and [each.name for each in calls] == ["f", "g"]
    assert parsed('<tool_call>{"name": "f", "arguments": {}} and so on', [4])[0] == "and so on"


@given(SIZES)
def test_only_the_first_call_where_calls_may_not_be_parallel(sizes: list[int]) -> None:
    text, calls = parsed(call("a", {"x": 1}) + '<tool_call>{"name": "b"}</tool_call>' + call("c", {}), sizes, False)
    assert text == "" and [(each.name, each.arguments) for each in calls] == [("a", '{"x": 1}')]


def test_ids_follow_from_the_request() -> None:
    def ids(request_id: str) -> list[str | None]:
        pieces = ToolCallParser(request_id).push(call("a", {}) + call("b", {}))
        return [piece.call.id for piece in pieces if piece.call and piece.call.id]

    assert ids("one") == ids("one") and len({*ids("one"), *ids("two")}) == 4


def test_a_call_behind_a_tag_of_none_is_found_however_it_comes() -> None:
    text = "<tool_call>\n" + call("f", {"a": 1})
    found = {
        json.dumps([parsed(text, sizes)[0], [each.name for each in parsed(text, sizes)[1]]])
        for sizes in (None, [1], [7])
    }
    assert len(found) == 1 and json.loads(found.pop())[1] == ["f"]
