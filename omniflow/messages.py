"""The envelope: everything that hosts and the runtime say to each other, as one msgspec tagged union.

Requests are numbers here: the runtime counts submissions, so a number is never used twice, even where a caller
reuses an id. Edges are the numbers of the plan. A value never travels as a chunk that is missing: a stream ends
with `End`, a port that gets nothing gets `Skip`.
"""

from __future__ import annotations

import msgspec

from omniflow.engine.stats import EngineStats
from omniflow.errors import ErrorInfo
from omniflow.media import Options

MAX_OPTIONS_BYTES = 104 * 1024
"""Of the options of a request: `Open` goes in one datagram, which has 128 KiB."""
MAX_REQUEST_ID_CHARS = 4096


class Open(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Runtime -> host: a request begins; `entry` and `outputs` say which part of the graph it runs."""

    request: int
    request_id: str
    entry: str
    outputs: tuple[str, ...]
    options: Options
    deadline_s: float


class Block(msgspec.Struct, frozen=True, array_like=True):
    """A place in the sender's shared memory: `length` bytes at `offset` of `slab`. Old generations are stale."""

    slab: int
    slot: int
    generation: int
    offset: int
    length: int


class Item(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """A value on an edge. `body` is its msgpack form; its buffers lie in `block`, or in `inline` where they are small.

    Where the msgpack form itself is large, it is the first `body_length` bytes of `block`, and `body` is nil. `loans`
    are the blocks of buffers that were allocated in shared memory and lie there still. `device` is where the tensors
    that stay on their device lie; how they get there is the lane's affair.
    """

    edge: int
    request: int
    seq: int
    body: msgspec.Raw
    inline: bytes = b""
    block: Block | None = None
    body_length: int = 0
    loans: tuple[Block, ...] = ()
    device: Block | None = None


class End(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """A stream edge has ended after `count` items."""

    edge: int
    request: int
    count: int


class Skip(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """An edge carries nothing for this request."""

    edge: int
    request: int


class Credit(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Consumer -> producer: `count` more items may be sent; -1: the reader is gone, send nothing more."""

    edge: int
    request: int
    count: int


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Runtime -> host: stop everything of this request. Unknown requests are ignored."""

    request: int


class Failure(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Host -> runtime: this request failed, with a typed error."""

    request: int
    error: ErrorInfo


class Waiting(msgspec.Struct, frozen=True, array_like=True):
    """What a stage was doing when its request was cancelled: running, or waiting for `port`."""

    stage: str
    port: str | None


class Closed(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """Host -> runtime: nothing of this request is left here. `unfinished` is empty unless it was cancelled.

    `dropped` are (edge, items) that readers here missed, where the policy of an edge is to drop the oldest.
    """

    request: int
    unfinished: tuple[Waiting, ...] = ()
    dropped: tuple[tuple[int, int], ...] = ()


class Recorded(msgspec.Struct, frozen=True, array_like=True, tag=18):
    """Host -> runtime, before `Closed`, where requests are recorded: a part of its account of this request."""

    request: int
    part: bytes
    last: bool


class SlabOpened(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """Producer -> consumer, with a descriptor: a slab that coming items will name."""

    slab: int
    size_bytes: int


class SlabClosed(msgspec.Struct, frozen=True, array_like=True, tag=17):
    """Producer -> consumer: no coming item will name this slab."""

    slab: int


class SlabMissing(msgspec.Struct, frozen=True, array_like=True, tag=19):
    """Consumer -> producer: a slab could not be mapped (too many open files); tell of it again before the next item."""

    slab: int


class Release(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """Consumer -> producer: the last view of these (slab, slot, generation) has died."""

    blocks: tuple[tuple[int, int, int], ...]


class LaneOffer(msgspec.Struct, frozen=True, array_like=True, tag=30):
    """Producer -> consumer: device tensors can come by a lane of this kind. `device` is the producer's GPU, by its
    UUID; of memory that is shared come the size and two descriptors. A size without descriptors asks a consumer on
    another GPU for so much of its own.
    """

    kind: str
    device: str = ""
    size_bytes: int = 0


class LaneAnswer(msgspec.Struct, frozen=True, array_like=True, tag=31):
    """Consumer -> producer: the lane is open here; or it is not (any more), and why: tensors go through the host.

    Of memory on the consumer's own GPU, for the producer to write to, come the name of that GPU, the size and two
    descriptors.
    """

    problem: str | None = None
    device: str = ""
    size_bytes: int = 0


class LaneNote(msgspec.Struct, frozen=True, array_like=True, tag=32):
    """Either way: what the two ends of a communicator tell each other before it exists. `incoming`: of the lane that
    leads to the receiver of this note.
    """

    incoming: bool
    key: str
    value: bytes


class Connect(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """Runtime -> host, with a descriptor: the socket to `peer`, replacing an older one. `number` is its own."""

    peer: str
    number: int = 0


class Unconnected(msgspec.Struct, frozen=True, array_like=True, tag=20):
    """Host -> runtime: a `Connect` came without its descriptor, because this process may open no more files."""

    peer: str
    number: int


class StageReady(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """Host -> runtime: the stage's `setup` has returned."""

    stage: str
    seconds: float


class HostReady(msgspec.Struct, frozen=True, array_like=True, tag=13):
    """Host -> runtime: all stages are ready."""


class HostFailed(msgspec.Struct, frozen=True, array_like=True, tag=14):
    """Host -> runtime: a stage failed in `setup`, or broke for good; the host ends itself after this."""

    stage: str
    message: str
    detail: str


class StageLoad(msgspec.Struct, frozen=True, array_like=True):
    """What a stage has to do: calls of `run` under way, items and calls that wait for it, and what its engine holds."""

    stage: str
    running: int
    queued: int
    engine: EngineStats | None = None


class Beat(msgspec.Struct, frozen=True, array_like=True, tag=15):
    """Host -> runtime: the event loop is alive; `stage` has been in one step for `busy_s`."""

    stage: str
    busy_s: float
    load: tuple[StageLoad, ...] = ()


class Shutdown(msgspec.Struct, frozen=True, array_like=True, tag=16):
    """Runtime -> host: close the actors and exit."""


Message = (
    Open | Item | End | Skip | Credit | Cancel | Failure | Closed | SlabOpened | SlabClosed | SlabMissing | Release
    | Connect | Unconnected | StageReady | HostReady | HostFailed | Beat | Shutdown | Recorded
    | LaneOffer | LaneAnswer | LaneNote
)  # fmt: skip
READER_GONE = -1
"""`Credit.count` of a reader that wants nothing more."""
