"""Whose cancellation a CancelledError is."""

from __future__ import annotations

import asyncio


def is_cancelled() -> bool:
    """Where a CancelledError was caught: whether it is the current task that was cancelled, which must end then.

    Else code of an actor or a caller has awaited something that was cancelled. Passed on, it would end the task group
    of this task without a word, and with it all that runs there.
    """
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0
