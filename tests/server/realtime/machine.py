"""A session's machine with hands on all its inputs, and a reader that checks every event that it gives."""

from __future__ import annotations

import base64
import json
from typing import Any, get_args

import msgspec
import numpy as np
from openai.types.realtime import RealtimeServerEvent

from omniflow.server.realtime.hearing import Listen, Transcribe
from omniflow.server.realtime.protocol import Bounds, Protocol, Work
from omniflow.server.realtime.responses import Abilities, Respond, Stop
from omniflow.server.realtime.settings import Session, updated
from omniflow.server.realtime.turns import FRAME_SAMPLES

EVERYTHING = Abilities(frozenset({"tiny"}), frozenset({"text", "audio", "usage", "tool_calls"}), transcribes=True)
BOUNDS = Bounds(items=50, buffer_s=2.0)
MANUAL = {"audio": {"input": {"turn_detection": None}}}
_TYPES = {
    get_args(model.model_fields["type"].annotation)[0]: model for model in get_args(get_args(RealtimeServerEvent)[0])
}
"""OpenAI's client's own, by the type of the event. openai-agents drops what does not fit them."""
_OF_ITEM = ("response.output_text.", "response.output_audio", "response.function_call_arguments.", "response.content_p")


class Reader:
    """Reads events as a strict client: what must come in pairs and in order does."""

    def __init__(self) -> None:
        self.num_read = 0
        self.responses: dict[str, str] = {}
        self.items: dict[tuple[str, str], str] = {}
        self.parts: dict[str, str] = {}
        self.added: dict[str, str] = {}
        self.order: list[str] = []  # LiveKit keeps one, by what `previous_item_id` says

    def read(self, event: dict[str, Any]) -> None:
        kind = event["type"]
        if self.num_read == 0:
            assert kind in ("session.created", "error")  # the latter where it is refused
        else:
            assert kind != "session.created"
        assert event["event_id"].startswith("event_")
        _TYPES[kind].model_validate(event)
        self.num_read += 1
        no_nulls(event.get("item"))
        no_nulls(event.get("part"))
        if kind == "response.created":
            self._open(self.responses, event["response"]["id"])
            assert event["response"]["status"] == "in_progress"
        elif kind == "response.done":
            self._response_done(event["response"])
        elif kind == "conversation.item.deleted":
            self.order.remove(event["item_id"])
            if self.added.get(event["item_id"]) == "done":  # else its done still comes
                del self.added[event["item_id"]]
        elif kind.startswith("conversation.item.") and kind.endswith((".added", ".done")):
            self._conversation(kind, event["item"]["id"], event["previous_item_id"])
        elif kind.startswith("response."):
            self._of_response(kind, event)

    @property
    def open_responses(self) -> set[str]:
        return {id for id, state in self.responses.items() if state == "open"}

    def _open(self, table: dict[Any, str], key: Any) -> None:
        assert key not in table
        table[key] = "open"

    def _close(self, table: dict[Any, str], key: Any) -> None:
        assert table[key] == "open"
        table[key] = "done"

    def _response_done(self, response: dict[str, Any]) -> None:
        self._close(self.responses, response["id"])
        assert response["status"] in ("completed", "cancelled", "failed", "incomplete")
        mine = {item: state for (of, item), state in self.items.items() if of == response["id"]}
        assert set(mine.values()) <= {"done"} and list(mine) == [item["id"] for item in response["output"]]
        assert all(self.parts.get(item, "done") == "done" for item in mine)
        assert response["usage"]["total_tokens"] >= 0

    def _conversation(self, kind: str, id: str, previous: str | None) -> None:
        if kind.endswith(".added"):
            self._open(self.added, id)
            self.order.insert(0 if previous is None else self.order.index(previous) + 1, id)
        else:
            self._close(self.added, id)

    def _of_response(self, kind: str, event: dict[str, Any]) -> None:
        response = event["response_id"]
        assert self.responses[response] == "open"
        if kind == "response.output_item.added":
            self._open(self.items, (response, event["item"]["id"]))
        elif kind == "response.output_item.done":
            self._close(self.items, (response, event["item"]["id"]))
        else:
            assert kind.startswith(_OF_ITEM) and self.items[response, event["item_id"]] == "open"
            if kind == "response.content_part.added":
                self._open(self.parts, event["item_id"])
            elif kind == "response.content_part.done":
                self._close(self.parts, event["item_id"])
            elif "function_call" not in kind:
                assert self.parts[event["item_id"]] == "open"


def no_nulls(value: Any) -> None:
    """agents-js drops an event whose item or part has one; it needs one in sound that is not yet words."""
    if isinstance(value, dict):
        if value.get("type") == "input_audio":
            assert "transcript" in value
        else:
            assert None not in value.values(), value
        for each in value.values():
            no_nulls(each)
    elif isinstance(value, list):
        for each in value:
            no_nulls(each)


class Machine:
    """A session; `events` are all that it has sent, `work` what it wants done, by kind."""

    def __init__(
        self,
        update: dict[str, Any] | None = None,
        abilities: Abilities = EVERYTHING,
        bounds: Bounds = BOUNDS,
    ) -> None:
        self.now_s = 100.0
        session = updated(Session(model="tiny"), update or {})
        self.protocol = Protocol(session, abilities, bounds, 2_000_000_000, clock=lambda: self.now_s)
        self.reader = Reader()
        self.events: list[dict[str, Any]] = []
        self.responds: list[Respond] = []
        self.stops: list[str] = []
        self.transcribes: list[Transcribe] = []
        self.listens: list[Listen] = []
        self.take()

    def take(self) -> list[dict[str, Any]]:
        """The events since the last call, read."""
        events, work = self.protocol.take()
        encoded = [msgspec.json.encode(event) for event in events]
        assert all(len(message) < 2**20 for message in encoded)
        fresh = [json.loads(message) for message in encoded]
        for event in fresh:
            self.reader.read(event)
        self.events += fresh
        for task in work:
            self._note(task)
        return fresh

    def _note(self, task: Work) -> None:
        match task:
            case Respond():
                self.responds.append(task)
            case Stop(response_id=id):
                self.stops.append(id)
            case Transcribe():
                self.transcribes.append(task)
            case Listen():
                self.listens.append(task)

    def send(self, kind: str, **fields: Any) -> list[dict[str, Any]]:
        """What a client's event brings."""
        self.protocol.receive(json.dumps({"type": kind, **fields}))
        return self.take()

    def say(self, probabilities: list[float]) -> list[dict[str, Any]]:
        """Sound comes in, a frame for each probability of being speech."""
        pcm = np.ones(len(probabilities) * FRAME_SAMPLES * 3 // 2, "<i2").tobytes()
        self.protocol.receive(
            json.dumps({"type": "input_audio_buffer.append", "audio": base64.b64encode(pcm).decode()})
        )
        frames = len(self.protocol.frames()) // FRAME_SAMPLES
        self.protocol.heard((probabilities + [0.0] * frames)[:frames])
        return self.take()

    def ask(self, text: str = "hello", **response: Any) -> Respond:
        """A message, and a response to it."""
        item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}
        self.send("conversation.item.create", item=item)
        self.send("response.create", response=response)
        return self.responds[-1]

    def gives(self, task: Respond, *values: object, end: bool = True) -> list[dict[str, Any]]:
        """What becomes of a response where the graph gives `values`."""
        for value in values:
            self.protocol.output(task.response_id, value)
        if end:
            self.protocol.ended(task.response_id)
        return self.take()


def kinds(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"] for event in events]
