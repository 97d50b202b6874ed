"""Whatever comes, in whatever order: nothing raises, what is begun is ended, and the next turn works."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from openai.types.realtime import RealtimeServerEvent
from pydantic import TypeAdapter

from omniflow.errors import DeadlineError, OverloadedError
from omniflow.media import AudioChunk, Generated, TextDelta, ToolCallDelta
from omniflow.server.realtime.protocol import Bounds

from ..scripted import tone
from .machine import Machine, kinds

TYPES: TypeAdapter[Any] = TypeAdapter(RealtimeServerEvent)
IDS = st.sampled_from(["a", "b", "c", "root", "nobody"])
TURNS = st.sampled_from(
    [
        None,
        {"type": "server_vad"},
        {"type": "server_vad", "interrupt_response": False, "idle_timeout_ms": 5000},
        {"type": "server_vad", "create_response": False},
        {"type": "semantic_vad", "eagerness": "high"},
    ]
)
SESSIONS = st.one_of(
    TURNS.map(lambda turns: {"audio": {"input": {"turn_detection": turns}}}),
    st.sampled_from(
        [
            {"output_modalities": ["text"]},
            {"output_modalities": ["audio"]},
            {"audio": {"input": {"transcription": {}}, "output": {"format": {"type": "audio/pcma"}}}},
            {"audio": {"input": {"transcription": None, "format": {"type": "audio/pcmu"}}}},
            {"tools": [{"type": "function", "name": "f", "parameters": {}}]},
            {"tools": []},
            {"type": "transcription"},
            {"type": "realtime"},
            {"audio": 3},
        ]
    ),
)
PARTS = st.sampled_from(
    [
        {"type": "input_text", "text": "hi"},
        {"type": "input_audio", "audio": "AAAA"},
        {"type": "input_audio"},
        {"type": "output_text", "text": "so"},
        {"type": "output_audio", "transcript": "so"},
        {"type": "input_image", "image_url": "data:image/png;base64,AAAA"},
        {"type": "input_image", "image_url": "http://example/x.png"},
        {"type": "nonsense"},
    ]
)
ITEMS = st.one_of(
    st.builds(
        lambda id, role, parts: {"type": "message", "id": id, "role": role, "content": parts},
        IDS,
        st.sampled_from(["user", "assistant", "system"]),
        st.lists(PARTS, max_size=2),
    ),
    st.builds(lambda id: {"type": "function_call_output", "id": id, "call_id": "c", "output": "o"}, IDS),
    st.builds(lambda id: {"type": "function_call", "id": id, "name": "f", "arguments": "{}"}, IDS),
)
RESPONSES = st.one_of(
    st.none(),
    st.builds(
        lambda conversation, modality, items: {
            "conversation": conversation,
            "output_modalities": [modality],
            "input": items,
        },
        st.sampled_from([None, "auto", "none", "other"]),
        st.sampled_from(["text", "audio"]),
        st.one_of(st.none(), st.lists(ITEMS, max_size=2)),
    ),
)
OUTPUTS = st.one_of(
    st.sampled_from(["", "word ", "é"]).map(TextDelta),
    st.sampled_from([tone(1), tone(700), tone(700, 22050), AudioChunk(np.array([np.nan], np.float32), 24000)]),
    st.builds(ToolCallDelta, st.integers(0, 1), st.just('{"x":'), st.none(), st.sampled_from([None, "f"])),
    st.sampled_from([Generated("stop", 3, 4), Generated("length", 3, 4)]),
)


class Sessions(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.machine = Machine(bounds=Bounds(items=6, buffer_s=2))
        self.read = 0

    def send(self, kind: str, **fields: Any) -> None:
        events = self.machine.send(kind, event_id="mine", **fields)
        assert all(event["error"].get("event_id") == "mine" for event in events if event["type"] == "error")

    @rule(update=SESSIONS)
    def update(self, update: dict[str, Any]) -> None:
        self.send("session.update", session=update)

    @rule(item=ITEMS, previous=st.one_of(st.none(), IDS))
    def create(self, item: dict[str, Any], previous: str | None) -> None:
        self.send("conversation.item.create", item=item, previous_item_id=previous)

    @rule(kind=st.sampled_from(["retrieve", "delete", "truncate"]), id=IDS, ms=st.integers(0, 9999), of=st.booleans())
    def of_item(self, kind: str, id: str, ms: int, of: bool) -> None:
        made = [key for key in self.machine.reader.added if of]
        item_id = made[ms % len(made)] if made else id
        self.send(f"conversation.item.{kind}", item_id=item_id, content_index=0, audio_end_ms=ms)

    @rule(kind=st.sampled_from(["commit", "clear"]))
    def buffer(self, kind: str) -> None:
        self.send(f"input_audio_buffer.{kind}")

    @rule(speech=st.lists(st.sampled_from([0.0, 0.4, 0.9]), min_size=1, max_size=4), times=st.integers(1, 20))
    def say(self, speech: list[float], times: int) -> None:
        self.machine.say(speech * times)

    @rule(response=RESPONSES)
    def respond(self, response: dict[str, Any] | None) -> None:
        self.send("response.create", response=response)

    @rule(which=st.integers(0, 3), own=st.booleans())
    def cancel(self, which: int, own: bool) -> None:
        task = self.machine.responds[which % len(self.machine.responds)] if self.machine.responds else None
        self.send("response.cancel", response_id=task.response_id if task and own else None)

    @precondition(lambda self: self.machine.responds)
    @rule(which=st.integers(0, 9), values=st.lists(OUTPUTS, max_size=3), end=st.sampled_from(["", "ended", "failed"]))
    def output(self, which: int, values: list[object], end: str) -> None:
        task = self.machine.responds[-1 - which % len(self.machine.responds)]
        self.machine.gives(task, *values, end=end == "ended")
        if end == "failed":
            self.machine.protocol.failed(task.response_id, DeadlineError("too late"))
        self.machine.take()

    @precondition(lambda self: self.machine.transcribes)
    @rule(fails=st.booleans())
    def transcribe(self, fails: bool) -> None:
        task = self.machine.transcribes.pop(0)
        if fails:
            self.machine.protocol.not_written(task.item_id, OverloadedError("full"))
        else:
            self.machine.protocol.wrote(task.item_id, "so")
            self.machine.protocol.written(task.item_id, "so", 0.1)
        self.machine.take()

    @precondition(lambda self: self.machine.listens)
    @rule(text=st.sampled_from(["Yes.", "and", "", None]))
    def understood(self, text: str | None) -> None:
        self.machine.protocol.understood(self.machine.listens.pop(0).pause, text)
        self.machine.take()

    @rule(seconds=st.sampled_from([0.1, 6.0]))
    def wait(self, seconds: float) -> None:
        self.machine.now_s += seconds
        self.machine.protocol.tick()
        self.machine.take()

    @rule(text=st.sampled_from(["", "{", "[]", '{"type": 1}', '{"type": "x"}', '{"type": "session.update"}']))
    def nonsense(self, text: str) -> None:
        self.machine.protocol.receive(text)
        assert kinds(self.machine.take()) == ["error"]

    @invariant()
    def every_event_is_of_the_sdks_types(self) -> None:
        for event in self.machine.events[self.read :]:
            TYPES.validate_python(event)
        self.read = len(self.machine.events)

    @invariant()
    def one_response_of_the_conversation(self) -> None:
        running = self.machine.protocol._responses._answers.values()
        assert sum(answer.in_conversation for answer in running) <= 1 and len(running) <= 5
        assert {answer.id for answer in running} == self.machine.reader.open_responses
        assert self.machine.protocol._num_writing == len(self.machine.transcribes) <= 8

    def teardown(self) -> None:
        """All that is still open can be ended, and a plain turn works."""
        machine = self.machine
        for answer in list(machine.protocol._responses._answers.values()):
            machine.send("response.cancel", response_id=answer.id)
        machine.send("session.update", session={"type": "realtime", "output_modalities": ["text"], "tools": []})
        for answer in list(machine.protocol._responses._answers.values()):
            machine.send("response.cancel", response_id=answer.id)
        assert machine.protocol._responses.idle and not machine.reader.open_responses
        task = machine.ask("still there?")
        (done,) = [event for event in machine.gives(task, TextDelta("yes")) if event["type"] == "response.done"]
        assert done["response"]["output"][0]["content"][0]["text"] == "yes"
        assert set(machine.reader.items.values()) == {"done"}


Sessions.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # to shrink a case takes minutes
    suppress_health_check=list(HealthCheck),
)
TestSessions = Sessions.TestCase
