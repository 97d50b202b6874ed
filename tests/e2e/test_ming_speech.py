"""Ming's talker and vocoder in processes of their own, tiny: text to sound, several at once, a death."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import anyio
import numpy as np
import pytest

from actors.ming.speaking import MingTalker
from actors.ming.vocoder import MingVocoder
from actors.segmenter import Segmenter
from omniflow import Graph, Options, Runtime, StageDiedError, TextDelta, one_for_one
from omniflow.errors import UnsupportedError
from tests.actors.ming.tiny import write_checkpoint
from tests.running import CPU, pid_of, running, up_again

pytestmark = pytest.mark.anyio
TEXT = "The children built a small boat. After dinner they played cards."


def speech(model: Path) -> Graph:
    graph = Graph("ming_speech")
    segment = graph.stage("segment", Segmenter, near="talker")
    again = one_for_one(max_restarts=5, within_s=60)
    talker = graph.stage("talker", MingTalker, model=str(model), max_running=4, restart=again)
    vocoder = graph.stage("vocoder", MingVocoder, model=str(model))
    graph.stream(segment, talker, bound=8)
    graph.stream(talker, vocoder, bound=8)
    graph.input(speech=segment)
    graph.output(audio=vocoder)
    return graph


async def say(runtime: Runtime, text: str, seed: int) -> np.ndarray:
    reply = await runtime.submit("speech", [TextDelta(text)], options=Options(seed=seed))
    chunks = (await reply.collect())["audio"]
    assert {(chunk.sample_rate_hz, chunk.channels) for chunk in chunks} == {(44100, 1)}
    return np.concatenate([chunk.samples for chunk in chunks])


async def test_it_speaks_to_several_at_once_and_after_a_death(tmp_path: Path) -> None:
    async with running(speech(write_checkpoint(tmp_path)), CPU) as runtime:
        alone = await say(runtime, TEXT, 1)
        assert len(alone) > 4410 and 0.02 < np.std(alone) and np.abs(alone).max() <= 1
        together: dict[int, np.ndarray] = {}

        async def one(seed: int) -> None:
            together[seed] = await say(runtime, TEXT, seed)

        async with anyio.create_task_group() as group:
            for seed in range(6):
                group.start_soon(one, seed)
        assert len(together[1]) == len(alone) and np.abs(together[1] - alone).max() <= 1e-6
        assert np.abs(together[2][:2000] - alone[:2000]).max() > 0.01

        with pytest.raises(UnsupportedError, match="speed 2"):
            await (await runtime.submit("speech", [TextDelta(TEXT)], options=Options(speed=2.0))).collect()

        reply = await runtime.submit("speech", [TextDelta(TEXT * 20)])
        with pytest.raises(StageDiedError):
            async for _output in reply:
                os.kill(pid_of(runtime, "talker"), signal.SIGKILL)
        await up_again(runtime)
        assert np.abs(await say(runtime, TEXT, 1) - alone).max() <= 1e-6
