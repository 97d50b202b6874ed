"""Ming's talker: one step of its Qwen2 is a patch of latents (0.32 s of sound), and reads what the last one made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from actors.checkpoint import load
from actors.ming.config import Talker
from actors.ming.dit import Aggregator, DitNet
from actors.ming.weights import AGGREGATOR, BACKBONE, FLOW, part
from actors.qwen2 import KeyValues, Qwen2Decoder, step
from actors.speaker import SPEAKER_DIM
from omniflow.engine.flow import FlowHead, FlowKnobs, FlowState, FlowStep, time_grid
from omniflow.errors import ContextLengthError

SOLVER_STEPS = 10
MIN_STEPS = 4
"""Before it has taken so many, a segment does not end."""


class TalkerStream:
    """One segment: the keys and values of its prompt and its steps, and the head's state."""

    def __init__(self, past: KeyValues, state: FlowState) -> None:
        self.past = past
        self.state = state


class TalkerModel(nn.Module):
    """The backbone with its head; `embedding` and `speaker` make its inputs of ids and of a speaker's embedding."""

    def __init__(self, config: Talker) -> None:
        super().__init__()
        llm, latent_dim = config.llm_config, config.audio_tokenizer_config.dec_kwargs.latent_dim
        self._config, self.shape = llm, llm.shape
        self.embedding = nn.Embedding(llm.vocab_size, llm.hidden_size)
        self.decoder = Qwen2Decoder(llm.shape)
        self.speaker = nn.Linear(SPEAKER_DIM, llm.hidden_size)
        patch = config.ditar_config.patch_size
        self.head = FlowHead(
            DitNet(config.ditar_config, latent_dim, llm.hidden_size),
            Aggregator(config.aggregator_config, patch, latent_dim, llm.hidden_size),
            nn.Linear(llm.hidden_size, 2),
            times=time_grid(SOLVER_STEPS),
            rule="beyond",
            min_steps=MIN_STEPS,
        )

    @property
    def max_positions(self) -> int:
        """Inputs that one segment may have: those of its prompt, and one for each step but the last."""
        return self._config.max_position_embeddings

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Take the weights of a checkpoint in either layout (`actors.ming.weights`). Raises WeightsError."""
        backbone = part(weights, BACKBONE)
        name = "embed_tokens."
        embedding = {each.removeprefix(name): backbone.pop(each) for each in list(backbone) if each.startswith(name)}
        backbone.pop("lm_head.weight", None)  # the talker writes no text
        load(self.embedding, embedding, "the talker's embed_tokens")
        load(self.decoder, backbone, "the talker's backbone")
        load(self.head.net, part(weights, FLOW), "the talker's flow")
        load(self.head.feedback, part(weights, AGGREGATOR), "the talker's aggregator")
        load(self.head.stop, part(weights, ("stop_head.",)), "the talker's stop_head")
        load(self.speaker, part(weights, ("spk_head.",)), "the talker's spk_head")

    def init(self, before: torch.Tensor | None = None) -> TalkerStream:
        """A new segment, with nothing before it or with the latents `before` [n, latent_dim] of a voice's recording."""
        state = self.head.begin(1, self.embedding.weight.device)
        if before is not None:
            history = torch.cat([state.history[0], before.to(state.history)])[len(before) :]
            state = FlowState(state.step, history[None])
        return TalkerStream(KeyValues(self._config.windows), state)

    @torch.inference_mode()
    def step(
        self, streams: Sequence[TalkerStream], inputs: Sequence[torch.Tensor], noise: torch.Tensor, knobs: FlowKnobs
    ) -> FlowStep:
        """One step of all `streams`, after the `inputs` [n, hidden] of each: its prompt's, or its last feedback.

        `noise` is [len(streams), *head.noise_shape], on any device as `knobs`. Streams may join and leave between
        steps. Raises ContextLengthError, before any has stepped, where one has no room left.
        """
        longest = max(stream.past.length + len(each) for stream, each in zip(streams, inputs, strict=True))
        if longest > self._config.max_position_embeddings:
            raise ContextLengthError(
                f"{longest} inputs in one segment; the talker takes at most {self._config.max_position_embeddings}"
            )
        hidden = torch.stack([each[-1] for each in step(self.decoder, [each.past for each in streams], inputs)])
        state = FlowState(*(torch.cat(each) for each in zip(*(stream.state for stream in streams), strict=True)))
        knobs = FlowKnobs(*(each.to(hidden.device) for each in knobs))
        given: FlowStep = self.head(hidden, noise.to(hidden.device), knobs, state)
        for number, stream in enumerate(streams):
            stream.state = FlowState(*(each[number : number + 1] for each in given.state))
        return given

    def end(self, stream: TalkerStream) -> None:
        """A stream that takes no more steps leaves nothing behind."""


def load_talker(
    config: Talker, weights: Mapping[str, torch.Tensor], device: str = "cpu", dtype: torch.dtype = torch.float32
) -> TalkerModel:
    """The talker of `config` with its weights. Raises WeightsError where they do not fit."""
    with torch.device(device):
        model = TalkerModel(config)
    model.load(weights)
    return model.to(dtype).requires_grad_(False).eval()
