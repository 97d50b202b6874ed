"""The requests in a batch: their inputs, their keys and values, and the attention that keeps them apart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface

from omniflow.engine.base import EngineOutput, EngineRequest
from omniflow.engine.places import places_of
from omniflow.engine.sampling import Sampler, tokens_of
from omniflow.engine.stops import Decode, StopStrings

if TYPE_CHECKING:
    from omniflow.engine.grammar import Matcher

ATTENTION = "omniflow_by_request"


class KeyValues:
    """Keys and values of one request, layer by layer: [kv_heads, capacity, head_dim] each."""

    def __init__(self, num_layers: int, capacity: int) -> None:
        self.capacity = capacity
        self._keys = [torch.empty(0)] * num_layers
        self._values = [torch.empty(0)] * num_layers

    def append(
        self, layer: int, start: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store [kv_heads, n, head_dim] from position `start` on; returns all that is known of the layer."""
        end = start + keys.shape[1]
        if self._keys[layer].numel() == 0:
            self._keys[layer] = keys.new_empty(keys.shape[0], self.capacity, keys.shape[2])
            self._values[layer] = values.new_empty(values.shape[0], self.capacity, values.shape[2])
        self._keys[layer][:, start:end] = keys
        self._values[layer][:, start:end] = values
        return self._keys[layer][:, :end], self._values[layer][:, :end]

    def grow(self, capacity: int) -> None:
        """Make room for `capacity` positions."""
        more = capacity - self.capacity
        self.capacity = capacity
        for store in (self._keys, self._values):
            for layer, old in enumerate(store):
                if old.numel():
                    store[layer] = torch.cat([old, old.new_empty(old.shape[0], more, old.shape[2])], dim=1)


class Row:
    """One request on its way: its inputs (prompt, fed rows, then its own tokens) and how far they are computed.

    `matcher` is where its answer stands in the request's grammar; `decode` is needed where that has stop strings.
    """

    def __init__(
        self,
        request: EngineRequest,
        num_layers: int,
        capacity: int,
        matcher: Matcher | None = None,
        decode: Decode | None = None,
    ) -> None:
        self.id = request.id
        self.sampling = request.sampling
        self.stops = StopStrings(request.stop, decode)
        self.open = request.open
        self.ids = list(request.ids)
        """Input ids so far; a 0 stands where an embedding takes the place of a token."""
        self.positions = torch.tensor(request.positions, dtype=torch.long)
        self.embeds = request.embeds
        """Input embeddings [len(positions), hidden], in the order of `positions`."""
        self.generated: list[int] = []
        self.computed = 0
        self.cache = KeyValues(num_layers, capacity)
        self._inputs = places_of(request)
        self.asks_hidden = request.hidden
        self._hidden: list[torch.Tensor] = []
        """Hidden states that are computed and not told: [n, hidden] each."""
        self._sampler = Sampler(request.sampling, tokens_of(request))
        self._matcher = matcher
        self._ends = torch.tensor(sorted(request.sampling.stop_token_ids), dtype=torch.long)

    @property
    def capacity(self) -> int:
        """Positions that its cache has room for."""
        return self.cache.capacity

    @property
    def length(self) -> int:
        """Inputs so far."""
        return len(self.ids)

    @property
    def available(self) -> int:
        """Inputs that can be computed now. The last one of an open request waits: its output may be the first token."""
        return len(self.ids) - self.computed - self.open

    @property
    def complete(self) -> bool:
        """True where the grammar lets nothing follow."""
        return self._matcher is not None and self._matcher.ended

    def draw(self, logits: torch.Tensor) -> int:
        """The next token, or one of the stop tokens.

        Raises InvalidInputError where the grammar is too complex, ProtocolError where the logits are not finite.
        """
        if self._matcher is None:
            return self._sampler.next(logits)
        token = self._sampler.next(logits, self._matcher.allowed(self._ends))
        if token not in self.sampling.stop_token_ids:
            self._matcher.advance(token)
        return token

    def feed(self, rows: torch.Tensor, capacity: int) -> None:
        """Append input embeddings [n, hidden], and make room for `capacity` positions."""
        start = len(self.ids)
        self.ids += [0] * len(rows)
        self.positions = torch.cat([self.positions, torch.arange(start, len(self.ids))])
        self.embeds = rows if self.embeds is None else torch.cat([self.embeds, rows])
        self.cache.grow(capacity)

    def places(self, start: int, end: int) -> torch.Tensor:
        """Positions in time, height and width of the inputs [start, end): int64 [3, end - start]."""
        return self._inputs.places(start, end)

    def kinds(self, start: int, end: int) -> torch.Tensor:
        """Which of the model's kinds each of the inputs [start, end) is: uint8 [end - start]."""
        return self._inputs.kinds(start, end)

    def keep_hidden(self, hidden: torch.Tensor) -> None:
        """Of inputs before the last of the prompt, [n, hidden]: kept until `with_hidden` where they are asked for."""
        if self.asks_hidden == "all":
            self._hidden.append(hidden)

    def with_hidden(self, output: EngineOutput, hidden: torch.Tensor) -> EngineOutput:
        """`output` with those that were kept and `hidden` [n, hidden], where they are asked for."""
        if self.asks_hidden is None:
            return output
        whole, self._hidden = torch.cat([*self._hidden, hidden]), []
        return msgspec.structs.replace(output, hidden=whole)

    def place(self, hidden: torch.Tensor, start: int) -> None:
        """Write the embeddings that belong into inputs [start, start + len(hidden)) over `hidden`."""
        if self.embeds is not None:
            here = (self.positions >= start) & (self.positions < start + len(hidden))
            hidden[self.positions[here] - start] = self.embeds[here].to(hidden)


class Span(NamedTuple):
    """The inputs [start, end) of `row`, at [offset, offset + end - start) of a step."""

    row: Row
    start: int
    end: int
    offset: int
    mask: torch.Tensor | None
    """Which of the `end` keys each input sees; None where a causal mask, or none, says it."""

    @property
    def size(self) -> int:
        """How many inputs it is."""
        return self.end - self.start

    @property
    def kept(self) -> range:
        """Those of the step's inputs whose hidden states are kept: its last, and all where they are asked for."""
        end = self.offset + self.size
        return range(self.offset if self.row.asks_hidden == "all" else end - 1, end)


def attend_by_request(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    spans: list[Span],
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of a step, [1, heads, total, dim] to [1, total, heads, dim]; see transformers' AttentionInterface.

    `spans` comes through the model's forward as it is; keys and values are stored here, so no `Cache` is involved.
    """
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    outputs = []
    for span in spans:
        here = slice(span.offset, span.offset + span.size)
        keys, values = span.row.cache.append(layer, span.start, key[0, :, here], value[0, :, here])
        causal = span.start == 0 and span.end > 1
        outputs.append(
            F.scaled_dot_product_attention(
                query[:, :, here], keys[None], values[None], span.mask, is_causal=causal, scale=scaling, enable_gqa=True
            )
        )
    return torch.cat(outputs, dim=2).transpose(1, 2), None


AttentionInterface.register(ATTENTION, attend_by_request)
