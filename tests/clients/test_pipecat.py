"""pipecat's OpenAI services in a pipeline without a transport, unmodified."""

from __future__ import annotations

from typing import Any

import pytest

from .conftest import Served

pytest.importorskip("pipecat", reason="pipecat-ai is not installed: make test-clients")
from pipecat.frames.frames import (
    ErrorFrame,
    InputAudioRawFrame,
    LLMContextFrame,
    LLMFullResponseEndFrame,
    LLMTextFrame,
    TranscriptionFrame,
    TTSAudioRawFrame,
    TTSSpeakFrame,
    VADUserStartedSpeakingFrame,
    VADUserStoppedSpeakingFrame,
)
from pipecat.pipeline.worker import PipelineParams
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.services.openai.llm import OpenAILLMService
from pipecat.services.openai.realtime.llm import OpenAIRealtimeLLMService
from pipecat.services.openai.stt import OpenAISTTService
from pipecat.services.openai.tts import OpenAITTSService
from pipecat.tests.utils import SleepFrame, run_test

pytestmark = [pytest.mark.clients, pytest.mark.timeout(300), pytest.mark.anyio]
SAID = "The meeting begins at nine."


async def play(service: Any, frames: list[Any], **params: Any) -> tuple[Any, Any]:
    """What comes out of `service` for `frames`; it leaves its client open, whose socket would outlive the loop."""
    sent = [*frames, SleepFrame(4)]
    found = await run_test(service, frames_to_send=sent, pipeline_params=PipelineParams(**params), start_timeout=20)
    await service._client.close()
    return found


async def spoken(real: Served) -> list[TTSAudioRawFrame]:
    settings = OpenAITTSService.Settings(model=real.model, voice="alloy")
    service = OpenAITTSService(api_key=real.key, base_url=real.base_url, settings=settings)
    down, up = await play(service, [TTSSpeakFrame(SAID)])
    assert not any(isinstance(frame, ErrorFrame) for frame in (*down, *up))
    return [frame for frame in down if isinstance(frame, TTSAudioRawFrame)]


async def test_it_speaks_and_hears(real: Served) -> None:
    sound = await spoken(real)
    assert {(frame.sample_rate, frame.num_channels) for frame in sound} == {(24000, 1)}
    data = b"".join(frame.audio for frame in sound)
    assert 1 < len(data) / 48000 < 5

    settings = OpenAISTTService.Settings(model=real.model)
    service = OpenAISTTService(api_key=real.key, base_url=real.base_url, settings=settings)
    frames = [InputAudioRawFrame(data[at : at + 4800], 24000, 1) for at in range(0, len(data), 4800)]
    speech = [VADUserStartedSpeakingFrame(), *frames, VADUserStoppedSpeakingFrame()]
    down, up = await play(service, speech, audio_in_sample_rate=24000)
    (heard,) = [frame for frame in down if isinstance(frame, TranscriptionFrame)]
    assert "meeting" in heard.text.lower() and not any(isinstance(frame, ErrorFrame) for frame in up)


async def test_it_answers(real: Served) -> None:
    settings = OpenAILLMService.Settings(model=real.model, max_completion_tokens=12)
    service = OpenAILLMService(api_key=real.key, base_url=real.base_url, settings=settings)
    context = LLMContext([{"role": "user", "content": "Say hello."}])
    down, up = await play(service, [LLMContextFrame(context)])
    assert "".join(frame.text for frame in down if isinstance(frame, LLMTextFrame))
    assert any(isinstance(frame, LLMFullResponseEndFrame) for frame in down)
    assert not any(isinstance(frame, ErrorFrame) for frame in up)


async def test_realtime(real: Served) -> None:
    service = OpenAIRealtimeLLMService(
        api_key=real.key,
        base_url=f"{real.base_url.replace('http', 'ws', 1)}/realtime",
        settings=OpenAIRealtimeLLMService.Settings(model=real.model),
    )
    context = LLMContext([{"role": "user", "content": "Say hello."}])
    sent = [LLMContextFrame(context), SleepFrame(12)]
    down, up = await run_test(service, frames_to_send=sent, start_timeout=20)
    assert not any(isinstance(frame, ErrorFrame) for frame in (*down, *up))
    sound = [frame for frame in down if isinstance(frame, TTSAudioRawFrame)]
    assert sum(len(frame.audio) for frame in sound) > 4800 and {frame.sample_rate for frame in sound} == {24000}
    assert any(isinstance(frame, LLMFullResponseEndFrame) for frame in down)
