"""Outputs of quick steps, gathered so that whoever reads a request wakes up once for several of its tokens."""

from __future__ import annotations

import time

from omniflow.engine.base import EngineOutput


class Gathering:
    """Hands over what steps give at the end of each, or of as many as take `gather_s`, the tokens of a request in one.

    The first and the last output of a request never wait, and all that waits goes with them. Before a step that takes
    long, whoever steps asks for the `rest`.
    """

    def __init__(self, gather_s: float) -> None:
        self._gather_s = gather_s
        self._steps: list[list[EngineOutput]] = []
        self._handed_over = 0.0
        self._was_quiet = False
        """True where the step before gave nothing: then the engine has gathered by itself."""
        self._begun: set[str] = set()
        """Requests whose first output was handed over, and whose last was not."""

    @property
    def holds(self) -> bool:
        """True where something waits."""
        return bool(self._steps)

    def add(self, outputs: list[EngineOutput]) -> list[EngineOutput]:
        """What is to be handed over after a step that gave `outputs`; nothing where more is to travel with it."""
        if not self._gather_s:
            return outputs
        was_quiet, self._was_quiet = self._was_quiet, not outputs
        if not outputs:
            return []
        self._steps.append(outputs)
        waited = time.monotonic() - self._handed_over
        if not self._is_urgent(outputs) and not was_quiet and waited < self._gather_s:
            return []
        return self.rest()

    def rest(self) -> list[EngineOutput]:
        """All that waits: it is to be handed over now."""
        self._handed_over = time.monotonic()
        steps, self._steps = self._steps, []
        return joined(steps)

    def _is_urgent(self, outputs: list[EngineOutput]) -> bool:
        urgent = False
        for output in outputs:
            if output.finish_reason is not None:
                self._begun.discard(output.id)
                urgent = True
            elif output.id not in self._begun:
                self._begun.add(output.id)
                urgent = True
        return urgent


def joined(steps: list[list[EngineOutput]]) -> list[EngineOutput]:
    """The outputs of some steps, the tokens of each request in one."""
    if len(steps) == 1:
        return steps[0]
    by_request: dict[str, list[EngineOutput]] = {}
    for outputs in steps:
        for output in outputs:
            by_request.setdefault(output.id, []).append(output)
    found: list[EngineOutput] = []
    for each in by_request.values():
        found += [_of_all(each)] if all(map(_is_tokens, each)) else each
    return found


def _is_tokens(output: EngineOutput) -> bool:
    """True where it has tokens and nothing that lies on a device, or ends what came before."""
    return output.frames is None and output.hidden is None and output.error is None


def _of_all(outputs: list[EngineOutput]) -> EngineOutput:
    last = outputs[-1]
    ids = tuple([id for output in outputs for id in output.ids])
    logprobs = tuple([logprob for output in outputs for logprob in output.logprobs])
    return EngineOutput(last.id, ids, last.finish_reason, logprobs)
