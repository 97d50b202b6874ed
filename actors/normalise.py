"""Written text as it is said, for talkers that read letters: figures, dates, times, money and units become words.

English is read by normt2s, and Chinese by wetext. A text may be of both: a sentence is Chinese if it has an ideograph,
and inside it three and more English words between two marks, or between ideographs, are English; figures that stand
alone are of the language that came before them.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from normt2s import Normalizer as EnglishNormalizer
    from wetext import Normalizer as ChineseNormalizer

_HAN = r"\u3400-\u9fff\uf900-\ufaff"
_IDEOGRAPH = re.compile(rf"[{_HAN}]")
_LETTER = re.compile(r"[^\W\d_]")
_SENTENCE = re.compile(r".+?(?:[。！？!?\n]+|\.(?=\s)|$)\s*|\s+", re.DOTALL)
_PIECE = re.compile(r"""((?:[\n"“”\\。，；！？、（）()《》]|[,;:.!?](?=\s|$))+)""")
"""Marks that part a Chinese sentence. Among them are all that wetext would write as `\\"`."""
_FOREIGN = re.compile(rf"[^{_HAN}]+")
_WORD = re.compile(r"[A-Za-z]{2,}")
_ENGLISH_WORDS = 3
_FIGURE = re.compile(r"[0-9]")
_THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")
_CALLED = re.compile(r"(?:电话|手机|号码|热线|拨打|致电|分机|验证码|房间)(?:号|是|为)*[\s:：]*[0-9][0-9-]*")
"""A number that is said figure by figure, as its name tells."""
_FIGURES = dict(zip("0123456789", "零幺二三四五六七八九", strict=True))
_RAISED = re.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u2079]+")
_HALF_DAY = re.compile(r"[0-9]\s*[AaPp]\.?[Mm]\b")


class SpokenText:
    """Writes text as it is said. Used by one thread at a time; what reads Chinese is loaded with the first figure in it
    (0.3 s, 45 MB).
    """

    def __call__(self, text: str, before: str = "") -> str:
        """`text` without figures; `before` is what was said before it. What has nothing to write out stays as it is."""
        text = "".join(map(_ascii_digit, _without_raised(text) if "\\" in text else text))
        parts, chinese = [], _is_chinese(before)
        for sentence in _SENTENCE.findall(text):
            if _LETTER.search(sentence):
                chinese = _is_chinese(sentence)
            parts.append(self._mixed(sentence) if chinese else self._read_english(sentence))
        return "".join(parts)

    def _mixed(self, sentence: str) -> str:
        """Every other piece is marks."""
        return "".join(
            piece if number % 2 else self._read_piece(piece) for number, piece in enumerate(_PIECE.split(sentence))
        )

    def _read_piece(self, piece: str) -> str:
        parts, start = [], 0
        for run in _FOREIGN.finditer(piece):
            if len(_WORD.findall(run[0])) >= _ENGLISH_WORDS:
                parts += [self._read_chinese(piece[start : run.start()]), self._read_english(run[0])]
                start = run.end()
        return "".join([*parts, self._read_chinese(piece[start:])])

    def _read_chinese(self, text: str) -> str:
        if not _FIGURE.search(text):
            return text
        text = _CALLED.sub(lambda named: "".join(_FIGURES.get(each, each) for each in named[0].replace("-", "")), text)
        said = self._chinese.normalize(_THOUSANDS.sub("", text))
        return _between_blanks(text, said)

    def _read_english(self, text: str) -> str:
        said = self._english.normalize(text)
        if _HALF_DAY.search(text):
            said = re.sub(r"\b([ap]) m\b", lambda half: half[1].upper() + "M", said)
        return _between_blanks(text, said)

    @functools.cached_property
    def _english(self) -> EnglishNormalizer:
        from normt2s import Normalizer

        return Normalizer("en", markdown="strip")

    @functools.cached_property
    def _chinese(self) -> ChineseNormalizer:
        from wetext import Normalizer

        return Normalizer(lang="zh", operator="tn")


def _is_chinese(text: str) -> bool:
    return _IDEOGRAPH.search(text) is not None


def _ascii_digit(character: str) -> str:
    """Digits of other scripts are read as ours: normt2s fails on some."""
    return str(unicodedata.decimal(character)) if character.isdecimal() else character


def _without_raised(text: str) -> str:
    """Raised figures as powers, and lowered ones and those in circles as ours: behind LaTeX normt2s fails on them."""
    text = _RAISED.sub(lambda raised: "^{" + "".join(str(unicodedata.digit(each)) for each in raised[0]) + "}", text)
    return "".join(str(unicodedata.digit(each)) if each.isdigit() else each for each in text)


def _between_blanks(text: str, said: str) -> str:
    """`said`, which may have lost the white space at its ends, between that of `text`."""
    bare = text.strip()
    start = text.index(bare)
    return text[:start] + said.strip() + text[start + len(bare) :]
