"""The engine of speech models that make continuous latents: a backbone, and a flow head that says its next input.

    prompt ids -> embedding -> backbone -> flow head -> latents, and the next input of the backbone

Latents that were there before, as those of a recording whose voice goes on, are read as if the head had made them.

All running requests step together, a new one with its whole prompt. Their noise comes from their seeds, so that on a
CPU the same seed gives the same latents alone and in any company.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Generic, Literal, Protocol, TypeVar

import msgspec
import numpy as np
import torch
from torch import nn

from omniflow.engine.base import EngineOutput, EngineRequest
from omniflow.engine.batching import BatchingEngine
from omniflow.engine.flow import FlowHead, FlowKnobs, FlowStep, flow_noise
from omniflow.engine.frames import embedded
from omniflow.errors import InvalidInputError, ProtocolError

S = TypeVar("S")
_MOST_HEARD = 64
"""Recordings whose feedback is kept: 0.3 MB each for 30 s of Ming's."""


class FlowModel(Protocol[S]):
    """A backbone with a flow head. What belongs to a request is a stream `S`."""

    @property
    def embedding(self) -> nn.Embedding:
        """That of the prompt's ids."""
        ...

    @property
    def head(self) -> FlowHead:
        """Tells the shape of the noise."""
        ...

    @property
    def max_positions(self) -> int:
        """Inputs that one stream may have."""
        ...

    def init(self, before: torch.Tensor | None = None) -> S:
        """A new stream, with nothing before it or with the latents `before` [n, latent_dim]."""
        ...

    def step(
        self, streams: Sequence[S], inputs: Sequence[torch.Tensor], noise: torch.Tensor, knobs: FlowKnobs
    ) -> FlowStep:
        """One step of all `streams`, after the `inputs` [n, hidden] of each: its prompt's, or its last feedback.

        `noise` float32 [len(streams), *head.noise_shape] and `knobs` are on the CPU.
        """
        ...

    def end(self, stream: S) -> None:
        """`stream` takes no more steps."""
        ...


