"""POST /v1/chat/completions: create_chat_completion -> Runtime.submit -> stream_chat or whole_chat."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterable
from typing import TYPE_CHECKING

import anyio
import msgspec

from omniflow.errors import UnsupportedError
from omniflow.media import Chat, Options
from omniflow.server.call import EVENT_STREAM, Call
from omniflow.server.chat_answer import Answering, ChoiceChunks, WholeChoice
from omniflow.server.chat_reply import Chunk, Completion, usage_of
from omniflow.server.chat_request import ChatRequest, chat_of, refuse_unsupported, wanted_media
from omniflow.server.choices import ChoiceOutputs, choices
from omniflow.server.encoders import CHAT_FORMATS, Format
from omniflow.server.service import Service

if TYPE_CHECKING:
    from omniflow.runtime import Reply

DONE = b"data: [DONE]\n\n"


async def create_chat_completion(service: Service, call: Call) -> None:
    """Answer a conversation, in text or aloud, whole or as server-sent events."""
    request = call.read(ChatRequest)
    service.require_model(request.model)
    service.require_entry("chat", "conversations")
    service.require_output("chat", "text")
    refuse_unsupported(request)
    options = request.options()
    options = msgspec.structs.replace(options, voice=service.voice(options.voice, "audio.voice"))
    options = service.with_learned_voice(options)
    if options.tools:
        service.require_output("chat", "tool_calls", param="tools")
    answering = _answering(service, call, request)
    deadline = anyio.current_time() + call.deadline_s if call.deadline_s is not None else None
    chat = await _conversation(service, request, call.deadline_s)
    submission = _Submission(service, call, chat, options, _wanted(service, request, options), deadline)
    try:
        async with choices(submission, answering.n) as outputs:
            if request.stream:
                await call.stream(stream_chat(outputs, answering), EVENT_STREAM)
            else:
                await call.send(await whole_chat(outputs, answering), "application/json")
    except UnsupportedError as error:
        # An image, say, that no stage of this profile takes: the graph does not know what it was in the request.
        error.param = error.param or "messages"
        raise


class _Submission:
    """Starts the choices of a request: each with a seed of its own, all within one deadline."""

    def __init__(
        self, service: Service, call: Call, chat: Chat, options: Options, wanted: frozenset[str], deadline: float | None
    ) -> None:
        self._service = service
        self._call = call
        self._chat = chat
        self._options = options
        self._wanted = wanted
        self._deadline = deadline

    async def __call__(self, index: int) -> Reply:
        options = self._options
        if index and options.seed is not None:
            options = msgspec.structs.replace(options, seed=_next_seed(options.seed, index))
        return await self._service.runtime.submit(
            "chat",
            self._chat,
            outputs=self._wanted,
            options=options,
            deadline_s=self._deadline and max(0.001, self._deadline - anyio.current_time()),
            request_id=f"{self._call.request_id}-{index}" if index else self._call.request_id,
        )


def _next_seed(seed: int, index: int) -> int:
    return (seed + index + 2**63) % 2**64 - 2**63


def _wanted(service: Service, request: ChatRequest, options: Options) -> frozenset[str]:
    wanted = {"text", "usage"} | ({"audio"} if request.wants_audio else set())
    if options.tools:
        wanted.add("tool_calls")
    return frozenset(wanted.intersection(service.runtime.plan.outputs_of("chat")))


async def _conversation(service: Service, request: ChatRequest, deadline_s: float | None) -> Chat:
    wanted = list(wanted_media(request.messages)) if service.remote is not None else []
    fetched = await service.remote.fetch(wanted, deadline_s) if service.remote is not None and wanted else {}
    return chat_of(request.messages, service.transcripts, fetched)


def _answering(service: Service, call: Call, request: ChatRequest) -> Answering:
    return Answering(
        hex_id=call.request_id.removeprefix("req_"),
        model=request.model,
        audio=_audio_format(service, request),
        logprobs=bool(request.logprobs),
        usage_chunk=request.wants_usage_chunk,
        transcripts=service.transcripts,
        times=call.times,
        created=int(time.time()),
        n=request.n or 1,
    )


def _audio_format(service: Service, request: ChatRequest) -> Format | None:
    if not request.wants_audio:
        return None
    service.require_output("chat", "audio", param="modalities")
    asked = request.audio.format if request.audio is not None else None
    if request.stream and asked not in (None, "pcm16"):
        raise UnsupportedError(f"audio.format: {asked!r} cannot be streamed; ask for 'pcm16'", param="audio.format")
    return CHAT_FORMATS[asked or ("pcm16" if request.stream else "wav")]


async def whole_chat(outputs: ChoiceOutputs, answering: Answering) -> bytes:
    """The JSON of a whole answer."""
    parts = [WholeChoice(answering, index) for index in range(answering.n)]
    async for index, name, value in outputs:
        if name is not None:
            await parts[index].take(name, value)
    found = tuple([await part.finish() for part in parts])
    usage = usage_of([part.generated for part in parts if part.generated is not None])
    return msgspec.json.encode(Completion(answering.id, answering.created, answering.model, found, usage))


async def stream_chat(outputs: ChoiceOutputs, answering: Answering) -> AsyncGenerator[bytes]:
    """The server-sent events of an answer, each as soon as its text, call or sound is there.

    `[DONE]` ends an answer that is whole, and only that.
    """
    parts = [ChoiceChunks(answering, index) for index in range(answering.n)]
    async for index, name, value in outputs:
        chunks = await parts[index].take(name, value) if name is not None else await parts[index].end()
        if events := _events(chunks):
            yield events
    last = b""
    if answering.usage_chunk:
        usage = usage_of([part.generated for part in parts if part.generated is not None])
        last = _events([Chunk(answering.id, answering.created, answering.model, (), usage)])
    yield last + DONE


def _events(chunks: Iterable[Chunk]) -> bytes:
    return b"".join(b"data: " + msgspec.json.encode(chunk) + b"\n\n" for chunk in chunks)
