from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from actors.detokenize import Detokenize, LogprobsOfText, StopFilter, TextOfTokens, TokenNames
from omniflow.errors import WeightsError
from omniflow.media import TextDelta, TextLogprob, TokenLogprob, Tokens, Tool, ToolCallDelta
from tests.doubles import ListEmit, ListStream, context

pytestmark = pytest.mark.anyio
SAMPLES = [
    "Hello, world! ",
    "Grüße",
    "你好，世界。",
    "👩‍👩‍👧‍👦 🇫🇷",
    "नमस्ते",
    "สวัสดี",
    "مرحبا",
    "e\u0301",
    "\u200b",
    "\ufffd",
]
TEXTS = st.lists(st.sampled_from(SAMPLES) | st.text(max_size=5)).map("".join)


@cache
def byte_level() -> Tokenizer:
    """One token a byte, a few merged ones, and a special token: as GPT-2, Llama 3 and SmolLM2 do."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("H", "e"), ("l", "l"), ("He", "ll"), ("Ġ", "w"), ("ð", "Ł"), ("ä", "½")]
    vocab = {token: i for i, token in enumerate([*letters, *("".join(pair) for pair in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return tokenizer


@cache
def byte_fallback() -> Tokenizer:
    """Words with a leading mark, and a token a byte for what they do not cover: as SentencePiece models do."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "▁b", "a", "b", "é"]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def chunks(items: list[int], sizes: list[int]) -> list[list[int]]:
    """`items` cut into pieces of `sizes`, taken in turns."""
    cut, at = [], 0
    while at < len(items):
        size = sizes[len(cut) % len(sizes)]
        cut.append(items[at : at + size])
        at += size
    return cut


def pieces(tokenizer: Tokenizer, ids: list[int], sizes: list[int]) -> list[str]:
    text = TextOfTokens(tokenizer)
    return [*(text.push(part) for part in chunks(ids, sizes)), text.end()]


SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=5)


@given(TEXTS, SIZES)
def test_joined_deltas_are_the_text_and_no_delta_splits_a_character(text: str, sizes: list[int]) -> None:
    ids = byte_level().encode(text).ids
    got = pieces(byte_level(), ids, sizes)
    assert "".join(got) == byte_level().decode(ids) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in got)


@given(st.lists(st.integers(0, byte_level().get_vocab_size() - 1)), SIZES)
def test_any_tokens_even_broken_ones_give_the_decoding_of_all(ids: list[int], sizes: list[int]) -> None:
    assert "".join(pieces(byte_level(), ids, sizes)) == byte_level().decode(ids)


@given(st.lists(st.sampled_from(["▁a", "▁b", "a", "b", "▁", "é", "你", "👍"])), SIZES)
def test_sentencepiece_keeps_inner_spaces_and_drops_the_first(words: list[str], sizes: list[int]) -> None:
    ids = []
    for word in words:
        token = byte_fallback().token_to_id(word)
        ids += [token] if token is not None else [byte_fallback().token_to_id(f"<0x{b:02X}>") for b in word.encode()]
    got = "".join(pieces(byte_fallback(), ids, sizes))
    assert got == byte_fallback().decode(ids) == "".join(words).replace("▁", " ").removeprefix(" ")


def test_text_comes_as_soon_as_its_character_is_whole() -> None:
    text = TextOfTokens(byte_level())
    assert [text.push([id]) for id in byte_level().encode("a你b").ids] == ["a", "", "你", "b"]


def test_only_the_newest_tokens_are_decoded_again() -> None:
    text = TextOfTokens(byte_level())
    for id in byte_level().encode("Hello world. " * 50).ids:
        text.push([id])
    assert len(text._ids) <= 2


@given(
    st.text("abc", max_size=30),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(1, 4), min_size=1, max_size=5),
)
def test_stop_strings_never_leak(text: str, stops: list[str], sizes: list[int]) -> None:
    """Whatever the chunks are: all before the first place where a stop string is complete, up to where it begins."""
    filter = StopFilter(stops)
    got = []
    for part in chunks(list(text), sizes):
        got.append(filter.push("".join(part)))
        if filter.stopped:
            break
    sent = "".join(got) + filter.end()
    assert not any(stop in sent for stop in stops)
    assert text.startswith(sent)
    if filter.stopped:
        assert any(text.startswith(stop, len(sent)) for stop in stops)
    else:
        assert sent == text
        assert not any(stop in text for stop in stops)


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    filter = StopFilter(["END"])
    assert [filter.push(part) for part in ["a", "bE", "N", "x", "EEN", "D", "ignored"]][:6] == [
        "a",
        "b",
        "",
        "ENx",
        "E",
        "",
    ]
    assert filter.stopped


async def detokenize(text: str, **options: object) -> tuple[list[str], ListStream[Tokens]]:
    actor = Detokenize()
    actor._tokenizer, actor._names = byte_level(), TokenNames(byte_level())
    stream = ListStream([Tokens((id,)) for id in byte_level().encode(text).ids])
    emit = ListEmit()
    await actor.run(stream, emit, ListEmit(), context(**options))
    return [delta.text for delta in emit.items], stream


