"""What can be asked of this server over HTTP: one entry for a method of a path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from msgspec import Struct

from omniflow.server.chat_reply import Chunk, Completion
from omniflow.server.chat_request import ChatRequest
from omniflow.server.encoders import SPEECH_FORMATS
from omniflow.server.failures import ErrorReply
from omniflow.server.health import Health, Liveness, Readiness
from omniflow.server.models import Model, ModelList
from omniflow.server.realtime.client_secrets import ClientSecretReply, ClientSecretRequest
from omniflow.server.speech import SpeechDelta, SpeechDone, SpeechRequest
from omniflow.server.speech_batch import SpeechBatch, SpeechBatchRequest
from omniflow.server.transcription_reply import TranscriptDelta, TranscriptDone, Transcription, VerboseTranscription
from omniflow.server.transcriptions import TranscriptionRequest, TranslationRequest
from omniflow.server.voices import CreatedVoice, DeletedVoice, VoiceList, VoiceUpload

EVENTS = "text/event-stream"
JSON = "application/json"
FORM: Literal["multipart/form-data"] = "multipart/form-data"
_CALL_ERRORS = {
    400: "The request is not valid, or this model cannot do it: `param` names the field.",
    404: "No such model.",
    408: "The body did not come in time.",
    413: "The body is too large.",
    429: "Too much is asked for at once; `retry-after` says when to come back. Nothing of it ran.",
    500: "A bug. The log of the server has it under the `x-request-id`.",
    503: "Starting, draining, or a stage died; `x-should-retry` says whether to send it again.",
    504: "The deadline passed, which `x-request-timeout` (seconds) can set.",
}


class Operation(Struct, frozen=True, kw_only=True):
    """A method of a path.

    `body`: its JSON, or its form with a file called as `file` says. `replies`: shapes by media type, None where it is
    no JSON, several for one or the other.
    `events`: the shape of a server-sent event. `needs`: an input that the graph must have. `is_open`: needs no key.
    """

    method: Literal["get", "post", "delete"]
    path: str
    name: str
    summary: str
    body: type[Struct] | None = None
    body_type: Literal["application/json", "multipart/form-data"] = "application/json"
    file: str = "file"
    replies: Mapping[str, Any] = {}
    events: Any = None
    failures: Mapping[int, str] = {}
    failure_shape: Any = ErrorReply
    needs: str | None = None
    is_open: bool = False


OPERATIONS = (
    Operation(
        method="post",
        path="/v1/chat/completions",
        name="createChatCompletion",
        summary="Answer a conversation, in text or aloud, whole or as server-sent events.",
        body=ChatRequest,
        replies={JSON: Completion, EVENTS: None},
        events=Chunk,
        failures=_CALL_ERRORS,
        needs="chat",
    ),
    Operation(
        method="post",
        path="/v1/audio/speech",
        name="createSpeech",
        summary="Say a text: as a file, as bytes while they are made, or as server-sent events.",
        body=SpeechRequest,
        replies={**{format.media_type: None for format in SPEECH_FORMATS.values()}, EVENTS: None},
        events=SpeechDelta | SpeechDone,
        failures=_CALL_ERRORS,
        needs="speech",
    ),
    Operation(
        method="post",
        path="/v1/audio/speech/batch",
        name="createSpeechBatch",
        summary="Say many texts: each gets a file, or an error of its own.",
        body=SpeechBatchRequest,
        replies={JSON: SpeechBatch},
        failures=_CALL_ERRORS,
        needs="speech",
    ),
    Operation(
        method="get",
        path="/v1/audio/voices",
        name="listVoices",
        summary="What `voice` of a request may be; none: anything.",
        replies={JSON: VoiceList},
    ),
    Operation(
        method="post",
        path="/v1/audio/voices",
        name="createVoice",
        summary="Learn a voice from a recording, where the model can: `voice` of later requests may be its name.",
        body=VoiceUpload,
        body_type=FORM,
        file="audio_sample",
        replies={JSON: CreatedVoice},
        failures=_CALL_ERRORS,
    ),
    Operation(
        method="delete",
        path="/v1/audio/voices/{voice}",
        name="deleteVoice",
        summary="Forget a voice that was uploaded.",
        replies={JSON: DeletedVoice},
        failures={400: "It is a voice of the model.", 404: "There is no such voice."},
    ),
    Operation(
        method="post",
        path="/v1/audio/transcriptions",
        name="createTranscription",
        summary="Write down what is said in a file.",
        body=TranscriptionRequest,
        body_type=FORM,
        replies={JSON: (Transcription, VerboseTranscription), "text/plain": None, "text/vtt": None},
        events=TranscriptDelta | TranscriptDone,
        failures=_CALL_ERRORS,
        needs="transcription",
    ),
    Operation(
        method="post",
        path="/v1/audio/translations",
        name="createTranslation",
        summary="Write down in English what is said in a file.",
        body=TranslationRequest,
        body_type=FORM,
        replies={JSON: (Transcription, VerboseTranscription), "text/plain": None, "text/vtt": None},
        failures=_CALL_ERRORS,
        needs="transcription",
    ),
    Operation(
        method="post",
        path="/v1/realtime/client_secrets",
        name="createClientSecret",
        summary="A key for a browser: for a while, and for WebSockets only.",
        body=ClientSecretRequest,
        replies={JSON: ClientSecretReply},
        failures={status: _CALL_ERRORS[status] for status in (400, 404, 408, 413, 500)},
    ),
    Operation(
        method="get",
        path="/v1/models",
        name="listModels",
        summary="The models that are served.",
        replies={JSON: ModelList},
    ),
    Operation(
        method="get",
        path="/v1/models/{model}",
        name="retrieveModel",
        summary="A served model.",
        replies={JSON: Model},
        failures={404: "No such model."},
    ),
    Operation(
        method="get",
        path="/live",
        name="live",
        summary="Is the process worth keeping?",
        replies={JSON: Liveness},
        failures={503: "The graph has failed for good."},
        failure_shape=Liveness,
        is_open=True,
    ),
    Operation(
        method="get",
        path="/ready",
        name="ready",
        summary="May requests be sent here?",
        replies={JSON: Readiness},
        failures={503: "Not now: `reason` says why."},
        failure_shape=Readiness,
        is_open=True,
    ),
    Operation(
        method="get",
        path="/health",
        name="health",
        summary="What runs here, and how it is.",
        replies={JSON: Health},
        failures={503: "It takes no requests: `reason` says why."},
        failure_shape=Health,
        is_open=True,
    ),
    Operation(
        method="get",
        path="/metrics",
        name="metrics",
        summary="Prometheus text.",
        replies={"text/plain": None},
    ),
    Operation(
        method="get",
        path="/openapi.json",
        name="openapi",
        summary="This document.",
        replies={JSON: None},
        is_open=True,
    ),
)
