from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import anyio
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actors import encoding
from actors.attention import attend_apart
from actors.encoding import MediaEncoder, Recent, bounded, digest_of, on_host, run_through
from omniflow.actor import Actor
from omniflow.errors import InvalidInputError


def test_the_results_used_last_are_kept_within_their_bytes() -> None:
    recent: Recent[str] = Recent(10, len)
    recent.keep(b"a", "four")
    recent.keep(b"b", "three")
    assert recent.get(b"a") == "four"
    recent.keep(b"c", "1")
    assert recent.get(b"b") == "three"
    recent.keep(b"d", "22")  # 12 bytes: what was used longest ago goes
    assert [recent.get(each) for each in (b"a", b"b", b"c", b"d")] == [None, "three", "1", "22"]
    recent.keep(b"b", "six666")
    assert [recent.get(each) for each in (b"b", b"c", b"d")] == ["six666", "1", "22"]
    recent.keep(b"e", "more than ten")
    assert [recent.get(each) for each in (b"b", b"c", b"d", b"e")] == [None] * 4
    recent.keep(b"f", "tenletters")
    assert recent.get(b"f") == "tenletters"


def test_a_digest_is_of_the_data_and_of_what_is_made_of_it() -> None:
    assert digest_of(b"x") == digest_of(memoryview(b"x"))
    assert len({digest_of(b"x"), digest_of(b"y"), digest_of(b"x", b"clip"), digest_of(b"x", b"image")}) == 4


def test_what_is_kept_of_a_pass_is_memory_of_its_own() -> None:
    """A view would keep all of the pass, and `Recent` counts what is its own."""
    whole = torch.arange(12.0).reshape(6, 2)
    short, long = (on_host(each) for each in torch.split(whole, [1, 5]))
    assert not np.shares_memory(short, whole.numpy()) and not np.shares_memory(long, whole.numpy())
    assert np.array_equal(np.concatenate([short, long]), whole.numpy())
    assert np.shares_memory(on_host(whole), whole.numpy())
    assert not any(each.flags.writeable for each in (short, long, on_host(whole)))


def test_batches_are_bounded_and_in_order() -> None:
    assert list(bounded({"a": 4, "b": 6, "c": 1, "d": 30, "e": 0, "f": 10}, 10)) == [
        ["a", "b"],
        ["c"],
        ["d"],
        ["e", "f"],
    ]
    assert list(bounded({}, 10)) == []


@pytest.mark.anyio
@pytest.mark.parametrize(("step_s", "others_wait"), [(-1.0, False), (100.0, True)])
async def test_others_go_between_the_layers_of_a_long_pass(
    step_s: float, others_wait: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding, "STEP_S", step_s)
    actor, order = Actor(), list[str]()

    def layers() -> Iterator[str | None]:
        for number in range(3):
            order.append(f"layer {number}")
            yield None
        yield "done"

    async def passing() -> None:
        assert await run_through(actor.offload, layers()) == "done"

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(passing)
        tasks.start_soon(actor.offload, order.append, "other")
    assert (order.index("other") > order.index("layer 2")) == others_wait
    assert [each for each in order if each != "other"] == ["layer 0", "layer 1", "layer 2"]


@pytest.mark.anyio
async def test_a_pass_without_a_result_is_an_error() -> None:
    nothing: list[str | None] = [None]
    with pytest.raises(RuntimeError, match="without a result"):
        await run_through(Actor().offload, iter(nothing))


@pytest.mark.parametrize("lengths", [[5], [3, 3, 3], [2, 7, 7, 1, 4, 2]])
def test_each_sequence_attends_to_itself(lengths: list[int]) -> None:
    """As with a mask over all of them."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(sum(lengths), 2, 8, generator=generator) for _ in range(3))
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    mask = owner[:, None] == owner
    wanted = F.scaled_dot_product_attention(*(each.transpose(0, 1) for each in (query, key, value)), mask)
    made = attend_apart(query, key, value, lengths)
    assert made.shape == query.shape
    assert torch.allclose(made, wanted.transpose(0, 1), atol=1e-6)


class Lengths(MediaEncoder[str, list[str], int]):
    """Makes of words how long they are, letter by letter; what it did is in `did`."""

    most = 8

    def __init__(self, folder: Path, decoders: int = 2, cache_bytes: int = 10**6) -> None:
        super().__init__(str(folder), "cpu", "auto", 1, decoders, 0)
        self._recent = Recent(cache_bytes, self.num_bytes)
        self.did: list[list[str]] = []

    def digest(self, item: str) -> bytes:
        return digest_of(item.encode())

    async def ready(self, item: str) -> list[str]:
        if not item:
            raise InvalidInputError("a word is empty", param="messages")
        return await self.decode(list, item)

    def size(self, ready: list[str]) -> int:
        return len(ready)

    def layers(self, batch: Sequence[list[str]]) -> Iterator[list[int] | None]:
        self.did.append(["".join(word) for word in batch])
        yield None
        yield [len(word) for word in batch]

    def num_bytes(self, made: int) -> int:
        return made


@pytest.mark.anyio
async def test_media_of_several_requests_pass_together_in_order_within_a_bound(tmp_path: Path) -> None:
    encoder = Lengths(tmp_path)
    requests = [["one", "three"], ["seventeen", "one"], ["a", "bc", "def"], []]
    assert await encoder.encoded(requests) == [[3, 5], [9, 3], [1, 2, 3], []]
    assert encoder.did == [["one", "three"], ["seventeen"], ["a", "bc", "def"]], "the largest goes alone"
    assert await encoder.encoded([["bc", "new", "one"]]) == [[2, 3, 3]]
    assert encoder.did[3:] == [["new"]], "what is kept is not made again"
    assert encoder.busy_s() == 0


@pytest.mark.anyio
@given(st.lists(st.lists(st.text("abc", min_size=1, max_size=9), max_size=5), max_size=4), st.integers(1, 4))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_what_is_made_is_each_requests_own(requests: list[list[str]], decoders: int) -> None:
    encoder = Lengths(Path(__file__).parent, decoders, cache_bytes=7)
    for _ in range(2):
        assert await encoder.encoded(requests) == [[len(word) for word in words] for words in requests]
    assert all(sum(map(len, words)) <= encoder.most or len(words) == 1 for words in encoder.did)


@pytest.mark.anyio
async def test_what_passed_before_a_bad_item_is_kept(tmp_path: Path) -> None:
    encoder = Lengths(tmp_path)
    with pytest.raises(InvalidInputError, match="a word is empty"):
        await encoder.encoded([["seventeen", "one"], ["", "two"]])
    assert encoder.did == [["seventeen"]]
    assert await encoder.encoded([["one", "seventeen"]]) == [[3, 9]]
    assert encoder.did == [["seventeen"], ["one"]]
