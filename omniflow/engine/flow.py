"""Flow matching: a velocity that a network tells, followed from noise to a frame of continuous latents.

    x(0) = noise, then for each span of the time grid: x += dt * velocity(x, t), and some more noise

All noise is an input (`flow_noise`), so the same seed gives the same latents alone and in any batch. As in `heads.py`,
shapes are static and nothing branches on the value of a tensor, so that a head can be captured in a CUDA graph.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import nn

from omniflow.engine.heads import frame_noise

Velocity = Callable[[torch.Tensor, float], torch.Tensor]
"""(x [batch, ...], time in 0 to 1) -> the direction of x at that time, of the same shape."""

Guidance = Literal["beyond", "between"]
"""How a prediction with its condition, p, and one without, n, become one, by a scale w.

beyond: p + (p - n) * w. 0 is no guidance. Ming, and LLaDA as n + (w + 1) * (p - n).
between: n + (p - n) * w. 1 is no guidance. Voxtral, as w * p + (1 - w) * n.
"""

_PRUNED = {
    5: (0, 2, 4, 8, 16, 32),
    6: (0, 2, 4, 6, 8, 16, 32),
    7: (0, 2, 4, 6, 8, 16, 24, 32),
    10: (0, 2, 4, 6, 8, 12, 16, 20, 24, 28, 32),
    12: (0, 2, 4, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32),
    16: (0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32),
}
"""By number of steps, of 32 even ones: those kept by the empirical pruning of F5-TTS (arXiv:2505.19931)."""


def time_grid(num_steps: int, *, pruned: bool = True, sway: float | None = -1.0) -> tuple[float, ...]:
    """The num_steps + 1 times from 0 to 1 between which a flow is followed, rounded to float32.

    `pruned` takes the known grid of that many steps where there is one, else even steps; `sway` below 0 then moves
    times to the front, where the curve bends most: t + sway * (cos(pi / 2 * t) - 1 + t).
    """
    times = torch.linspace(0, 1, num_steps + 1, device="cpu")  # whatever the default is where a model is built
    if pruned and num_steps in _PRUNED:
        times = torch.tensor(_PRUNED[num_steps], device="cpu") / 32
    if sway is not None:
        times = times + sway * (torch.cos(torch.pi / 2 * times) - 1 + times)
    return tuple(times.tolist())


def guide(rule: Guidance, positive: torch.Tensor, negative: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """`positive` and `negative` [batch, ...] as one, by `scale` [batch]; see `Guidance`."""
    scale = scale.reshape(-1, *[1] * (positive.ndim - 1))
    return (positive if rule == "beyond" else negative) + (positive - negative) * scale


def follow(velocity: Velocity, noise: torch.Tensor, times: Sequence[float], jitter: torch.Tensor) -> torch.Tensor:
    """Where the flow ends, [batch, ...]: Euler's steps between `times`.

    `noise` [batch, num_steps, ...] is normal: the start, then what is added behind each step but the last, times
    `jitter` [batch] and the root of the step's length. Jitter 0 is the plain differential equation.
    """
    x = noise[:, 0]
    jitter = jitter.reshape(-1, *[1] * (x.ndim - 1))
    for step, (start, end) in enumerate(zip(times, times[1:], strict=False), 1):
        x = x + (end - start) * velocity(x, start)
        if step < noise.shape[1]:
            x = x + jitter * (end - start) ** 0.5 * noise[:, step]
    return x


def flow_noise(seed: int, first_step: int, num_steps: int, shape: Sequence[int]) -> np.ndarray:
    """The noise of steps [first_step, first_step + num_steps) of a request: normal float32 [num_steps, *shape].

    Counter-based as `frame_noise`, of which it is made (Box-Muller), so any step can be made without those before it.
    """
    size = int(np.prod(shape))
    uniform = frame_noise(seed, first_step, num_steps, 2 * size).astype(np.float64)
    normal = np.sqrt(-2 * np.log(uniform[:, :size])) * np.cos(2 * np.pi * uniform[:, size:])
    noise: np.ndarray = normal.astype(np.float32).reshape(num_steps, *shape)
    return noise


class FlowNet(nn.Module, ABC):
    """The network of a `FlowHead`."""

    patch: int
    """Latents per step of the backbone."""
    history: int
    """Latents before them that it sees."""
    latent_dim: int

    def remember(self, times: Sequence[float]) -> None:
        """Told once at which times it will be asked, in its final type and place: what is the same for all requests
        may be computed now.
        """

    @abstractmethod
    def condition(self, hidden: torch.Tensor, history: torch.Tensor) -> torch.Tensor:
        """What is the same for all times [batch, ...], of `hidden` [batch, hidden] and `history` [batch, history, dim].

        `hidden` of zeros is no condition.
        """

    @abstractmethod
    def forward(self, x: torch.Tensor, time: float, condition: torch.Tensor) -> torch.Tensor:
        """The velocity of `x` [batch, patch, latent_dim] at `time`."""


class FlowKnobs(NamedTuple):
    """How the latents of each row are drawn: float32 [batch], on the device of the head."""

    guidance: torch.Tensor
    """The scale of the head's rule."""
    jitter: torch.Tensor
    """See `follow`; Ming's is sigma * temperature ** 0.5."""


