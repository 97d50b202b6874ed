"""Every error that omniflow raises, in one tree.

    OmniflowError                     base: message, stage, request_id, hint
      GraphError                      a graph that cannot work; found before anything is loaded
      ConfigError                     an unknown key or a value of the wrong type
      PlanError                       the graph does not fit the cluster
      WeightsError                    weights that are missing, broken or unreachable
      RecordingError                  a recording that cannot be read, written or replayed
      StartError                      a stage failed in `setup`
      ActorBrokenError                an actor cannot go on; its host ends and the supervisor decides
      DeviceError                     a GPU or its driver refused something; values go another way
      RequestError                    ends one request, and only that one
        InvalidInputError             400  the caller can mend it; `param` names the field
          UnsupportedError            400  this model or profile cannot do it
          ContextLengthError          400  the prompt does not fit
        NotFoundError                 404  no such model, voice, ...
        OverloadedError               429  admission refused it; retry after `retry_after_s`
        UnavailableError              503  draining, or a stage is restarting
        StageDiedError                503  a host died while it ran this request
        EdgeFullError                 503  a stream edge with policy 'fail' was full
        DeadlineError                 504  the request's deadline passed; names what was waited for
        CancelledError                499  the caller went away
        StageError                    500  an unexpected exception in a stage's `run`
          ProtocolError               500  a stage broke its contract (wrong type, order, bound)

The HTTP status comes from the type, never from the text. A request error travels between processes as
`ErrorInfo` (a value) and is rebuilt as the same type on the other side.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec


class ErrorInfo(msgspec.Struct, frozen=True, array_like=True):
    """The wire form of a `RequestError`: type by name, plus the fields that every one has."""

    kind: str
    message: str
    stage: str | None = None
    request_id: str | None = None
    param: str | None = None
    retry_after_s: float | None = None


class OmniflowError(Exception):
    """Base of all errors of omniflow; `str()` is one line that says what to do."""

    def __init__(self, message: str, *, stage: str | None = None, request_id: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.stage = stage
        self.request_id = request_id

    def __str__(self) -> str:
        return f"stage {self.stage!r}: {self.message}" if self.stage else self.message


class GraphError(OmniflowError):
    """The graph cannot work as declared; the message names stage, port and the likely mistake."""


class ConfigError(OmniflowError):
    """A setting is unknown or has the wrong type; the message names the nearest known key."""


class PlanError(OmniflowError):
    """The graph does not fit the cluster; the message says what would fit."""


class WeightsError(OmniflowError):
    """Weights are missing, broken or out of reach; the message says how to get them."""


class RecordingError(OmniflowError):
    """A recording cannot be read, written or replayed; the message says which, and why."""


class StartError(OmniflowError):
    """A stage failed while it was set up. `detail` holds the traceback of its process."""

    def __init__(self, message: str, *, stage: str | None = None, detail: str = "") -> None:
        super().__init__(message, stage=stage)
        self.detail = detail


class ActorBrokenError(OmniflowError):
    """Raised by an actor whose engine or device is broken for good: its host ends, and the supervisor decides."""


class DeviceError(OmniflowError):
    """A GPU, its driver or its libraries refused what a transport needs; the message says what, in their words."""


class RequestError(OmniflowError):
    """Ends one request with a typed reply; other requests do not notice."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    retriable: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        *,
        stage: str | None = None,
        request_id: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, stage=stage, request_id=request_id)
        self.param = param
        self.retry_after_s = retry_after_s

    def info(self) -> ErrorInfo:
        """This error as a value that can cross a process."""
        return ErrorInfo(type(self).__name__, self.message, self.stage, self.request_id, self.param, self.retry_after_s)


class InvalidInputError(RequestError):
    """The caller sent something that cannot be served; `param` names the field."""

    status = 400
    code = "invalid_value"


class UnsupportedError(InvalidInputError):
    """The input is well formed, but this model or profile cannot take it."""

    code = "unsupported_value"


class ContextLengthError(InvalidInputError):
    """The prompt does not fit into the model's context."""

    code = "context_length_exceeded"


class NotFoundError(RequestError):
    """What the request names does not exist here."""

    status = 404
    code = "not_found"


class OverloadedError(RequestError):
    """Admission refused the request; nothing of it ran."""

    status = 429
    code = "rate_limit_exceeded"
    retriable = True


class UnavailableError(RequestError):
    """The runtime is draining, or a stage that this request needs is not up; nothing of it ran."""

    status = 503
    code = "unavailable"
    retriable = True


class StageDiedError(RequestError):
    """The process of a stage died while it ran this request. The stage is being restarted."""

    status = 503
    code = "stage_died"
    retriable = True


class EdgeFullError(RequestError):
    """A stream edge whose policy is to fail was full: its reader did not keep up. The message names the edge."""

    status = 503
    code = "edge_full"
    retriable = True


class DeadlineError(RequestError):
    """The request's deadline passed; the message names the stage or port that was waited for."""

    status = 504
    code = "deadline_exceeded"


class CancelledError(RequestError):
    """The request was cancelled by its caller."""

    status = 499
    code = "cancelled"


class StageError(RequestError):
    """A stage raised something unexpected for this request; its traceback is in the log."""

    code = "stage_error"


class ProtocolError(StageError):
    """A stage broke its contract: a wrong type on a port, a chunk out of order, too much of something."""

    code = "protocol_error"


def _request_errors(root: type[RequestError]) -> dict[str, type[RequestError]]:
    found = {root.__name__: root}
    for child in root.__subclasses__():
        found |= _request_errors(child)
    return found


_BY_NAME = _request_errors(RequestError)


def error_from_info(info: ErrorInfo) -> RequestError:
    """Rebuild the error that `RequestError.info` described; an unknown type becomes `StageError`."""
    return _BY_NAME.get(info.kind, StageError)(
        info.message,
        stage=info.stage,
        request_id=info.request_id,
        param=info.param,
        retry_after_s=info.retry_after_s,
    )
