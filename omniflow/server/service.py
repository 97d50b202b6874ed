"""What every endpoint shares: the runtime, the names it serves under, and what is kept between turns."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from omniflow.actor import NamedVoice
from omniflow.config import ServerConfig
from omniflow.errors import InvalidInputError, UnsupportedError
from omniflow.media import Options
from omniflow.server.failures import ModelNotFoundError
from omniflow.server.keys import Keys
from omniflow.server.learned import LearnedVoices
from omniflow.server.remote import RemoteMedia
from omniflow.server.transcripts import Transcripts

if TYPE_CHECKING:
    from omniflow.runtime import Runtime


STOCK_VOICES = frozenset("alloy ash ballad cedar coral echo fable marin nova onyx sage shimmer verse".split())
"""OpenAI's: clients have them as defaults, and some take no others."""


class Service(msgspec.Struct, frozen=True):
    """One served graph. `aliases` are further names that requests may use for `model`."""

    runtime: Runtime
    model: str
    aliases: frozenset[str]
    transcripts: Transcripts
    keys: Keys = msgspec.field(default_factory=Keys)
    config: ServerConfig = msgspec.field(default_factory=ServerConfig)
    remote: RemoteMedia | None = None
    """Fetches media by URL; None: nothing is fetched."""
    voices: tuple[NamedVoice, ...] = ()
    """What its talker speaks with; none: it takes any name."""
    learned: LearnedVoices = msgspec.field(default_factory=LearnedVoices)
    created: int = msgspec.field(default_factory=lambda: int(time.time()))

    def require_model(self, name: str) -> None:
        """Raises ModelNotFoundError unless this service goes by `name`."""
        if name != self.model and name not in self.aliases:
            raise ModelNotFoundError(f"model {name!r} is not served here; {self.model!r} is", param="model")

    def voice(self, asked: str | None, param: str) -> str | None:
        """The voice to speak with: `asked`, or the default one for a name that every client of OpenAI knows.

        Raises InvalidInputError, naming `param` and the voices that there are, for any other name.
        """
        names = [voice.name for voice in self.voices] + [voice.name for voice in self.learned.named()]
        if asked is None or not self.voices or asked in names:
            return asked
        if asked in STOCK_VOICES:
            return names[0]
        raise InvalidInputError(f"{param}: there is no voice {asked!r}; there are {', '.join(names)}", param=param)

    def with_learned_voice(self, options: Options) -> Options:
        """`options` as the graph takes them: of an uploaded voice it does not know the name, but the recording."""
        learned = self.learned.find(options.voice)
        if learned is None:
            return options
        return msgspec.structs.replace(options, voice=None, voice_code=learned.code, voice_text=learned.text)

    def require_learning(self, param: str | None) -> None:
        """Raises UnsupportedError, naming `param`, unless the graph learns voices."""
        if "voice" in self.runtime.plan.inputs:
            return
        trained = "this model has the voices that it was trained with, and cannot learn others"
        reason = self._absence_of("voice") or trained
        raise UnsupportedError(f"{param}: {reason}" if param else f"voices cannot be uploaded: {reason}", param=param)

    def require_entry(self, entry: str, what: str) -> None:
        """Raises UnsupportedError unless the graph can be entered at `entry`; `what` is what it would take there. It
        says why the stage is absent that would take it.
        """
        plan = self.runtime.plan
        if entry in plan.inputs:
            return
        known = ", ".join(sorted(plan.inputs))
        reason = self._absence_of(entry) or f"it has no input {entry!r}, only {known}"
        raise UnsupportedError(f"graph {plan.name!r} takes no {what}: {reason}")

    def _absence_of(self, entry: str) -> str | None:
        """Why the stage behind an input is absent."""
        graph = self.runtime.plan.graph
        return next((graph.absent[edge.target] for edge in graph.inputs if edge.source_port == entry), None)

    def require_output(self, entry: str, output: str, param: str | None = None) -> None:
        """Raises UnsupportedError unless what enters at `entry` can give `output`. It names `param`, the reason, and
        the stage that would give it where that one is absent.
        """
        plan = self.runtime.plan
        possible = plan.outputs_of(entry)
        if output in possible:
            return
        sources = [edge.source for edge in plan.graph.outputs if edge.target_port == output]
        stage = next((source for source in sources if source in plan.graph.absent), None)
        reason = plan.graph.absent[stage] if stage else f"from {entry} it gives {', '.join(sorted(possible))}"
        raise UnsupportedError(f"graph {plan.name!r} gives no {output}: {reason}", param=param, stage=stage)
