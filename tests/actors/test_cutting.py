from __future__ import annotations

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.cutting import LEAST, Strength, find_cut, places, size_of
from actors.segmenter import limits

LATIN = ["Hello", "world", "a", "Dr. Smith", "e.g.", "3.14", "1,000", "https://a.example/x?y=1.5", "it's", "(yes)", "—"]
CHINESE = ["你好", "世界", "。", "，", "“好。”", "３．１４", "1,000", "元", "https://例子.example/路", "！", "《书》"]
JAPANESE = ["今日は", "コンピューター", "、", "。", "「はい。」", "1,980", "円", "っ", "ー", "です", "！"]
THAI = ["สวัสดี", "เป็น", "ไทย", "ก็", "น้ำ", "3.14", "ๆ", "เ", "ครับ", "ะ"]
HINDI = ["नमस्ते", "क्षत्रिय", "।", "है", "?", "३.१४", ",", "हूँ", "॥", "डॉ."]
ARABIC = ["مرحبا", "كيف", "؟", "،", "٣٫١٤", ".", "بَيْتٌ", "(نعم)", "؛", "في"]
SCRIPTS = {"latin": LATIN, "chinese": CHINESE, "japanese": JAPANESE, "thai": THAI, "hindi": HINDI, "arabic": ARABIC}
GAPS = st.sampled_from([" ", "", " ", "\n", ". ", "\n\n", "  "])
FIRST, MAX = 24, 200


def texts(words: list[str]) -> st.SearchStrategy[str]:
    return st.lists(st.tuples(st.sampled_from(words), GAPS), max_size=40).map(
        lambda pairs: "".join(word + gap for word, gap in pairs)
    )


ALL_TEXTS = st.one_of(*map(texts, SCRIPTS.values()), st.text(max_size=300), st.text("ab .,", max_size=400))


def cut_all(text: str, late: bool = False) -> list[str]:
    """The pieces of a text that has come whole."""
    pieces: list[str] = []
    while text:
        at = find_cut(text, limits(len(pieces), FIRST), MAX, late) or len(text)
        pieces.append(text[:at])
        text = text[at:]
    return pieces


def cut_growing(text: str, sizes: list[int]) -> list[str]:
    """The pieces of a text that comes in chunks of `sizes`, taken in turns."""
    pieces: list[str] = []
    buffer, start, number = "", 0, 0
    while start < len(text):
        size = sizes[number % len(sizes)]
        buffer += text[start : start + size]
        start, number = start + size, number + 1
        while (at := find_cut(buffer, limits(len(pieces), FIRST), MAX, False)) is not None:
            pieces.append(buffer[:at])
            buffer = buffer[at:]
    return [*pieces, buffer] if buffer else pieces


@given(ALL_TEXTS, st.lists(st.integers(1, 30), min_size=1, max_size=4))
def test_pieces_do_not_depend_on_how_the_text_comes(text: str, sizes: list[int]) -> None:
    pieces = cut_growing(text, sizes)
    assert "".join(pieces) == text
    assert pieces == cut_all(text)


