"""All that omniflow knows of SGLang's insides: its scheduler, held in this process and stepped by its owner.

No socket and no child process: what SGLang would send is put into a list (`sglang_outbox.py`). What differs between the
`VERSIONS` is in `_construct`. SGLang's settings and process groups are global to a process, so there is one scheduler
in a process, for the life of it.
"""

from __future__ import annotations

import contextlib
import os
import re
from array import array
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

# What is set here is read while SGLang is imported: whoever imports some of it, imports this before.
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

import sglang
import sglang.srt.managers.scheduler as sglang_scheduler
import sglang.srt.models.registry  # all models, now: errors on the way keep the frames that they passed
from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject
from sglang.srt.distributed.parallel_state import cleanup_dist_env_and_memory
from sglang.srt.layers.moe.fused_moe_native import fused_moe_forward_native
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
from sglang.srt.managers.embed_types import PositionalEmbeds
from sglang.srt.managers.io_struct import AbortReq, TokenizedGenerateReqInput
from sglang.srt.managers.scheduler import DynamicGradMode, Scheduler
from sglang.srt.runtime_context import publish
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import PortArgs, ServerArgs

from omniflow.engine.group import meet
from omniflow.engine.places import Places
from omniflow.engine.ranks import ALONE, Ranks
from omniflow.engine.sglang_models.placed import PlacedModel
from omniflow.engine.sglang_outbox import Aside, Outbox, Progress, spans, taken
from omniflow.errors import RequestError, StartError

if TYPE_CHECKING:
    from omniflow.engine.grammar import Matcher

VERSIONS = ("0.5.17", "0.5.23")
"""Of SGLang, run with this code: the oldest and the newest."""
# Its thread would end the parent of this process where a step takes too long, and never ends; our supervisor watches.
sglang_scheduler.create_scheduler_watchdog = lambda *args, **kwargs: None
_OLDEST = (0, 5, 17)
_PLAIN = Places(None, None)
_RANKS_IN_CONTEXT = (0, 5, 18)
"""From this version on the scheduler reads its rank from what was published, instead of taking it."""


class Held(BaseGrammarObject):  # type: ignore[misc]
    """The grammar of one answer, as SGLang asks for it: masks are bool [batch, vocab], True for what may not come."""

    def __init__(self, matcher: Matcher, end_ids: frozenset[int]) -> None:
        super().__init__()
        self._matcher = matcher
        self._end_ids = end_ids
        self._ends = torch.tensor(sorted(end_ids), dtype=torch.int64)
        self.error: RequestError | None = None
        """Why the answer cannot go on."""

    @property
    def ended(self) -> bool:
        """True where nothing may follow but the end."""
        return self._matcher.ended

    def accept_token(self, token: int) -> None:
        if token not in self._end_ids and not self._matcher.ended:
            with self._told():
                self._matcher.advance(token)
        if self.error is not None:
            raise ValueError("the answer cannot go on")  # SGLang then ends this request, and only it

    def allocate_vocab_mask(self, vocab_size: int, batch_size: int, device: Any) -> torch.Tensor:
        return torch.zeros(batch_size, vocab_size, dtype=torch.bool)

    def fill_vocab_mask(self, vocab_mask: torch.Tensor, idx: int) -> None:
        if self._matcher.ended:
            vocab_mask[idx] = True
            vocab_mask[idx, self._ends] = False
            return
        with self._told():
            vocab_mask[idx] = ~self._matcher.allowed(self._ends)

    @staticmethod
    def move_vocab_mask(vocab_mask: torch.Tensor, device: Any) -> torch.Tensor:
        return vocab_mask.to(device, non_blocking=True)

    @staticmethod
    def apply_vocab_mask(logits: torch.Tensor, vocab_mask: torch.Tensor) -> None:
        logits.masked_fill_(vocab_mask, -torch.inf)

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """An error of this request is told by its end: here it would break the engine."""
        try:
            yield
        except RequestError as error:
            self.error = error.with_traceback(None)


class SteppedScheduler(Scheduler):  # type: ignore[misc]
    """SGLang's scheduler without its sockets, one batch a `step`.

    With overlap (GPUs) a step launches a batch and then hands out the results of the one before it, so that the device
    does not wait for Python.
    """

    running_batch: Any
    last_batch: Any

    def init_ipc_channels(self, port_args: PortArgs) -> None:
        self.outbox = Outbox()
        self.ipc_channels = SimpleNamespace(
            recv_from_tokenizer=None,
            recv_from_rpc=None,
            send_to_tokenizer=self.outbox,
            send_to_detokenizer=self.outbox,
            send_metrics_from_scheduler=None,
        )
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
        if self.device == "cpu":
            return
        self.schedule_stream = self.device_module.Stream(priority=0)
        while self.schedule_stream.cuda_stream == self.forward_stream.cuda_stream:  # from a pool of 32
            self.schedule_stream = self.device_module.Stream(priority=0)
        self._war_barrier_enabled = True
        torch.cuda.set_stream(self.schedule_stream)

    def has_work(self) -> bool:
        """True while `step` would do something."""
        return bool(self.outbox.progress) or not self.is_fully_idle()

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
        if self.knows_kinds and batch.forward_mode.is_extend():
            self._read_places(batch, asides)
        result = super().run_batch(batch, *args, **kwargs)
        result.hidden = []
        if self._asks_hidden:
            with self.forward_stream_ctx if self.enable_overlap else contextlib.nullcontext():
                result.hidden = taken(result.logits_output.hidden_states, batch, asides)
                result.hidden_taken = self.forward_stream.record_event() if self.enable_overlap else None
        return result

    def _read_places(self, batch: Any, asides: list[Aside | None]) -> None:
        rows, places = batch.req_pool_indices_cpu.tolist(), [aside.places if aside else _PLAIN for aside in asides]
        told = [(row, each, *span) for row, each, span in zip(rows, places, spans(batch), strict=True)]
        for tensor in self.model.read(told):
            if self.enable_overlap:
                tensor.record_stream(self.forward_stream)

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
        if _needs_last_tokens(self.running_batch) or _needs_last_tokens(self.last_batch):
            self._process_pending()
        plan = self.get_next_batch_to_run(running_batch=self.running_batch, last_batch=self.last_batch)
        self.running_batch, batch = plan.running_batch, plan.batch_to_run
        if self.enable_overlap:
            self._step_overlapped(batch)
        elif batch:
            self.process_batch_result(batch, self.run_batch(batch))
        self.last_batch = batch
        if batch is None:
            self.on_idle()  # raises where a KV slot was lost
        progress, self.outbox.progress = self.outbox.progress, []
        return progress

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


