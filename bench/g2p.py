"""How well the speech is understood with several ways to phonemes: the word error rates of docs/adr/0003-g2p.md.

    python bench/g2p.py [--phonemes ours gruut espeak] [--seeds 1 2]

Whisper tiny.en hears what Piper's joe says; its own normalizer makes "twelve" and "12" the same. espeak needs the
program espeak-ng, which omniflow itself never runs.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import gruut
import numpy as np
from transformers.models.whisper.english_normalizer import EnglishTextNormalizer

from actors.piper import PIPER_JOE
from actors.piper.g2p import EnglishPhonemes
from actors.piper.talker import Acoustics, pieces_of
from actors.piper.vocoder import PiperDecoder
from actors.piper.voice import PAUSES
from actors.whisper.transcriber import transcribe

SENTENCES = Path(__file__).with_name("g2p_sentences.txt")
_normal = EnglishTextNormalizer({})


def main() -> None:
    """Print errors / words for each way, set and seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--phonemes", nargs="+", choices=list(WAYS), default=["ours", "gruut"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2])
    arguments = parser.parse_args()
    folder = PIPER_JOE.fetch()
    acoustics, decoder = Acoustics(folder), PiperDecoder(folder)
    for way in arguments.phonemes:
        phonemes = WAYS[way]()
        for name, sentences in _sentences().items():
            for seed in arguments.seeds:
                counts = [
                    _errors(s, _heard(phonemes(s[0]), acoustics, decoder, [seed, i])) for i, s in enumerate(sentences)
                ]
                errors, words = (sum(column) for column in zip(*counts, strict=True))
                print(f"{way:8} {name:9} seed {seed}: {errors:3} / {words} = {errors / words:.1%}", flush=True)


def _sentences() -> dict[str, list[list[str]]]:
    sets: dict[str, list[list[str]]] = {}
    for line in SENTENCES.read_text().splitlines():
        if line.startswith("["):
            sets[line.strip("[]")] = []
        elif line and not line.startswith("#"):
            sets[list(sets)[-1]].append(line.split(" | "))
    return sets


def _heard(phonemes: str, acoustics: Acoustics, decoder: PiperDecoder, seed: list[int]) -> str:
    rng = np.random.default_rng(seed)
    samples = []
    for piece in pieces_of(phonemes):
        prior = acoustics.prior(piece, 1.0, rng)
        samples.append(decoder.decode(acoustics.frames(prior, 0, len(prior))))
    return transcribe(np.concatenate(samples), decoder.sample_rate_hz)


def _errors(references: list[str], heard: str) -> tuple[int, int]:
    """(word errors, words) against the reference that fits best."""
    got = _normal(heard).split()
    return min((_distance(_normal(each).split(), got), len(_normal(each).split())) for each in references)


def _distance(wanted: list[str], got: list[str]) -> int:
    row = list(range(len(got) + 1))
    for i, word in enumerate(wanted, 1):
        last, row[0] = row[0], i
        for j, other in enumerate(got, 1):
            last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (word != other))
    return row[-1]


def _gruut() -> Callable[[str], str]:
    """gruut as it comes, with its eSpeak lexicon and its own reading of numbers."""

    def phonemes(text: str) -> str:
        words = [word for sentence in gruut.sentences(text, lang="en-us", espeak=True) for word in sentence]
        said = "".join(
            " " + "".join(word.phonemes) if word.is_spoken and word.phonemes else word.text
            for word in words
            if word.is_spoken or word.text in PAUSES
        )
        return said.strip()

    return phonemes


def _espeak() -> Callable[[str], str]:
    """espeak-ng as a subprocess: it gives a line a clause, to which the text's marks are added again."""

    def phonemes(text: str) -> str:
        command = ["espeak-ng", "-q", "--ipa", "-v", "en-us", text]
        clauses = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")
        clauses = [clause.strip() for clause in clauses if clause.strip()]
        whole = re.sub(r"\b(?:Dr|Mrs|Mr|Ms|vs|St|e\.g|Ph\.D)\.", "", text)
        marks = re.findall(rf"([{PAUSES}])(?:\s|$)", whole)
        if len(marks) != len(clauses):  # it has paused at an abbreviation
            marks = [","] * (len(clauses) - 1) + marks[-1:]
        return " ".join(clause + mark for clause, mark in zip(clauses, marks, strict=True))

    return phonemes


WAYS: dict[str, Callable[[], Callable[[str], str]]] = {"ours": EnglishPhonemes, "gruut": _gruut, "espeak": _espeak}

if __name__ == "__main__":
    main()
