"""Ming's thinker on SGLang: the engine for GPUs, with the answers of the reference engine."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import msgspec

# Read by SGLang when it chooses experts: its own kernel, in Triton; FlashInfer's would be compiled on first use.
os.environ.setdefault("SGLANG_OPT_USE_JIT_KERNEL_GROUPED_TOPK", "1")

from actors.ming.config import Thinker
from omniflow.engine.sglang import SGLangEngine, load_engine
from omniflow.engine.sglang_registry import register
from omniflow.errors import StartError


def load_sglang_thinker(folder: Path, *, max_running: int = 8, **settings: Any) -> SGLangEngine:
    """An engine on the thinker of the checkpoint in `folder`; call it in the thread that will call `step`.

    Its requests may have `places` and `kinds` (`actors.ming.prompt.places`, TEXT, IMAGE, AUDIO). `settings` are those
    of `omniflow.engine.sglang.load_engine`; `dtype` auto is bfloat16 where the checkpoint does not say. Of its
    `prompt_graphs` a batch with an image or audio in it has none. Raises WeightsError.
    """
    register("actors.ming.sglang_model")
    with tempfile.TemporaryDirectory() as shown:
        show_thinker(folder, Path(shown), max_running + 1)
        return load_engine(Path(shown), max_running=max_running, **settings)


def show_thinker(folder: Path, shown: Path, num_rows: int) -> None:
    """Fill `shown` with the checkpoint in `folder` as SGLang can read it: a config of a kind that it knows, links."""
    thinker = Thinker.load(folder)
    if thinker.num_experts_per_tok < 2:
        raise StartError("SGLang's gates need 2 experts per token at least; this thinker has 1")
    whole = json.loads((folder / "config.json").read_bytes())
    config = {
        "architectures": ["OmniflowMingThinker"],
        # A decoder whose sizes have the usual names; what is not usual is in `thinker`.
        "model_type": "llama",
        "vocab_size": thinker.vocab_size,
        "hidden_size": thinker.hidden_size,
        "intermediate_size": thinker.intermediate_size,
        "num_hidden_layers": thinker.num_hidden_layers,
        "num_attention_heads": thinker.num_attention_heads,
        "num_key_value_heads": thinker.num_key_value_heads,
        "head_dim": thinker.dim,
        "max_position_embeddings": thinker.max_position_embeddings,
        "tie_word_embeddings": False,
        "torch_dtype": whole.get("torch_dtype") or whole.get("dtype") or "bfloat16",
        "thinker": msgspec.to_builtins(thinker),
        "num_rows": num_rows,
    }
    (shown / "config.json").write_text(json.dumps(config))
    for file in (*folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json")):
        (shown / file.name).symlink_to(file.resolve())
