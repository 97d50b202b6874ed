"""The actor API: what a stage is made of.

An actor is a class with `setup`, `run` and `close`. One instance lives in one host process and serves many
requests at once; whatever belongs to one request lives in the frame of `run`, so cancelling it cleans up.
Ports are read from the signature of `run`:

    async def run(self, prompt: Prompt, audio: AudioFeatures | None) -> TokenPrompt     value ports, one optional
    async def run(self, prompt: TokenPrompt, emit: Emit[Tokens]) -> Generated           value in, stream and value out
    async def run(self, segments: Stream[Segment], emit: Emit[AudioChunk]) -> None      stream in, stream out
    @batched(max_size=8)
    def run(self, mels: list[Mel]) -> list[Features]                                    across requests

A result with several ports is a Struct that derives from `Outputs`: each field is a port, `None` skips it.
Settings are the keyword parameters of `__init__`, typed, with defaults: `--set stage.name=value` reaches them.
"""

from __future__ import annotations

import functools
import inspect
import math
import time
import types
import typing
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

import anyio
import anyio.to_thread
import msgspec
import numpy as np
import numpy.typing as npt

from omniflow.engine.ranks import ALONE, Ranks
from omniflow.engine.stats import EngineStats
from omniflow.errors import ActorBrokenError, GraphError
from omniflow.media import Options
from omniflow.turns import Turns
from omniflow.weights import Weights

Count = Annotated[int, msgspec.Meta(ge=1)]
"""The type of a setting that is 1 at least: places, tokens, threads."""

T = TypeVar("T")
R = TypeVar("R")


class Context(msgspec.Struct, frozen=True):
    """What a `run` may know of its request: a parameter annotated `Context` is not a port."""

    request_id: str
    """What the caller calls the request; it may use the same id again once the request has ended."""
    options: Options
    deadline_s: float
    """Seconds that this request was given in all, from its submission."""
    run_id: str
    """Of fixed length and never used twice: what an engine calls the request (SGLang aborts by id prefix)."""
    room: Callable[[int], np.ndarray | None] | None = None
    """Gives `allocate` memory that the stage's readers in other processes can see; None where there are none."""

    def allocate(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike = np.float32) -> np.ndarray:
        """An array to fill, of undefined contents, for a value that this `run` gives; callable from `offload`, too.

        Where the stage's readers are in another process, it lies in memory that they read in place: sending it copies
        nothing, whatever its size. Otherwise, and where that memory is used up, it is a plain array, which is copied as
        any other. Once a value with it has been sent, nobody writes to it.
        """
        kind = np.dtype(dtype)
        num_bytes = math.prod(shape if isinstance(shape, tuple) else (shape,)) * kind.itemsize
        memory = self.room(num_bytes) if self.room is not None else None
        return memory.view(kind).reshape(shape) if memory is not None else np.empty(shape, kind)


class Stream(AsyncIterator[T], ABC):
    """The receiving end of a stream edge for one request: `async for item in stream`.

    It ends when the producer has ended. Items not read when `run` returns are dropped, and the producer goes on.
    """

    dropped: int = 0
    """Items missed so far: they were the oldest when the edge was full, and its policy is to drop them."""


class Emit(ABC, Generic[T]):
    """The sending end of a stream port for one request."""

    @property
    @abstractmethod
    def wanted(self) -> bool:
        """False where nobody reads this port for this request; `send` then returns at once."""

    @abstractmethod
    async def send(self, value: T) -> None:
        """Hand `value` to every consumer; suspends while one of them has no credit left."""


class NamedVoice(msgspec.Struct, frozen=True):
    """A voice that a stage speaks with: its name, as `Options.voice` gives it, and its language (BCP 47)."""

    name: str
    language: str


class Outputs(msgspec.Struct, frozen=True):
    """Base of results that have several ports: one a field; `None` on an optional field skips the port."""


class BatchPolicy(msgspec.Struct, frozen=True):
    """How calls of several requests are put into one call of `run`."""

    max_size: int
    max_wait_ms: float


class batched(Generic[T]):
    """Mark `run` as taking lists: one element a request. A lone request never waits with `max_wait_ms=0`.

    Where a batch of several raises, its items are run again one by one, so that only the bad one fails.
    """

    def __init__(self, *, max_size: int, max_wait_ms: float = 0) -> None:
        if max_size < 1:
            raise GraphError(f"@batched(max_size={max_size}): a batch has at least 1 item")
        self.policy = BatchPolicy(max_size, max_wait_ms)

    def __call__(self, run: Callable[..., T]) -> Callable[..., T]:
        return typing.cast("Callable[..., T]", _BatchedRun(run, self.policy))


