from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from omniflow.engine.base import EngineRequest, Sampling
from omniflow.engine.content import content_key
from omniflow.engine.places import Places

IDS = list(range(8))


def key(request: EngineRequest) -> str | None:
    return content_key(request, Places(request.places, request.kinds))


def with_rows(values: list[list[float]], positions: tuple[int, ...]) -> EngineRequest:
    rows = torch.tensor(values, dtype=torch.bfloat16).reshape(len(positions), 3)
    return EngineRequest(id="x", ids=IDS, sampling=Sampling(), embeds=rows, positions=positions)


small = st.integers(-2, 2).map(float)
rows = st.integers(1, 3).flatmap(
    lambda count: st.builds(
        with_rows,
        st.lists(st.lists(small, min_size=3, max_size=3), min_size=count, max_size=count),
        st.lists(st.sampled_from(IDS), min_size=count, max_size=count, unique=True).map(tuple),
    )
)


@given(rows, rows)
def test_embeddings_have_the_same_key_only_where_they_and_their_places_are_the_same(
    one: EngineRequest, other: EngineRequest
) -> None:
    assert one.embeds is not None and other.embeds is not None
    same = one.positions == other.positions and torch.equal(one.embeds, other.embeds)
    assert (key(one) == key(other)) == same


PLAIN = EngineRequest(id="x", ids=IDS, sampling=Sampling())
PLACED = msgspec.structs.replace(
    PLAIN, places=torch.arange(8).expand(3, -1) // 2, kinds=torch.tensor([0, 0, 1, 1, 1, 2, 0, 0], dtype=torch.uint8)
)


def test_a_plain_text_has_none() -> None:
    assert key(PLAIN) is None
    plain_places = torch.arange(8).expand(3, -1)
    assert key(msgspec.structs.replace(PLAIN, places=plain_places, kinds=torch.zeros(8, dtype=torch.uint8))) is None


def changed(tensor: torch.Tensor, place: tuple[int, ...]) -> torch.Tensor:
    tensor = tensor.clone()
    tensor[place] += 1
    return tensor


@pytest.mark.parametrize(
    "change",
    [
        lambda request: {"places": changed(request.places, (2, 7))},
        lambda request: {"places": None},
        lambda request: {"kinds": changed(request.kinds, (4,))},
        lambda request: {"kinds": None},
        lambda request: {"embeds": torch.zeros(1, 4), "positions": (0,)},
    ],
)
def test_what_the_model_reads_otherwise_has_another_key(change: Callable[[EngineRequest], dict[str, object]]) -> None:
    other = msgspec.structs.replace(PLACED, **change(PLACED))
    assert key(PLACED) == key(msgspec.structs.replace(PLACED, id="y", sampling=Sampling(max_tokens=3)))
    assert key(other) != key(PLACED)


def test_one_element_has_a_key_whatever_its_stride() -> None:
    row = torch.arange(12.0).reshape(3, 4)[1:2, 2:3].T
    assert row.stride() == (1, 4) and row.is_contiguous()
    same = torch.full((1, 1), 6.0)
    keys = {key(msgspec.structs.replace(PLAIN, embeds=each, positions=(0,))) for each in (row, same)}
    assert len(keys) == 1 and keys != {None}


def test_numbers_of_other_types_and_shapes_have_other_keys() -> None:
    zeros = [torch.zeros(1, 6), torch.zeros(1, 12, dtype=torch.bfloat16), torch.zeros(1, 12, dtype=torch.float16)]
    keys = {key(msgspec.structs.replace(PLAIN, embeds=each, positions=(0,))) for each in zeros}
    assert len(keys) == 3
