"""docs/request_path.md names functions that exist, and a request really goes through its hops, in that order."""

from __future__ import annotations

import inspect
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import httpx
import numpy as np
import pytest

from omniflow import Actor, AudioChunk, Cluster, Emit, Graph, Runtime, Stream, TextDelta, plan
from omniflow.host import Host
from omniflow.runtime import Runtime as RuntimeClass
from omniflow.server.app import build_app
from omniflow.server.speech import create_speech, stream_audio
from omniflow.transport.local_object import LocalObjectLink
from omniflow.visit import PortEmit

PAGE = (Path(__file__).parents[1] / "docs/request_path.md").read_text()
HOPS = re.findall(r"^\| \d \| `([\w.]+)`", PAGE, flags=re.MULTILINE)


class Hum(Actor):
    async def run(self, texts: Stream[TextDelta], audio: Emit[AudioChunk]) -> None:
        async for text in texts:
            await audio.send(AudioChunk(np.zeros(240 * len(text.text), np.float32), 24000))


def test_the_page_has_six_hops() -> None:
    assert len(HOPS) == 6


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(omniflow(?:\.\w+)+)`", PAGE))))
def test_functions_that_are_named_exist(name: str) -> None:
    if name != "omniflow.actor.Actor.run":  # every actor has its own; the base only declares it
        assert pkgutil.resolve_name(name) is not None


@contextmanager
def traced(functions: list[Callable[..., object]]) -> Iterator[list[str]]:
    """The names of those functions that run in this thread, each once, in the order of their first call."""
    codes = {inspect.unwrap(function).__code__: function.__qualname__ for function in functions}
    seen: list[str] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        name = codes.get(frame.f_code)
        if event == "call" and name is not None and name not in seen:
            seen.append(name)

    sys.setprofile(note)
    try:
        yield seen
    finally:
        sys.setprofile(None)


@pytest.mark.anyio
async def test_a_request_goes_through_the_hops_in_order() -> None:
    graph = Graph("hum")
    hum = graph.stage("hum", Hum)
    graph.input(speech=hum)
    graph.output(audio=hum)
    here = Cluster("here", cpu_cores=1, memory_bytes=0, single_process=True)
    body = {"model": "hum", "input": "hello", "response_format": "pcm"}
    hops = [
        create_speech,
        RuntimeClass.submit,
        Host._run_stage,
        Hum.run,
        PortEmit.send,
        LocalObjectLink.send_item,
        stream_audio,
    ]
    async with Runtime(plan(graph.spec(), here)) as runtime:
        transport = httpx.ASGITransport(build_app(runtime, model="hum"))
        async with httpx.AsyncClient(transport=transport, base_url="http://hum") as client:
            with traced([*hops, stream_audio]) as seen:
                reply = await client.post("/v1/audio/speech", json=body)
    assert reply.status_code == 200
    assert len(reply.content) == 2 * 240 * len("hello")
    # stream_audio is first called while the request is under way, and goes on after the last Emit.send.
    # The link takes the text to the stage, too.
    in_order = ["create_speech", "Runtime.submit", "Host._run_stage", "Hum.run", "PortEmit.send"]
    assert [name for name in seen if name not in ("stream_audio", "LocalObjectLink.send_item")] == in_order
    assert "LocalObjectLink.send_item" in seen
    assert "stream_audio" in seen and seen.index("stream_audio") > seen.index("Runtime.submit")
    assert [hop.rpartition(".")[2] for hop in HOPS] == [
        "create_speech", "submit", "run", "step", "send", "stream_audio",
    ]  # fmt: skip