class FlowState(NamedTuple):
    """Of each row, from step to step."""

    step: torch.Tensor
    """int64 [batch]: steps so far."""
    history: torch.Tensor
    """float32 [batch, history, latent_dim]: the latents before the next; at the beginning zeros, or a prompt's."""


class FlowStep(NamedTuple):
    """What a step gave each row."""

    latents: torch.Tensor
    """float32 [batch, patch, latent_dim]; part of the speech where `stopped`, too."""
    feedback: torch.Tensor
    """[batch, hidden]: the next input of the backbone."""
    stopped: torch.Tensor
    """bool [batch]: these latents are the last."""
    state: FlowState


class FlowHead(nn.Module):
    """One step of a backbone to a patch of latents: `net` is followed over `times` with guidance by `rule`.

    `feedback` makes [batch, hidden] of [batch, patch, latent_dim]; `stop` makes two logits of [batch, hidden], and ends
    a row where the second is the larger, once it has taken `min_steps` before. These three may be of any type: latents
    are float32 between them.
    """

    def __init__(
        self,
        net: FlowNet,
        feedback: nn.Module,
        stop: nn.Module,
        *,
        times: Sequence[float],
        rule: Guidance,
        min_steps: int,
    ) -> None:
        super().__init__()
        self.net, self.feedback, self.stop = net, feedback, stop
        self._times, self._rule, self._min_steps = tuple(times), rule, min_steps

    @property
    def noise_shape(self) -> tuple[int, int, int]:
        """That of one row's noise for one step."""
        return len(self._times) - 1, self.net.patch, self.net.latent_dim

    def remember_times(self) -> None:
        """See `FlowNet.remember`."""
        self.net.remember(self._times[:-1])

    def begin(self, batch: int, device: torch.device) -> FlowState:
        """The state of `batch` rows before the first step, without a prompt's latents."""
        step = torch.zeros(batch, dtype=torch.int64, device=device)
        return FlowState(step, torch.zeros(batch, self.net.history, self.net.latent_dim, device=device))

    def forward(self, hidden: torch.Tensor, noise: torch.Tensor, knobs: FlowKnobs, state: FlowState) -> FlowStep:
        """One step of every row.

        `hidden` [batch, hidden] is the normed output of the backbone; `noise` float32 [batch, *noise_shape] is normal.
        """
        history = torch.cat([state.history, state.history]).to(hidden.dtype)
        condition = self.net.condition(torch.cat([hidden, torch.zeros_like(hidden)]), history)

        def velocity(x: torch.Tensor, time: float) -> torch.Tensor:
            positive, negative = self.net(torch.cat([x, x]).to(hidden.dtype), time, condition).chunk(2)
            return guide(self._rule, positive, negative, knobs.guidance)

        latents = follow(velocity, noise, self._times, knobs.jitter)
        logits = self.stop(hidden)
        stopped = (logits[:, 1] > logits[:, 0]) & (state.step >= self._min_steps)
        later = torch.cat([state.history, latents], dim=1)[:, latents.shape[1] :]
        return FlowStep(latents, self.feedback(latents.to(hidden.dtype)), stopped, FlowState(state.step + 1, later))
