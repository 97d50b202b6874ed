from __future__ import annotations

import functools
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.piper.g2p import EnglishPhonemes
from actors.piper.spoken import SpokenWords
from actors.piper.talker import LONGEST_PIECE, pieces_of
from actors.piper.voice import PAUSES

SPOKEN = SpokenWords()
IPA = set("abdefhijklmnoprstuvwxzæðŋɐɑɔəɚɛɜɡɪɬɹɾʃʊʌʒʔʲθᵻ\u0303\u0329")
"""What eSpeak has for English; all of it is in the voice's table, as test_piper_talker.py tests."""


@functools.cache
def english() -> EnglishPhonemes:
    return EnglishPhonemes()


@pytest.fixture
def phonemes() -> EnglishPhonemes:
    return english()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("He paid $3.50 on 12/25/2023.", "He paid three dollars and fifty cents on December twenty fifth , twenty "
                                         "twenty three ."),
        ("Nearly 75% of 1,234 people", "Nearly seventy five percent of one thousand two hundred thirty four people"),
        ("In 1969 it was -12 degrees.", "In nineteen sixty nine it was minus twelve degrees ."),
        ("the 21st of May at 5:30 pm", "the twenty first of May at five thirty p m"),
        ("Be there at 6 pm.", "Be there at six p m ."),
        ("Dr. Smith vs. Mrs. Lee, Ph.D.", "Doctor Smith versus Missus Lee , PHD ."),
        ("St. Louis is not on Main St. today", "Saint Louis is not on Main Street today"),
        ("J. K. Rowling from the U.S.A. came.", "J K Rowling from the U S A came ."),
        ("Write to user@example.com or C++", "Write to user at example dot com or C plus plus"),
        ("naïve café in Łódź", "naive cafe in Lodz"),
        ("He said “don’t” — twice…", "He said don't , twice ."),
        ("**Bold** and `code`:\n\n- one\n- two", "Bold and code : one two"),
        ("First line\nSecond line\nwrapped here\n\nNext", "First line , Second line wrapped here . Next"),
        ('<speak>Hello <break time="1s"/> there</speak>', "Hello there"),
        ("½ of x² is π", "one half of x squared is pi"),
        ("１２ and ٣", "twelve and three"),
        ("What?! Yes!No, one,two", "What ? Yes ! No , one , two"),
        ("你好 world 😀 привет", "world"),
    ],
)  # fmt: skip
def test_what_is_written_as_it_is_said(text: str, words: str) -> None:
    assert " ".join(SPOKEN(text)) == words


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The quick brown fox.", "ðə kwˈɪk bɹˈaʊn fˈɑːks."),
        ("Hello! Are you there?", "həlˈoʊ! ɑːɹ juː ðɛɹ?"),
        ("The end of the apple", "ðɪ ˈɛnd ʌv ðɪ ˈæpəl"),
        ("a cabin at Copenhagen", "ɐ kˈæbɪn æt kˌoʊpənhˈeɪɡən"),
        ("the CEO of NASA", "ðə sˌiːˌiːˈoʊ ʌv nˈæsɐ"),
        ("the US told us", "ðə jˌuːˈɛs tˈoʊld ˌʌs"),
        ("an A and a cat", "ɐn ˈeɪ ænd ɐ kˈæt"),
        ("NASA's and Bush's", "nˈæsɐz ænd bˈʊʃᵻz"),
        ("html", "ˌeɪtʃtˌiːˌɛmˈɛl"),
    ],
)
def test_sounds(phonemes: EnglishPhonemes, text: str, expected: str) -> None:
    assert phonemes(text) == expected


def test_homographs_follow_their_part_of_speech(phonemes: EnglishPhonemes) -> None:
    assert phonemes("I read it yesterday.").split()[1] == "ɹˈɛd"
    assert phonemes("I will read it.").split()[2] == "ɹˈiːd"
    assert phonemes("He lives here.").split()[1] == "lˈɪvz"
    assert phonemes("They saved many lives.").split()[3] == "lˈaɪvz."


