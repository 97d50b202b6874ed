"""Frame models on SGLang: backbone step, frame head and feedback under one CUDA graph; codes stay on the GPU.

The counterpart of `engine/frames.py`, with the same heads and the same noise: where the arithmetic is the same, so are
the codes.
"""

from __future__ import annotations

import json
import secrets
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

import omniflow.engine.sglang_environment  # noqa: F401 - before SGLang

# isort: split
from sglang.srt.sampling.sampling_params import SamplingParams

from omniflow.engine.base import EngineOutput, EngineRequest
from omniflow.engine.checks import refuse_text
from omniflow.engine.decoder import DecoderLayer, DecoderShape
from omniflow.engine.frames import FrameModel, knobs_of
from omniflow.engine.heads import FrameHead, frame_noise
from omniflow.engine.queue import RunQueue
from omniflow.engine.sglang import Finish, Running, SGLangEngine, error_of, finish_reason
from omniflow.engine.sglang_grammar import Held
from omniflow.engine.sglang_models.frame_model import SETUP, STOP, FrameSetup, OmniflowFrameModel
from omniflow.engine.sglang_outbox import Aside, Entrance, Progress
from omniflow.engine.sglang_registry import register
from omniflow.engine.sglang_scheduler import SteppedScheduler
from omniflow.engine.sglang_settings import server_settings
from omniflow.engine.sglang_start import build
from omniflow.engine.stats import EngineStats

MAX_STEPS = 4096
"""Of one request. Its noise for all of them lies on the GPU: 256 KiB of 16 codes."""
OVERSHOOT = 2
"""KV slots that a request can hold beyond its last step: a batch is launched before the one before it is looked at."""


class _Queued(NamedTuple):
    """A request, and the KV slots that it may come to hold."""

    id: str
    capacity: int
    request: EngineRequest


