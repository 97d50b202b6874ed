"""Frame heads: what one step of a speech model's backbone becomes, a frame of codes and the backbone's next input.

    TokenHead       one code
    ParallelHead    all codes at once, each codebook some steps behind the first (delay pattern)
    DepthHead       code after code: a small decoder over the codes of one step (code predictor)

A head is a torch module that every engine runs, and that can be captured in a CUDA graph: all shapes are static, and
nothing in it branches on the value of a tensor or waits for the device. Chance is an input (`frame_noise`), so the same
seed gives the same codes alone, in any batch, and on any device whose arithmetic is the same.

An engine keeps two things of each request from step to step: `feedback`, the next input of the backbone, and `state`.
It takes the codes of every step that is not `stopped`, and ends the request at the first that is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from omniflow.engine.decoder import Decoder, DecoderLayer, DecoderShape, attend_last
from omniflow.engine.fused import gated, has_kernels

STATE_SIZE = 2
"""Of each row: how many steps it has taken, and how many since its end began (0: it has not)."""


class Knobs(NamedTuple):
    """How each code of each row is drawn; all are [batch, num_codes], on the device of the head.

    `temperature` float32, 0 is greedy; `top_k` int64, 0 is all; `top_p` float32 above 0, of what `top_k` has left.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor


class FrameStep(NamedTuple):
    """What a step gave each row."""

    codes: torch.Tensor
    """int64 [batch, num_codes]; where `stopped`, no part of the speech."""
    feedback: torch.Tensor
    """[batch, hidden]: the next input of the backbone."""
    stopped: torch.Tensor
    """bool [batch]."""
    state: torch.Tensor
    """int64 [batch, STATE_SIZE], for the next step."""


class FrameHead(nn.Module, ABC):
    """See the module's docstring."""

    num_codes: int

    @abstractmethod
    def forward(self, hidden: torch.Tensor, noise: torch.Tensor, knobs: Knobs, state: torch.Tensor) -> FrameStep:
        """One step of every row.

        `hidden` [batch, hidden] is the normed output of the backbone; `noise` float32 [batch, num_codes] is uniform in
        (0, 1); `state` int64 [batch, STATE_SIZE] is zero before a row's first step, then what the step before gave.
        """


class TokenHead(FrameHead):
    """One code of `vocab_size` a step. One of `stop_ids` ends; `banned_ids` are never drawn."""

    num_codes = 1
    _stops: torch.Tensor
    _bias: torch.Tensor
    _ranks: torch.Tensor

    def __init__(
        self, hidden_size: int, vocab_size: int, stop_ids: Sequence[int], banned_ids: Sequence[int] = ()
    ) -> None:
        super().__init__()
        self.head = nn.Linear(hidden_size, vocab_size, bias=False)
        self.embedding = nn.Embedding(vocab_size, hidden_size)
        self.register_buffer("_stops", torch.tensor(stop_ids), persistent=False)
        self.register_buffer("_bias", _ban(vocab_size, banned_ids), persistent=False)
        self.register_buffer("_ranks", torch.arange(vocab_size), persistent=False)

    def forward(self, hidden: torch.Tensor, noise: torch.Tensor, knobs: Knobs, state: torch.Tensor) -> FrameStep:
        code = _pick(self.head(hidden).float() + self._bias, _ready(noise, knobs), self._ranks)
        stopped = (code == self._stops).any(-1)
        return FrameStep(code, self.embedding(code[:, 0]), stopped, _one_step_on(state))


