"""The autoregressive talker in processes of their own: text to sound, several at once, a death."""

from __future__ import annotations

import os
import signal

import anyio
import numpy as np
import pytest

from actors.piper import PIPER_JOE
from actors.piper.vocoder import PiperVocoder
from actors.segmenter import Segmenter
from actors.tiny_talker.talker import TinyTalker
from omniflow import Graph, Options, Runtime, StageDiedError, TextDelta, one_for_one
from tests.e2e.hearing import heard_pcm, word_errors
from tests.running import CPU, pid_of, running, up_again

pytestmark = pytest.mark.anyio
TEXT = "The children built a small boat. After dinner they played cards."


def speech() -> Graph:
    graph = Graph("ar_speech")
    segment = graph.stage("segment", Segmenter, near="talker")
    talker = graph.stage("talker", TinyTalker, model="tiny-talker", restart=one_for_one(max_restarts=5, within_s=60))
    vocoder = graph.stage("vocoder", PiperVocoder)
    graph.stream(segment, talker, bound=8)
    graph.stream(talker, vocoder, bound=8)
    graph.input(speech=segment)
    graph.output(audio=vocoder)
    return graph


async def say(runtime: Runtime, text: str, seed: int) -> np.ndarray:
    reply = await runtime.submit("speech", [TextDelta(text)], options=Options(seed=seed), deadline_s=100)
    return np.concatenate([chunk.samples for chunk in (await reply.collect())["audio"]])


async def test_it_speaks_to_several_at_once_and_after_a_death() -> None:
    PIPER_JOE.fetch()
    async with running(speech(), CPU, start_timeout_s=100.0) as runtime:
        alone = await say(runtime, TEXT, 1)
        wrong, count = word_errors(TEXT, heard_pcm(alone, 24000))
        assert wrong / count <= 0.3
        together: dict[int, np.ndarray] = {}

        async def one(seed: int) -> None:
            together[seed] = await say(runtime, TEXT, seed)

        async with anyio.create_task_group() as group:
            for seed in (1, 2, 3):
                group.start_soon(one, seed)
        assert np.array_equal(together[1], alone)
        assert not np.array_equal(together[2][:20_000], alone[:20_000])

        reply = await runtime.submit("speech", [TextDelta(TEXT * 10)], deadline_s=100)
        with pytest.raises(StageDiedError):
            async for _output in reply:
                os.kill(pid_of(runtime, "talker"), signal.SIGKILL)
        await up_again(runtime, 60)
        assert np.array_equal(await say(runtime, TEXT, 1), alone)
