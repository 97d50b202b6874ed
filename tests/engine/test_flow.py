from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from omniflow.engine.flow import Guidance, flow_noise, follow, guide, time_grid


def test_a_grid_runs_from_0_to_1_and_sways_to_the_front() -> None:
    plain = time_grid(10, pruned=False, sway=None)
    assert plain == pytest.approx([n / 10 for n in range(11)])
    assert time_grid(10, sway=None) == pytest.approx([n / 32 for n in (0, 2, 4, 6, 8, 12, 16, 20, 24, 28, 32)])
    assert time_grid(9, sway=None) == pytest.approx([n / 9 for n in range(10)])
    swayed = time_grid(10)
    assert swayed == pytest.approx([1 - math.cos(math.pi / 2 * t) for t in time_grid(10, sway=None)], abs=1e-7)
    assert (swayed[0], swayed[-1]) == (0, 1)
    assert list(swayed) == sorted(set(swayed))


@pytest.mark.parametrize(("rule", "scales", "wanted"), [("beyond", (0, 2), (3, 7)), ("between", (1, 3), (3, 7))])
def test_guidance_by_either_rule(rule: Guidance, scales: tuple[int, int], wanted: tuple[int, int]) -> None:
    positive, negative = torch.full((2, 4, 3), 3.0), torch.full((2, 4, 3), 1.0)
    guided = guide(rule, positive, negative, torch.tensor(scales))
    assert torch.equal(guided, torch.tensor(wanted, dtype=torch.float32)[:, None, None].expand(2, 4, 3))


def test_a_flow_is_followed_to_its_end() -> None:
    """dx/dt = x is e times as much; Euler's error halves with the step."""
    noise = torch.ones(1, 1, 2)
    errors = []
    for steps in (64, 128):
        grid = time_grid(steps, pruned=False, sway=None)
        end = follow(lambda x, time: x, noise.expand(1, steps, 2), grid, torch.zeros(1))
        errors.append(math.e - float(end[0, 0]))
    assert 0 < errors[1] < 0.011
    assert errors[0] / errors[1] == pytest.approx(2, rel=0.02)


def test_jitter_is_each_rows_own_and_follows_all_steps_but_the_last() -> None:
    times = (0.0, 0.25, 0.5, 1.0)
    noise = torch.from_numpy(flow_noise(3, 0, 2, (3, 5)))
    end = follow(lambda x, time: torch.zeros_like(x), noise, times, torch.tensor([0.0, 2.0]))
    assert torch.equal(end[0], noise[0, 0])
    assert torch.allclose(end[1], noise[1, 0] + 2 * 0.5 * (noise[1, 1] + noise[1, 2]))


def test_noise_is_normal_and_each_step_can_be_made_alone() -> None:
    noise = flow_noise(7, 0, 40, (10, 4, 16))
    assert noise.dtype == np.float32
    assert np.array_equal(flow_noise(7, 13, 2, (10, 4, 16)), noise[13:15])
    assert not np.array_equal(flow_noise(8, 0, 1, (10, 4, 16)), noise[:1])
    flat = noise.ravel().astype(np.float64)  # 25600: a mean is 0.006 off in one case of three
    assert abs(flat.mean()) < 0.03
    assert flat.std() == pytest.approx(1, abs=0.02)
    assert (flat**4).mean() == pytest.approx(3, abs=0.3)
    assert abs((flat[1:] * flat[:-1]).mean()) < 0.03
