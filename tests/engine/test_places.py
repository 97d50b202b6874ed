from __future__ import annotations

import msgspec
import torch

from omniflow.engine.base import EngineRequest, Sampling
from omniflow.engine.places import PLAIN, Places, places_of

IMAGE = torch.tensor([[0, 1, 2, 2, 2, 2, 3], [0, 1, 1, 1, 2, 2, 3], [0, 1, 1, 3, 1, 3, 3]])


def test_an_answer_goes_on_after_the_last_time() -> None:
    places = Places(IMAGE, None)
    assert places.shift == -3
    assert places.places(5, 10).tolist() == [[2, 3, 4, 5, 6], [2, 3, 4, 5, 6], [3, 3, 4, 5, 6]]
    assert places.places(9, 10).tolist() == [[6]] * 3
    assert places.kinds(5, 8).tolist() == [0, 0, 0]


def test_inputs_count_up_where_nothing_is_said() -> None:
    places = Places(None, torch.tensor([0, 1, 1], dtype=torch.uint8))
    assert places.places(2, 5).tolist() == [[2, 3, 4]] * 3
    assert places.kinds(1, 5).tolist() == [1, 1, 0, 0]
    assert places.shift == 0


def test_what_a_text_has_by_itself_is_plain() -> None:
    count = torch.arange(4).expand(3, -1)
    assert Places(None, None).plain
    assert Places(count, torch.zeros(4, dtype=torch.uint8)).plain
    assert not Places(count + 1, None).plain
    assert not Places(IMAGE, None).plain
    assert not Places(None, torch.tensor([0, 2, 0], dtype=torch.uint8)).plain


def test_a_request_that_tells_places_or_kinds_has_them() -> None:
    asked = EngineRequest(id="a", ids=[1, 2, 3, 4, 5, 6, 7], sampling=Sampling())
    assert places_of(asked) is PLAIN
    assert places_of(msgspec.structs.replace(asked, places=IMAGE)).shift == -3
    assert not places_of(msgspec.structs.replace(asked, kinds=torch.ones(7, dtype=torch.uint8))).plain