class FrameScheduler(SteppedScheduler):
    """A scheduler whose model makes frames; a progress carries those of its step."""

    @property
    def model(self) -> OmniflowFrameModel:
        """The model that it runs."""
        model: OmniflowFrameModel = self.tp_worker.model_runner.model
        return model

    def run_batch(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """As SGLang's, then takes the codes of the batch before the next one overwrites them."""
        if batch.forward_mode.is_extend():
            for req, row in zip(batch.reqs, batch.req_pool_indices_cpu.tolist(), strict=True):
                entrance = self.outbox.asides[req.rid].entrance
                assert entrance is not None
                self.model.enter(row, *entrance)
        result = super().run_batch(batch, *args, **kwargs)
        if not self.enable_overlap:
            result.frames = self.model.codes[batch.req_pool_indices]
            return result
        with self.forward_stream_ctx:
            result.frames = self.model.codes[batch.req_pool_indices]
            result.frames_taken = self.forward_stream.record_event()
        return result

    def process_batch_result(self, batch: Any, result: Any) -> None:
        """As SGLang's; what it hands out has frames."""
        if self.enable_overlap:
            result.frames_taken.synchronize()
            # Whoever reads them does so in the default stream: their memory is not used again before it has.
            result.frames.record_stream(torch.cuda.default_stream(result.frames.device))
        self.outbox.frames = result.frames
        super().process_batch_result(batch, result)


class SGLangFrameEngine(SGLangEngine):
    """`Engine` whose outputs have `frames` int64 [1, num_codes], on its device; see `engine/frames.py` for requests.

    Requests are admitted by what they may come to hold: SGLang would otherwise take one's KV cache away and read it
    anew as tokens, which frames are not. `deterministic` makes the codes of a seed the same in any batch, in low
    precision too.
    """

    _scheduler: FrameScheduler

    def __init__(
        self, scheduler: FrameScheduler, *, max_running: int, max_waiting: int = 64, max_steps: int = MAX_STEPS
    ) -> None:
        super().__init__(scheduler, max_waiting=max_waiting, deterministic=True)
        self._max_steps = max_steps
        self._num_codes = scheduler.model.head.num_codes
        self._queue: RunQueue[_Queued] = RunQueue(
            max_running=max_running, max_waiting=max_waiting, kv_tokens=scheduler.kv_tokens()
        )
        """Those that run are those that SGLang has."""

    def step(self) -> list[EngineOutput]:
        """Run one batch. On a GPU it returns what the batch before it gave."""
        outputs = [EngineOutput(queued.id, (), "abort") for queued in self._queue.drop_aborted()]
        for queued in self._queue.admit():
            super()._hand_over(queued.request, None)
        return outputs + super().step()

    def abort(self, request_id: str) -> None:
        """Drop a request at the next step; unknown ids are ignored."""
        if request_id in self._running or request_id in self._open:
            super().abort(request_id)
        else:
            self._queue.abort(request_id)

    def has_work(self) -> bool:
        """True while `step` would do something; an open request that waits for input is no work."""
        return super().has_work() or self._queue.has_work()

    def stats(self) -> EngineStats:
        """Counts for metrics and admission; KV tokens are those that running requests may come to hold."""
        return msgspec.structs.replace(self._queue.stats(), num_waiting=self._num_waiting())

    def close(self) -> None:
        """Drop all requests and the model."""
        self._queue.clear()
        super().close()

    @property
    def model(self) -> OmniflowFrameModel:
        """The model that SGLang runs."""
        return self._scheduler.model

    def _num_waiting(self) -> int:
        return self._queue.stats().num_waiting + len(self._open)

    def _is_known(self, request_id: str) -> bool:
        return super()._is_known(request_id) or self._queue.find(request_id) is not None

    def _check(self, request: EngineRequest) -> None:
        refuse_text(request)
        super()._check(request)

    def _hand_over(self, request: EngineRequest, held: Held | None) -> None:
        """Queue it: a step lets SGLang have it once there is room."""
        most = self._scheduler.max_req_len - 1  # what SGLang lets it grow to: 4 more than it takes of a prompt
        capacity = min(len(request.ids) + self._steps(request), most) + OVERSHOOT
        self._queue.wait(_Queued(request.id, capacity, request), request.urgent)

    def _steps(self, request: EngineRequest) -> int:
        return min(request.sampling.max_tokens, self._max_steps)

    def _entrance(self, request: EngineRequest) -> Entrance:
        seed = secrets.randbits(64) if request.sampling.seed is None else request.sampling.seed
        noise = torch.from_numpy(frame_noise(seed, 0, self._steps(request), self._num_codes))
        return Entrance(noise, knobs_of(request, self._num_codes, torch.device("cpu")))

    def _aside(self, request: EngineRequest, running: Running) -> Aside:
        aside = super()._aside(request, running)
        aside.entrance = self._entrance(request)
        return aside

    def _way(self, request: EngineRequest) -> SamplingParams:
        """The head draws; what SGLang draws of its two tokens is the likelier one."""
        return SamplingParams(max_new_tokens=self._steps(request), stop_token_ids={STOP}, temperature=0.0)

    def _output(self, progress: Progress) -> list[EngineOutput]:
        request_id = self._ids.get(progress.rid)
        if request_id is None:
            return []
        running = self._running[request_id]
        stopped = STOP in progress.ids
        reason: Finish | None = "stop" if stopped else None
        if progress.finish is not None:
            reason = reason or finish_reason(progress.finish)
            self._forget(running)
            self._queue.end(next(queued for queued in self._queue.running if queued.id == request_id))
        frames = None if stopped or not progress.ids else progress.frames
        error = error_of(running, progress) if reason == "abort" else None
        return [EngineOutput(request_id, (), reason, (), frames, error)]


def load_frame_engine(model: FrameModel, **settings: Any) -> SGLangFrameEngine:
    """An engine on a frame model whose weights are at hand; `settings` are those of `build_frame_engine`."""
    engine = build_frame_engine(_config(model.shape, model.embedding.num_embeddings), model.head, **settings)
    for name, value in _weights(model):
        engine.model.load(f"model.{name}", value)
    engine.model.head.load_state_dict(model.head.state_dict())
    return engine


def build_frame_engine(
    config: Mapping[str, Any],
    head: FrameHead,
    *,
    device: str = "gpu",
    dtype: str = "float32",
    threads: int = 1,
    max_running: int = 8,
    max_waiting: int = 64,
    kv_tokens: int = 16384,
    max_steps: int = MAX_STEPS,
    deterministic: bool = False,
    **more: Any,
) -> SGLangFrameEngine:
    """An engine on a backbone of `config` (as in a checkpoint's config.json) and `head`, with small random weights.

    `kv_tokens` bounds what all running requests may come to hold together; `more` are settings of SGLang's
    `ServerArgs`.
    """
    torch.set_num_threads(threads)
    register("omniflow.engine.sglang_models")
    # Its prompts are embeddings, which SGLang does not read as CUDA graphs.
    settings = server_settings(device, max_running, kv_tokens, deterministic, prompt_graphs=False)
    settings |= {"dtype": dtype, "load_format": "dummy", "disable_radix_cache": True}
    token = SETUP.set(FrameSetup(head, max_running + 1, max_steps))
    try:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(dict(config) | {"architectures": ["OmniflowFrameModel"]}))
            scheduler = build(FrameScheduler, settings | {"model_path": folder} | more)
    finally:
        SETUP.reset(token)
    return SGLangFrameEngine(scheduler, max_running=max_running, max_waiting=max_waiting, max_steps=max_steps)


def _config(shape: DecoderShape, vocab_size: int) -> dict[str, Any]:
    return msgspec.structs.asdict(shape) | {
        "model_type": "qwen3",
        "vocab_size": vocab_size,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
    }


def _weights(model: FrameModel) -> Iterator[tuple[str, torch.Tensor]]:
    """The backbone's weights, by the names of SGLang's Qwen3."""
    yield "embed_tokens.weight", model.embedding.weight
    yield "norm.weight", model.decoder.norm.weight
    for number, layer in enumerate(model.decoder.layers):
        assert isinstance(layer, DecoderLayer)
        prefix = f"layers.{number}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}{name}.weight", layer.get_parameter(f"{name}.weight")
        for name in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"):
            yield f"{prefix}{name}.weight", layer.get_parameter(f"{name.partition('.')[2]}.weight")
        yield f"{prefix}self_attn.q_norm.weight", layer.qk_norm[0]
        yield f"{prefix}self_attn.k_norm.weight", layer.qk_norm[-1]
