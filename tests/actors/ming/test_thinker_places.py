from __future__ import annotations

import numpy as np
import pytest

from actors.ming.thinker_places import Grid, places


def by_definition(parts: list[int | Grid]) -> list[list[int]]:
    """In plain loops: (time, height, width) of each input."""
    found: list[list[int]] = []
    for part in parts:
        start = max((time for time, _, _ in found), default=-1) + 1
        if isinstance(part, int):
            found += [[start + each] * 3 for each in range(part)]
            continue
        middle = ((part.rows - 1) // 2, (part.columns - 1) // 2)
        for frame in range(part.frames):
            time = start + 2 * frame
            for row in range(part.rows):
                found += [[time, time + row - middle[0], time + each - middle[1]] for each in range(part.columns)]
    return found


def test_a_text_counts_up_on_all_axes() -> None:
    assert np.array_equal(places([3, 4]), np.broadcast_to(np.arange(7), (3, 7)))
    assert places([]).shape == (3, 0)


def test_an_image_stands_around_one_time_and_the_text_goes_on_after_it() -> None:
    time, height, width = places([2, Grid(1, 2, 4), 0, 2]).tolist()
    assert time == [0, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 4]
    assert height == [0, 1, 2, 2, 2, 2, 3, 3, 3, 3, 3, 4]
    assert width == [0, 1, 1, 2, 3, 4, 1, 2, 3, 4, 3, 4]


def test_the_frames_of_a_clip_are_two_apart() -> None:
    time, height, width = places([Grid(3, 1, 3), 1]).tolist()
    assert time == [0, 0, 0, 2, 2, 2, 4, 4, 4, 5]
    assert height == time
    assert width == [-1, 0, 1, 1, 2, 3, 3, 4, 5, 5]


@pytest.mark.parametrize(
    "parts",
    [
        [1, Grid(2, 3, 2), Grid(1, 1, 5), 4, Grid(1, 2, 2)],
        [Grid(1, 7, 8), 3, Grid(4, 2, 3), 0, Grid(1, 1, 1), 2],
    ],
)
def test_any_prompt_is_as_plain_loops_have_it(parts: list[int | Grid]) -> None:
    got = places(parts)
    assert got.dtype == np.int64
    assert got.T.tolist() == by_definition(parts)
