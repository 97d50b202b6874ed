"""Whisper through CTranslate2: windows of sound to text, and when each word of it was spoken."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from actors.mel import HOP, SAMPLE_RATE_HZ, log_mel, mel_filters
from actors.tokenizer import encode_texts
from actors.whisper.windows import SILENCE, WINDOWS_S, cut, window_s
from omniflow.errors import WeightsError

if TYPE_CHECKING:
    import ctranslate2

MAX_TOKENS = 224
"""Of a text, and of what may stand before it."""
MAX_HINT = 1 << 15
"""Characters of a hint that are looked at, the last ones: more than `MAX_TOKENS` tokens have."""
FRAME = 2 * HOP
"""Samples that a position of the encoder stands for."""
FRAME_S = FRAME / SAMPLE_RATE_HZ
PAUSE_FRAMES = 15
"""0.3 s: no word holds a pause as long; the closure of a plosive takes up to 0.15 s."""


class Heard(NamedTuple):
    """What was understood of a window: "" and no tokens where that was nothing."""

    text: str
    ids: tuple[int, ...]
    no_speech_prob: float


class TimedWord(NamedTuple):
    """A word of a window, in seconds from its begin, with its tokens and their log-probabilities."""

    text: str
    start_s: float
    end_s: float
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]


NOTHING = Heard("", (), 1.0)
"""Of a window in which it did nothing but repeat itself."""


class Whisper:
    """A loaded English model. A call keeps `threads` cores busy; calls from several threads come one at a time.

    Raises WeightsError for a model of many languages, which wants to be told which is spoken.
    """

    def __init__(self, folder: Path, threads: int = 1) -> None:
        import ctranslate2
        import tokenizers

        self._model = ctranslate2.models.Whisper(
            str(folder), device="cpu", compute_type="int8", inter_threads=1, intra_threads=threads
        )
        if self._model.is_multilingual:
            raise WeightsError(
                f"{folder} knows several languages; give one of Whisper's English models (their names end in .en)"
            )
        self._view = ctranslate2.StorageView.from_array
        self._tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        vocabulary: dict[str, int] = self._tokenizer.get_vocab()
        self._start = vocabulary["<|startoftranscript|>"]
        self._prompt = [self._start, vocabulary["<|notimestamps|>"]]
        self._end = vocabulary["<|endoftext|>"]
        self._previously = vocabulary["<|startofprev|>"]
        self._filters = mel_filters()

    def transcribe(self, samples: np.ndarray) -> str:
        """The text of `samples`, float32 [n] at 16 kHz, of any length; "" where nothing was understood."""
        return joined(text for window in cut(samples) for text in self.hear([window]))

    def hear(self, windows: Sequence[np.ndarray]) -> list[str]:
        """The texts of some windows as `cut` makes them, all of the same `window_s`."""
        length_s = window_s(windows[0])
        found = self.generate(self.encode(windows, length_s), windows, length_s)
        return [(heard or self._hear_again(window)).text for window, heard in zip(windows, found, strict=True)]

    def _hear_again(self, window: np.ndarray) -> Heard:
        """In the window that it was trained with it repeats itself much less."""
        length_s = WINDOWS_S[-1]
        return self.generate(self.encode([window], length_s), [window], length_s)[0] or NOTHING

    def encode(self, windows: Sequence[np.ndarray], length_s: int) -> ctranslate2.StorageView:
        """What the encoder makes of windows, with silence behind them up to `length_s`."""
        features = np.stack([log_mel(window, self._filters, length_s) for window in windows])
        return self._model.encode(self._view(features))

    def generate(
        self,
        encoded: ctranslate2.StorageView,
        windows: Sequence[np.ndarray],
        length_s: int,
        hint: str = "",
        temperature: float = 0.0,
    ) -> list[Heard | None]:
        """The text of each window; None for one that did not end, as a loop does not.

        `hint` is what was said before, or text in which names are spelled as they should be. A `temperature` above 0
        draws from what is likely, in place of the likeliest.
        """
        # Fast speech has 6 tokens a second; a loop in a short window is cut off at twice that.
        # Of each its own: what is beside a window does not change its text.
        whole = length_s == WINDOWS_S[-1]
        mosts = [MAX_TOKENS if whole else 16 + 12 * len(window) // SAMPLE_RATE_HZ for window in windows]
        prompt = self._hinted(hint)
        results = self._model.generate(
            encoded,
            [prompt] * len(windows),
            beam_size=1,
            # Whisper models of CTranslate2 stop at half of it.
            max_length=min(2 * MAX_TOKENS, 2 * max(mosts) + len(prompt)),
            return_scores=True,
            return_no_speech_prob=True,
            sampling_topk=0 if temperature > 0 else 1,
            sampling_temperature=temperature or 1.0,
        )
        return [self._heard(result, most) for result, most in zip(results, mosts, strict=True)]

    def words(self, encoded: ctranslate2.StorageView, window: np.ndarray, heard: Heard) -> list[TimedWord]:
        """The words of a window with their times; `encoded` is of that window alone."""
        if not heard.ids or len(window) < FRAME:  # less than a frame is no word, and has no alignment
            return []
        (aligned,) = self._model.align(encoded, [self._start], [list(heard.ids)], [len(window) // HOP])
        return list(self._words(window, heard.ids, aligned))

    def _hinted(self, hint: str) -> list[int]:
        if not hint.strip():
            return self._prompt
        # A hint is text, even where it spells a mark like <|endoftext|>: those come behind all tokens of text.
        (ids,) = encode_texts(self._tokenizer, [" " + hint.strip()[-MAX_HINT:]])
        said = [token for token in ids if token < self._end]
        return [self._previously, *said[-(MAX_TOKENS - 1) :], *self._prompt]

    def _heard(self, result: ctranslate2.models.WhisperGenerationResult, most: int) -> Heard | None:
        ids = result.sequences_ids[0]
        # Noise has no_speech_prob >= 0.78 and a mean log-probability <= -0.87; speech <= 0.4 and mostly >= -0.8.
        if result.no_speech_prob > 0.6 and result.scores[0] < -0.8:
            return Heard("", (), result.no_speech_prob)
        if len(ids) >= most and most < MAX_TOKENS:
            return None
        return Heard(str(self._tokenizer.decode(ids)).strip(), tuple(ids), result.no_speech_prob)

    def _words(
        self, window: np.ndarray, ids: Sequence[int], aligned: ctranslate2.models.WhisperAlignmentResult
    ) -> Iterator[TimedWord]:
        """A word begins with a token that begins with a blank."""
        tokens, frames = zip(*aligned.alignments, strict=True)
        loud = loud_frames(window)
        frame_of = [*np.asarray(frames)[np.searchsorted(tokens, np.arange(len(ids)))], len(loud)]
        texts = [self._tokenizer.decode([token], skip_special_tokens=False) for token in ids]
        starts = [index for index, text in enumerate(texts) if index == 0 or text.startswith(" ")]
        bounds = [*starts, len(ids)]
        spans = spoken_spans([int(frame_of[bound]) for bound in bounds], loud)
        for (start, stop), (begin, end) in zip(pairwise(bounds), spans, strict=True):
            text = str(self._tokenizer.decode(list(ids[start:stop]))).strip()
            if text:
                logprobs = tuple(float(np.log(max(p, 1e-10))) for p in aligned.text_token_probs[start:stop])
                yield TimedWord(text, begin * FRAME_S, end * FRAME_S, tuple(ids[start:stop]), logprobs)


def joined(texts: Iterable[str]) -> str:
    """Texts of successive windows as one."""
    return " ".join(text for text in texts if text)


def loud_frames(window: np.ndarray) -> np.ndarray:
    """For each 20 ms of a window whether there is sound, rather than a pause: bool [num_frames]."""
    padded = np.pad(window, (0, -len(window) % FRAME)).reshape(-1, FRAME)
    level = np.sqrt(np.square(padded).mean(axis=1))
    floor, peak = np.percentile(level, (10, 95))
    # 30 dB below what is loud, or above the noise between the words, where that is at least 20 dB below.
    loud: np.ndarray = level > max(SILENCE, min(max(0.03 * peak, 3 * floor), 0.1 * peak))
    return loud


def spoken_spans(bounds: Sequence[int], loud: np.ndarray) -> list[tuple[int, int]]:
    """First frame and end of each word, given where one ends and the next begins according to the model.

    It puts a pause, and up to 0.3 s of what is behind it, into one of the words beside it. So of a word with a pause
    inside, the longer part is the word, and the rest belongs to its neighbours. A word that got no time at all shares
    that of the word before. Words neither overlap nor run back.
    """
    spans: list[tuple[int, int]] = []
    borrowed: int | None = None
    for begin, end in pairwise(bounds):
        if begin >= end and borrowed is None and spans:
            first, last = spans[-1]
            middle = (first + last) // 2
            spans[-1:] = [(first, middle), (middle, last)]
            continue
        parts = _parts(begin if borrowed is None else borrowed, end, loud)
        borrowed = None
        if not parts:
            spans.append((begin, end))
            continue
        longest = max(range(len(parts)), key=lambda index: parts[index][1] - parts[index][0])
        if longest > 0 and spans:
            spans[-1] = (spans[-1][0], parts[longest - 1][1])
        if longest + 1 < len(parts):
            borrowed = parts[longest + 1][0]
        spans.append(parts[longest])
    return spans


def _parts(begin: int, end: int, loud: np.ndarray) -> list[tuple[int, int]]:
    """What is loud between two frames, cut at pauses."""
    heard = begin + np.flatnonzero(loud[begin:end])
    cuts = np.flatnonzero(np.diff(heard) > PAUSE_FRAMES) + 1
    return [(int(part[0]), int(part[-1]) + 1) for part in np.split(heard, cuts) if len(part)]


@functools.cache
def shared_whisper(folder: Path, threads: int) -> Whisper:
    """The model of `folder`, once in a process: stages that share a host share it (80 MB), for as long as it lives."""
    return Whisper(folder, threads)
