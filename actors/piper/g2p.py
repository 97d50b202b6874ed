"""US English text to the phonemes that Piper voices were trained on (eSpeak's IPA), without eSpeak.

Words come from `actors.piper.spoken`; their sounds from the lexicons, the part-of-speech tagger (for words like
"read") and the guesser that gruut ships. docs/adr/0003-g2p.md says why these, with word error rates.
"""

from __future__ import annotations

import contextlib
import re
import sqlite3
from collections.abc import Sequence
from pathlib import Path

import gruut_lang_en
from gruut.g2p import GraphemesToPhonemes
from gruut.pos import PartOfSpeechTagger

from actors.piper.spoken import SpokenWords
from actors.piper.voice import PAUSES

INITIALISMS = frozenset({"US", "UN", "MIT", "ID", "OK"})
"""Spelled although the lexicon has a word of these letters; only where they are written in capitals."""
LONGEST_INITIALISM = 4
"""Letters; a longer unknown word in capitals is read as a word, if it has a vowel."""
LONGEST_WORD = 24
"""Letters; what is longer is no English word and is read in pieces, so that a guess takes < 5 ms."""
VOWELS = "aeiouæɐɑɒɔəɚɛɜɪʊʌᵻ"
UNSTRESSED = {"i": "aɪ", "a": "ɐ"}
"""Words that the lexicon has as one would say them alone."""
LETTER_A = "ˈeɪ"


class EnglishPhonemes:
    """Turns text into phonemes. Holds 124,000 words; for one thread at a time."""

    def __init__(self) -> None:
        folder = gruut_lang_en.get_lang_dir()
        self._spoken = SpokenWords()
        self._lexicon = _lexicon(folder / "espeak" / "lexicon.db")
        self._homographs = _homographs(folder / "lexicon.db")
        self._tag = PartOfSpeechTagger(folder / "pos" / "model.crf")
        self._guess = GraphemesToPhonemes(folder / "espeak" / "g2p" / "model.crf")

    def __call__(self, text: str) -> str:
        """The phonemes of `text`: words parted by blanks, each pause as its mark; "" if there is no word in it."""
        tokens = self._spoken(text)
        words = [token for token in tokens if token not in PAUSES]
        if not words:
            return ""
        tags = iter(self._tag(words))
        sounds: list[str] = []
        for before, token, after in zip(["", *tokens], tokens, [*tokens[1:], ""], strict=False):
            if token in PAUSES:
                if sounds and sounds[-1][-1] not in PAUSES:
                    sounds[-1] += token
            elif token == "A" and (_is_letter(after) or before.isalpha()):
                next(tags)
                sounds.append(LETTER_A)
            else:
                sounds.append(self._word(token, next(tags)))
        return " ".join(_linked(sounds))

    def _word(self, word: str, tag: str) -> str:
        known = self._known(word.lower(), tag)
        if known and word not in INITIALISMS:
            return known
        stem, _, ending = word.rpartition("'")
        if stem and ending in ("s", "S"):
            return _possessive(self._word(stem, tag))
        letters = word.replace("'", "")
        if (letters.isupper() and len(letters) <= LONGEST_INITIALISM) or _is_unpronounceable(letters):
            return self._spelled(letters)
        parts = [part for part in re.split(rf"(?<=[a-z])(?=[A-Z])|(.{{{LONGEST_WORD}}})", letters) if part]
        if len(parts) > 1:
            return " ".join(self._word(part, tag) for part in parts)
        guess = "".join(self._guess(letters.lower())) or self._spelled(letters)
        return guess if "ˈ" in guess else re.sub(f"(?=[{VOWELS}])", "ˈ", guess, count=1)

    def _known(self, word: str, tag: str) -> str | None:
        by_tag = self._homographs.get(word, {})
        as_tagged = by_tag.get("VBD" if tag == "VBN" else tag) or by_tag.get(tag[:2])
        return UNSTRESSED.get(word) or as_tagged or self._lexicon.get(word)

    def _spelled(self, letters: str) -> str:
        names = [LETTER_A if letter in "aA" else self._lexicon[letter.lower()] for letter in letters]
        return "".join([*(name.replace("ˈ", "ˌ") for name in names[:-1]), names[-1]])


def _lexicon(path: Path) -> dict[str, str]:
    rows = _rows(path, "SELECT word, phonemes FROM word_phonemes WHERE role = '' ORDER BY pron_order DESC")
    return {word: _in_isolation(word, phonemes.replace(" ", "")) for word, phonemes in rows}


def _rows(path: Path, query: str) -> list[tuple[str, ...]]:
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
        return database.execute(query).fetchall()


def _in_isolation(word: str, phonemes: str) -> str:
    """Undo how a word's end was bent by its neighbour: eSpeak was given the list of words as one running text.

    So "cabin" ends in the sound of "sing" before "cabinet", "at" in a flap before a vowel, "rama" in an r before an r.
    """
    if phonemes.endswith("ŋ") and "ng" not in word[-4:]:
        return phonemes[:-1] + "n"
    if phonemes.endswith("ɾ"):
        return phonemes[:-1] + ("d" if word.rstrip("e").endswith("d") else "t")
    if phonemes.endswith("ɚɹ"):
        return phonemes[:-1]
    if phonemes.endswith("ɚ") and "r" not in word[-3:]:
        return phonemes[:-1] + "ə"
    return phonemes


def _homographs(path: Path) -> dict[str, dict[str, str]]:
    """Words that sound differently as noun, verb, ...: word -> part of speech -> phonemes in eSpeak's notation."""
    found: dict[str, dict[str, str]] = {}
    rows = _rows(path, "SELECT word, role, phonemes FROM word_phonemes WHERE role != '' ORDER BY pron_order")
    for word, role, phonemes in rows:
        by_tag = found.setdefault(word, {})
        by_tag.setdefault(role.removeprefix("gruut:"), _from_gruut(phonemes.replace(" ", "")))
    return {word: by_tag for word, by_tag in found.items() if len(set(by_tag.values())) > 1}


def _from_gruut(phonemes: str) -> str:
    for theirs, espeaks in (("d͡ʒ", "dʒ"), ("t͡ʃ", "tʃ"), ("ɔɹ", "oːɹ"), ("([ˈˌ])i", r"\1iː"), ("([ˈˌ])ɚ", r"\1ɜː"),
                            ("ɑ", "ɑː"), ("ɔ(?!ɪ)", "ɔː"), ("u", "uː")):  # fmt: skip
        phonemes = re.sub(theirs, espeaks, phonemes)
    return phonemes


def _is_letter(token: str) -> bool:
    return len(token) == 1 and token.isupper()


def _is_unpronounceable(letters: str) -> bool:
    return len(letters) <= LONGEST_WORD and not set(letters.lower()) & set("aeiouy")


def _possessive(phonemes: str) -> str:
    if phonemes[-1] in "szʃʒ":
        return phonemes + "ᵻz"
    return phonemes + ("s" if phonemes[-1] in "ptkfθ" else "z")


def _linked(sounds: Sequence[str]) -> list[str]:
    """How "the" and "to" are said before a vowel."""
    before_vowel = {"ðə": "ðɪ", "tə": "tʊ"}
    following = [*(sound.lstrip("ˈˌ")[:1] for sound in sounds[1:]), ""]
    return [
        before_vowel.get(sound, sound) if next_sound and next_sound in VOWELS else sound
        for sound, next_sound in zip(sounds, following, strict=True)
    ]
