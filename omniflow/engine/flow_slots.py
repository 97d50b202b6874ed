"""A flow talker's streams in slots of tensors that never move, so that a step is a few CUDA graphs and no more.

    backbone over the last feedback of those that run --+
    backbone over the prompts of those that join -------+-> flow head of all: latents, feedback, stop

Those that run are in the first slots; who leaves is replaced by the last. Graphs are captured for some numbers of
streams, and a step takes the next larger one: what its further rows compute is not looked at. On a CPU the same
functions are called plainly.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import nn

from omniflow.engine.decoder import Decoder, DecoderShape
from omniflow.engine.flow import FlowHead, FlowKnobs, FlowState, FlowStep
from omniflow.engine.replays import Replays
from omniflow.engine.slot_cache import SlotCache
from omniflow.errors import ContextLengthError, ProtocolError

_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 28, 32, 40, 48, 64)
"""Numbers of streams of the captured steps: seldom more than a third of a step is in vain."""
_Batch = Sequence[tuple[int, torch.Tensor]]
_PROMPTS = ((1, 64), (8, 64), (1, 128), (4, 128), (1, 256), (2, 256), (1, 512))
"""Prompts and their inputs in one pass: half a thousand inputs take about as long as one."""


class FlowBackbone(Protocol):
    """A decoder with a flow head."""

    @property
    def shape(self) -> DecoderShape: ...

    @property
    def embedding(self) -> nn.Embedding: ...

    @property
    def decoder(self) -> Decoder: ...

    @property
    def head(self) -> FlowHead: ...


class SlotStream:
    """One stream. It has a slot from its first step until its end."""

    def __init__(self, history: torch.Tensor) -> None:
        self.history = history
        """float32 [history, latent_dim]: the latents before its own."""
        self.slot: int | None = None
        self.length = 0


class SlottedFlow:
    """A `FlowModel` on a `FlowBackbone`, for up to `slots` streams of up to `positions` inputs each.

    On a GPU all graphs are captured here, in some seconds. There a row of a batch is a rounding apart from what it is
    alone, because matrices of other sizes are summed in another order: with Ming's sizes latents differ by 1e-6 in
    float32, and by 1.5 % in bfloat16, about as far as these are from float32.
    """

    def __init__(self, model: FlowBackbone, *, slots: int, positions: int) -> None:
        self._model = model
        device, dtype = model.embedding.weight.device, model.embedding.weight.dtype
        positions = min(positions, model.shape.max_position_embeddings)
        self._cache = SlotCache(model.shape, slots, positions, dtype=dtype, device=device)
        self._replays = Replays(device)
        self._streams: list[SlotStream] = []
        self._slots = slots
        self._sizes = [*(size for size in _SIZES if size < slots), slots]
        self._passes = [*(each for each in _PROMPTS if each[1] < positions), (1, positions)]
        hidden, rows = model.shape.hidden_size, slots + 1
        steps, patch, dim = model.head.noise_shape
        self._noise_size = steps * patch * dim
        self._drawn = torch.zeros(slots, self._noise_size + 2, device=device)
        """Of each row the noise of the next step, its guidance and its jitter."""
        self._positions = torch.zeros(rows, dtype=torch.int64, device=device)
        self._inputs = torch.zeros(rows, hidden, dtype=dtype, device=device)
        self._hidden = torch.zeros(rows, hidden, dtype=dtype, device=device)
        self._state = model.head.begin(rows, device)
        self._latents = torch.zeros(rows, patch, dim, device=device)
        self._stopped = torch.zeros(rows, dtype=torch.bool, device=device)
        most = max(count * size for count, size in self._passes)
        self._prompts = torch.zeros(most, hidden, dtype=dtype, device=device)
        self._prompt_ends = torch.zeros(2, max(count for count, _ in self._passes), dtype=torch.int64, device=device)
        """Slots and lengths of the prompts of a pass."""
        with torch.inference_mode():
            model.head.remember_times()
        self._capture()

    @property
    def embedding(self) -> nn.Embedding:
        """See `FlowModel`."""
        return self._model.embedding

    @property
    def head(self) -> FlowHead:
        """See `FlowModel`."""
        return self._model.head

    @property
    def max_positions(self) -> int:
        """See `FlowModel`."""
        return self._cache.positions

    def init(self, before: torch.Tensor | None = None) -> SlotStream:
        """A new stream, with nothing before it or with the latents `before` [n, latent_dim]."""
        net = self._model.head.net
        history = torch.zeros(net.history, net.latent_dim)
        return SlotStream(history if before is None else torch.cat([history, before.to(history)])[len(before) :])

    def end(self, stream: SlotStream) -> None:
        """The stream takes no more steps: its slot is free."""
        if stream.slot is None:
            return
        last = self._streams.pop()
        if last is not stream:
            assert last.slot is not None
            self._cache.move(last.slot, stream.slot)
            for each in (self._positions, self._inputs, *self._state):
                each[stream.slot] = each[last.slot]
            self._streams[stream.slot] = last
            last.slot = stream.slot
        stream.slot = None

    @torch.inference_mode()
    def step(
        self, streams: Sequence[SlotStream], inputs: Sequence[torch.Tensor], noise: torch.Tensor, knobs: FlowKnobs
    ) -> FlowStep:
        """See `FlowModel.step`: all that have a slot take part. `noise` and `knobs` are on the CPU.

        Of `inputs` the prompts count: the last feedback of the others is still in its place.
        """
        new = [(stream, each) for stream, each in zip(streams, inputs, strict=True) if stream.slot is None]
        running = len(self._streams)
        if running + len(new) != len(streams) or len(streams) > self._slots:
            raise ProtocolError(f"{len(streams)} streams step, {running} have slots, and {len(new)} are to join")
        self._lengthen(streams, new)
        prompts = [(self._join(stream), prompt) for stream, prompt in new]
        order = [stream.slot for stream in streams if stream.slot is not None]
        self._draw(order, noise, knobs)
        if running:
            size = self._size(running)
            self._replays.run(("decode", size), functools.partial(self._decode, size))
        for batch, each in self._batches(prompts):
            self._fill(batch, *each)
            self._replays.run(("prompts", each), functools.partial(self._read, *each))
        size = self._size(len(streams))
        self._replays.run(("flow", size), functools.partial(self._flow, size))
        return self._made(order)

    def _lengthen(self, streams: Sequence[SlotStream], new: Sequence[tuple[SlotStream, torch.Tensor]]) -> None:
        """Raises ContextLengthError before any is longer."""
        longest = max([stream.length + 1 for stream in streams] + [len(prompt) for _, prompt in new])
        if longest > self.max_positions:
            raise ContextLengthError(f"{longest} inputs in one stream; a slot has room for {self.max_positions}")
        for stream in streams:
            stream.length += stream.slot is not None
        for stream, prompt in new:
            stream.length = len(prompt)

    def _join(self, stream: SlotStream) -> int:
        stream.slot = slot = len(self._streams)
        self._streams.append(stream)
        self._cache.clear(slot)
        self._positions[slot] = 0
        self._state.step[slot] = 0
        self._state.history[slot] = self._sent(stream.history)
        return slot

    def _draw(self, order: Sequence[int], noise: torch.Tensor, knobs: FlowKnobs) -> None:
        """Bring the noise and the knobs of a step to their rows, in one copy."""
        drawn = torch.empty(len(order), self._drawn.shape[1])
        drawn[order] = torch.cat([noise.flatten(1), knobs.guidance[:, None], knobs.jitter[:, None]], dim=1)
        self._drawn[: len(order)] = self._sent(drawn)

    def _batches(self, prompts: list[tuple[int, torch.Tensor]]) -> Iterator[tuple[_Batch, tuple[int, int]]]:
        """Slots and their prompts by passes over similar lengths, each with the number and the size of the pass."""
        waiting = sorted(prompts, key=lambda each: len(each[1]))
        while waiting:
            longest = len(waiting[-1][1])
            size = min(size for _, size in self._passes if size >= longest)
            counts = sorted(count for count, each in self._passes if each == size)
            most = min(counts[-1], len(waiting))
            yield waiting[-most:], (min(count for count in counts if count >= most), size)
            del waiting[-most:]

    def _fill(self, batch: _Batch, count: int, size: int) -> None:
        """Bring the prompts of a pass to their rows; the others are one input that nobody wants."""
        self._prompts[: count * size].zero_()
        for row, (_, prompt) in enumerate(batch):
            self._prompts[row * size : row * size + len(prompt)] = prompt
        ends = [(slot, len(prompt)) for slot, prompt in batch] + [(self._cache.spare, 1)] * (count - len(batch))
        self._prompt_ends[:, :count] = self._sent(torch.tensor(ends)).T

    def _sent(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` on the device. Without pinned memory a copy would wait for all that the GPU has to do."""
        if self._latents.device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self._latents.device, non_blocking=True)

    def _made(self, order: list[int]) -> FlowStep:
        rows = self._sent(torch.tensor(order))
        state = FlowState(*(each[rows] for each in self._state))
        return FlowStep(self._latents[rows], self._inputs[rows], self._stopped[rows], state)

    def _size(self, count: int) -> int:
        return min(size for size in self._sizes if size >= count)

    @torch.inference_mode()
    def _capture(self) -> None:
        for size in reversed(self._sizes):  # the largest first: the others fit into its memory
            self._replays.capture(("decode", size), functools.partial(self._decode, size))
            self._replays.capture(("flow", size), functools.partial(self._flow, size))
        for each in self._passes:
            self._prompt_ends[0], self._prompt_ends[1] = self._cache.spare, 1
            self._replays.capture(("prompts", each), functools.partial(self._read, *each))

    def _decode(self, count: int) -> None:
        """The backbone over the last feedback of the first `count` slots."""
        positions = self._positions[:count].clamp(max=self._cache.positions - 1)[:, None]
        slots = torch.arange(count, device=positions.device)
        sight = self._cache.sight(slots, positions, length=self._cache.positions)

        def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            return self._cache.attend(layer, query, key, value, sight)

        self._hidden[:count] = self._model.decoder(self._inputs[:count, None], positions, attend)[:, 0]
        self._positions[:count] += 1

    def _read(self, count: int, size: int) -> None:
        """The backbone over `count` prompts of up to `size` inputs."""
        slots, lengths = self._prompt_ends[:, :count]

        def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            return self._cache.attend_prompts(layer, query, key, value, slots)

        prompts = self._prompts[: count * size].reshape(count, size, -1)
        hidden = self._model.decoder(prompts, slice(size), attend)
        last = hidden[torch.arange(count, device=slots.device), lengths - 1]
        self._hidden.index_copy_(0, slots, last)
        self._positions.index_copy_(0, slots, lengths)

    def _flow(self, count: int) -> None:
        """The head over what the backbone gave the first `count` slots."""
        drawn, hidden = self._drawn[:count], self._hidden[:count]
        noise = drawn[:, : self._noise_size].reshape(count, *self._model.head.noise_shape)
        state = FlowState(*(each[:count] for each in self._state))
        given: FlowStep = self._model.head(hidden, noise, FlowKnobs(*drawn[:, self._noise_size :].unbind(1)), state)
        self._latents[:count], self._inputs[:count] = given.latents, given.feedback
        self._stopped[:count] = given.stopped
        for own, later in zip(state, given.state, strict=True):
            own.copy_(later)