class ParallelHead(FrameHead):
    """`len(delays)` codes a step from one matrix; codebook q tells at step t what belongs to frame t - delays[q].

    Before its first frame a codebook gives `begin_id`. Once the first codebook draws `end_id`, each of the others gives
    it as many steps later as it is behind, and the step after the last has begun to do so is `stopped`. `delays[0]` is
    0. Ids beyond the codes (`begin_id`, `end_id`) are below `vocab_size`. `undelayed` straightens the codes.
    """

    _delays: torch.Tensor
    _bias: torch.Tensor
    _offsets: torch.Tensor
    _ranks: torch.Tensor

    def __init__(self, hidden_size: int, vocab_size: int, delays: Sequence[int], begin_id: int, end_id: int) -> None:
        super().__init__()
        self.num_codes, self._vocab_size = len(delays), vocab_size
        self._begin_id, self._end_id, self._most = begin_id, end_id, max(delays)
        self.head = nn.Linear(hidden_size, self.num_codes * vocab_size, bias=False)
        self.embedding = nn.Embedding(self.num_codes * vocab_size, hidden_size)
        bias = torch.stack([_ban(vocab_size, [begin_id] if q == 0 else [begin_id, end_id]) for q in range(len(delays))])
        self.register_buffer("_bias", bias, persistent=False)
        self.register_buffer("_delays", torch.tensor(delays), persistent=False)
        self.register_buffer("_offsets", torch.arange(self.num_codes) * vocab_size, persistent=False)
        self.register_buffer("_ranks", torch.arange(vocab_size), persistent=False)

    def forward(self, hidden: torch.Tensor, noise: torch.Tensor, knobs: Knobs, state: torch.Tensor) -> FrameStep:
        logits = self.head(hidden).float().unflatten(-1, (self.num_codes, self._vocab_size)) + self._bias
        drawn = _pick(logits, _Ways(*(each[..., None] for each in _ready(noise, knobs))), self._ranks)[..., 0]
        step, ending = state[:, :1], state[:, 1:]
        ending = torch.where((ending > 0) | (drawn[:, :1] == self._end_id), ending + 1, 0)
        codes = torch.where(step < self._delays, self._begin_id, drawn)
        codes = torch.where(ending > self._delays, self._end_id, codes)
        feedback = self.embedding(codes + self._offsets).sum(dim=1)
        return FrameStep(codes, feedback, ending[:, 0] > self._most + 1, torch.cat([step + 1, ending], dim=1))


