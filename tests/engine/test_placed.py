"""Models for SGLang that know places: what they are told before a batch, and find in it. No SGLang is needed."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from omniflow.engine.places import Places
from omniflow.engine.sglang_models.placed import PlacedModel

IMAGE = torch.tensor([[0, 1, 1, 1, 1, 2], [0, 0, 0, 1, 1, 2], [0, 0, 1, 0, 1, 2]])
KINDS = torch.tensor([0, 1, 1, 1, 1, 0], dtype=torch.uint8)
TEXT = Places(None, None)


def batch(decodes: bool, *rows: int) -> SimpleNamespace:
    return SimpleNamespace(forward_mode=SimpleNamespace(is_decode=lambda: decodes), req_pool_indices=torch.tensor(rows))


def test_a_batch_that_reads_finds_what_it_was_told() -> None:
    model = PlacedModel(num_rows=4)
    told = model.read([(1, Places(IMAGE, KINDS), 3, 6), (3, TEXT, 10, 12), (2, Places(None, KINDS), 0, 2)])
    places, kinds = model.located(torch.arange(7), batch(False, 1, 3, 2))
    assert kinds is not None
    assert places.tolist() == [[1, 1, 2, 10, 11, 0, 1], [1, 1, 2, 10, 11, 0, 1], [0, 1, 2, 10, 11, 0, 1]]
    assert kinds.tolist() == [1, 1, 0, 0, 0, 0, 1]
    assert [tensor.data_ptr() for tensor in told] == [places.data_ptr(), kinds.data_ptr()]


def test_texts_are_where_sglang_numbers_them() -> None:
    model = PlacedModel(num_rows=4)
    model.read([(1, Places(IMAGE, KINDS), 0, 6)])
    assert model.read([(2, TEXT, 5, 7), (3, Places(torch.arange(2).expand(3, -1), None), 0, 2)]) == []
    places, kinds = model.located(torch.tensor([5, 6, 0, 1]), batch(False, 2, 3))
    assert places.tolist() == [[5, 6, 0, 1]] * 3
    assert kinds is None


def test_an_answer_keeps_its_shift_while_others_come_to_other_rows() -> None:
    model = PlacedModel(num_rows=4)
    model.read([(1, Places(IMAGE, KINDS), 0, 6)])
    model.read([(2, TEXT, 0, 3)])
    places, kinds = model.located(torch.tensor([3, 6]), batch(True, 2, 1))
    assert places.tolist() == [[3, 3]] * 3
    assert kinds is None
    model.read([(1, TEXT, 0, 6)])  # the row has another request now
    assert model.located(torch.tensor([6]), batch(True, 1))[0].tolist() == [[6]] * 3


def test_what_was_never_told_is_where_it_is_numbered() -> None:
    places, kinds = PlacedModel(num_rows=2).located(torch.arange(2), batch(False, 0))
    assert places.tolist() == [[0, 1]] * 3
    assert kinds is None