@given(ALL_TEXTS, st.booleans())
def test_no_piece_is_too_long_or_empty_or_parts_a_grapheme_cluster(text: str, late: bool) -> None:
    pieces = cut_all(text, late)
    assert all(0 < size_of(piece) <= MAX for piece in pieces)
    ends, at = {match.end() for match in regex.finditer(r"\X", text)}, 0
    for piece in pieces[:-1]:
        at += len(piece)
        assert at in ends
        assert size_of(piece) >= min(LEAST, FIRST // 4)


@pytest.mark.parametrize("script", SCRIPTS)
@given(data=st.data())
@settings(max_examples=40)
def test_the_first_piece_is_small_in_every_script(script: str, data: st.DataObject) -> None:
    """With its limit reached a piece ends with its word; unspaced scripts may take half as much again."""
    text = data.draw(texts(SCRIPTS[script]))
    pieces = cut_all(text)
    if len(pieces) > 1:
        inside = [place for place in places(pieces[0] + "x") if place.at < len(pieces[0])]
        assert all(place.size < 3 * FIRST // 2 for place in inside)
        assert all(place.size < FIRST for place in inside if place.strength >= Strength.WORD)


@pytest.mark.parametrize(
    "whole",
    [
        "3.14",
        "1,000,000.50",
        "1 000 000",
        "12:30",
        "５，０００",
        "5元",
        "99%的",
        "Dr. Smith",
        "Mr. and",
        "e.g. this",
        "i.e. that",
        "U.S. Army",
        "J. R. R. Tolkien",
        "No. 5",
        "vs. them",
        "Fig. 3",
        "1. First",
        "https://example.com/a.b,c?d=e;f",
        "www.example.com",
        "a.b@example.com",
        "コンピューター",
        "“好”",
        "(yes)",
        "น้ำ",
        "เป็",
        "ไท",
        "ๆๆ",
        "डॉ. शर्मा",
        "क्षत्रिय",
        "👩‍👩‍👧‍👦",
        "🇫🇷",
        "e\u0301",
        "10\u00a0km",
    ],
)
def test_never_cut_inside(whole: str) -> None:
    for before in ("", "This is ", "这是", "これは", "นี่คือ "):
        for after in ("", " and more of it. Next", "，是的。然后"):
            text = before + whole + after + "x"
            cut = {place.at for place in places(text)}
            inside = range(len(before) + 1, len(before) + len(whole))
            if before != "" and whole == "1. First":
                continue  # a list number stands at the beginning of a line
            assert not cut.intersection(inside), (text, sorted(cut))


@pytest.mark.parametrize(
    ("left", "right", "strength"),
    [
        ("Hello world. ", "How are", Strength.SENTENCE),
        ("Hello world! ", "42 is", Strength.SENTENCE),
        ('"Hello world." ', "She said", Strength.SENTENCE),
        ("No. ", "That is", Strength.SENTENCE),
        ("Wait... ", "What", Strength.SENTENCE),
        ("I like pie etc. ", "Then", Strength.SENTENCE),
        ("A title\n\n", "a paragraph", Strength.SENTENCE),
        ("你好。", "世界", Strength.SENTENCE),
        ("“你好。”", "他说", Strength.SENTENCE),
        ("なに？！", "え", Strength.SENTENCE),
        ("كيف حالك؟ ", "أنا", Strength.SENTENCE),
        ("नमस्ते। ", "आप", Strength.SENTENCE),
        ("네. ", "안녕", Strength.SENTENCE),
        ("Wait... ", "what", Strength.CLAUSE),
        ('"Really?" ', "he asked", Strength.CLAUSE),
        ("First, ", "second", Strength.CLAUSE),
        ("one — ", "two", Strength.CLAUSE),
        ("a line\n", "another", Strength.CLAUSE),
        ("你好，", "世界", Strength.CLAUSE),
        ("مرحبا، ", "كيف", Strength.CLAUSE),
        ("สวัสดี ", "ครับ", Strength.CLAUSE),
        ("etc. ", "and so", Strength.WORD),
        ("Hello ", "world", Strength.WORD),
        ("世", "界", Strength.CHARACTER),
        ("word", "界", Strength.CHARACTER),
        ("สวัสดี", "ครับ", Strength.CHARACTER),
    ],
)
def test_how_good_a_place_is(left: str, right: str, strength: Strength) -> None:
    found = {place.at: place.strength for place in places(left + right)}
    assert found.get(len(left)) == strength


@pytest.mark.parametrize(
    ("left", "right"), [("你好", "。"), ("「", "はい"), ("เ", "ป็น"), ("Hello", " world"), ("ab", "c")]
)
def test_where_no_cut_may_be(left: str, right: str) -> None:
    assert len(left) not in {place.at for place in places(left + right)}


def test_the_first_piece_comes_early_and_others_are_whole() -> None:
    text = "Hello! The tower is 330 metres tall, and it was built in 1889. It stands in Paris. Dr. Eiffel built it."
    assert cut_all(text) == [
        "Hello! ",
        "The tower is 330 metres tall, and it was built in 1889. ",
        "It stands in Paris. Dr. Eiffel built it.",
    ]
    assert cut_all("The capital of France has been Paris since long ago.")[0] == "The capital of France has "


def test_a_giant_word_is_cut_at_the_limit() -> None:
    pieces = cut_all("a" * 1000)
    assert [len(piece) for piece in pieces] == [MAX] * 5
    assert [len(piece) for piece in cut_all("e" + "\u0301" * 500)][:2] == [MAX, MAX]


def test_a_long_text_is_cut_in_linear_time() -> None:
    """200 KB: were the whole rest looked at for each piece, this would take a minute."""
    assert len(cut_all("word " * 4000 + "a" * 20000)) > 200


def test_figures_take_as_long_as_their_words() -> None:
    """Of 300 figures, 200 were one piece, which takes more than 80 s to say."""
    assert size_of("3.14") == 1 + 3 * 5
    assert max(map(len, cut_all("3." + "1415926535" * 30))) <= 200 // 5