class DepthHead(FrameHead):
    """The first code from the backbone, then `shape`'s decoder tells each further code from those before it.

    Its inputs are the hidden state, then the embedding of each code; its outputs from the second on give the codes from
    the second on, each by a matrix of its own. The feedback is the sum of all embeddings. The first code is of
    `first_vocab_size`, where `stop_ids` end and `banned_ids` are never drawn; the others are of `vocab_size`.
    """

    _stops: torch.Tensor
    _bias: torch.Tensor
    _ranks: torch.Tensor

    def __init__(
        self,
        shape: DecoderShape,
        *,
        num_codes: int,
        vocab_size: int,
        first_vocab_size: int,
        stop_ids: Sequence[int],
        banned_ids: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self.num_codes, self._shape, self._vocab_size = num_codes, shape, vocab_size
        hidden = shape.hidden_size
        self.first_head = nn.Linear(hidden, first_vocab_size, bias=False)
        self.first_embedding = nn.Embedding(first_vocab_size, hidden)
        self.decoder = Decoder(shape)
        self.heads = nn.ModuleList(nn.Linear(hidden, vocab_size, bias=False) for _ in range(num_codes - 1))
        self.embeddings = nn.ModuleList(nn.Embedding(vocab_size, hidden) for _ in range(num_codes - 1))
        self.register_buffer("_stops", torch.tensor(stop_ids), persistent=False)
        self.register_buffer("_bias", _ban(first_vocab_size, banned_ids), persistent=False)
        self.register_buffer("_ranks", torch.arange(max(first_vocab_size, vocab_size)), persistent=False)

    def forward(self, hidden: torch.Tensor, noise: torch.Tensor, knobs: Knobs, state: torch.Tensor) -> FrameStep:
        ways = _ready(noise, knobs)
        ranks = self._ranks[: self._vocab_size]
        logits = self.first_head(hidden).float() + self._bias
        code = _pick(logits, ways.of(0), self._ranks[: logits.shape[-1]])
        stopped = (code == self._stops).any(-1)
        attention = _DepthAttention(self._shape, self.num_codes, hidden)
        codes, embedded = [code], self.first_embedding(code)
        inputs, feedback = torch.cat([hidden[:, None], embedded], dim=1), embedded
        for number, (head, embedding) in enumerate(zip(self.heads, self.embeddings, strict=True), 1):
            logits = head(attention.step(self.decoder, inputs)[:, -1]).float()
            code = _pick(logits, ways.of(number), ranks)
            inputs = embedding(code)
            codes.append(code)
            feedback = feedback + inputs
        return FrameStep(torch.cat(codes, dim=1), feedback[:, 0], stopped, _one_step_on(state))

    def load(self, weights: Mapping[str, torch.Tensor], first_head: str, first_embedding: str, predictor: str) -> None:
        """Take weights by the names that Qwen3-TTS and Qwen3-Omni use. Raises KeyError where one is missing.

        `first_head` and `first_embedding` are whole names; `predictor` is the prefix of the code predictor's.
        """
        self.first_head.weight.data.copy_(weights[first_head])
        self.first_embedding.weight.data.copy_(weights[first_embedding])
        self.decoder.load(weights, f"{predictor}model.")
        for number, (head, embedding) in enumerate(zip(self.heads, self.embeddings, strict=True)):
            head.weight.data.copy_(weights[f"{predictor}lm_head.{number}.weight"])  # type: ignore[operator]
            embedding.weight.data.copy_(weights[f"{predictor}model.codec_embedding.{number}.weight"])  # type: ignore[operator]


class _DepthAttention:
    """Attention over the inputs of one frame so far, [batch, length, heads, dim]; lives for one step of the head."""

    def __init__(self, shape: DecoderShape, length: int, like: torch.Tensor) -> None:
        size = (len(like), shape.num_key_value_heads, length, shape.head_dim)
        self._stored = [(like.new_empty(size), like.new_empty(size)) for _ in range(shape.num_hidden_layers)]
        self._start = self._end = 0
        self._eps = shape.rms_norm_eps
        self._has_kernels = has_kernels(like) and shape.head_dim.bit_count() == 1

    def step(self, decoder: Decoder, inputs: torch.Tensor) -> torch.Tensor:
        """What `decoder` gives for the next `inputs` [batch, length, hidden]."""
        self._start, self._end = self._end, self._end + inputs.shape[1]
        if self._has_kernels:
            return self._step_by_kernels(decoder, inputs)
        output: torch.Tensor = decoder(inputs, slice(self._start, self._end), self._attend)
        return output

    def _step_by_kernels(self, decoder: Decoder, x: torch.Tensor) -> torch.Tensor:
        """The same in 8 calls a layer instead of 21: on a GPU, of small matrices, the calls are what takes time."""
        from omniflow.engine import depth_kernels

        cos, sin = (each[self._start : self._end] for each in (decoder.rotary.cos, decoder.rotary.sin))
        delta = torch.zeros_like(x)
        for layer, stored in zip(decoder.layers, self._stored, strict=True):
            assert isinstance(layer, DecoderLayer)
            x, normed = layer.input_layernorm.after(x, delta)
            qkv = layer.qkv_proj(normed)
            attended = depth_kernels.attend(qkv, layer.qk_norm, cos, sin, *stored, self._start, self._eps)
            x, normed = layer.post_attention_layernorm.after(x, layer.o_proj(attended))
            delta = layer.down_proj(gated(layer.gate_up_proj(normed)))
        return decoder.norm.after(x, delta)[1]

    def _attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        keys, values = (stored[:, :, : self._end] for stored in self._stored[layer])
        keys[:, :, self._start :] = key.transpose(1, 2)
        values[:, :, self._start :] = value.transpose(1, 2)
        return attend_last(query, keys, values)


class _Ways(NamedTuple):
    """Noise and knobs of all codes, made ready for `_pick`: what is the same for each of them is done once."""

    noise: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor

    def of(self, code: int) -> _Ways:
        """Those [batch, 1] of one code."""
        return _Ways(*(each[:, code : code + 1] for each in self))


def _ready(noise: torch.Tensor, knobs: Knobs) -> _Ways:
    greedy = knobs.temperature <= 0
    return _Ways(
        # Without noise the likeliest is drawn. Times a sum, what is just below 1 can be rounded to the sum itself,
        # which is beyond the last id.
        noise.clamp(max=1 - 2**-22).masked_fill(greedy, 0),
        knobs.temperature.masked_fill(greedy, 1),
        knobs.top_k.masked_fill(knobs.top_k <= 0, 2**31),
        knobs.top_p,
    )


def _pick(logits: torch.Tensor, ways: _Ways, ranks: torch.Tensor) -> torch.Tensor:
    """One id [..., 1] from each row of `logits` [..., vocab]; `ways` are [..., 1], `ranks` 0 to vocab - 1."""
    ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
    if has_kernels(logits):
        from omniflow.engine import depth_kernels

        rows = (each.expand(*logits.shape[:-1], 1).reshape(-1) for each in ways)
        found = depth_kernels.draw_ordered(ordered.flatten(0, -2), ids.flatten(0, -2), *rows)
        return found.reshape(*logits.shape[:-1], 1)
    probs = (ordered / ways.temperature).masked_fill(ranks >= ways.top_k, -torch.inf).softmax(dim=-1)
    sums = (probs * (probs.cumsum(dim=-1) - probs < ways.top_p)).cumsum(dim=-1)
    index = (sums <= ways.noise * sums[..., -1:]).sum(dim=-1, keepdim=True)
    return ids.gather(-1, index)


def draw(logits: torch.Tensor, noise: torch.Tensor, knobs: Knobs) -> torch.Tensor:
    """One id int64 [...] from each row of `logits` float32 [..., vocab]; `noise` and `knobs` are [...].

    Filters in the order of `omniflow.engine.sampling`: temperature, top_k, top_p of what is left. Of what remains,
    likeliest first, the id is drawn at which the sum of probabilities first exceeds `noise` of the whole.
    """
    ways = _Ways(*(each[..., None] for each in _ready(noise, knobs)))
    return _pick(logits, ways, torch.arange(logits.shape[-1], device=logits.device))[..., 0]


def frame_noise(seed: int, first_step: int, num_steps: int, num_codes: int) -> np.ndarray:
    """The noise of steps [first_step, first_step + num_steps) of a request: float32 [num_steps, num_codes] in (0, 1).

    Counter-based (Philox 4x64, the key is `seed`), so any step can be made without those before it.
    """
    blocks = -(-num_codes // 8)  # a count of the generator gives 256 bits, and a code takes 32 of them
    generator = np.random.Philox(key=seed % 2**64, counter=first_step * blocks)
    bits = generator.random_raw(num_steps * blocks * 4).view(np.uint32).reshape(num_steps, blocks * 8)
    # 23 bits and a half: every value is a float32 and neither 0 nor 1.
    return ((bits[:, :num_codes] >> 9).astype(np.float32) + np.float32(0.5)) * np.float32(2**-23)


def undelayed(codes: torch.Tensor, delays: Sequence[int]) -> torch.Tensor:
    """Frames [num_steps - max(delays), num_codes] from the codes [num_steps, num_codes] that a `ParallelHead` gave."""
    length = max(0, len(codes) - max(delays))
    return torch.stack([codes[delay : delay + length, q] for q, delay in enumerate(delays)], dim=1)


def _ban(vocab_size: int, ids: Sequence[int]) -> torch.Tensor:
    bias = torch.zeros(vocab_size)
    bias[list(ids)] = -torch.inf
    return bias


def _one_step_on(state: torch.Tensor) -> torch.Tensor:
    return torch.cat([state[:, :1] + 1, state[:, 1:]], dim=1)
