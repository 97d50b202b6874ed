"""What tells two prompts of the same tokens apart: a cache that knows prompts by their tokens needs it beside them."""

from __future__ import annotations

import hashlib

import torch

from omniflow.engine.base import EngineRequest
from omniflow.engine.places import Places


def content_key(request: EngineRequest, places: Places) -> str | None:
    """A name for what of a prompt its tokens do not tell: embeddings, places, kinds. None where they tell it all."""
    if request.embeds is None and places.plain:
        return None
    tensors = [request.embeds, *((None, None) if places.plain else (request.places, request.kinds))]
    shapes = [None if tensor is None else (str(tensor.dtype), *tensor.shape) for tensor in tensors]
    content = hashlib.sha256(repr((request.positions, shapes)).encode())
    for tensor in tensors:
        if tensor is not None:
            content.update(bytes_of(tensor))
    return content.hexdigest()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor, on the CPU, in its order."""
    plain = tensor.detach().cpu().contiguous()
    # Not by `reshape`: of one element, the stride may be any number, and stays what it was.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy().data
