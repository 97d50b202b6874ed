"""Ming's talker: one step of its Qwen2 is a patch of latents (0.32 s of sound), and reads what the last one made."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from actors.checkpoint import load
from actors.ming.config import Talker
from actors.ming.dit import Aggregator, DitNet
from actors.ming.weights import AGGREGATOR, BACKBONE, FLOW, part
from actors.qwen2_flow import Qwen2Flow
from actors.speaker import SPEAKER_DIM
from omniflow.engine.flow import FlowHead, time_grid


class TalkerModel(Qwen2Flow):
    """The backbone with its head; `speaker` makes an input of a speaker's embedding, where the talker is told one."""

    def __init__(self, config: Talker) -> None:
        llm, latent_dim = config.llm_config, config.audio_tokenizer_config.dec_kwargs.latent_dim
        patch, manner = config.ditar_config.patch_size, config.manner
        head = FlowHead(
            DitNet(config.ditar_config, latent_dim, llm.hidden_size),
            Aggregator(config.aggregator_config, patch, latent_dim, llm.hidden_size),
            nn.Linear(llm.hidden_size, 2),
            times=time_grid(manner.solver_steps),
            rule="beyond",
            min_steps=manner.min_steps,
        )
        super().__init__(llm.shape, llm.windows, llm.vocab_size, head)
        self.speaker = nn.Linear(SPEAKER_DIM, llm.hidden_size) if manner.in_chat else nn.Identity()

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


def load_talker(
    config: Talker, weights: Mapping[str, torch.Tensor], device: str = "cpu", dtype: torch.dtype = torch.float32
) -> TalkerModel:
    """The talker of `config` with its weights. Raises WeightsError where they do not fit."""
    with torch.device(device):
        model = TalkerModel(config)
    model.load(weights)
    return model.to(dtype).requires_grad_(False).eval()
