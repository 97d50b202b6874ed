"""Stop strings: an answer ends with the token that completes one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[list[int]], str]
"""Token ids to text."""


def has_stopped(generated: list[int], stop: Sequence[str], decode: Decode | None) -> bool:
    """True where the newest token of `generated` completes one of `stop`, which needs `decode`."""
    if not stop or decode is None:
        return False
    # A token is at least one byte, so a stop string that ends with the newest token began within this window.
    window = max(len(each.encode()) for each in stop) + 8
    text = decode(generated[-window:])
    return any(each in text for each in stop)
