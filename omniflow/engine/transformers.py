"""The reference AR engine: plain Hugging Face decoders, for CPUs and for parity with other engines.

A step is one forward pass over the inputs of all requests laid end to end, without padding: the next token of each that
decodes, and a chunk of the prompts that are still being read. Linear layers see one matrix; attention is called request
by request with exactly its own keys and values, so no request ever sees another, not even as a masked-out number. With
`PackedLinear` a request gets the same bits alone and in any company.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from omniflow.engine.base import EngineOutput, EngineRequest
from omniflow.engine.batching import FeedingEngine
from omniflow.engine.checks import check_prompt
from omniflow.engine.linear import pack_linears
from omniflow.engine.rows import ATTENTION, Row, Span
from omniflow.engine.sampling import token_logprob
from omniflow.engine.stops import Decode
from omniflow.errors import (
    RequestError,
    StartError,
    UnsupportedError,
    WeightsError,
)

if TYPE_CHECKING:
    from omniflow.engine.grammar import Grammars, Matcher


class TransformersEngine(FeedingEngine[Row]):
    """`Engine` on a Hugging Face decoder with full attention (Llama, Qwen2, Qwen3, SmolLM2, ...).

    `kv_tokens` bounds the positions that all running requests reserve together, `max_running` and `max_waiting` their
    number, `chunk` the inputs of one request read in a step: 64 cost 8 % more per token than 256, and hold up the
    tokens of others by 0.14 s instead of 0.5 s (135M parameters, one core). `decode` turns ids into text and is needed
    for `stop` strings, `grammars` for requests with a grammar. `media` says that `model` reads the `places` and `kinds`
    of the rows of a step; requests with such are refused elsewhere. Raises StartError for other kinds of attention.
    """

    counted, param = "tokens", "messages"

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        decode: Decode | None = None,
        grammars: Grammars | None = None,
        max_running: int = 8,
        max_waiting: int = 64,
        kv_tokens: int = 16384,
        chunk: int = 64,
        media: bool = False,
    ) -> None:
        config = model.config.get_text_config()
        _check_attention(config)
        model.set_attn_implementation(ATTENTION)
        self._model = model
        self._embedding: Any = model.get_input_embeddings()
        self._head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        self._num_layers: int = config.num_hidden_layers
        self._decode = decode
        size = self._embedding.num_embeddings
        if grammars is not None and grammars.num_tokens != size:
            raise StartError(f"the model has {size} tokens, the grammars are for one of {grammars.num_tokens}")
        self._grammars = grammars
        self._chunk = chunk
        self._media = media
        super().__init__(
            width=config.hidden_size,
            limit=min(config.max_position_embeddings, kv_tokens),
            max_running=max_running,
            max_waiting=max_waiting,
            kv_tokens=kv_tokens,
        )

    def start(self, request: EngineRequest) -> None:
        """Queue `request`. Raises ContextLengthError if it can never fit, OverloadedError if the queue is full."""
        self._check(request)
        capacity = self._capacity(request.id, len(request.ids), request.sampling)
        self._queue.check_room(request.id)
        row = Row(request, self._num_layers, capacity, self._matcher(request), self._decode)
        self._queue.wait(row, request.urgent)

    def step(self) -> list[EngineOutput]:
        """One step of the whole batch; see the module's docstring."""
        outputs = self._join()
        spans = self._schedule()
        if spans:
            with torch.inference_mode():
                outputs += self._sample(*self._forward(spans), spans)
        return outputs

    def close(self) -> None:
        """Drop all requests and the model."""
        super().close()
        del self._model, self._embedding, self._head

    def _check(self, request: EngineRequest) -> None:
        self._queue.check_new(request.id)
        check_prompt(
            request,
            vocab_size=self._embedding.num_embeddings,
            width=self._width,
            decodes=self._decode is not None,
            knows_kinds=self._media,
        )

    def _matcher(self, request: EngineRequest) -> Matcher | None:
        if request.grammar is None:
            return None
        if self._grammars is None:
            raise UnsupportedError("this engine was started without grammars", request_id=request.id)
        return self._grammars.matcher(request.grammar)

    def _schedule(self) -> list[Span]:
        """The next input of every row that decodes, and as many chunks of others as `chunk` inputs in all allow.

        A prompt is always cut at the same places, whatever else runs: other places would give other last bits.
        """
        spans: list[Span] = []
        budget, offset = self._chunk, 0
        for row in list(self._queue.running):
            count = min(row.available, self._chunk)
            if count > 1:
                if count > budget:
                    continue
                budget -= count
                # Whoever reads goes to the back: a long prompt does not hold up a short one behind it.
                self._queue.put_last(row)
            if count > 0:
                spans.append(self._span(row, count, offset))
                offset += count
        return spans

    def _span(self, row: Row, count: int, offset: int) -> Span:
        start, end = row.computed, row.computed + count
        mask = None
        if start > 0 and count > 1:
            mask = torch.ones(count, end, dtype=torch.bool, device=self._model.device).tril(start)
        return Span(row, start, end, offset, mask)

    def _forward(self, spans: list[Span]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Of each span: logits [vocab] of its last input, float32 on the CPU, and hidden states of those it `keeps`."""
        device = self._model.device
        ids = [id for span in spans for id in span.row.ids[span.start : span.end]]
        positions = [position for span in spans for position in range(span.start, span.end)]
        hidden = self._embedding(torch.tensor(ids, device=device))
        for span in spans:
            span.row.place(hidden[span.offset : span.offset + span.size], span.start)
        read: list[torch.Tensor] = []
        hook = self._head.register_forward_pre_hook(lambda _, given: read.append(given[0].flatten(0, -2)))
        output = self._model(
            inputs_embeds=hidden[None],
            position_ids=torch.tensor([positions], device=device),
            use_cache=False,
            logits_to_keep=torch.tensor([index for span in spans for index in span.kept], device=device),
            spans=spans,
        )
        hook.remove()
        sizes = [len(span.kept) for span in spans]
        last = [end - 1 for end in itertools.accumulate(sizes)]
        logits: torch.Tensor = output.logits[0, last].float().cpu()
        return logits, list(torch.split(read[0], sizes))

    def _sample(self, logits: torch.Tensor, hidden: list[torch.Tensor], spans: list[Span]) -> list[EngineOutput]:
        outputs = []
        for span, row_logits, row_hidden in zip(spans, logits, hidden, strict=True):
            row = span.row
            row.computed = span.end
            if row.computed == len(row.ids) and not row.open:
                try:
                    output = self._advance(row, row_logits)
                except RequestError as error:  # ends this request; the others of the step go on
                    output = EngineOutput(row.id, (), "abort", error=error)
                outputs.append(row.with_hidden(output, row_hidden))
                if output.finish_reason:
                    self._end(row)
            else:
                row.keep_hidden(row_hidden)
        return outputs

    def _advance(self, row: Row, logits: torch.Tensor) -> EngineOutput:
        """Draw the next token of `row` and say what became of it."""
        token = row.draw(logits)
        if token in row.sampling.stop_token_ids:
            return EngineOutput(row.id, (), "stop")
        row.generated.append(token)
        row.ids.append(token)
        reason: Literal["stop", "length"] | None = None
        if row.stops.completed_by(token) or row.complete:
            reason = "stop"
        elif len(row.generated) >= row.sampling.max_tokens or len(row.ids) >= row.cache.capacity:
            reason = "length"
        top = row.sampling.top_logprobs
        logprobs = () if top is None else (token_logprob(logits, token, top),)
        return EngineOutput(row.id, (token,), reason, logprobs)


def _check_attention(config: PretrainedConfig) -> None:
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if getattr(config, "sliding_window", None) is not None:
        kinds.add("sliding_attention")
    if kinds != {"full_attention"}:
        raise StartError(f"the transformers engine knows full_attention only; this model has {sorted(kinds)}")


def load_engine(
    folder: Path,
    *,
    decode: Decode | None = None,
    grammars: Grammars | None = None,
    device: str = "cpu",
    threads: int = 1,
    max_running: int = 8,
    max_waiting: int = 64,
    kv_tokens: int = 16384,
) -> TransformersEngine:
    """An engine on the checkpoint in `folder`, in float32; call it in the thread that will call `step`.

    `device` is cpu, gpu or cuda, or gpu:1 for one by number. `threads` sets torch's number of threads in this process:
    more than one rarely pays for a small model and collapses where cores are contended. Raises WeightsError where
    `folder` holds no decoder, or not all of its weights.
    """
    torch.set_num_threads(threads)
    model = _load_model(folder)
    model.to(device.replace("gpu", "cuda"))
    pack_linears(model)
    for parameter in model.parameters():  # what is left lies in the mapped file, which is 0.5 GB of resident memory
        parameter.data = parameter.data.clone()
    return TransformersEngine(
        model, decode=decode, grammars=grammars, max_running=max_running, max_waiting=max_waiting, kv_tokens=kv_tokens
    )


def _load_model(folder: Path) -> Any:
    disable_progress_bar()  # type: ignore[no-untyped-call]
    auto: Any = AutoModelForCausalLM  # its return type does not know of output_loading_info
    try:
        model, found = auto.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise WeightsError(f"{folder} holds no model that transformers can load: {reason}") from error
    if found["missing_keys"]:  # transformers would go on with random numbers
        raise WeightsError(f"{folder} lacks weights of its model, like {min(found['missing_keys'])}")
    return model
