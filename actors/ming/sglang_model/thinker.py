"""Ming-flash-omni's thinker (BailingMoeV2) of SGLang's layers, its parts named as its checkpoints name them.

SGLang has that decoder (`models/bailing_moe.py`), in 0.5.17 with one gate a layer and a plain rotary embedding. Here
each kind of input has a gate of its own, and positions are in time, height and width: `actors/ming/thinker_model.py` is
the same in plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import torch
import torch.nn.functional as F
from sglang.srt.distributed import tensor_model_parallel_all_reduce
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from sglang.srt.layers.logits_processor import LogitsProcessor, LogitsProcessorOutput
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.moe.topk import StandardTopKOutput, TopK
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.rotary_embedding import RotaryEmbedding
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from sglang.srt.models.utils import apply_qk_norm
from sglang.srt.runtime_context import get_exec, get_parallel
from torch import nn

from actors.ming.config import AUDIO, IMAGE, Thinker
from actors.ming.sglang_model.loading import load_checkpoint
from omniflow.engine.sglang_models.placed import PlacedModel


class _Rope(RotaryEmbedding):  # type: ignore[misc]
    """SGLang's rotation, its table not by position but by input: `turn` makes that of a batch, for all layers."""

    frequencies: torch.Tensor
    axes: torch.Tensor

    def __init__(self, config: Thinker) -> None:
        dim, rope = config.rotary_dim, config.rope_scaling
        super().__init__(
            head_size=config.dim,
            rotary_dim=dim,
            max_position_embeddings=1,
            base=config.rope_theta,
            is_neox_style=True,
            dtype=torch.get_default_dtype(),
        )
        num_space = sum(rope.mrope_section[1:]) if rope else 0
        axes = [1 + each % 2 for each in range(num_space)] + [0] * (dim // 2 - num_space)
        frequencies = 1.0 / config.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.register_buffer("axes", torch.tensor(axes), persistent=False)

    def turn(self, places: torch.Tensor) -> torch.Tensor:
        """From now on, until the next call, inputs [n] turn by `places` [3, n]; returns their rows in the table."""
        angles = places[self.axes].T * self.frequencies
        self.cos_sin_cache = torch.cat([angles.cos(), angles.sin()], dim=-1)
        return torch.arange(len(angles), device=places.device)


class _Heads(nn.Module):
    def __init__(self, config: Thinker, layer: int) -> None:
        super().__init__()
        hidden, dim, heads = config.hidden_size, config.dim, config.num_attention_heads
        self._dim = dim
        self.query_key_value = QKVParallelLinear(hidden, dim, heads, config.num_key_value_heads, bias=False)
        self.q_norm = RMSNorm(dim, eps=config.rms_norm_eps)
        self.k_norm = RMSNorm(dim, eps=config.rms_norm_eps)
        self.dense = RowParallelLinear(heads * dim, hidden, bias=False)
        # Those of this rank.
        heads, kv_heads = self.query_key_value.num_heads, self.query_key_value.num_kv_heads
        self._sizes = [heads * dim, kv_heads * dim, kv_heads * dim]
        # SGLang looks for it by this name, and without it captures no prompts.
        self.attn = RadixAttention(heads, dim, dim**-0.5, num_kv_heads=kv_heads, layer_id=layer)

    def forward(self, x: torch.Tensor, rows: torch.Tensor, rope: _Rope, forward_batch: Any) -> torch.Tensor:
        query, key, value = self.query_key_value(x)[0].split(self._sizes, dim=-1)
        query, key = apply_qk_norm(query, key, self.q_norm, self.k_norm, self._dim)
        query, key = rope(rows, query, key)
        y: torch.Tensor = self.dense(self.attn(query, key, value, forward_batch))[0]
        return y


class _Mlp(nn.Module):
    """With `whole` false, each rank has its part of the sum."""

    def __init__(self, hidden_size: int, inner: int, whole: bool) -> None:
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(hidden_size, [inner, inner], bias=False)
        self.act = SiluAndMul()
        self.down_proj = RowParallelLinear(inner, hidden_size, bias=False, reduce_results=whole)

    def forward(self, x: torch.Tensor, kinds: torch.Tensor | None = None) -> torch.Tensor:
        y: torch.Tensor = self.down_proj(self.act(self.gate_up_proj(x)[0]))[0]
        return y


class _Gate(nn.Module):
    """Logits in float32, whatever the model is in: many experts are nearly even."""

    def __init__(self, config: Thinker, layer: int) -> None:
        super().__init__()
        weight = torch.empty(config.num_experts, config.hidden_size)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.expert_bias = nn.Parameter(torch.empty(config.num_experts, dtype=torch.float32), requires_grad=False)
        self._any_order = not get_exec().deterministic.enable_deterministic_inference
        self.topk = TopK(
            config.num_experts_per_tok,
            layer_id=layer,
            use_grouped_topk=True,
            num_expert_group=config.n_group,
            topk_group=config.topk_group,
            renormalize=True,
            scoring_func="sigmoid",
            correction_bias=self.expert_bias,
            routed_scaling_factor=config.routed_scaling_factor,
            apply_routed_scaling_factor_on_output=True,
        )

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_cuda and x.dtype != torch.float32 and self._any_order:
            # Summed in float32, too, and three times as fast: 7 us for 8 inputs of 4096 and 256 experts on an H200.
            return torch.mm(x, self.weight.t(), out_dtype=torch.float32)
        return F.linear(x.float(), self.weight.float())

    def forward(self, x: torch.Tensor) -> StandardTopKOutput:
        return self.topk(x, self._logits(x))


class _Experts(nn.Module):
    def __init__(self, config: Thinker, layer: int) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.moe_intermediate_size
        self._ranks = get_parallel().tp_size
        self.gate = _Gate(config, layer)
        several = config.router_type == "MultiRouter"
        self.image_gate = _Gate(config, layer) if several else None
        self.audio_gate = _Gate(config, layer) if several else None
        self.experts = FusedMoE(config.num_experts, hidden, inner, layer, top_k=config.num_experts_per_tok)
        shared = inner * config.num_shared_experts
        self.shared_experts = _Mlp(hidden, shared, whole=False) if shared else None

    def _route(self, x: torch.Tensor, kinds: torch.Tensor | None) -> StandardTopKOutput:
        """Each input by the gate of its kind. All go through all gates where any is not text: a small matrix each."""
        chosen = self.gate(x)
        for kind, gate in ((IMAGE, self.image_gate), (AUDIO, self.audio_gate)):
            if kinds is not None and gate is not None:
                here = (kinds == kind)[:, None]
                others = zip(gate(x), chosen, strict=True)
                chosen = StandardTopKOutput(*(torch.where(here, theirs, ours) for theirs, ours in others))
        return chosen

    def forward(self, x: torch.Tensor, kinds: torch.Tensor | None) -> torch.Tensor:
        chosen = self._route(x, kinds)
        shared = None if self.shared_experts is None else self.shared_experts(x)
        y: torch.Tensor = self.experts(x, chosen)  # may write over x
        if shared is not None:
            y = y + shared
        return tensor_model_parallel_all_reduce(y) if self._ranks > 1 else y


class _Layer(nn.Module):
    def __init__(self, config: Thinker, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.attention = _Heads(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        dense = layer < config.first_k_dense_replace
        self.mlp = _Mlp(config.hidden_size, config.intermediate_size, whole=True) if dense else _Experts(config, layer)


class _Decoder(nn.Module):
    def __init__(self, config: Thinker) -> None:
        super().__init__()
        self.word_embeddings = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.rope = _Rope(config)
        self.layers = nn.ModuleList(_Layer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: Any,
        input_embeds: torch.Tensor | None = None,
        places: torch.Tensor | None = None,
        kinds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """SGLang captures this for prompts, with its own four arguments: inputs of kind 0, each at its own position.

        What it replays in place of this is for such batches alone (`PlacedModel.is_plain`).
        """
        x = self.word_embeddings(input_ids) if input_embeds is None else input_embeds
        places = positions.expand(3, -1) if places is None else places
        rows, sum_so_far = self.rope.turn(places), torch.zeros_like(x)
        for layer in self.layers:
            assert isinstance(layer, _Layer)
            x, sum_so_far = layer.input_layernorm(x, sum_so_far)
            x = layer.attention(x, rows, self.rope, forward_batch)
            x, sum_so_far = layer.post_attention_layernorm(x, sum_so_far)
            x = layer.mlp(x, kinds)
        normed: torch.Tensor = self.norm(x, sum_so_far)[0]
        return normed


class OmniflowMingThinker(PlacedModel):
    """What `load_sglang_thinker` lets SGLang run: `config.thinker` are the fields of `Thinker`."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__(config.num_rows)
        thinker = msgspec.convert(config.thinker, Thinker)
        self._num_experts = thinker.num_experts
        self.model = _Decoder(thinker)
        self.lm_head = ParallelLMHead(thinker.vocab_size, thinker.hidden_size)
        self.logits_processor = LogitsProcessor(config)

    def get_input_embeddings(self) -> nn.Module:
        """The embedding of a prompt's ids; SGLang asks for it where it puts embeddings in their place."""
        embedding: nn.Module = self.model.word_embeddings
        return embedding

    @torch.no_grad()
    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: Any,
        input_embeds: torch.Tensor | None = None,
        **_: Any,
    ) -> LogitsProcessorOutput:
        """Called by SGLang with a batch that decodes, or with one that reads prompts."""
        located = self.located(positions, forward_batch)
        hidden = self.model(input_ids, positions, forward_batch, input_embeds, *located)
        return self.logits_processor(input_ids, hidden, self.lm_head, forward_batch)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Called by SGLang with all tensors of the checkpoint. Raises WeightsError where one of ours is missing."""
        load_checkpoint(self, weights, self._num_experts)


EntryClass = OmniflowMingThinker
