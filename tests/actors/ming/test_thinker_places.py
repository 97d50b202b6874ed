from __future__ import annotations

import pytest
import torch

from actors.ming.thinker_places import Grid, places


def test_a_text_counts_up_on_all_axes() -> None:
    assert torch.equal(places([3, 4]), torch.arange(7).expand(3, -1))
    assert places([]).shape == (3, 0)


def test_an_image_stands_at_one_time_and_the_text_goes_on_after_it() -> None:
    time, height, width = places([2, Grid(1, 2, 4), 0, 2]).tolist()
    assert time == [0, 1, 2, 2, 2, 2, 2, 2, 2, 2, 6, 7]
    assert height == [0, 1, 2, 2, 2, 2, 3, 3, 3, 3, 6, 7]
    assert width == [0, 1, 2, 3, 4, 5, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(("step", "times"), [(1.0, [0, 1, 2]), (3.0, [0, 3, 6]), (0.5, [0, 0, 1])])
def test_the_frames_of_a_video_are_apart_in_time(step: float, times: list[int]) -> None:
    got = places([Grid(3, 1, 2, frame_step=step), 1])
    assert got[0].tolist() == [*(time for time in times for _ in range(2)), max(*times, 1) + 1]
    assert got[2].tolist()[:6] == [0, 1] * 3


def test_any_prompt_is_as_plain_loops_have_it() -> None:
    parts = [1, Grid(2, 3, 2, 2.0), Grid(1, 1, 5), 4, Grid(1, 2, 2)]
    wanted: list[list[int]] = []
    for part in parts:
        start = max((max(each) for each in wanted), default=-1) + 1
        if isinstance(part, int):
            wanted += [[start + each] * 3 for each in range(part)]
            continue
        wanted += [
            [start + int(frame * part.frame_step), start + row, start + column]
            for frame in range(part.frames)
            for row in range(part.rows)
            for column in range(part.columns)
        ]
    assert places(parts).T.tolist() == wanted
