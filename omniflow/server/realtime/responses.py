"""The responses of a session: what each asks of the graph, which run, and what becomes of them. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from omniflow.errors import (
    InvalidInputError,
    OverloadedError,
    ProtocolError,
    RequestError,
    UnavailableError,
    UnsupportedError,
)
from omniflow.media import AudioChunk, Chat, Generated, Options, TextDelta, ToolCallDelta
from omniflow.server.chat_request import Voice, voice_name
from omniflow.server.realtime import client_events as client
from omniflow.server.realtime.answers import Answer, Emit, Ending, Manner
from omniflow.server.realtime.items import Conversation, Entry, ItemError, chat_of, entry_of
from omniflow.server.realtime.server_events import ErrorDetail, ErrorEvent, StatusDetails
from omniflow.server.realtime.settings import DEFAULT_VOICE, FunctionTool, NamedTool, Session, ToolChoice

_MOST_BESIDE = 4
"""Responses beside the conversation that run at once."""


class Respond(NamedTuple):
    """To do: ask the graph."""

    response_id: str
    chat: Chat
    outputs: frozenset[str]
    options: Options


class Stop(NamedTuple):
    """To do: stop a `Respond`; what it still gives is dropped anyway."""

    response_id: str


class Abilities(NamedTuple):
    """What the graph can do."""

    models: frozenset[str]
    outputs: frozenset[str]
    """Of its input `chat`."""
    transcribes: bool
    voice: Callable[[str | None, str], str | None] = lambda asked, param: asked
    """The voice that a name stands for. Raises InvalidInputError, naming the field, where it stands for none."""
    with_learned_voice: Callable[[Options], Options] = lambda options: options
    """Options as the graph takes them, where their voice is one that was uploaded."""


class ActiveResponseError(InvalidInputError):
    """A response of the conversation runs, and there is one at a time."""

    code = "conversation_already_has_active_response"


class NoResponseError(InvalidInputError):
    """Nothing to cancel."""

    code = "response_cancel_not_active"


class Responses:
    """All responses of one session. `session` is set anew with each update."""

    leaving = False
    """True where none may begin any more."""
    waiting = False
    """True while a turn of the user waits for the response that runs."""
    last_id = ""
    """Of the response that began last."""
    quiet_since_s: float | None = None
    """Since when what was said last has been played; None: nothing yet, or the user has spoken since."""

    def __init__(
        self,
        session: Session,
        conversation: Conversation,
        abilities: Abilities,
        emit: Emit,
        clock: Callable[[], float],
    ) -> None:
        self.session = session
        self.work: list[Respond | Stop] = []
        self._conversation = conversation
        self._abilities = abilities
        self._emit = emit
        self._clock = clock
        self._answers: dict[str, Answer] = {}
        self._first_sound_s: dict[str, float] = {}

    def require(self, output: str, param: str) -> None:
        """Raises UnsupportedError, naming `param`, where the graph has no such output."""
        if output not in self._abilities.outputs:
            what = {"audio": "speech", "tool_calls": "calls of tools"}[output]
            raise UnsupportedError(f"{param}: this graph gives no {what}", param=param)

    def voice(self, voice: Voice, param: str) -> str | None:
        """What the graph calls a voice. Raises InvalidInputError, naming `param`, where it has none of that name."""
        return None if voice == DEFAULT_VOICE else self._abilities.voice(voice_name(voice), param)

    @property
    def idle(self) -> bool:
        """True while none runs."""
        return not self._answers

    @property
    def active(self) -> Answer | None:
        """The response of the conversation that runs."""
        return next((answer for answer in self._answers.values() if answer.in_conversation), None)

    # -- asking ----------------------------------------------------------------------------------------------------

    def create(self, params: client.ResponseParams) -> None:
        """Begin a response. Raises a RequestError where it may not begin."""
        if self.session.type != "realtime":
            raise UnsupportedError("type: a transcription session gives no responses", param="type")
        if self.leaving:
            raise UnavailableError("the server is about to stop; connect again")
        if params.conversation == "none":
            if sum(not answer.in_conversation for answer in self._answers.values()) >= _MOST_BESIDE:
                raise OverloadedError(f"{_MOST_BESIDE} responses run beside the conversation; wait for one to end")
        elif params.conversation not in (None, "auto"):
            message = "response.conversation: expected 'auto' or 'none'"
            raise InvalidInputError(message, param="response.conversation")
        elif self.active is not None:
            message = f"the conversation has an active response: {self.active.id}; wait for its end, or cancel it"
            raise ActiveResponseError(message)
        self._begin(params)

    def answer_turn(self) -> None:
        """Answer what the user said, at once or after the response that runs."""
        if self.session.type != "realtime" or self.leaving:
            return
        self.waiting = self.active is not None
        if self.waiting:
            return
        try:
            self._begin(client.ResponseParams())
        except RequestError as error:
            self._emit(ErrorEvent(error=error_detail(error, None)))

    def _begin(self, params: client.ResponseParams) -> None:
        """Ask the graph. Raises InvalidInputError before anything of the response is seen."""
        session = self.session
        aloud = session.speaks if params.output_modalities is None else "audio" in params.output_modalities
        if aloud:
            self.require("audio", "response.output_modalities")
        tools = session.tools if params.tools is None else params.tools
        if tools:
            self.require("tool_calls", "response.tools")
        chat = chat_of(_first(params.instructions, session.instructions), self._context(params))
        manner = self._manner(params, aloud=aloud)
        options = self._options(params, manner, tools)
        answer = Answer(manner, None if params.conversation == "none" else self._conversation, self._emit)
        self._answers[answer.id] = answer
        self.last_id = answer.id
        if answer.in_conversation:
            self.waiting = False
            self.quiet_since_s = None
        wanted = {"text", "usage"} | ({"audio"} if aloud else set()) | ({"tool_calls"} if tools else set())
        self.work.append(Respond(answer.id, chat, frozenset(wanted & self._abilities.outputs), options))

    def _context(self, params: client.ResponseParams) -> list[Entry]:
        if params.input is None:
            return list(self._conversation)
        format = self.session.audio.input.format
        entries = []
        for at, item in enumerate(params.input):
            where = f"response.input[{at}]"
            if isinstance(item, client.ReferenceIn):
                entries.append(self._conversation.find(item.id, "item_reference_invalid_item_id", f"{where}.id"))
            else:
                entries.append(entry_of(item, format, where))
        return entries

    def _manner(self, params: client.ResponseParams, *, aloud: bool) -> Manner:
        output = self.session.audio.output
        asked = params.audio.output if params.audio is not None else None
        return Manner(
            aloud=aloud,
            format=_first(asked.format if asked else None, output.format),
            voice=_first(asked.voice if asked else None, output.voice),
            max_output_tokens=_first(params.max_output_tokens, self.session.max_output_tokens),
            metadata=params.metadata,
        )

    def _options(self, params: client.ResponseParams, manner: Manner, tools: tuple[FunctionTool, ...]) -> Options:
        choice: ToolChoice = _first(params.tool_choice, self.session.tool_choice)
        if isinstance(choice, NamedTool) and tools and choice.name not in [tool.name for tool in tools]:
            message = f"response.tool_choice: there is no tool {choice.name!r}"
            raise InvalidInputError(message, param="response.tool_choice")
        mode: Literal["auto", "none", "required"] = "required" if isinstance(choice, NamedTool) else choice
        options = Options(
            max_tokens=None if manner.max_output_tokens == "inf" else manner.max_output_tokens,
            voice=self.voice(manner.voice, "response.audio.output.voice"),
            speed=self.session.audio.output.speed,
            tools=tuple(tool.for_graph() for tool in tools),
            tool_choice=mode if tools else "auto",
            tool_name=choice.name if isinstance(choice, NamedTool) and tools else None,
            parallel_tool_calls=_first(params.parallel_tool_calls, self.session.parallel_tool_calls),
        )
        return self._abilities.with_learned_voice(options)

    # -- stopping --------------------------------------------------------------------------------------------------

    def cancel(self, id: str | None) -> None:
        """Stop a response; None: that of the conversation. Raises NoResponseError."""
        answer = self.active if id is None else self._answers.get(id)
        if answer is None:
            raise NoResponseError("Cancellation failed: no active response found", param="response_id" if id else None)
        self._cancel(answer, "client_cancelled")
        self._after_response()

    def interrupt(self) -> None:
        """The user speaks."""
        self.waiting = False
        if self.active is not None:
            self._cancel(self.active, "turn_detected")

    def _cancel(self, answer: Answer, reason: Literal["turn_detected", "client_cancelled"]) -> None:
        self.work.append(Stop(answer.id))
        self._end(answer, "cancelled", StatusDetails("cancelled", reason=reason))

    # -- what the graph gives --------------------------------------------------------------------------------------

    def output(self, response_id: str, value: object) -> None:
        """More of a response."""
        answer = self._answers.get(response_id)
        if answer is None:
            return
        try:
            match value:
                case TextDelta(text=text):
                    answer.text(text)
                case AudioChunk():
                    self._first_sound_s.setdefault(response_id, self._clock())
                    answer.sound(value)
                case ToolCallDelta():
                    answer.call(value)
                case Generated():
                    answer.generated = value
        except ProtocolError as error:
            self.work.append(Stop(response_id))
            self.failed(response_id, error)

    def ended(self, response_id: str) -> None:
        """A response has come to its end."""
        answer = self._answers.get(response_id)
        if answer is None:
            return
        if answer.generated is not None and answer.generated.finish_reason == "length":
            self._end(answer, "incomplete", StatusDetails("incomplete", reason="max_output_tokens"))
        else:
            self._end(answer, "completed", None)
        self._after_response()

    def failed(self, response_id: str, error: RequestError) -> None:
        """A response could not be given, or not all of it. What its client has to change is an `error` as well."""
        answer = self._answers.get(response_id)
        if answer is not None:
            detail = error_detail(error, None)
            if isinstance(error, InvalidInputError):
                self._emit(ErrorEvent(error=detail))
            self._end(answer, "failed", StatusDetails("failed", error=detail))
            self._after_response()

    def _end(self, answer: Answer, status: Ending, details: StatusDetails | None) -> None:
        del self._answers[answer.id]
        answer.end(status, details)
        began_s = self._first_sound_s.pop(answer.id, None)
        if answer.in_conversation:
            now_s = self._clock()
            self.quiet_since_s = now_s if began_s is None else max(now_s, began_s + answer.audio_s)
            self._conversation.drop_answered_sound()

    def _after_response(self) -> None:
        if self.waiting and self.active is None:
            self.answer_turn()


def error_detail(error: RequestError, event_id: str | None) -> ErrorDetail:
    """`error` as clients read it."""
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    code = error.item_code if isinstance(error, ItemError) else error.code
    return ErrorDetail(kind, str(error), code, error.param, event_id)


def _first(asked: Any, otherwise: Any) -> Any:
    return otherwise if asked is None else asked
