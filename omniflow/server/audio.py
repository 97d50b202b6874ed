"""The routes of everything that is sound over plain HTTP."""

from __future__ import annotations

from functools import partial

from starlette.routing import Route

from omniflow.server import voices
from omniflow.server.call import Endpoint
from omniflow.server.service import Service
from omniflow.server.speech import create_speech
from omniflow.server.speech_batch import create_speech_batch
from omniflow.server.transcriptions import create_transcription, create_translation


def audio_routes(service: Service) -> list[Route]:
    """Speech, its batches, voices, transcriptions and translations. What the graph cannot do, they refuse."""
    speech = Endpoint("audio.speech", create_speech, service)
    batch = Endpoint("audio.speech.batch", create_speech_batch, service)
    transcription = Endpoint("audio.transcriptions", create_transcription, service, form=True)
    translation = Endpoint("audio.translations", create_translation, service, form=True)
    upload = Endpoint("audio.voices", voices.create_voice, service, form=True)
    return [
        Route("/v1/audio/speech", speech, methods=["POST"]),
        Route("/v1/audio/speech/batch", batch, methods=["POST"]),
        Route("/v1/audio/transcriptions", transcription, methods=["POST"]),
        Route("/v1/audio/translations", translation, methods=["POST"]),
        Route("/v1/audio/voices", partial(voices.list_voices, service)),
        Route("/v1/audio/voices", upload, methods=["POST"]),
        Route("/v1/audio/voices/{voice}", partial(voices.delete_voice, service), methods=["DELETE"]),
    ]
