"""Written English as words to be said: numbers, money, dates, units, symbols and abbreviations are spelled out.

normt2s does most of it; here is what its readers of prose leave over: addresses, tags, initials, foreign letters.
"""

from __future__ import annotations

import re
import unicodedata

from normt2s import Normalizer

from actors.piper.voice import PAUSES, SENTENCE_ENDS

ABBREVIATIONS = {
    "Ph.D.": "PHD", "Mt.": "Mount", "Gov.": "Governor", "Sen.": "Senator", "Gen.": "General", "Capt.": "Captain",
    "Jan.": "January", "Feb.": "February", "Apr.": "April", "Aug.": "August", "Sept.": "September",
    "Oct.": "October", "Nov.": "November", "Dec.": "December", "Ave.": "Avenue", "Blvd.": "Boulevard",
    "Apt.": "Apartment", "Corp.": "Corporation", "AT&T": "A T and T", "St.": "Street",
}  # fmt: skip
"""What normt2s does not know; matched with their case."""

SYMBOLS = {"@": "at", "&": "and", "%": "percent", "+": "plus", "=": "equals", "$": "dollars", "#": "hash",
           "/": "slash"}  # fmt: skip
"""How a symbol is read inside a word, as in an address; one that stands alone is left out."""

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

MATH = "½¼¾²³°€£¥µ×÷≠≤≥≈±−→∞√‰αβγδεζηθικλμνξοπρστυφχψωΓΔΘΛΞΠΣΦΨΩ"
"""What normt2s reads beside ASCII. It gets nothing else: it fails on digits of other scripts and on broken LaTeX."""

PLAIN = {"‘": "'", "’": "'", "—": ", ", "–": "-", "…": "... ", "\\": " ", "ł": "l", "Ł": "L", "ø": "o", "Ø": "O",
         "æ": "ae", "Æ": "Ae", "œ": "oe", "Œ": "Oe", "ß": "ss", "đ": "d", "Đ": "D", "ð": "th", "þ": "th", "Þ": "Th",
         "ı": "i"}  # fmt: skip
"""Letters and marks that Unicode does not take apart itself."""

_TAG = re.compile(r"</?[A-Za-z][^<>]{0,200}>")
_US_DATE = re.compile(r"\b(0?[1-9]|1[0-2])/(0?[1-9]|[12]\d|3[01])/(\d{4})\b")
_DOTTED = re.compile(r"\b(?:[A-Za-z]\.){2,}")
_SAINT = re.compile(r"\bSt\.(?=\s[A-Z])")
_INITIAL = re.compile(r"\b([A-Z])\.(?=\s[A-Z])")
_INNER_DOT = re.compile(r"(?<=\w)\.(?=[a-z0-9])")
_SYMBOL = re.compile(r"(?<=\w)[@&%+=$#/](?=\w)|(?<=\w)[+#]+(?!\w)")
_PARAGRAPH = re.compile(r"(?<=\w)\s*\n\s*\n")
_LINE = re.compile(r"(?<=\w)\s*\n(?=\s*[A-Z0-9])")
_TOKEN = re.compile(rf"[A-Za-z]+(?:'[A-Za-z]+)*|[{PAUSES}]+(?![\w/])|[,;!]|(?<=\s)-+(?=\s)")


class SpokenWords:
    """Splits written text into words (letters and inner apostrophes) and pauses (one of `PAUSES`)."""

    def __init__(self) -> None:
        self._normalizer = Normalizer("en", markdown="strip")
        for short, long in ABBREVIATIONS.items():
            self._normalizer.add_abbreviation(short, long, capitalized=False)

    def __call__(self, text: str) -> list[str]:
        """The words and pauses of `text`; capitals are kept. What is not English writing is dropped."""
        text = _TAG.sub(" ", _plain(text, keep=MATH))
        text = _SAINT.sub("Saint", text)
        ending = text.rstrip()[-1:]
        text = _US_DATE.sub(lambda date: f"{date[3]}-{date[1]:0>2}-{date[2]:0>2}", text)
        text = _plain(self._normalizer.normalize(text))
        text = _LINE.sub(", ", _PARAGRAPH.sub(". ", text))
        text = re.sub(r"\ba m\b", "A M", text)  # the hour of the morning, not an article
        text = _DOTTED.sub(lambda letters: letters[0].replace(".", " ").upper(), text)
        text = _INITIAL.sub(r"\1", text)
        text = _INNER_DOT.sub(" dot ", text)
        text = _SYMBOL.sub(lambda marks: " ".join(["", *(SYMBOLS[mark] for mark in marks[0]), ""]), text)
        text = re.sub(r"\d", lambda digit: f" {DIGITS[int(digit[0])]} ", text)
        tokens = [_pause(token) if token[0] in PAUSES + "-" else token for token in _TOKEN.findall(text)]
        # normt2s takes the dot of "at 6 p.m." for one of the abbreviation's, also where it ends the sentence.
        return [*tokens, ending] if ending in SENTENCE_ENDS and tokens and tokens[-1] not in PAUSES else tokens


def _plain(text: str, keep: str = "") -> str:
    """`text` in ASCII and the characters of `keep`: accents dropped, other scripts blanked."""
    return "".join(c if c in keep else _plain_character(c) for c in text)


def _plain_character(character: str) -> str:
    if character in PLAIN:
        return PLAIN[character]
    parts = unicodedata.normalize("NFKD", character)
    return "".join(_plain_part(part) for part in parts)


def _plain_part(part: str) -> str:
    if part.isascii():
        return part
    if part.isdecimal():
        return str(unicodedata.decimal(part))
    return "" if unicodedata.category(part) in ("Mn", "Cf") else " "  # accents; marks that are not seen


def _pause(marks: str) -> str:
    return next((mark for mark in "?!" if mark in marks), "," if marks[0] == "-" else marks[0])