def test_unknown_words_are_guessed_with_a_stress(phonemes: EnglishPhonemes) -> None:
    for word in ("Priya", "gruffalo", "blorptastic", "OpenZorg"):
        assert "ˈ" in phonemes(word)


@pytest.mark.parametrize("text", ["", "   ", "\n", ".", "?!...", "—", "你好，世界。", "🙂🙂", "$", "()[]", "привет"])
def test_nothing_to_say(phonemes: EnglishPhonemes, text: str) -> None:
    assert phonemes(text) == ""
    assert pieces_of("") == []


ODD = [
    "$", "5", "1,000", "3.50", "%", "A", "a", "US", "NASA's", "'", "''", "-", "\n", "e.g.", "12/25/2023", "</b>", "@",
    "x.y", "http://", "`", "**", "#", "|", "[a](b)", "1e999", "½", "²", "你好", "😀", "é", "ß", "İ", "ﬁ", "\u0301",
    "\u200d", "\x00", "...", "?!", "—", "O'", "'s", "\\frac{1}{2}", "$x^2$", "{", "_", "~", "&amp;", "1st", "+", "=",
    "1:30", "p.m.", "U.S.A.", "iPhone", "ABCDEFGH", "9" * 50, "µ", "Ω", "٣", "Ⅷ", "hh", "St.",
]  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=40) | st.lists(st.sampled_from([*ODD, " "]), max_size=12).map("".join))
def test_any_text_gives_pieces_that_the_voice_can_say(text: str) -> None:
    sounds = english()(text)
    pieces = pieces_of(sounds)
    assert "".join(pieces).replace(" ", "") == sounds.replace(" ", "")
    for piece in pieces:
        assert len(piece) <= LONGEST_PIECE
        assert piece == piece.strip()
        assert any(character not in PAUSES for character in piece)
    assert not set(sounds) - set(" ˈˌː'-" + PAUSES) - IPA


@pytest.mark.parametrize("text", ["a" * 1000, "9" * 1000, "x^2" * 333, "A.B." * 250, "word " * 200, "'a" * 500])
def test_the_work_of_a_step_grows_with_its_characters_alone(
    phonemes: EnglishPhonemes, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What takes time is the guess of a sound, a letter at a time, and the tagger, a word at a time.

    Both are counted, for a clock would tell how busy the machine is; bench/test_speed.py measures the seconds.
    """
    guess, tag = Mock(wraps=phonemes._guess), Mock(wraps=phonemes._tag)
    monkeypatch.setattr(phonemes, "_guess", guess)
    monkeypatch.setattr(phonemes, "_tag", tag)
    assert phonemes(text)
    guessed = [len(call.args[0]) for call in guess.call_args_list]
    assert max(guessed, default=0) <= 24  # letters, < 5 ms
    assert sum(guessed) <= len(text)
    [tagged] = [len(call.args[0]) for call in tag.call_args_list]
    assert tagged <= 2 * len(text)


def test_pieces_are_sentences() -> None:
    assert pieces_of("wˈʌn. tˈuː! θɹˈiː? fˈoːɹ, fˈaɪv") == ["wˈʌn.", "tˈuː!", "θɹˈiː?", "fˈoːɹ, fˈaɪv"]


def test_long_sentences_are_cut_at_clauses_else_between_words() -> None:
    clause = "wˈʌn " * 15
    assert pieces_of(f"{clause}tˈuː, {clause}{clause}ˈɛnd.") == [f"{clause}tˈuː,", f"{clause}{clause}ˈɛnd."]
    assert all(piece.endswith("n") for piece in pieces_of(("wˈʌn " * 100).strip()))
    assert [len(piece) for piece in pieces_of("n" * 400)] == [160, 160, 80]