async def test_the_actor_sends_text_without_empty_deltas() -> None:
    texts, _ = await detokenize("Hello 你好 👍")
    assert "".join(texts) == "Hello 你好 👍"
    assert all(texts)


async def test_the_actor_ends_at_a_stop_string_and_reads_no_further() -> None:
    texts, stream = await detokenize("one two three four", stop=("three", "zero"))
    assert "".join(texts) == "one two "
    assert len(stream.left) == len(" four")


async def test_a_beginning_of_a_stop_string_comes_at_the_end() -> None:
    texts, _ = await detokenize("one two thr", stop=("three",))
    assert "".join(texts) == "one two thr"


async def test_the_real_tokenizer() -> None:
    actor = Detokenize(model="smollm2-135m-instruct")
    actor.weights()[0].fetch()
    await actor.setup()
    text = "Dr. Smith paid 3.14 €: 你好，世界！ 👩‍🚀"
    emit = ListEmit()
    ids = [1, *actor._tokenizer.encode(text).ids, 2]
    await actor.run(ListStream([Tokens((id,)) for id in ids]), emit, ListEmit(), context())
    assert "".join(delta.text for delta in emit.items) == text


@given(TEXTS, SIZES)
def test_bytes_of_tokens_are_those_of_the_text(text: str, sizes: list[int]) -> None:
    names, ids = TokenNames(byte_level()), byte_level().encode(text).ids
    assert b"".join(map(names.bytes_of, ids)) == text.encode()
    decoded, logprobs, sent, given = TextOfTokens(byte_level()), LogprobsOfText(names), "", b""
    for part in chunks(ids, sizes):
        logprobs.push(TokenLogprob(id, -0.5) for id in part)
        delta = decoded.push(part)
        sent += delta
        given += b"".join(named.data for named in logprobs.take(delta))
        assert "\ufffd" in text or given.startswith(sent.encode())
    assert given + b"".join(named.data for named in logprobs.rest()) == text.encode()


def test_names_of_tokens() -> None:
    names = TokenNames(byte_fallback())
    ids = [byte_fallback().token_to_id(token) for token in ("▁a", "<0xE4>", "é")]
    assert [names.bytes_of(id) for id in [*ids, 99999]] == [b" a", b"\xe4", "é".encode(), b""]
    named = names.named(TokenLogprob(ids[1], -1.5, ((ids[0], -0.5), (ids[1], -1.5))))
    assert named == TextLogprob("\ufffd", b"\xe4", -1.5, ((" a", b" a", -0.5), ("\ufffd", b"\xe4", -1.5)))


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


async def answered(text: str, **options: object) -> tuple[list[TextDelta], list[ToolCallDelta]]:
    """What the actor gives for an answer with log-probabilities; the last token is a special one."""
    actor = Detokenize()
    actor._tokenizer, actor._names = byte_level(), TokenNames(byte_level())
    ids = [*byte_level().encode(text).ids, byte_level().token_to_id("<|end|>")]
    texts, calls = ListEmit(), ListEmit()
    items = [Tokens((id,), (TokenLogprob(id, -1.0),)) for id in ids]
    await actor.run(ListStream(items), texts, calls, context(**options))
    return texts.items, calls.items


async def test_calls_leave_by_their_own_port() -> None:
    texts, calls = await answered("Well. " + CALL, tools=(Tool("f"),))
    assert "".join(delta.text for delta in texts) == "Well."
    assert calls[0].name == "f" and "".join(delta.arguments for delta in calls) == '{"a": 1}'


async def test_without_tools_markup_is_text() -> None:
    texts, calls = await answered(CALL)
    assert ("".join(delta.text for delta in texts), calls) == (CALL, [])


@pytest.mark.parametrize("options", [{}, {"tools": (Tool("f"),)}])
async def test_logprobs_come_with_their_text(options: dict[str, object]) -> None:
    for text, shown in (("Hello 你!", "Hello 你!"), ("你 STOP and", "你 ")):
        deltas, _ = await answered(text, stop=("STOP",), **options)
        joined = b"".join(named.data for delta in deltas for named in delta.logprobs)
        assert joined.decode().strip() == "".join(delta.text for delta in deltas).strip() == shown.strip()


async def test_calls_have_no_logprobs() -> None:
    texts, _ = await answered("Hi" + CALL + "Ho", tools=(Tool("f"),))
    assert b"".join(named.data for delta in texts for named in delta.logprobs) == b"HiHo"


async def test_a_folder_without_a_tokenizer_is_named(tmp_path: object) -> None:
    actor = Detokenize(model=str(tmp_path))
    with pytest.raises(WeightsError, match=r"has no tokenizer\.json"):
        await actor.setup()
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(WeightsError, match="is not a tokenizer"):
        await actor.setup()


@pytest.mark.parametrize("sizes", [[1], [2], [9]])
def test_of_two_stop_strings_the_one_that_is_whole_first_stops(sizes: list[int]) -> None:
    stops, text, given, at, turn = StopFilter(["c", "bcc"]), "abccd", "", 0, 0
    while at < len(text) and not stops.stopped:
        given += stops.push(text[at : at + sizes[turn % len(sizes)]])
        at, turn = at + sizes[turn % len(sizes)], turn + 1
    assert (given, stops.stopped) == ("ab", True)
