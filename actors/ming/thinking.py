"""Ming's thinker as a stage: it answers what it reads, hears and sees, token by token."""

from __future__ import annotations

from pathlib import Path

from actors.stage import GATHER_S
from actors.thinker import Thinker
from omniflow.engine.base import Engine


class MingThinker(Thinker):
    """Ming-flash-omni's thinker (BailingMoeV2): a `Thinker` whose prompts have rows of sound and sight.

    `model` is a whole checkpoint, of which the other parts are left where they are. The engine transformers is the
    reference; it takes the weights in float32, 4 bytes each. SGLang reads short texts as CUDA graphs.
    """

    preload = ("torch", "omniflow.engine.transformers", "actors.ming.thinker_model")

    def load_engine(self, folder: Path) -> Engine:
        decode, grammars = self._tokenizer.decode, self._grammars
        if self._engine == "sglang":
            from actors.ming.thinker_sglang import load_sglang_thinker

            return load_sglang_thinker(
                folder,
                decode=decode,
                grammars=grammars,
                device=self._device,
                threads=self._threads,
                gather_s=GATHER_S,
                ranks=self.ranks,
                **self._limits,
                **self._sglang,
            )
        import torch

        from actors.ming.thinker_model import load_thinker
        from omniflow.engine.transformers import TransformersEngine

        torch.set_num_threads(self._threads)
        model = load_thinker(folder, self._device)
        return TransformersEngine(model, decode=decode, grammars=grammars, media=True, **self._limits)
