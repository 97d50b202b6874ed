"""Ming-flash-omni's thinker (BailingMoeV2) for the reference engine, its parts named as its checkpoints name them.

Every matrix is an `nn.Linear`, those of the experts too: packed, a row of one gives the same bits in any company, so a
request does not depend on which tokens of others went to the same expert.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from actors.checkpoint import load, read_tensors
from actors.ming.config import AUDIO, IMAGE, Thinker
from actors.ming.weights import thinker_part
from omniflow.engine.decoder import RMSNorm
from omniflow.engine.linear import pack_linears
from omniflow.engine.rows import Span, attend_by_request


class Rope(nn.Module):
    """Angles of positions: int64 [3, n] (time, height, width) to cos and sin [n, rotary_dim / 2].

    Of the frequencies, from the fastest on, height and width have one each in turn, and time has those that are left.
    Where the three positions are equal that is a plain rotary embedding.
    """

    frequencies: torch.Tensor
    axes: torch.Tensor

    def __init__(self, config: Thinker) -> None:
        super().__init__()
        dim, rope = config.rotary_dim, config.rope_scaling
        frequencies = 1.0 / config.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
        num_space = sum(rope.mrope_section[1:]) if rope else 0
        axes = [1 + each % 2 for each in range(num_space)] + [0] * (dim // 2 - num_space)
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.register_buffer("axes", torch.tensor(axes), persistent=False)

    def forward(self, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = places[self.axes].T * self.frequencies
        return _alike(torch.cos, angles), _alike(torch.sin, angles)


def _alike(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """`function` of each element, the same bits for it in any batch.

    torch computes what does not fill 32 numbers at a tensor's end in another way, which is another last bit.
    """
    size = x.shape[-1]
    padded: torch.Tensor = F.pad(x, (0, -size % 32))
    return function(padded.contiguous())[..., :size]


class _Heads(nn.Module):
    def __init__(self, config: Thinker, layer: int) -> None:
        super().__init__()
        self.layer_idx = layer
        self._heads, self._kv_heads, self._dim = config.num_attention_heads, config.num_key_value_heads, config.dim
        num_heads = self._heads + 2 * self._kv_heads
        self.query_key_value = nn.Linear(config.hidden_size, num_heads * self._dim, bias=False)
        self.query_layernorm = RMSNorm(self._dim, config.rms_norm_eps)
        self.key_layernorm = RMSNorm(self._dim, config.rms_norm_eps)
        self.dense = nn.Linear(self._heads * self._dim, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, spans: list[Span]) -> torch.Tensor:
        qkv = self.query_key_value(x).unflatten(-1, (-1, self._dim)).transpose(0, 1)[None]
        query, key, value = torch.split(qkv, [self._heads, self._kv_heads, self._kv_heads], dim=1)
        query, key = (_turn(each, cos, sin) for each in (self.query_layernorm(query), self.key_layernorm(key)))
        attended, _ = attend_by_request(self, query, key, value, None, scaling=self._dim**-0.5, spans=spans)
        y: torch.Tensor = self.dense(attended[0].flatten(-2))
        return y


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[-1]
    a, b, rest = torch.split(x, [half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)


class _Mlp(nn.Module):
    def __init__(self, hidden_size: int, inner: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(hidden_size, 2 * inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden_size, bias=False)

    def forward(self, x: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
        """`kinds` are for what routes; a plain one treats all alike."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        y: torch.Tensor = self.down_proj(_alike(F.silu, gate) * up)
        return y


class Gate(nn.Module):
    """Experts of each input [n, hidden]: their numbers and their weights, [n, num_experts_per_tok] both.

    Only the `topk_group` groups count whose two best experts are best together. `expert_bias` takes part in the choice
    and not in the weights.
    """

    expert_bias: torch.Tensor

    def __init__(self, config: Thinker) -> None:
        super().__init__()
        self._config = config
        self.scores = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.register_buffer("expert_bias", torch.zeros(config.num_experts))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        config = self._config
        scores = _alike(torch.sigmoid, self.scores(x).float())
        choice = (scores + self.expert_bias).reshape(len(x), config.n_group, -1)
        groups = choice.topk(2, dim=-1).values.sum(-1).topk(config.topk_group, dim=-1).indices
        closed = torch.ones(choice.shape[:-1], dtype=torch.bool, device=x.device).scatter(-1, groups, False)
        chosen = choice.masked_fill(closed[..., None], -torch.inf).flatten(-2).topk(config.num_experts_per_tok).indices
        weights = scores.gather(-1, chosen)
        if config.num_experts_per_tok > 1:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return chosen, weights * config.routed_scaling_factor


