"""Lets SGLang import where there is no GPU: `install()` before anything of sglang is imported, also in children.

PyTorch's builds for CPUs do not load the operators of torchvision's wheel, and SGLang's kernels exist for GPUs alone.
Both are only named while SGLang is imported; nothing of them is called for a Llama on a CPU.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any

import torch


class _Kernels(ModuleType):
    """Stands in for a module: it has every name, and calling one says what is missing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*args: object, **kwargs: object) -> None:
            raise NotImplementedError(f"{self.__name__}.{name} is not installed here")

        return missing


def install() -> None:
    """Declare what torchvision registers, and a stand-in for `sgl_kernel`."""
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    library: Any = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    kernels = _Kernels("sgl_kernel")
    kernels.__spec__ = importlib.machinery.ModuleSpec("sgl_kernel", None)
    kernels.__path__ = []
    sys.modules["sgl_kernel"] = kernels
    if importlib.util.find_spec("IPython") is None:  # two names of it are imported and never used when serving
        sys.modules["IPython"] = sys.modules["IPython.display"] = _Kernels("IPython")
    _kept.append(library)


class _Stream:
    """A CPU has done what it was told when it was told."""

    def wait_stream(self, other: _Stream) -> None:
        pass

    def record_event(self) -> _Stream:
        return self

    def synchronize(self) -> None:
        pass


def overlap(scheduler: Any) -> None:
    """Let a scheduler for CPUs, made with `disable_overlap_schedule=False`, do all in the order of GPUs: a batch is
    launched before the results of the one before it are looked at.
    """
    scheduler.schedule_stream = scheduler.forward_stream = scheduler.copy_stream = _Stream()
    scheduler._war_barrier_enabled = False


def install_where_needed() -> None:
    """`install` where SGLang can be imported and there is no GPU; before transformers is imported, which also fails."""
    if importlib.util.find_spec("sglang") is not None and not torch.cuda.is_available() and not _kept:
        install()


_kept: list[Any] = []
"""A library's declarations live as long as it does."""
