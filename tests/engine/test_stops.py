from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from actors.smollm2 import SMOLLM2_135M_INSTRUCT
from actors.tokenizer import load_tokenizer
from omniflow.engine.stops import StopStrings
from tests.actors.test_detokenize import SAMPLES, byte_fallback, byte_level

NO_TEXT = 1_000_000
"""A token that models have and tokenizers lack; like special tokens it is no text."""
TEXTS = st.lists(st.sampled_from([*SAMPLES, "a b", "ab ", "\u20ac" * 9, "\U0001f600" * 7]), max_size=4).map("".join)


@cache
def smollm2() -> Tokenizer:
    return load_tokenizer(SMOLLM2_135M_INSTRUCT.fetch())


def fallback_ids(text: str) -> list[int]:
    tokenizer = byte_fallback()
    ids: list[int] = []
    for letter in text.replace(" ", "\u2581"):
        token = tokenizer.token_to_id(letter)
        ids += [token] if token is not None else [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in letter.encode()]
    return ids


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    if tokenizer is byte_fallback():
        return fallback_ids(text)
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("load", [byte_level, byte_fallback, smollm2])
@settings(max_examples=15)
@given(data=st.data())
def test_the_token_that_completes_a_stop_string_stops(load: Callable[[], Tokenizer], data: st.DataObject) -> None:
    """Tokens are words, parts of a character, or no text at all; a stop string begins and ends anywhere in them."""
    tokenizer = load()
    text = data.draw(TEXTS)
    special = [NO_TEXT, *(id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special)]
    silent = st.lists(st.sampled_from(special), max_size=data.draw(st.sampled_from([0, 1, 40])))
    ids = [each for id in ids_of(tokenizer, text) for each in (*data.draw(silent), id)]
    cuts = [data.draw(st.tuples(st.integers(0, len(text)), st.integers(1, 6))) for _ in range(3)]
    stop = [each for at, size in cuts if (each := text[at : at + size]) and "\ufffd" not in each]

    stops = StopStrings(stop, tokenizer.decode)
    for end, token in enumerate(ids, 1):
        whole = tokenizer.decode(ids[:end])
        is_there = any(each in whole for each in stop)
        assert stops.completed_by(token) == is_there
        if is_there:
            break


def test_neither_tokens_without_text_nor_single_bytes_hide_a_stop_string() -> None:
    stops = StopStrings(["END"], byte_fallback().decode)
    ids = [each for letter in "a aEND" for each in (*[NO_TEXT] * 20, *fallback_ids(letter))]
    assert [stops.completed_by(id) for id in ids].index(True) == len(ids) - 1
    stops = StopStrings(["\u754c"], byte_fallback().decode)
    ids = fallback_ids("\u4f60\u597d" * 9 + "\u754c")
    assert [stops.completed_by(id) for id in ids].index(True) == len(ids) - 1


def test_a_space_that_is_a_token_is_text() -> None:
    """Alone it is decoded to nothing, as what no answer begins with."""
    stops = StopStrings(["a b"], byte_fallback().decode)
    assert [stops.completed_by(id) for id in fallback_ids("a b")] == [False, False, True]


def test_a_long_answer_is_not_decoded_again_and_again() -> None:
    decoded = []

    def decode(ids: list[int]) -> str:
        decoded.append(len(ids))
        return byte_fallback().decode(ids)

    stops = StopStrings(["never", "END."], decode)
    assert not any(map(stops.completed_by, fallback_ids("a b" * 300 + "\U0001f600" * 300)))
    assert max(decoded) == len("never") + 8 + 3


def test_without_stop_strings_nothing_is_decoded() -> None:
    def never(ids: list[int]) -> str:
        raise AssertionError(ids)

    assert not StopStrings((), never).completed_by(1)
    assert not StopStrings(("x",), None).completed_by(1)
