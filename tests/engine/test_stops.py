from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from omniflow.engine.stops import has_stopped


def decode(ids: list[int]) -> str:
    return bytes(ids).decode(errors="replace")


@given(
    st.text("ab\N{EURO SIGN}", max_size=30), st.lists(st.text("ab\N{EURO SIGN}", min_size=1, max_size=3), max_size=3)
)
def test_the_token_that_completes_a_stop_string_stops(text: str, stop: list[str]) -> None:
    """Tokens are bytes: a letter may take several."""
    ids = list(text.encode())
    stopped = [has_stopped(ids[:end], stop, decode) for end in range(1, len(ids) + 1)]
    whole = [any(each in decode(ids[:end]) for each in stop) for end in range(1, len(ids) + 1)]
    assert (True in stopped) == (True in whole)
    if True in whole:
        assert stopped.index(True) == whole.index(True)


def test_without_stop_strings_nothing_is_decoded() -> None:
    def never(ids: list[int]) -> str:
        raise AssertionError(ids)

    assert not has_stopped([1, 2], (), never)
    assert not has_stopped([1, 2], ("x",), None)
