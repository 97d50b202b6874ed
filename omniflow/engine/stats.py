"""What engines say of themselves, for those who know no engine: the runtime's metrics."""

from __future__ import annotations

import msgspec


class EngineStats(msgspec.Struct, frozen=True):
    """What an engine holds now."""

    num_running: int
    num_waiting: int
    kv_tokens_used: int
    """Those that running requests hold or, where an engine reserves them, may come to hold."""
    kv_tokens_total: int
