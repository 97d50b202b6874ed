"""The reference engine of speech models that make frames: a backbone, and a frame head that says its next input.

    prompt ids -> embedding -> decoder -> head -> codes, and the next input of the decoder

As in `transformers.py`, a step is one pass over the inputs of all requests laid end to end: the last feedback of each
that makes frames, and a chunk of one prompt that is still being read. Attention is called request by request, so the
same seed gives the same codes alone and in any company.
"""

from __future__ import annotations

import functools
import secrets
from typing import Literal, NamedTuple

import torch
from torch import nn

from omniflow.engine.base import EngineOutput, EngineRequest
from omniflow.engine.batching import FeedingEngine
from omniflow.engine.checks import check_embeds, refuse_kinds, refuse_no_answer, refuse_text
from omniflow.engine.decoder import Decoder, DecoderShape, attend_last
from omniflow.engine.heads import STATE_SIZE, FrameHead, Knobs, frame_noise
from omniflow.engine.linear import pack_linears
from omniflow.engine.sampling import LEAST_TOP_P
from omniflow.errors import InvalidInputError, ProtocolError


class FrameModel(nn.Module):
    """A backbone of `shape` with a frame head; `embedding` is that of the prompt's ids."""

    def __init__(self, shape: DecoderShape, embedding: nn.Embedding, head: FrameHead) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = embedding
        self.decoder = Decoder(shape)
        self.head = head


class FrameEngine(FeedingEngine["_Row"]):
    """`Engine` on a `FrameModel`, float32; its outputs have `frames`, one step at a time.

    Of a request's `sampling` and `later_codes` count `temperature`, `top_k`, `top_p`, and of `sampling` `seed` and
    `max_tokens`, the most steps. `kv_tokens` bounds the positions that all running requests reserve together,
    `max_running` and `max_waiting` their number, `chunk` the inputs of a prompt that are read in a step: 64 take as
    long as 2 steps of one request.
    """

    def __init__(
        self,
        model: FrameModel,
        *,
        max_running: int = 8,
        max_waiting: int = 64,
        kv_tokens: int = 16384,
        chunk: int = 64,
    ) -> None:
        pack_linears(model, least_rows=1)
        self._model = model
        self._chunk = chunk
        super().__init__(
            width=model.shape.hidden_size,
            limit=min(model.shape.max_position_embeddings, kv_tokens),
            max_running=max_running,
            max_waiting=max_waiting,
            kv_tokens=kv_tokens,
        )

    def start(self, request: EngineRequest) -> None:
        """Queue `request`. Raises ContextLengthError if it can never fit, OverloadedError if the queue is full."""
        self._queue.check_new(request.id)
        if not request.ids and not request.open:
            raise InvalidInputError("the prompt is empty: it needs at least 1 input", request_id=request.id)
        refuse_no_answer(request)
        self._queue.check_room(request.id)
        capacity = self._capacity(request.id, len(request.ids), request.sampling)
        self._queue.wait(_Row(request, self._model, capacity), request.urgent)

    def step(self) -> list[EngineOutput]:
        """One step of the whole batch; see the module's docstring."""
        outputs = self._join()
        spans = self._schedule()
        if spans:
            with torch.inference_mode():
                hidden = self._forward(spans)
                ready = [number for number, span in enumerate(spans) if span.row.is_ready]
                if ready:
                    outputs += self._frames([spans[number].row for number in ready], hidden[ready])
        return outputs

    def close(self) -> None:
        """Drop all requests and the model."""
        super().close()
        del self._model

    def _schedule(self) -> list[_Span]:
        """The next input of every row that makes frames, and the next chunk of the first that reads.

        A prompt is always cut at the same places, whatever else runs: other places would give other last bits.
        """
        spans: list[_Span] = []
        offset, someone_reads = 0, False
        for row in self._queue.running:
            count = min(row.available, self._chunk)
            if count == 0 or (someone_reads and row.num_steps == 0):
                continue
            someone_reads = someone_reads or row.num_steps == 0
            spans.append(_Span(row, row.computed, count, offset))
            offset += count
        return spans

    def _forward(self, spans: list[_Span]) -> torch.Tensor:
        """The backbone's output [len(spans), hidden] at the last input of each span."""
        device = self._model.embedding.weight.device
        inputs = torch.cat([span.row.take(span.size) for span in spans])
        positions = torch.tensor([span.start + n for span in spans for n in range(span.size)], device=device)
        hidden: torch.Tensor = self._model.decoder(inputs, positions, functools.partial(_attend, spans))
        return hidden[[span.offset + span.size - 1 for span in spans]]

    def _frames(self, rows: list[_Row], hidden: torch.Tensor) -> list[EngineOutput]:
        """The next frame of each of `rows`, whose outputs of the backbone are `hidden`."""
        noise = torch.stack([row.noise[row.num_steps] for row in rows])
        knobs = Knobs(*(torch.stack(each) for each in zip(*(row.knobs for row in rows), strict=True)))
        given = self._model.head(hidden, noise, knobs, torch.stack([row.state for row in rows]))
        outputs = []
        for number, (row, stopped) in enumerate(zip(rows, given.stopped.tolist(), strict=True)):
            row.pending, row.state = given.feedback[number : number + 1], given.state[number]
            row.num_steps += 1
            reason: Literal["stop", "length"] | None = "stop" if stopped else "length" if row.is_full else None
            frames = None if stopped else given.codes[number : number + 1]
            outputs.append(EngineOutput(row.id, (), reason, (), frames))
            if reason is not None:
                self._end(row)
        return outputs


