"""Ming's thinker as a stage: it answers what it reads, hears and sees, token by token."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from actors.thinker import Thinker
from omniflow.engine.base import Engine


class MingThinker(Thinker):
    """Ming-flash-omni's thinker (BailingMoeV2): a `Thinker` whose prompts have rows of sound and sight.

    `model` is a whole checkpoint, of which the other parts are left where they are. The defaults of `temperature`,
    `top_p` and `max_tokens` are those that vllm-omni serves it with. The engine transformers is the reference; it takes
    the weights in float32, 4 bytes each.
    """

    preload = ("torch", "omniflow.engine.transformers", "actors.ming.thinker_weights")

    def __init__(
        self,
        *,
        model: str,
        device: str = "cpu",
        threads: int = 1,
        max_tokens: int = 2048,
        temperature: float = 0.4,
        top_p: float = 0.9,
        top_k: int = 0,
        max_running: int = 8,
        max_waiting: int = 64,
        kv_tokens: int = 16384,
        engine: Literal["transformers", "sglang"] = "transformers",
        dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
        deterministic: bool = False,
    ) -> None:
        super().__init__(
            model=model,
            device=device,
            threads=threads,
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            max_running=max_running,
            max_waiting=max_waiting,
            kv_tokens=kv_tokens,
            engine=engine,
            dtype=dtype,
            deterministic=deterministic,
        )

    def _build(self, folder: Path) -> Engine:
        decode, grammars = self._tokenizer.decode, self._grammars
        if self._engine == "sglang":
            from actors.ming.thinker_sglang import load_sglang_thinker

            return load_sglang_thinker(
                folder,
                decode=decode,
                grammars=grammars,
                device=self._device,
                threads=self._threads,
                ranks=self.ranks,
                **self._limits,
                **self._sglang,
            )
        import torch

        from actors.ming.thinker_weights import load_thinker
        from omniflow.engine.transformers import TransformersEngine

        torch.set_num_threads(self._threads)
        model = load_thinker(folder, self._device)
        return TransformersEngine(model, decode=decode, grammars=grammars, media=True, **self._limits)