class FlowEngine(BatchingEngine["_Row[S]"], Generic[S]):
    """`Engine` on a `FlowModel`; each output has the latents of one step, the last of them too.

    Of a request's `sampling` count `seed`, `max_tokens`, the most steps, and `temperature`: `sigma` times its root is
    the jitter of the flow, 0 follows the plain differential equation from the seed's noise. `guidance` is the scale of
    the head's rule.

    `kv_tokens` bounds the positions that all running requests reserve together, `max_running` and `max_waiting` their
    number. Urgent requests run before others that wait; once `max_running` have overtaken those, one of them runs.

    With `overlap` a call of `step` returns what the step before has given once it has begun the next, so that a GPU
    works while readers are told.
    """

    def __init__(
        self,
        model: FlowModel[S],
        *,
        guidance: float,
        sigma: float,
        max_running: int = 8,
        max_waiting: int = 64,
        kv_tokens: int = 16384,
        overlap: bool = False,
    ) -> None:
        self._model = model
        self._overlap = overlap
        self._given: tuple[list[_Row[S]], torch.Tensor] | None = None
        """The rows of a step that was begun, and of each its latents and whether it stopped."""
        self._guidance, self._sigma = guidance, sigma
        super().__init__(
            limit=min(model.max_positions, kv_tokens),
            max_running=max_running,
            max_waiting=max_waiting,
            kv_tokens=kv_tokens,
        )
        self._heard: dict[bytes, torch.Tensor] = {}
        """Feedback of latents that came before requests, what was asked for last at the end."""

    def start(self, request: EngineRequest) -> None:
        """Queue `request`. Raises ContextLengthError if it can never fit, OverloadedError if the queue is full,
        InvalidInputError for an empty prompt or a temperature below 0.
        """
        self._check(request)
        capacity = self._capacity(request.id, len(request.ids) + self._num_heard(request), request.sampling)
        self._queue.check_room(request.id)
        heard = self._feedback(request)
        self._queue.wait(_Row(request, self._model, heard, capacity), request.urgent)

    def feed(self, request_id: str, rows: torch.Tensor, done: bool) -> None:
        """Raises ProtocolError: no request of this engine is open. One that has ended is ignored."""
        if self._queue.find(request_id) is not None:
            raise ProtocolError(f"request {request_id} is not open for more input", request_id=request_id)

    def step(self) -> list[EngineOutput]:
        """One step of the whole batch; see the module's docstring."""
        outputs = [*self._ended(), *self._join()]
        if self._queue.running:
            self._begin(list(self._queue.running))
        return outputs if self._overlap else [*outputs, *self._ended()]

    def close(self) -> None:
        """Drop all requests and the model."""
        self._given = None
        super().close()
        del self._model

    def _check(self, request: EngineRequest) -> None:
        self._queue.check_new(request.id)
        if request.open:
            raise ProtocolError("this engine takes whole prompts: no `open` ones", request_id=request.id)
        if not request.ids:
            raise InvalidInputError("the prompt is empty: it needs at least 1 input", request_id=request.id)
        if request.sampling.temperature < 0:
            raise InvalidInputError(
                f"temperature {request.sampling.temperature} is below 0", request_id=request.id, param="temperature"
            )

    def _num_heard(self, request: EngineRequest) -> int:
        """Inputs that the latents before `request` are. Raises ProtocolError where they are no whole steps."""
        if request.before is None:
            return 0
        _, patch, dim = self._model.head.noise_shape
        shape = request.before.shape
        if len(shape) != 2 or shape[1] != dim or shape[0] % patch:
            raise ProtocolError(
                f"latents before of shape {list(shape)}; this model takes [n * {patch}, {dim}]", request_id=request.id
            )
        return shape[0] // patch

    def _feedback(self, request: EngineRequest) -> torch.Tensor:
        """[n, hidden] of the latents before `request`; kept, because a voice says more than one text."""
        weight = self._model.embedding.weight
        if request.before is None or not len(request.before):
            return weight.new_zeros(0, weight.shape[1])
        key = request.before.numpy().tobytes()
        found = self._heard.pop(key, None)
        if found is None:
            patches = request.before.reshape(-1, *self._model.head.noise_shape[1:])
            with torch.inference_mode():
                found = self._model.head.feedback(patches.to(weight))
        self._heard[key] = found
        if len(self._heard) > _MOST_HEARD:
            del self._heard[next(iter(self._heard))]
        return found

    def _release(self, row: _Row[S]) -> None:
        self._model.end(row.stream)

    def _begin(self, rows: list[_Row[S]]) -> None:
        """A step of `rows`, which a GPU may still work on afterwards."""
        noise = torch.from_numpy(np.concatenate([row.noise for row in rows]))
        jitter = [self._sigma * row.sampling.temperature**0.5 for row in rows]
        knobs = FlowKnobs(torch.full((len(rows),), self._guidance), torch.tensor(jitter, dtype=torch.float32))
        with torch.inference_mode():
            given = self._model.step([row.stream for row in rows], [row.inputs for row in rows], noise, knobs)
            both = torch.cat([given.latents.flatten(1), given.stopped[:, None]], dim=1)
        for number, row in enumerate(rows):
            row.take(given.feedback[number : number + 1])
        self._given = rows, both

    def _ended(self) -> list[EngineOutput]:
        """What the step that was begun gave; the one wait for the device."""
        if self._given is None:
            return []
        (rows, both), self._given = self._given, None
        for row in rows:
            row.draw()  # while a GPU still works on this step: 0.36 ms a row of Ming's size
        both = both.cpu()  # float32, as the latents are; a stop is a 1
        latents, stopped = both[:, :-1].reshape(len(rows), *self._model.head.noise_shape[1:]), both[:, -1].tolist()
        outputs = []
        for number, row in enumerate(rows):
            reason: Literal["stop", "length"] | None = "stop" if stopped[number] else "length" if row.is_full else None
            outputs.append(EngineOutput(row.id, (), reason, (), latents[number]))
            if reason is not None:
                self._end(row)
        return outputs


class _Row(Generic[S]):
    """One request."""

    def __init__(self, request: EngineRequest, model: FlowModel[S], heard: torch.Tensor, capacity: int) -> None:
        self.id, self.sampling, self.capacity = request.id, request.sampling, capacity
        self.stream = model.init(request.before)
        prompt = msgspec.structs.replace(request, before=None)
        self.inputs = torch.cat([embedded(prompt, model.embedding), heard])
        """Of the next step, [n, hidden]."""
        self.num_steps = self._length = 0
        self._seed = secrets.randbits(64) if request.sampling.seed is None else request.sampling.seed
        self._shape = model.head.noise_shape
        self.draw()

    @property
    def available(self) -> int:
        """Inputs of the next step."""
        return len(self.inputs)

    @property
    def is_full(self) -> bool:
        """True where no further step is allowed, or fits."""
        return self.num_steps == self.sampling.max_tokens or self._length == self.capacity

    def take(self, feedback: torch.Tensor) -> None:
        """A step is done; `feedback` [1, hidden] is the next input."""
        self._length += len(self.inputs)
        self.num_steps += 1
        self.inputs = feedback

    def draw(self) -> None:
        """Make the noise of the next step, [1, *shape]."""
        self.noise = flow_noise(self._seed, self.num_steps, 1, self._shape)