class _Row:
    """One request: the inputs that are not computed yet (of its prompt, then its last feedback), keys and values."""

    def __init__(self, request: EngineRequest, model: FrameModel, capacity: int) -> None:
        self.id, self.sampling, self.open = request.id, request.sampling, request.open
        self.pending = embedded(request, model.embedding)
        """Inputs [n, hidden]."""
        self.computed = self.num_steps = 0
        device, num_codes = self.pending.device, model.head.num_codes
        self.knobs = knobs_of(request, num_codes, device)
        seed = secrets.randbits(64) if request.sampling.seed is None else request.sampling.seed
        most_steps = min(request.sampling.max_tokens, model.shape.max_position_embeddings)
        self.noise = torch.from_numpy(frame_noise(seed, 0, most_steps, num_codes)).to(device)
        self.state = torch.zeros(STATE_SIZE, dtype=torch.int64, device=device)
        shape = model.shape
        self.capacity = capacity
        self._stored = self.pending.new_empty(
            shape.num_hidden_layers, 2, shape.num_key_value_heads, capacity, shape.head_dim
        )

    @property
    def length(self) -> int:
        """Inputs so far."""
        return self.computed + len(self.pending)

    @property
    def available(self) -> int:
        """Inputs that can be computed now. The last one of an open request waits: its output may be the first frame."""
        return len(self.pending) - self.open

    @property
    def is_ready(self) -> bool:
        """True where all inputs are computed, so that a frame comes next."""
        return len(self.pending) == 0 and not self.open

    @property
    def is_full(self) -> bool:
        """True where no further step is allowed, or fits."""
        return self.num_steps == self.sampling.max_tokens or self.computed == self.capacity

    def feed(self, rows: torch.Tensor, capacity: int) -> None:
        """Append input embeddings [n, hidden], and make room for `capacity` positions."""
        self.pending = torch.cat([self.pending, rows.to(self.pending)])
        layers, both, heads, old, dim = self._stored.shape
        more = self._stored.new_empty(layers, both, heads, capacity - old, dim)
        self._stored = torch.cat([self._stored, more], dim=3)
        self.capacity = capacity

    def take(self, count: int) -> torch.Tensor:
        """The next `count` inputs, which are now being computed."""
        taken, self.pending = self.pending[:count], self.pending[count:]
        self.computed += count
        return taken

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attention of the inputs that are being computed, [n, heads, dim], over all so far."""
        keys, values = self._stored[layer, 0, :, : self.computed], self._stored[layer, 1, :, : self.computed]
        keys[:, self.computed - len(key) :] = key.transpose(0, 1)
        values[:, self.computed - len(key) :] = value.transpose(0, 1)
        return attend_last(query[None], keys[None], values[None])[0]


class _Span(NamedTuple):
    """Inputs [start, start + size) of `row`, at [offset, offset + size) of a step."""

    row: _Row
    start: int
    size: int
    offset: int


def _attend(
    spans: list[_Span], layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    if len(spans) == 1:
        return spans[0].row.attend(layer, query, key, value)
    here = [slice(span.offset, span.offset + span.size) for span in spans]
    return torch.cat(
        [span.row.attend(layer, query[at], key[at], value[at]) for span, at in zip(spans, here, strict=True)]
    )


def embedded(request: EngineRequest, embedding: nn.Embedding) -> torch.Tensor:
    """The inputs [n, hidden] of a prompt: embeddings of its ids, and its own rows in their places."""
    refuse_kinds(request)
    refuse_text(request)
    ids, size = request.ids, embedding.num_embeddings
    if ids and not 0 <= min(ids) <= max(ids) < size:
        raise ProtocolError(f"an id is outside of the vocabulary of {size}", request_id=request.id)
    check_embeds(request, embedding.embedding_dim)
    wanted, device = torch.tensor(ids, dtype=torch.int64), embedding.weight.device
    if device.type == "cuda":
        wanted = wanted.pin_memory()  # else the copy would wait for the step that the GPU is at
    inputs: torch.Tensor = embedding(wanted.to(device, non_blocking=True)).detach()
    if request.embeds is not None:
        inputs[list(request.positions)] = request.embeds.to(inputs)
    return inputs


def knobs_of(request: EngineRequest, num_codes: int, device: torch.device) -> Knobs:
    """One knob [num_codes] of a kind."""
    first, later = request.sampling, request.later_codes or request.sampling
    each = [first, *[later] * (num_codes - 1)]
    return Knobs(
        torch.tensor([sampling.temperature for sampling in each], device=device),
        torch.tensor([sampling.top_k for sampling in each], device=device),
        torch.tensor([max(sampling.top_p, LEAST_TOP_P) for sampling in each], device=device),
    )
