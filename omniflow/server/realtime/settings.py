"""A session's settings, and how `session.update` changes them. Pure.

An update is merged into what is set: what it leaves out stays, and so does what it gives as null, save for what null
turns off (`CLEARED_BY_NULL`). Unknown keys are ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from omniflow.errors import InvalidInputError
from omniflow.media import Tool as GraphTool
from omniflow.server.body import invalid_field
from omniflow.server.chat_request import Voice
from omniflow.server.realtime.audio import AudioFormat, Pcm
from omniflow.server.realtime.turns import ServerVad, TurnDetection

CLEARED_BY_NULL = frozenset(
    {
        "audio.input.turn_detection",
        "audio.input.turn_detection.idle_timeout_ms",
        "audio.input.transcription",
        "audio.input.transcription.language",
        "audio.input.transcription.prompt",
        "audio.input.noise_reduction",
        "include",
        "prompt",
        "tracing",
    }
)
_TABLES = frozenset(
    {
        "audio",
        "audio.input",
        "audio.input.format",
        "audio.input.transcription",
        "audio.input.noise_reduction",
        "audio.input.turn_detection",
        "audio.output",
        "audio.output.format",
    }
)
"""What is merged key by key; anything else is replaced."""
MAX_ECHO_BYTES = 900_000
"""Of what is sent back as a whole (a session, an item): clients take messages below 1 MiB."""

DEFAULT_VOICE = "default"
"""The one that the graph speaks with by itself."""
_MAX_DEPTH = 32
"""Of what clients nest: schemas of tools need ten."""

MaxTokens = Annotated[int, Meta(ge=1, le=2**31 - 1)] | Literal["inf"]
Modalities = Annotated[tuple[Literal["text", "audio"], ...], Meta(min_length=1)]


class Transcription(Struct, frozen=True, omit_defaults=True):
    """How what the user says is written down beside the conversation: by the graph's recogniser, whatever `model`."""

    model: str | None = None
    language: str | None = None
    prompt: str | None = None


class NoiseReduction(Struct, frozen=True):
    """Taken, and without effect: the recognisers served here are trained on noisy speech."""

    type: Literal["near_field", "far_field"]


class Tracing(Struct, frozen=True, omit_defaults=True):
    """Taken, and without effect."""

    workflow_name: str | None = None
    group_id: str | None = None
    metadata: Any = None


class RetentionRatio(Struct, frozen=True, omit_defaults=True, tag="retention_ratio", tag_field="type"):
    """Taken, and without effect: what a conversation may hold is in `server.realtime_items`."""

    retention_ratio: Annotated[float, Meta(ge=0, le=1)]
    token_limits: dict[str, int | None] | None = None


class Prompt(Struct, frozen=True, omit_defaults=True):
    """A template of OpenAI's: taken, and without effect."""

    id: str
    version: str | None = None
    variables: dict[str, Any] | None = None


class FunctionTool(Struct, frozen=True):
    """A function that the model may ask the client to call."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    type: Literal["function"] = "function"
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def __post_init__(self) -> None:
        require_plain(self.parameters)

    def for_graph(self) -> GraphTool:
        """As the graph takes it."""
        parameters = msgspec.json.encode(self.parameters or {}).decode()
        return GraphTool(self.name, self.description or "", parameters, bool(self.strict))


def require_plain(value: Any) -> None:
    """Raises ValueError where `value`, read from JSON, could not be sent back: too deep, or with too large a number."""
    layer = [value]
    for _ in range(_MAX_DEPTH):
        if any(isinstance(each, int) and abs(each) >= 2**63 for each in layer):
            raise ValueError("holds a number beyond 64 bits")
        inside = [each.values() if isinstance(each, dict) else each for each in layer if isinstance(each, dict | list)]
        layer = [each for values in inside for each in values]
        if not layer:
            return
    raise ValueError(f"is nested more than {_MAX_DEPTH} deep")


class NamedTool(Struct, frozen=True):
    """The one function to call."""

    name: str
    type: Literal["function"] = "function"


ToolChoice = Literal["auto", "none", "required"] | NamedTool


class Input(Struct, frozen=True, kw_only=True):
    """What comes in."""

    format: AudioFormat = Pcm()
    transcription: Transcription | None = None
    noise_reduction: NoiseReduction | None = None
    turn_detection: TurnDetection | None = ServerVad()


class Output(Struct, frozen=True, kw_only=True):
    """What goes out."""

    format: AudioFormat = Pcm()
    voice: Voice = DEFAULT_VOICE
    speed: Annotated[float, Meta(ge=0.25, le=4)] = 1.0


class Audio(Struct, frozen=True, kw_only=True):
    """Both directions."""

    input: Input = Input()
    output: Output = Output()


class Session(Struct, frozen=True, kw_only=True):
    """All settings of a session."""

    type: Literal["realtime", "transcription"] = "realtime"
    model: str = ""
    output_modalities: Modalities = ("audio",)
    instructions: str = ""
    tools: tuple[FunctionTool, ...] = ()
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    max_output_tokens: MaxTokens = "inf"
    audio: Audio = Audio()
    tracing: Literal["auto"] | Tracing | None = None
    truncation: Literal["auto", "disabled"] | RetentionRatio = "auto"
    prompt: Prompt | None = None
    include: tuple[Literal["item.input_audio_transcription.logprobs"], ...] | None = None

    @property
    def speaks(self) -> bool:
        """True where responses are spoken, unless they say otherwise."""
        return "audio" in self.output_modalities


def view(session: Session, id: str, expires_at: int) -> dict[str, Any]:
    """What `session.created` and `session.updated` show."""
    shown: dict[str, Any] = msgspec.to_builtins(session)
    kind = "realtime.session" if session.type == "realtime" else "realtime.transcription_session"
    if session.type == "transcription":
        shown = {"type": shown["type"], "include": shown["include"], "audio": {"input": shown["audio"]["input"]}}
    return {"object": kind, "id": id, "expires_at": expires_at, **shown}


def updated(session: Session, update: dict[str, Any]) -> Session:
    """`session` after `update`. Raises InvalidInputError whose `param` is the path of the field ("session....")."""
    try:
        require_plain(update)
    except ValueError as error:
        raise InvalidInputError(f"session: {error}", param="session") from error
    merged = _merged(msgspec.to_builtins(session), update, "")
    try:
        new = msgspec.convert(merged, Session)
    except msgspec.ValidationError as error:
        raise invalid_field(str(error), Session, within="session") from error
    if len(msgspec.json.encode(new)) > MAX_ECHO_BYTES:
        raise InvalidInputError(f"session: is larger than {MAX_ECHO_BYTES} bytes", param="session")
    if len(new.output_modalities) > 1:  # sound always comes with its transcript
        new = msgspec.structs.replace(new, output_modalities=("audio",))
    return new


def _merged(current: dict[str, Any], update: dict[str, Any], path: str) -> dict[str, Any]:
    merged = dict(current)
    for key, value in update.items():
        where = f"{path}{key}"
        if value is None and where not in CLEARED_BY_NULL:
            continue
        if isinstance(value, dict) and where in _TABLES:
            merged[key] = _merged(_before(current.get(key), value), value, f"{where}.")
        else:
            merged[key] = value
    return merged


def _before(current: Any, update: dict[str, Any]) -> dict[str, Any]:
    """What `update` goes on from: nothing where there was nothing, or where a union changes its arm."""
    same = isinstance(current, dict) and update.get("type", current.get("type")) == current.get("type")
    return current if same else {}