S = TypeVar("S", bound=SteppedScheduler)


class Way(NamedTuple):
    """How SGLang draws the tokens of one request, in its own words."""

    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    stop_token_ids: set[int]
    frequency_penalty: float
    presence_penalty: float
    logit_bias: dict[str, float] | None
    sampling_seed: int | None


def register(package: str) -> None:
    """Let SGLang find the models in `package` by their names; of equal names the newest counts."""
    sglang.srt.models.registry.ModelRegistry.register(package, overwrite=True)


def build(kind: type[S], settings: dict[str, Any], ranks: Ranks = ALONE) -> S:
    """A scheduler with `settings`, by the names of SGLang's `ServerArgs`; call it in the thread that will step it.

    With `ranks` it is one of several that compute together, each on a GPU of its own; it waits for the others.
    Raises StartError where this process has one already, or the device has no room for `max_total_tokens`.
    """
    if _version() < _OLDEST:
        raise StartError(f"SGLang {sglang.__version__} is too old; install {VERSIONS[0]} or newer")
    if torch.distributed.is_initialized():
        raise StartError("SGLang allows one engine in a process, and this process has one; isolate the stage")
    with contextlib.ExitStack() as stack:
        stack.callback(close)
        server_args = ServerArgs(**settings, tp_size=ranks.size)
        # SGLang would choose a port that is free, and another process could take it before it listens.
        meet(ranks, "nccl" if server_args.device == "cuda" else "gloo")
        scheduler = _construct(kind, server_args, ranks.rank)
        scheduler.begin()
        wanted = settings["max_total_tokens"]
        if scheduler.kv_tokens() < wanted:
            raise StartError(f"the device has room for {scheduler.kv_tokens()} KV tokens; lower kv_tokens={wanted}")
        stack.pop_all()
    return scheduler


def submit(
    scheduler: SteppedScheduler,
    rid: str,
    ids: list[int],
    way: Way,
    *,
    embeds: torch.Tensor | None = None,
    positions: tuple[int, ...] = (),
    extra_key: str | None = None,
    top_logprobs: int | None = None,
    held: Held | None = None,
    places: Places | None = None,
    next_hidden: int | None = None,
    may_wait: bool = False,
) -> None:
    """Queue a request.

    `embeds` take the place of token embeddings at `positions`; `extra_key` keeps it apart in the prefix cache.
    `next_hidden` is the first input whose hidden state is asked for.
    """
    sampling = SamplingParams(**way._asdict())
    sampling.normalize(None)
    request = TokenizedGenerateReqInput(
        rid=rid,
        input_text=None,
        input_ids=array("q", ids),
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=sampling,
        return_logprob=top_logprobs is not None,
        logprob_start_len=-1,
        top_logprobs_num=top_logprobs or 0,
        token_ids_logprob=None,
        stream=True,
        positional_embed_overrides=None if embeds is None else PositionalEmbeds(embeds, list(positions)),
        extra_key=extra_key,
    )
    scheduler.outbox.asides[rid] = Aside(places or _PLAIN, next_hidden, may_wait)
    scheduler.process_input_requests([request])
    if held is not None:
        scheduler.waiting_queue[-1].grammar = held


def abort(scheduler: SteppedScheduler, rid: str) -> None:
    """Let the request end at its next step. SGLang also aborts every request whose name begins with `rid`."""
    scheduler.process_input_requests([AbortReq(rid=rid)])


def close() -> None:
    """End SGLang's process groups and give the device's memory back, once nothing holds the scheduler any more."""
    cleanup_dist_env_and_memory()


def _construct(kind: type[S], server_args: ServerArgs, rank: int) -> S:
    gpu: int = server_args.base_gpu_id + rank
    if _version() < _RANKS_IN_CONTEXT:
        ports = _ports(server_args)
        publish(server_args, role="scheduler")
        ranks = {"tp_rank": rank, "moe_ep_rank": 0, "pp_rank": 0, "attn_cp_rank": 0, "moe_dp_rank": 0, "dp_rank": None}
        return kind(server_args, ports, gpu_id=gpu, **ranks)
    from sglang.srt.runtime_context import SpawnRanks

    server_args.resolve_once()
    ports = _ports(server_args)
    publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=rank, dp_rank=None, gpu_id=gpu))
    return kind(server_args, ports)


def _ports(server_args: ServerArgs) -> PortArgs:
    """The names of SGLang's sockets. It keeps them with empty files that stay; nobody here opens such a socket."""
    ports = PortArgs.init_new(server_args)
    for name in vars(ports).values():
        if isinstance(name, str) and name.startswith("ipc://"):
            Path(name.removeprefix("ipc://")).unlink(missing_ok=True)
    return ports


def _version() -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", sglang.__version__)[:3])