class _BatchedRun:
    """Stands in for `run` until the class exists, then tells it its policy and steps aside."""

    def __init__(self, run: Callable[..., Any], policy: BatchPolicy) -> None:
        self._run = run
        self._policy = policy

    def __set_name__(self, owner: type[Actor], name: str) -> None:
        if name != "run":
            raise GraphError(f"@batched belongs on run(), not on {owner.__name__}.{name}()")
        owner.batch = self._policy
        setattr(owner, name, self._run)


class Actor:
    """Base of all stages. Subclasses define `run`; see the module's docstring for its forms."""

    heavy: ClassVar[bool] = False
    """True for what keeps a core or a device busy: the planner gives it a host of its own."""
    owns_process: ClassVar[bool] = False
    """True for an engine that allows one instance a process."""
    preload: ClassVar[tuple[str, ...]] = ()
    """Modules that `setup` imports late (torch, ...) and that are safe to fork: on CPUs they are imported once, before
    hosts are forked, so that a restarted host does not import them again. They must start no threads."""
    timed: ClassVar[bool] = False
    """True where what `run` gives depends on when its input comes, too. A recording holds what such a stage gave, and a
    replay gives it again, where its only output is a stream."""
    batch: ClassVar[BatchPolicy | None] = None
    ranks: Ranks = ALONE
    """The place of this process in its stage: a stage with `tp` GPUs has as many processes, and the first runs it."""
    _step_began: float | None = None
    run: ClassVar[Callable[..., Any]]

    @classmethod
    def wants_process(cls, settings: Mapping[str, Any]) -> bool:
        """Whether an instance with these settings owns its process; by default what `owns_process` says."""
        return cls.owns_process

    @classmethod
    def refuses_tp(cls, settings: Mapping[str, Any]) -> str | None:
        """Why an instance with these settings cannot be split over several GPUs; None: it can. By default none can."""
        return f"{cls.__name__} runs on one GPU"

    @classmethod
    def refuses_cpu(cls, settings: Mapping[str, Any]) -> str | None:
        """Why an instance with these settings cannot run on a CPU; None: it can. By default all can."""
        return None

    @classmethod
    def lacks(cls, settings: Mapping[str, Any], device: str) -> str | None:
        """What is not installed here that an instance with these settings needs on `device`, and how to get it; None:
        nothing.

        Asked before weights are fetched, and where a host starts; a plan for another machine does not ask.
        """
        return None

    def weights(self) -> Sequence[Weights]:
        """What `setup` will read from disk; fetched with a progress bar before any host starts."""
        return ()

    def voices(self) -> Sequence[NamedVoice]:
        """What `Options.voice` may name, the voice of those who name none first. None: this stage has no say in it.

        Asked before `setup`, and without the weights on disk.
        """
        return ()

    async def setup(self) -> None:
        """Load what `run` needs; called once in the host, before the first request. Blocking work goes to `offload`."""

    async def close(self) -> None:
        """Give back what `setup` took; called once, after the last `run`."""

    def follow(self) -> None:
        """The life of each process of a stage but the first, where `refuses_tp` says that it can be split: loads its
        part, and does what `ranks` tells it. Called instead of all others; returns where the first is closed or gone.
        """
        raise ActorBrokenError(f"{type(self).__name__} runs on one GPU")

    async def offload(self, call: Callable[..., R], *args: Any) -> R:
        """Run blocking compute in a thread, one call at a time for this actor.

        A `run` that has sent nothing yet goes before those that have; nobody starves (omniflow/turns.py). A cancelled
        caller still waits for its own call to end, so a step must be short (< 100 ms).
        """
        async with self._turns.turn():
            self._step_began = time.monotonic()
            try:
                return await in_thread(call, *args)
            finally:
                self._step_began = None

    def busy_s(self) -> float:
        """How long the step that runs now has been running; 0 between steps. A host whose step lasts longer than
        `runtime.step_s` is killed. Actors with a thread of their own say here what it does.
        """
        return time.monotonic() - self._step_began if self._step_began is not None else 0.0

    def engine_stats(self) -> EngineStats | None:
        """What the engine of this stage holds now, for metrics; None: it has none. Asked at each heartbeat, in the
        event loop: it must not wait for the engine's thread.
        """
        return None

    def num_waiting(self) -> int:
        """Calls of `offload` that wait for their turn."""
        return self._turns.num_waiting

    @functools.cached_property
    def _turns(self) -> Turns:
        return Turns()


