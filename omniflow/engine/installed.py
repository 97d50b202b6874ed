"""What an engine needs and is not installed here. Imports none of it."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path


def torch_without_cuda() -> str | None:
    """Why torch cannot use a GPU here, as far as what is installed tells; None where it can."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return "torch is not installed"
    if re.search(r"^cuda[^=]*= *None", (Path(torch.origin).parent / "version.py").read_text(), re.MULTILINE):
        return "torch is built without CUDA"
    return None


def lacks_cuda(device: str) -> str | None:
    """What `Actor.lacks` says of a model of torch on `device`."""
    why = None if device == "cpu" else torch_without_cuda()
    if why is None:
        return None
    return f"device={device!r} needs torch for GPUs, and {why} here; install torch from PyPI, in a new environment"


def lacks_sglang() -> str | None:
    """What `Actor.lacks` says of an engine on SGLang."""
    if importlib.util.find_spec("sglang") is not None:
        return None
    return "engine='sglang' needs SGLang, which is not installed here: `pip install 'omniflow[sglang]'` (docs/gpu.md)"
