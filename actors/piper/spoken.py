"""Written English as words to be said: numbers, money, dates, units, symbols and abbreviations are spelled out.

normt2s does most of it; here is what its readers of prose leave over: addresses, tags, initials, foreign letters.
"""

from __future__ import annotations

import re
import unicodedata

from normt2s import Normalizer

from actors.piper.voice import PAUSES

ABBREVIATIONS = {
    "Ph.D.": "PHD", "Mt.": "Mount", "Gov.": "Governor", "Sen.": "Senator", "Gen.": "General", "Capt.": "Captain",
    "Jan.": "January", "Feb.": "February", "Apr.": "April", "Aug.": "August", "Sept.": "September",
    "Oct.": "October", "Nov.": "November", "Dec.": "December", "Ave.": "Avenue", "Blvd.": "Boulevard",
    "Apt.": "Apartment", "Corp.": "Corporation",
}  # fmt: skip
"""What normt2s does not know; matched with their case."""

SYMBOLS = {"@": "at", "&": "and", "%": "percent", "+": "plus", "=": "equals", "$": "dollars", "#": "hash",
           "/": "slash"}  # fmt: skip
"""How a symbol is read inside a word, as in an address; one that stands alone is left out."""

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

PLAIN = str.maketrans(
    {"‘": "'", "’": "'", "—": ", ", "–": "-", "…": "... ", "ł": "l", "Ł": "L", "ø": "o", "Ø": "O", "æ": "ae",
     "Æ": "Ae", "œ": "oe", "Œ": "Oe", "ß": "ss", "đ": "d", "Đ": "D", "ð": "th", "þ": "th", "Þ": "Th", "ı": "i"}
)  # fmt: skip
"""Letters and marks that Unicode does not take apart itself."""

_TAG = re.compile(r"</?[A-Za-z][^<>]{0,200}>")
_US_DATE = re.compile(r"\b(0?[1-9]|1[0-2])/(0?[1-9]|[12]\d|3[01])/(\d{4})\b")
_DOTTED = re.compile(r"\b(?:[A-Za-z]\.){2,}")
_INITIAL = re.compile(r"\b([A-Z])\.(?=\s[A-Z])")
_INNER_DOT = re.compile(r"(?<=\w)\.(?=[a-z0-9])")
_SYMBOL = re.compile(r"(?<=\w)[@&%+=$#/](?=\w)|(?<=\w)[+#]+(?!\w)")
_TOKEN = re.compile(rf"[A-Za-z]+(?:'[A-Za-z]+)*|[{PAUSES}]+|(?<=\s)-+(?=\s)")


class SpokenWords:
    """Splits written text into words (letters and inner apostrophes) and pauses (one of `PAUSES`)."""

    def __init__(self) -> None:
        self._normalizer = Normalizer("en", markdown="strip")
        for short, long in ABBREVIATIONS.items():
            self._normalizer.add_abbreviation(short, long, capitalized=False)

    def __call__(self, text: str) -> list[str]:
        """The words and pauses of `text`; capitals are kept. What is not English writing is dropped."""
        text = _TAG.sub(" ", text)
        text = _US_DATE.sub(lambda date: f"{date[3]}-{date[1]:0>2}-{date[2]:0>2}", text)
        text = _ascii(self._normalizer.normalize(text))
        text = re.sub(r"\ba m\b", "A M", text)  # the hour of the morning, not an article
        text = _DOTTED.sub(lambda letters: letters[0].replace(".", "").upper() + " ", text)
        text = _INITIAL.sub(r"\1", text)
        text = _INNER_DOT.sub(" dot ", text)
        text = _SYMBOL.sub(lambda marks: " ".join(["", *(SYMBOLS[mark] for mark in marks[0]), ""]), text)
        text = re.sub(r"\d", lambda digit: f" {DIGITS[int(digit[0])]} ", text)
        return [_pause(token) if token[0] in PAUSES + "-" else token for token in _TOKEN.findall(text)]


def _ascii(text: str) -> str:
    text = unicodedata.normalize("NFKD", text.translate(PLAIN))
    return "".join(c if c.isascii() else "" if unicodedata.combining(c) else " " for c in text)


def _pause(marks: str) -> str:
    return next((mark for mark in "?!" if mark in marks), "," if marks[0] == "-" else marks[0])
