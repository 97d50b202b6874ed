"""SGLang's scheduler, held in this process and stepped by its owner.

No socket and no child process: what SGLang would send is put into a list (`sglang_outbox.py`).
"""

from __future__ import annotations

import contextlib
import threading
from array import array
from collections import deque
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

import omniflow.engine.sglang_environment  # noqa: F401 - before SGLang

# isort: split
from sglang.srt.layers.moe.fused_moe_native import fused_moe_forward_native
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
from sglang.srt.managers.embed_types import PositionalEmbeds
from sglang.srt.managers.io_struct import AbortReq, TokenizedGenerateReqInput
from sglang.srt.managers.scheduler import DynamicGradMode, Scheduler
from sglang.srt.sampling.sampling_params import SamplingParams

from omniflow.engine.places import PLAIN
from omniflow.engine.sglang_models.placed import PlacedModel
from omniflow.engine.sglang_outbox import Aside, Outbox, Progress, spans, taken

if TYPE_CHECKING:
    from omniflow.engine.base import EngineRequest


class SteppedScheduler(Scheduler):  # type: ignore[misc]
    """SGLang's scheduler without its sockets, one batch a `step`.

    With overlap (GPUs) a step launches a batch and then hands out the results of the one before it, so that the device
    does not wait for Python.
    """

    running_batch: Any
    last_batch: Any

    def init_ipc_channels(self, port_args: Any) -> None:
        self.outbox = Outbox()
        self.ipc_channels = SimpleNamespace(
            recv_from_tokenizer=None,
            recv_from_rpc=None,
            send_to_tokenizer=self.outbox,
            send_to_detokenizer=self.outbox,
            send_metrics_from_scheduler=None,
        )
        self._submitted: list[TokenizedGenerateReqInput] = []
        self.load_snapshot_writer = None
        self.recv_from_tokenizer = None

    def init_output_streamer(self) -> None:
        self.output_streamer = self.outbox

    @property
    def model(self) -> Any:
        """The model that it runs."""
        return self.tp_worker.model_runner.model

    @property
    def knows_kinds(self) -> bool:
        """True where its model takes inputs of several kinds, at places."""
        return isinstance(self.model, PlacedModel)

    def init_all_cuda_graphs(self) -> None:
        model = self.model
        self._asks_hidden = False
        for name, child in model.named_children():
            if name == "logits_processor":
                child.register_forward_hook(self._show_hidden)
        if self.model_config.dtype == torch.float32 and torch.cuda.is_available():
            _use_plain_operators(model)
        super().init_all_cuda_graphs()

    def begin(self) -> None:
        """What SGLang does before its own loop; call it once, in the thread that will call `step`."""
        self.result_queue: deque[tuple[Any, Any]] = deque()
        self.model_config.hf_eos_token_id = set()  # a request says itself which tokens end it
        if self.device != "cpu":
            self.schedule_stream = self.device_module.Stream(priority=0)
            while self.schedule_stream.cuda_stream == self.forward_stream.cuda_stream:  # from a pool of 32
                self.schedule_stream = self.device_module.Stream(priority=0)
            self._war_barrier_enabled = True
        self.step_here()

    def step_here(self) -> None:
        """Let it be the calling thread that calls `step`: on a GPU its work goes to our stream from now on."""
        self._thread = threading.get_ident()
        if self.device != "cpu":
            torch.cuda.set_stream(self.schedule_stream)

    def submit(
        self, rid: str, request: EngineRequest, way: SamplingParams, aside: Aside, extra_key: str | None = None
    ) -> None:
        """Queue `request` as `rid`, its tokens drawn as `way` says. `extra_key` keeps it apart in the prefix cache.

        What comes before a step is read by it at once, as in SGLang's own loop: 64 one by one take 0.3 ms more, of 2.8.
        """
        way.normalize(None)
        top, embeds = request.sampling.top_logprobs, request.embeds
        asked = TokenizedGenerateReqInput(
            rid=rid,
            input_text=None,
            input_ids=array("q", request.ids),
            input_embeds=None,
            mm_inputs=None,
            token_type_ids=None,
            sampling_params=way,
            return_logprob=top is not None,
            logprob_start_len=-1,
            top_logprobs_num=top or 0,
            token_ids_logprob=None,
            stream=True,
            positional_embed_overrides=None if embeds is None else PositionalEmbeds(embeds, list(request.positions)),
            extra_key=extra_key,
        )
        self.outbox.asides[rid] = aside
        self._submitted.append(asked)

    def abort(self, rid: str) -> None:
        """Let the request end at its next step. SGLang also aborts every request whose name begins with `rid`."""
        self._take_in()
        self.process_input_requests([AbortReq(rid=rid)])

    def has_work(self) -> bool:
        """True while `step` would do something."""
        return bool(self.outbox.progress or self._submitted) or not self.is_fully_idle()

    def num_waiting(self) -> int:
        """Requests that no batch has."""
        return len(self.waiting_queue) + len(self._submitted)

    def is_reading(self) -> bool:
        """True where the batch whose results the next `step` hands out reads prompts."""
        return bool(self.result_queue) and bool(self.result_queue[0][0].forward_mode.is_extend())

    def kv_tokens(self) -> int:
        """Tokens that the KV cache holds."""
        return int(self.max_total_num_tokens)

    def kv_tokens_used(self) -> int:
        """Those of them that running requests hold; what only the prefix cache holds is free for others."""
        free = self.token_to_kv_pool_allocator.available_size() + self.tree_cache.evictable_size()
        return self.kv_tokens() - int(free)

    def run_batch(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """As SGLang's. Tells the model where inputs of prompts are, and takes hidden states before others follow."""
        asides = [self.outbox.asides.get(req.rid) for req in batch.reqs]
        self._asks_hidden = any(aside is not None and aside.next_hidden is not None for aside in asides)
        if batch.forward_mode.is_decode():
            # Those of its prompts: SGLang 0.5.17 leaves them, and then runs no CUDA graph as long as the batch lives.
            batch.replace_embeds = batch.replace_positions = None
        elif self.knows_kinds:
            self._read_places(batch, asides)
        result = super().run_batch(batch, *args, **kwargs)
        result.hidden = []
        if self._asks_hidden:
            with self.forward_stream_ctx if self.enable_overlap else contextlib.nullcontext():
                result.hidden = taken(result.logits_output.hidden_states, batch, asides)
                result.hidden_taken = self.forward_stream.record_event() if self.enable_overlap else None
        return result

    def _read_places(self, batch: Any, asides: list[Aside | None]) -> None:
        rows, places = batch.req_pool_indices_cpu.tolist(), [aside.places if aside else PLAIN for aside in asides]
        told = [(row, each, *span) for row, each, span in zip(rows, places, spans(batch), strict=True)]
        for tensor in self.model.read(told):
            if self.enable_overlap:
                tensor.record_stream(self.forward_stream)
        if not self.model.is_plain and batch.replace_embeds is None:
            # A graph has no places and kinds. SGLang replays none where a batch has embeddings, so it has 0 of them.
            batch.replace_embeds = torch.empty(0, self.model_config.hidden_size, device=self.device)
            batch.replace_positions = torch.empty(0, dtype=torch.int64, device=self.device)

    def process_batch_result(self, batch: Any, result: Any) -> None:
        """As SGLang's; what it hands out has hidden states."""
        if result.hidden and self.enable_overlap:
            result.hidden_taken.synchronize()
        for aside, hidden in result.hidden:
            aside.hidden.append(hidden)
        super().process_batch_result(batch, result)

    def _show_hidden(self, processor: torch.nn.Module, given: tuple[Any, ...], output: Any) -> None:
        """Called by SGLang's maker of logits: lets what it has read come out with them. CUDA graphs hold it anyway."""
        _, hidden, _, batch, *_ = given
        if self._asks_hidden or batch.forward_mode.is_decode():
            output.hidden_states = hidden

    @DynamicGradMode()  # type: ignore[untyped-decorator]
    def step(self) -> list[Progress]:
        """Run one batch; what requests got by it, or by the batch before it."""
        if threading.get_ident() != self._thread:
            # Its work would go to another stream, for which that of the model does not wait.
            raise RuntimeError("an engine is stepped by the thread that has built it")
        self._take_in()
        if _needs_last_tokens(self.running_batch) or _needs_last_tokens(self.last_batch):
            self._process_pending()
        plan = self.get_next_batch_to_run(running_batch=self.running_batch, last_batch=self.last_batch)
        self.running_batch, batch = plan.running_batch, plan.batch_to_run
        if self.enable_overlap:
            self._step_overlapped(batch)
        elif batch:
            self.process_batch_result(batch, self.run_batch(batch))
        self.last_batch = batch
        if self.is_reading():  # a long prompt takes 50 to 300 ms, and its results are those of no other
            self.outbox.tell(self.running_batch.reqs)
        self._drop_taken_back()
        if batch is None:
            self.on_idle()  # raises where a KV slot was lost
        progress, self.outbox.progress = self.outbox.progress, []
        return progress

    def _take_in(self) -> None:
        if self._submitted:
            submitted, self._submitted = self._submitted, []
            self.process_input_requests(submitted)

    def _add_request_to_queue(self, req: Any, is_retracted: bool = False) -> None:
        """As SGLang's, with our grammars. Whose memory is taken for others has got all its tokens: it may wait long."""
        if is_retracted:
            self.outbox.tell([req])
        else:
            req.grammar = self.outbox.asides[req.rid].grammar
        super()._add_request_to_queue(req, is_retracted)

    def _drop_taken_back(self) -> None:
        """End those that were aborted and then lost their memory to others: SGLang would wait for room to read them
        again before it does.
        """
        for req in [req for req in self.waiting_queue if req.to_finish is not None]:
            self.abort_request(AbortReq(rid=req.rid))

    def _step_overlapped(self, batch: Any) -> None:
        if self.result_queue and self.is_disable_overlap_for_batch(batch, last_batch=self.last_batch):
            self._process_pending()
        before, result = len(self.result_queue), None
        if batch:
            result = self.run_batch(batch)
            self._apply_war_barrier()
            self.result_queue.append((batch.copy(), result))
        if before:
            self._process_pending()
        self.launch_batch_sample_if_needed(result, batch)

    def _process_pending(self) -> None:
        """Hand out the results of the batch before, if that has not been done."""
        if self.result_queue:
            self.process_batch_result(*self.result_queue.popleft())


def _needs_last_tokens(batch: Any) -> bool:
    """Whether a request in `batch` has penalties: with overlap SGLang would count each of its tokens a step late."""
    info = batch.sampling_info if batch is not None else None
    penalties = info.penalizer_orchestrator if info is not None else None
    return penalties is not None and bool(penalties.is_required)


def _use_plain_operators(model: torch.nn.Module) -> None:
    """Let `model` run in float32 on a GPU: SGLang's own kernels for norms, rotations and gates know half precision."""
    for module in model.modules():
        if "_forward_method" in vars(module):
            module._forward_method = module.forward_native
        if isinstance(module, UnquantizedFusedMoEMethod):
            # Its plain way counts on the CPU what goes where, which no CUDA graph can hold; this one copies weights.
            module._forward_method = fused_moe_forward_native
        if "k_norm" in dict(module.named_children()):
            # Equal numbers would choose a kernel that norms both at once; this is the same number in float32.
            module.k_norm.variance_epsilon *= 1 + 1e-12  # type: ignore[union-attr, operator]