async def in_thread(call: Callable[..., R], *args: Any) -> R:
    """What `call` gives or raises, in a thread; a cancelled caller still waits for its end."""
    outcome = await anyio.to_thread.run_sync(_outcome, call, args)
    if not isinstance(outcome, _Raised):
        return outcome
    try:
        raise outcome.error
    finally:
        del outcome


class _Raised(NamedTuple):
    error: Exception


def _outcome(call: Callable[..., R], args: Sequence[Any]) -> R | _Raised:
    """What `call` gives or raises. An error that came out of the thread by itself would be held by a future, and hold
    the frame that holds the future: its values would live until the garbage collector comes.
    """
    try:
        return call(*args)
    except Exception as error:  # noqa: BLE001 - raised again by whoever called
        return _Raised(error.with_traceback(error.__traceback__ and error.__traceback__.tb_next))


class Port(msgspec.Struct, frozen=True):
    """One typed opening of a stage."""

    name: str
    kind: Literal["value", "stream"]
    type: Any
    optional: bool = False


class Ports(msgspec.Struct, frozen=True):
    """All ports of an actor class, and what else its `run` takes."""

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    context: str | None
    """Name of the parameter that takes the `Context`."""
    split: bool
    """True where the result is an `Outputs` whose fields are the ports."""


RESULT = "result"
"""Name of the only value output port of an actor whose result is not an `Outputs`."""


def ports_of(actor: type[Actor]) -> Ports:
    """Read the ports of an actor class from the signature of its `run`.

    Raises GraphError where a parameter has no annotation or the signature has no meaning as ports.
    """
    name = actor.__name__
    if "run" not in dir(actor):
        raise GraphError(f"{name} has no run(); an actor needs one")
    run = actor.run
    try:
        hints = typing.get_type_hints(run)
    except NameError as error:
        raise GraphError(f"{name}.run(): {error}; types of ports must be importable from its module") from error
    inputs: list[Port] = []
    outputs: list[Port] = []
    context = None
    for parameter in list(inspect.signature(run).parameters.values())[1:]:
        if parameter.name not in hints:
            raise GraphError(f"{name}.run(): parameter {parameter.name!r} has no annotation; a port needs a type")
        hint = hints[parameter.name]
        inner, optional = _strip_optional(hint)
        origin = typing.get_origin(inner)
        if inner is Context:
            context = parameter.name
        elif origin is Emit:
            outputs.append(Port(parameter.name, "stream", typing.get_args(inner)[0]))
        elif origin is Stream:
            inputs.append(Port(parameter.name, "stream", typing.get_args(inner)[0], optional))
        elif inner is Stream or inner is Emit:
            raise GraphError(f"{name}.run(): {parameter.name!r} needs an item type, like {inner.__name__}[TextDelta]")
        else:
            inputs.append(Port(parameter.name, "value", inner, optional))
    if "return" not in hints:
        raise GraphError(f"{name}.run() has no return annotation; write `-> None` where it gives no result")
    result = hints["return"]
    split = inspect.isclass(result) and issubclass(result, Outputs)
    if split:
        for field, hint in typing.get_type_hints(result).items():
            inner, optional = _strip_optional(hint)
            outputs.append(Port(field, "value", inner, optional))
    elif result is not type(None):
        inner, optional = _strip_optional(result)
        outputs.append(Port(RESULT, "value", inner, optional))
    if actor.batch is not None:
        inputs, outputs = _of_lists(actor, inputs, outputs)
    return Ports(tuple(inputs), tuple(outputs), context, split)


def _strip_optional(hint: Any) -> tuple[Any, bool]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        arms = typing.get_args(hint)
        rest = tuple(arm for arm in arms if arm is not type(None))
        if len(rest) < len(arms):
            return (rest[0] if len(rest) == 1 else typing.Union[rest]), True  # noqa: UP007 - built at run time
    return hint, False


def _of_lists(actor: type[Actor], inputs: list[Port], outputs: list[Port]) -> tuple[list[Port], list[Port]]:
    ports = inputs + outputs
    if len(inputs) != 1 or len(outputs) != 1 or any(typing.get_origin(port.type) is not list for port in ports):
        raise GraphError(f"{actor.__name__}.run() is @batched: it takes one list[...] and returns one list[...]")
    return (
        [msgspec.structs.replace(inputs[0], type=typing.get_args(inputs[0].type)[0])],
        [msgspec.structs.replace(outputs[0], type=typing.get_args(outputs[0].type)[0])],
    )
