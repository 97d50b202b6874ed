"""Where running text may be cut for speech: by sentence, clause, word, and in scripts without spaces by character.

Every rule looks at the text before a place and at the one character after it, so a decision never has to be taken back
when more text comes, and the pieces do not depend on how the text arrived.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from itertools import accumulate
from typing import NamedTuple

import regex

UNSPACED = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Bopomofo}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}ー々〆〇"
WIDE_MARKS = "、。，．：；！？・…‥～〜（）「」『』【】《》〈〉〔〕"
BLANK = r"[[\s\u200b]--[\xa0\u2007\u202f]]"
"""White space; a no-break space is part of a word."""
URL = r"(?:https?://|www\.)"
TOKEN = regex.compile(
    rf"""
    (?P<blank> (?: (?={BLANK})\X )+ )
  | (?P<url> {URL} (?: (?!{BLANK}|[{WIDE_MARKS}])\X )+ )
  | (?P<wide> (?=[{UNSPACED}{WIDE_MARKS}])\X )
  | (?P<word> (?: (?!{BLANK}|[{UNSPACED}{WIDE_MARKS}]|{URL})\X )+ )
  | (?P<rest> \X )
    """,
    regex.VERBOSE | regex.V1,
)
GRAPHEME = regex.compile(r"\X")
IS_BLANK = regex.compile(BLANK, regex.V1)
IS_WIDE = regex.compile(rf"[{UNSPACED}{WIDE_MARKS}]", regex.V1)
IDEOGRAPH = regex.compile(r"\p{Han}")
FIGURE = regex.compile(r"\p{Nd}")
SYLLABLE = regex.compile(r"[\p{Hiragana}\p{Katakana}\p{Hangul}]", regex.V1)

CLOSERS = r"""[\p{Pe}\p{Pf}"'*_`~]*"""
SENTENCE_END = regex.compile(rf"(?P<marks>[.!?…‥؟۔।॥。．！？។။]+){CLOSERS}$", regex.V1)
CLAUSE_END = regex.compile(rf"(?:[,;:،؛、，：；]{CLOSERS}|[—–]|\s-)$", regex.V1)
NEVER_AFTER = regex.compile(r"[\p{Ps}\p{Pi}เแโใไເແໂໃໄ\u17d2\u1039]$", regex.V1)
NEVER_BEFORE = regex.compile(
    r"[\p{Pe}\p{Pf}\p{M}!?.,;:%、。，．：；！？・…‥～〜ー々ゝゞヽヾぁぃぅぇぉっゃゅょゎァィゥェォッャュョヮะาำๅๆฯະາຳ]",
    regex.V1,
)
UNPARTED = regex.compile(r"\p{Nd}[，．]\p{Nd}$|\p{Nd}[%％]?[\p{Han}\p{Thai}]$|[\p{Katakana}ー]{2}$", regex.V1)
"""Neighbours of scripts without spaces that stay together: numbers with their unit, and words in katakana."""

TITLES = frozenset(
    "dr mr mrs ms mx prof rev hon st mt ft gen col maj capt cpt lt sgt gov sen rep pres messrs mme mlle sr sra srta"
    " hr fr vs approx cf viz bzw ca incl resp डॉ".split()
)
"""Abbreviations that something always follows."""
NUMBERED = frozenset(
    "no nos nr fig figs eq sec ch vol pp pg p art ver jan feb mar apr jun jul aug sep sept oct nov dec".split()
)
"""Abbreviations if a digit follows; else words that may end a sentence ("No.")."""
CASED = r"[\p{Latin}\p{Cyrillic}\p{Greek}]"
LETTERS = regex.compile(rf"(?:^|(?!{CASED})[^\p{{M}}.])(?:{CASED}\.)*{CASED}\.$", regex.V1)
"""An initial ("J."), or letters with a dot each ("e.g.", "U.S.")."""
LIST_NUMBER = regex.compile(r"(?:^|\n)\s*\p{Nd}{1,3}\.$", regex.V1)
LAST_WORD = regex.compile(rf"([[\p{{L}}\p{{M}}]--[{UNSPACED}]]+)\.$", regex.V1)
LOOK_BACK = 40
"""So many characters before a place are looked at; abbreviations and list numbers are shorter."""
LEAST = 8
"""A piece of a smaller size is half a second or less of speech: only the end of the text is as short."""


class Strength(IntEnum):
    """How good a place for a cut is."""

    CHARACTER = 0
    WORD = 1
    CLAUSE = 2
    SENTENCE = 3


class Place(NamedTuple):
    """A cut may be made before character `at`; `size` is that of the text before it."""

    at: int
    size: int
    strength: Strength


def size_of(text: str, figure: int = 5) -> int:
    """How long `text` takes to say, in Latin letters: an ideograph counts as 3, kana and hangul as 2, and a figure as
    `figure`, by default about as many letters as its word has.

    Never less than `len(text)`.
    """
    size = len(text) + (figure - 1) * len(FIGURE.findall(text))
    if text.isascii():
        return size
    return size + 2 * len(IDEOGRAPH.findall(text)) + len(SYLLABLE.findall(text))


def places(text: str) -> Iterator[Place]:
    """All places inside `text` where it may be cut, in order. Its end is none: nobody knows what follows."""
    size = 0
    for token in TOKEN.finditer(text):
        end = token.end()
        size += size_of(token.group())
        if end == len(text):
            return
        blank = token.group() if token.lastgroup == "blank" else ""
        if not blank and (IS_BLANK.match(text[end]) or not (token.lastgroup == "wide" or IS_WIDE.match(text[end]))):
            continue
        stop = end - len(blank)
        strength = _strength(text[max(0, stop - LOOK_BACK) : stop], blank, text[end])
        if strength is not None:
            yield Place(end, size, strength)


def find_cut(text: str, limits: tuple[int, int, int, int], max_size: int, late: bool) -> int | None:
    """Where to cut the first piece off `text`, or None while more text may bring a better place.

    The first place whose size reaches the limit for its strength (in the order of `Strength`). Where `late`, or where
    the piece would outgrow `max_size`, the best one so far.
    """
    head = text[: max_size + 1]
    best: Place | None = None
    for place in places(head):
        if place.size > max_size:
            break
        if place.size >= limits[place.strength]:
            return place.at
        if place.size >= LEAST and (best is None or place.strength >= best.strength):
            best = place
    too_long = size_of(head) > max_size
    if best is not None and (late or too_long):
        return best.at
    return _last_grapheme(head, max_size) if too_long else None


def _strength(left: str, blank: str, right: str) -> Strength | None:
    """How good a cut between `left` and `blank`, and the character `right`, is; None where it would be wrong."""
    if NEVER_AFTER.search(left) or NEVER_BEFORE.match(right) or (not blank and right in "\"'"):
        return None
    if blank.count("\n") > 1:
        return Strength.SENTENCE
    if not blank and UNPARTED.search(left[-2:] + right):
        return None
    end = SENTENCE_END.search(left)
    if end:
        return _after_marks(left[: end.end("marks")], end["marks"], right)
    if CLAUSE_END.search(left) or "\n" in blank:
        return Strength.CLAUSE
    if not blank:
        return None if left[-1:] in "\"'" else Strength.CHARACTER
    if left[-1:].isdigit() and right.isdigit():  # "1 000"
        return None
    between_wide = IS_WIDE.match(left[-1:]) and IS_WIDE.match(right)  # a space in Thai parts phrases
    return Strength.CLAUSE if between_wide else Strength.WORD


def _after_marks(left: str, marks: str, right: str) -> Strength | None:
    """The same where `left` ends with `marks` of a sentence's end, or what looks like them."""
    if marks == ".":
        word = LAST_WORD.search(left)
        name = word[1].lower() if word else ""
        if LIST_NUMBER.search(left) or LETTERS.search(left) or name in TITLES or (name in NUMBERED and right.isdigit()):
            return None
        return Strength.WORD if right.islower() else Strength.SENTENCE
    return Strength.CLAUSE if right.islower() else Strength.SENTENCE


def _last_grapheme(text: str, max_size: int) -> int:
    """The end of the last grapheme cluster before `max_size`; a single larger one is cut through."""
    at = size = 0
    for grapheme in GRAPHEME.finditer(text):
        size += size_of(grapheme.group())
        if size > max_size:
            break
        at = grapheme.end()
    if at:
        return at
    sizes = accumulate(map(size_of, text))
    return max(1, sum(size <= max_size for size in sizes))