class Experts(nn.Module):
    """Each input [n, hidden] through the experts that the gate of its kind chooses, and through the shared ones."""

    def __init__(self, config: Thinker) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.moe_intermediate_size
        self.gate = Gate(config)
        self.image_gate = Gate(config) if config.router_type == "MultiRouter" else None
        self.audio_gate = Gate(config) if config.router_type == "MultiRouter" else None
        self.experts = nn.ModuleList(_Mlp(hidden, inner) for _ in range(config.num_experts))
        self.shared_experts = _Mlp(hidden, inner * config.num_shared_experts) if config.num_shared_experts else None

    def route(self, x: torch.Tensor, kinds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Gate` gives it, each input by the gate of its kind, `kinds` [n]."""
        chosen, weights = self.gate(x)
        for kind, gate in ((IMAGE, self.image_gate), (AUDIO, self.audio_gate)):
            here = kinds == kind
            if gate is not None and here.any():
                chosen[here], weights[here] = gate(x[here])
        return chosen, weights

    def forward(self, x: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
        chosen, weights = self.route(x, kinds)
        y = torch.zeros_like(x)
        for number in sorted(set(chosen.flatten().tolist())):  # so a token's sum has the same order in any batch
            rows, places = (chosen == number).nonzero(as_tuple=True)
            y[rows] += self.experts[number](x[rows], kinds[rows]) * weights[rows, places, None].to(x)
        return y if self.shared_experts is None else y + self.shared_experts(x, kinds)


class _Layer(nn.Module):
    def __init__(self, config: Thinker, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = _Heads(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        dense = layer < config.first_k_dense_replace
        self.mlp = _Mlp(config.hidden_size, config.intermediate_size) if dense else Experts(config)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, kinds: torch.Tensor, spans: list[Span]
    ) -> torch.Tensor:
        x = x + self.attention(self.input_layernorm(x), cos, sin, spans)
        y: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x), kinds)
        return y


class _Decoder(nn.Module):
    def __init__(self, config: Thinker) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.rope = Rope(config)
        self.layers = nn.ModuleList(_Layer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: torch.Tensor, spans: list[Span]) -> torch.Tensor:
        kinds = torch.cat([span.row.kinds(span.start, span.end) for span in spans]).to(x.device)
        cos, sin = self.rope(torch.cat([span.row.places(span.start, span.end) for span in spans], dim=1).to(x.device))
        for layer in self.layers:
            x = layer(x, cos, sin, kinds, spans)
        normed: torch.Tensor = self.norm(x)
        return normed


class ThinkerModel(PreTrainedModel):  # type: ignore[no-untyped-call]
    """For a `TransformersEngine` with `media=True`: the spans of a step say positions and kinds of all its inputs."""

    config_class = PreTrainedConfig
    _supports_attention_backend = True

    def __init__(self, config: Thinker) -> None:
        super().__init__(
            PreTrainedConfig.from_dict(
                {
                    "num_hidden_layers": config.num_hidden_layers,
                    "hidden_size": config.hidden_size,
                    "max_position_embeddings": config.max_position_embeddings,
                    "vocab_size": config.vocab_size,
                }
            )
        )
        self.model = _Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def get_input_embeddings(self) -> nn.Module:
        """Of its vocabulary's tokens."""
        embeddings: nn.Module = self.model.word_embeddings
        return embeddings

    def forward(
        self, inputs_embeds: torch.Tensor, spans: list[Span], logits_to_keep: torch.Tensor, **_: Any
    ) -> CausalLMOutput:
        """Logits [1, len(logits_to_keep), vocab] of those of the inputs [1, n, hidden]."""
        hidden = self.model(inputs_embeds[0], spans)
        return CausalLMOutput(logits=self.lm_head(hidden[logits_to_keep])[None])


def load_thinker(folder: Path, device: str = "cpu") -> ThinkerModel:
    """The thinker in `folder`, in float32; on the CPU its matrices are packed. Raises WeightsError."""
    model = ThinkerModel(Thinker.load(folder))
    model.eval()  # type: ignore[no-untyped-call]
    model.requires_grad_(False)
    load(model, thinker_part(read_tensors(folder)), "the thinker")
    model.to(device)
    pack_linears(model)
    return model
