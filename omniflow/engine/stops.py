"""Stop strings: an answer ends with the token that completes one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[list[int]], str]
"""Token ids to text."""
_NO_CHARACTER = "\ufffd"
"""What decoders write for bytes that are no character: for a part of one, 3 at most."""


class StopStrings:
    """Those of one answer, which is told token by token; to look for any needs `decode`."""

    def __init__(self, stop: Sequence[str], decode: Decode | None) -> None:
        self._stop = stop
        self._decode = decode
        # A token with text is at least one byte, so a stop string that ends with the newest began within this window.
        self._window = max((len(each.encode()) for each in stop), default=0) + 8
        self._ids: list[int] = []
        """The last ones that are text."""

    def completed_by(self, token: int) -> bool:
        """True where `token`, the next one of the answer, completes a stop string."""
        # Special tokens are no text. One alone may lose its space, or be a part of a character.
        if not self._stop or self._decode is None or not self._decode([token, token]):
            return False
        self._ids = [*self._ids[-self._window - 2 :], token]
        text = self._last_text(self._decode)
        return any(each in text for each in self._stop)

    def _last_text(self, decode: Decode) -> str:
        """That of the window, or of up to 3 tokens more where it begins within a character: decoders with tokens for
        single bytes make nothing of all that follow it.
        """
        text = decode(self._ids[-self._window :])
        for more in (1, 2, 3):
            if not text.startswith(4 * _NO_CHARACTER):
                break
            text = decode(self._ids[-self._window - more :])
        return text
