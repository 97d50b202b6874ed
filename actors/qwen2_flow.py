"""Qwen2 with a flow head: one step of it is a patch of latents, and reads what the last one made."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from actors.qwen2 import KeyValues, Qwen2Decoder, step
from omniflow.engine.decoder import DecoderShape
from omniflow.engine.flow import FlowHead, FlowKnobs, FlowState, FlowStep
from omniflow.errors import ContextLengthError


class FlowStream:
    """One segment: the keys and values of its prompt and its steps, and the head's state."""

    def __init__(self, past: KeyValues, state: FlowState) -> None:
        self.past = past
        self.state = state


class Qwen2Flow(nn.Module):
    """A decoder of `shape` with `head`, for `FlowEngine`, and for `SlottedFlow` where all of its layers see all.

    `embedding` makes its inputs of ids; `windows` says how much each layer sees (None: all).
    """

    def __init__(self, shape: DecoderShape, windows: Sequence[int | None], vocab_size: int, head: FlowHead) -> None:
        super().__init__()
        self.shape, self._windows = shape, windows
        self.embedding = nn.Embedding(vocab_size, shape.hidden_size)
        self.decoder = Qwen2Decoder(shape)
        self.head = head

    @property
    def max_positions(self) -> int:
        """Inputs that one segment may have: those of its prompt, and one for each step but the last."""
        return self.shape.max_position_embeddings

    def init(self, before: torch.Tensor | None = None) -> FlowStream:
        """A new segment, with nothing before it or with the latents `before` [n, latent_dim] of a voice's recording."""
        state = self.head.begin(1, self.embedding.weight.device)
        if before is not None:
            history = torch.cat([state.history[0], before.to(state.history)])[len(before) :]
            state = FlowState(state.step, history[None])
        return FlowStream(KeyValues(self._windows), state)

    @torch.inference_mode()
    def step(
        self, streams: Sequence[FlowStream], inputs: Sequence[torch.Tensor], noise: torch.Tensor, knobs: FlowKnobs
    ) -> FlowStep:
        """One step of all `streams`, after the `inputs` [n, hidden] of each: its prompt's, or its last feedback.

        `noise` is [len(streams), *head.noise_shape], on any device as `knobs`. Streams may join and leave between
        steps. Raises ContextLengthError, before any has stepped, where one has no room left.
        """
        longest = max(stream.past.length + len(each) for stream, each in zip(streams, inputs, strict=True))
        if longest > self.max_positions:
            raise ContextLengthError(f"{longest} inputs in one segment; the talker takes at most {self.max_positions}")
        hidden = torch.stack([each[-1] for each in step(self.decoder, [each.past for each in streams], inputs)])
        state = FlowState(*(torch.cat(each) for each in zip(*(stream.state for stream in streams), strict=True)))
        knobs = FlowKnobs(*(each.to(hidden.device) for each in knobs))
        given: FlowStep = self.head(hidden, noise.to(hidden.device), knobs, state)
        for number, stream in enumerate(streams):
            stream.state = FlowState(*(each[number : number + 1] for each in given.state))
        return given

    def end(self, stream: FlowStream) -> None:
        """A stream that takes no more steps leaves nothing behind."""
