"""What SGLang reads from the environment while it is imported. Whoever imports some of it imports this before."""

from __future__ import annotations

import os

import torch

# Logprobs are the model's own, before temperature, as the other engine gives them.
os.environ.setdefault("SGLANG_RETURN_ORIGINAL_LOGPROB", "1")
# Read by Triton: float32 is multiplied in three parts, 1e-6 from exact; its default is one part, 5e-4.
os.environ.setdefault("TRITON_F32_DEFAULT", "tf32x3")
# A ring with a name in /dev/shm, which nothing here reads: after kill -9 it would stay.
os.environ.setdefault("SGLANG_USE_MESSAGE_QUEUE_BROADCASTER", "0")
# It would not start where other stages have taken more of one GPU than of another; here each has its budget.
os.environ.setdefault("SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK", "0")
if not torch.cuda.is_available():
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
