"""A model for SGLang whose step makes a frame: backbone, frame head and feedback, all in one captured CUDA graph.

SGLang gives every request a row of its pools; all that a request carries from step to step lies in buffers by that row,
at addresses that never change. So requests join and leave at any step, and nothing is copied between steps. Row 0 is
what SGLang pads batches with. The token that SGLang sees is 1 where the head says stop, else 0.
"""

from __future__ import annotations

import copy
from contextvars import ContextVar
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.models.llama import LlamaModel
from sglang.srt.models.qwen3 import Qwen3Model
from sglang.srt.models.qwen3_moe import Qwen3MoeModel
from torch import nn

from omniflow.engine.heads import STATE_SIZE, FrameHead, Knobs

GO, STOP = 0, 1
"""The tokens that SGLang sees."""
BACKBONES: dict[str, Any] = {"llama": LlamaModel, "qwen3": Qwen3Model, "qwen3_moe": Qwen3MoeModel}


class FrameSetup:
    """What a configuration file cannot say: the head, how many rows there are, and how many steps a row can take."""

    def __init__(self, head: FrameHead, num_rows: int, max_steps: int) -> None:
        self.head = head
        self.num_rows = num_rows
        self.max_steps = max_steps


SETUP: ContextVar[FrameSetup] = ContextVar("frame_setup")
"""Set by whoever builds the scheduler, around it: SGLang makes the model from its configuration alone."""


class OmniflowFrameModel(nn.Module):
    """See the module's docstring. `config.model_type` says which of SGLang's backbones it has."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__()
        setup = SETUP.get()
        self.model: Any = BACKBONES[config.model_type](config, quant_config=quant_config)
        weight = self.model.embed_tokens.weight
        self.head = copy.deepcopy(setup.head).to(weight.device, weight.dtype)
        self.max_steps = setup.max_steps
        rows, codes, device = setup.num_rows, setup.head.num_codes, weight.device
        self.noise = torch.full((rows, setup.max_steps, codes), 0.5, dtype=torch.float32, device=device)
        self.knobs = Knobs(
            torch.zeros(rows, codes, dtype=torch.float32, device=device),
            torch.zeros(rows, codes, dtype=torch.int64, device=device),
            torch.ones(rows, codes, dtype=torch.float32, device=device),
        )
        self.state = torch.zeros(rows, STATE_SIZE, dtype=torch.int64, device=device)
        self.feedback = torch.zeros(rows, config.hidden_size, dtype=weight.dtype, device=device)
        self.codes = torch.zeros(rows, codes, dtype=torch.int64, device=device)

    def get_input_embeddings(self) -> nn.Module:
        """The embedding of a prompt's ids; SGLang asks for it where it puts embeddings in their place."""
        embedding: nn.Module = self.model.embed_tokens
        return embedding

    def enter(self, row: int, noise: torch.Tensor, knobs: Knobs) -> None:
        """A request has `row` from now on: `noise` float32 [n, num_codes], `knobs` [num_codes] each."""
        self.noise[row, : len(noise)] = noise.to(self.noise.device, non_blocking=True)
        for ours, theirs in zip(self.knobs, knobs, strict=True):
            ours[row] = theirs.to(ours.device, non_blocking=True)

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
        rows = forward_batch.req_pool_indices
        if forward_batch.forward_mode.is_decode():
            state = self.state[rows]
            hidden = self.model(input_ids, positions, forward_batch, self.feedback[rows])
        else:
            state = self.state.new_zeros(len(rows), STATE_SIZE)
            hidden = self.model(input_ids, positions, forward_batch, input_embeds)
            hidden = hidden[forward_batch.extend_seq_lens.cumsum(0) - 1]
        noise = self.noise[rows, state[:, 0].clamp(max=self.max_steps - 1)]
        step = self.head(hidden, noise, Knobs(*(each[rows] for each in self.knobs)), state)
        self.state.index_copy_(0, rows, step.state)
        self.feedback.index_copy_(0, rows, step.feedback.to(self.feedback.dtype))
        self.codes.index_copy_(0, rows, step.codes)
        stopped = step.stopped.float()
        return LogitsProcessorOutput(next_token_logits=torch.stack([1 - stopped, stopped], dim=1))

    def load_weights(self, weights: Any) -> None:
        """Nothing: whoever builds the engine copies the weights in, see `load`."""

    def load(self, name: str, value: torch.Tensor) -> None:
        """Put `value` in the place of the parameter `name`, which CUDA graphs already point at; KeyError if unknown."""
        parameter = self.get_parameter(name)
        parameter.data[: len(value)].copy_(value)  # SGLang pads the vocabulary to a multiple of 64


EntryClass = OmniflowFrameModel
