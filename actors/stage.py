"""What stages with a model share: where its weights are, the device that it runs on, the loop of its engine."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from actors.catalogue import PACKAGED
from omniflow.actor import Actor
from omniflow.engine.installed import lacks_cuda, lacks_sglang
from omniflow.engine.loop import EngineLoop
from omniflow.engine.stats import EngineStats
from omniflow.weights import Weights, resolve

GATHER_S = 0.01
"""What a GPU's engine gives faster than this travels together."""


class ModelStage(Actor, ABC):
    """A stage that reads a checkpoint: `model` is a name of `actors.catalogue`, `hf:owner/repo` or a folder."""

    def __init__(self, model: str, device: str = "cpu", threads: int = 1) -> None:
        self._weights = resolve(model, PACKAGED)
        self._device = torch_device(device)
        self._threads = threads

    @classmethod
    def lacks(cls, settings: Mapping[str, Any], device: str) -> str | None:
        """A torch that cannot use GPUs, where it is to run on one."""
        return lacks_cuda(device)

    def weights(self) -> Sequence[Weights]:
        """The checkpoint."""
        return (self._weights,)


class EngineStage(ModelStage, ABC):
    """A stage whose engine steps in a thread of its own, `_loop`, which it sets up."""

    heavy = True
    cpu_engine: ClassVar[str] = ""
    """The engine for CPUs of a stage whose setting `engine` may be sglang, too."""
    _loop: EngineLoop

    @classmethod
    def wants_process(cls, settings: Mapping[str, Any]) -> bool:
        return settings.get("engine") == "sglang"

    @classmethod
    def refuses_cpu(cls, settings: Mapping[str, Any]) -> str | None:
        why = f"engine='sglang' is for GPUs; set device='gpu', or engine={cls.cpu_engine!r}"
        return why if cls.wants_process(settings) else None

    @classmethod
    def lacks(cls, settings: Mapping[str, Any], device: str) -> str | None:
        why = lacks_sglang() if cls.wants_process(settings) else None
        return why or super().lacks(settings, device)

    def busy_s(self) -> float:
        return max(super().busy_s(), self._loop.busy_s())

    def engine_stats(self) -> EngineStats:
        return self._loop.stats

    async def close(self) -> None:
        await self._loop.close()


def torch_device(device: str) -> str:
    """A stage's `device` as torch names it in the stage's host, which sees its GPUs alone: they count from 0 there."""
    return "cpu" if device == "cpu" else "cuda"
