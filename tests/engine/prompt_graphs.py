"""SGLang's runner of CUDA graphs of prompts, also where there is no GPU.

There it prepares batches as ever, padded and in buffers that do not move; what it would capture is kept with what it
was called with, and what it would replay is called with that again.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from omniflow.engine.sglang import SGLangEngine


def graphs_of(engine: SGLangEngine, sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The runner of the prompts of `engine`, which on a GPU has captured already; elsewhere one for `sizes`."""
    runner = engine._scheduler.tp_worker.model_runner
    if torch.cuda.is_available():
        return runner.prefill_cuda_graph_runner
    from sglang.srt.model_executor.cuda_graph_config import Backend
    from sglang.srt.model_executor.model_runner_components import cuda_graph_setup
    from sglang.srt.runtime_context import get_exec

    settings = get_exec().graph.cuda_graph_config.prefill
    monkeypatch.setattr(settings, "backend", Backend.BREAKABLE)
    monkeypatch.setattr(settings, "bs", sizes)
    monkeypatch.setattr(cuda_graph_setup, "PrefillCudaGraphRunner", _runner(monkeypatch))
    made = cuda_graph_setup.capture_prefill_graph(model_runner=runner, eager_runner=runner.eager_runner).runner
    monkeypatch.setattr(runner, "prefill_cuda_graph_runner", made)
    return made


def read_by(runner: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Fills with the inputs of each batch that `runner` reads by a graph, from now on."""
    read, execute = list[int](), runner.execute

    def counted(batch: Any, **more: Any) -> Any:
        read.append(len(batch.input_ids))
        return execute(batch, **more)

    monkeypatch.setattr(runner, "execute", counted)
    return read


def _runner(monkeypatch: pytest.MonkeyPatch) -> type:
    from sglang.srt.layers import radix_attention
    from sglang.srt.model_executor.runner import prefill_cuda_graph_runner as theirs
    from sglang.srt.model_executor.runner_backend.breakable_cuda_graph_backend import BreakableCudaGraphBackend

    class Called(BreakableCudaGraphBackend):  # type: ignore[misc]
        def __init__(self, runner: Any) -> None:
            self._runner = runner
            self._kept: dict[Any, tuple[tuple[Any, ...], dict[str, Any]]] = {}

        def capture_one(self, shape_key: Any, forward_fn: Any, **_: Any) -> None:
            with self._keeping(shape_key):
                forward_fn()

        @contextmanager
        def _keeping(self, shape_key: Any) -> Iterator[None]:
            model = self._runner.layer_model
            forward = model.forward

            def kept(*given: Any, **more: Any) -> Any:
                self._kept[shape_key] = (given, more)
                return forward(*given, **more)

            model.forward = kept
            yield
            del model.forward

        def replay(self, shape_key: Any, static_forward_batch: Any, **_: Any) -> Any:
            given, more = self._kept[shape_key]
            model = self._runner.layer_model
            return type(model).forward(model, *given, **more)

    class Runner(theirs.PrefillCudaGraphRunner):  # type: ignore[misc]
        def capture(self) -> None:
            with self.backend.replay_session():
                for size in self.capture_num_tokens:
                    self.capture_one_shape(size)

    monkeypatch.setattr(theirs, "resolve_prefill_backend", Called)
    attend = vars(radix_attention).get("_unified_attention_with_output_impl")
    if attend is not None:  # 0.5.17 has registered it for GPUs alone
        plain = functools.partial(attend, return_lse=False)
        monkeypatch.setattr(radix_attention, "breakable_unified_attention_with_output", plain)
    return Runner
