"""Graphs for the server's tests: a small real one without weights, and a scripted runtime behind the same surface.

In a script, what a request gives, waits for and fails with is data.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence

import anyio
import anyio.lowlevel
import numpy as np

from omniflow.actor import Actor, Emit, Stream
from omniflow.config import RuntimeConfig
from omniflow.engine.stats import EngineStats
from omniflow.graph import Graph
from omniflow.media import AudioChunk, Chat, Generated, Options, TextDelta, TextPart, ToolCallDelta
from omniflow.planner import Cluster, Plan, plan
from omniflow.runtime import Output, RuntimeStatus, StageStatus, State

Step = Output | Exception | anyio.Event
"""An output to give, an error to raise, an event to wait for."""


def tone(num_samples: int, rate_hz: int = 24000, channels: int = 1, start: int = 0) -> AudioChunk:
    """A quiet ramp whose samples are all different, so that a lost or doubled one is seen."""
    samples = (np.arange(start, start + num_samples * channels) % 20011 / 20011 - 0.5).astype(np.float32)
    return AudioChunk(samples, rate_hz, channels)


HELLO: tuple[Step, ...] = (
    Output("text", TextDelta("Hel")),
    Output("audio", tone(5)),
    Output("text", TextDelta("lo.")),
    Output("audio", tone(8, start=5)),
    Output("usage", Generated("stop", 7, 2)),
)


class Parrot(Actor):
    """Says the last thing it was told, word by word; waits for ever after the word 'wait'. It calls no tools."""

    async def run(self, chat: Chat, text: Emit[TextDelta], tool_calls: Emit[ToolCallDelta]) -> Generated:
        (part,) = chat.messages[-1].parts
        assert isinstance(part, TextPart)
        words = part.text.split()
        for word in words:
            await text.send(TextDelta(word + " "))
            if word == "wait":
                await anyio.sleep_forever()
        return Generated("stop", len(words), len(words))


class Hum(Actor):
    """Gives 10 samples a character, chunk by chunk; all of one text are that text's length in value."""

    async def run(self, texts: Stream[TextDelta], audio: Emit[AudioChunk]) -> None:
        async for delta in texts:
            await audio.send(AudioChunk(np.full(10 * len(delta.text), 0.25, np.float32), 24000))


def parrot_plan(
    inputs: Collection[str] = ("chat", "speech"), outputs: Collection[str] = ("text", "tool_calls", "audio")
) -> Plan:
    """Parrot and Hum in the process of the runtime, with some of the ends that ming_omni has."""
    graph = Graph("parrot")
    if "chat" in inputs:
        parrot = graph.stage("parrot", Parrot)
        graph.input(chat=parrot)
        graph.output(text=parrot["text"], usage=parrot["result"])
        if "tool_calls" in outputs:
            graph.output(tool_calls=parrot["tool_calls"])
    if "audio" in outputs:
        hum = graph.stage("hum", Hum)
        graph.output(audio=hum)
        if "chat" in inputs:
            graph.stream(parrot["text"], hum)
        if "speech" in inputs:
            graph.input(speech=hum)
    return plan(graph.spec(), Cluster("test", cpu_cores=2, memory_bytes=2**30, single_process=True))


def stage_status(
    name: str, host: str, state: str = "ready", restarts: int = 0, engine: EngineStats | None = None
) -> StageStatus:
    """A stage that works on nothing."""
    return StageStatus(name=name, host=host, state=state, restarts=restarts, in_flight=0, pid=None, engine=engine)


class ScriptedReply:
    def __init__(self, script: Sequence[Step], wanted: Collection[str]) -> None:
        self._script = script
        self._wanted = wanted
        self.num_taken = 0
        self.left = anyio.Event()

    async def __aenter__(self) -> ScriptedReply:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.left.set()

    async def __aiter__(self) -> AsyncIterator[Output]:
        for step in self._script:
            await anyio.lowlevel.checkpoint()
            if isinstance(step, anyio.Event):
                await step.wait()
            elif isinstance(step, Exception):
                raise step
            elif step.name in self._wanted:
                self.num_taken += 1
                yield step


class Submission:
    """What `submit` was called with."""

    def __init__(
        self,
        entry: str,
        value: object,
        outputs: Collection[str],
        options: Options | None,
        deadline_s: float | None,
        request_id: str | None,
    ) -> None:
        self.entry = entry
        self.value = value
        self.outputs = frozenset(outputs)
        self.options = options
        self.deadline_s = deadline_s
        self.request_id = request_id


class ScriptedRuntime:
    """Gives every request the same `script`, or the next of `scripts`; with a `refusal`, `submit` raises it."""

    def __init__(self, script: Sequence[Step] = HELLO, plan: Plan | None = None) -> None:
        self.plan = plan or parrot_plan()
        self.config = RuntimeConfig()
        self.script = script
        self.scripts: list[Sequence[Step]] = []
        self.refusal: Exception | None = None
        self.state: State = "ready"
        self.stages = (stage_status("thinker", "host0"), stage_status("talker", "host1"))
        self.submissions: list[Submission] = []
        self.replies: list[ScriptedReply] = []

    async def submit(
        self,
        entry: str,
        value: object,
        *,
        outputs: Collection[str] | None = None,
        options: Options | None = None,
        deadline_s: float | None = None,
        request_id: str | None = None,
    ) -> ScriptedReply:
        if self.refusal is not None:
            raise self.refusal
        wanted = frozenset(outputs or ())
        assert entry in self.plan.inputs and wanted and wanted <= set(self.plan.outputs_of(entry))
        self.submissions.append(Submission(entry, value, wanted, options, deadline_s, request_id))
        self.replies.append(ScriptedReply(self.scripts.pop(0) if self.scripts else self.script, wanted))
        return self.replies[-1]

    def status(self) -> RuntimeStatus:
        in_flight = sum(not reply.left.is_set() for reply in self.replies)
        return RuntimeStatus(self.state, in_flight, 0, self.stages, None)
