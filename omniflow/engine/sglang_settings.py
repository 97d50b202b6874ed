"""What every engine here tells SGLang."""

from __future__ import annotations

from typing import Any

from omniflow.errors import StartError

PROMPT_GRAPHS = (4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 640, 768, 1024)
"""Tokens of a batch of prompts for which there are CUDA graphs; what is in between is padded. SGLang's own list goes up
to 8,192 in 64 sizes, but from 1,024 on the GPU is busy for longer than Python takes to launch its kernels.
"""


def server_settings(
    device: str, max_running: int, kv_tokens: int, deterministic: bool, *, prompt_graphs: bool
) -> dict[str, Any]:
    """For a scheduler on `device`, by the names of SGLang's `ServerArgs`. `device` is cpu, gpu or cuda, or gpu:1.

    With `prompt_graphs` a GPU reads prompts as CUDA graphs, too, that end where attention begins. Raises StartError
    where it cannot be `deterministic`.
    """
    settings: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "grammar_backend": "none",
        "sampling_backend": "pytorch",
        "max_total_tokens": kv_tokens,
        "max_running_requests": max_running,
        "log_level": "warning",
    }
    kind, _, number = device.partition(":")
    if kind == "cpu":
        if deterministic:
            raise StartError("deterministic=true needs a GPU: SGLang draws by seed on GPUs only")
        return settings | {
            "device": "cpu",
            "attention_backend": "torch_native",
            "disable_overlap_schedule": True,
            "disable_cuda_graph": True,
        }
    return settings | {
        "device": "cuda",
        "base_gpu_id": int(number or 0),
        # FA3, SGLang's choice on Hopper, is 1.1 GB of kernels that are not always installed.
        "attention_backend": "triton",
        "enable_deterministic_inference": deterministic,
        # kv_tokens is the cap: a share of what happens to be free would differ from start to start.
        "mem_fraction_static": 0.95,
        "cuda_graph_bs_decode": graph_sizes(max_running),
        "disable_prefill_cuda_graph": not prompt_graphs,
        "cuda_graph_bs_prefill": [size for size in PROMPT_GRAPHS if size <= kv_tokens],
    }


def graph_sizes(max_running: int) -> list[int]:
    """Batch sizes with a CUDA graph of their own; a batch in between is padded to the next."""
    steps = [1, 2, 4, *range(8, max_running, 8)]
    return [size for size in steps if size < max_running] + [max_running]
