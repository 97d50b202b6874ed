"""What omniflow is held to: absolute numbers are for two cores of an AMD EPYC, ratios for any machine."""

from __future__ import annotations

from typing import NamedTuple

Bound = float | tuple[str, float] | tuple[str, float, str]
"""A number; or a share of what a system reached in the same metric, or in the one that is named."""


class Target(NamedTuple):
    """One line of the table. Each of `bounds` that was measured must hold."""

    part: str
    system: str
    metric: str
    says: str
    bounds: tuple[Bound, ...]
    unit: str = "µs"
    most: bool = False
    """True where more is better."""
    limit: str | None = None
    """The metric of what the machine itself allows."""


GRAPH = "ray compiled graph"
STAGES, LINK, LOANED, ASYNCIO = "omniflow", "omniflow link", "omniflow, loaned", "omniflow (asyncio)"
HOT, IDLE, HOP = "round trip hot", "round trip idle", "hop in a process"
K64, M1, M16, M64 = "payload 64 KB", "payload 1 MB", "payload 16 MB", "payload 64 MB"
SPIN = "round trip spinning"

TARGETS = (
    Target("fused edge", STAGES, "fused hop", "1 µs a hop", (1.0,), limit="fused hop"),
    Target("mailbox hop", STAGES, HOP, "1.3x asyncio.Queue", (("asyncio.Queue", 1.3),)),
    Target("mailbox hop", STAGES, HOP, "1/5 of AnyIO", (("AnyIO stream", 1 / 5),)),
    Target("mailbox hop", STAGES, HOP, "1/15 of xoscar", (("xoscar", 1 / 15),)),
    Target("mailbox rate", STAGES, "rate in a process", "0.7 M/s", (0.7e6,), "/s", True),
    Target("mailbox rate", STAGES, "rate in a process", "1x asyncio.Queue", (("asyncio.Queue", 1.0),), "/s", True),
    Target("control, idle", STAGES, IDLE, "1.2x pyzmq", (("pyzmq", 1.2),), limit=IDLE),
    Target("control, hot", STAGES, HOT, "40 µs", (40,), limit=SPIN),
    Target("control, hot", STAGES, HOT, "0.35x pyzmq", (("pyzmq", 0.35),), limit=SPIN),
    Target("control, hot", STAGES, HOT, "0.5x compiled graph", ((GRAPH, 0.5),), limit=SPIN),
    Target("control, hot", STAGES, HOT, "0.1x dora, xoscar", (("dora", 0.1), ("xoscar", 0.1)), limit=SPIN),
    Target("control, hot", STAGES, HOT, "0.05x Ray actor", (("ray actor", 0.05),), limit=SPIN),
    Target("control, hot, asyncio", ASYNCIO, HOT, "60 µs", (60,), limit=SPIN),
    Target("control rate", LINK, "rate", "150 k/s", (150e3,), "/s", True),
    Target("control rate", LINK, "rate", "1x pyzmq", (("pyzmq", 1.0),), "/s", True),
    Target("fan-in of 3", LINK, "fan-in", "180 k/s", (180e3,), "/s", True),
    Target("fan-in of 3", LINK, "fan-in least share", "0.8 of a fair share each", (0.8,), "", True),
    Target("64 KB copied, idle", STAGES, f"{K64} idle", "130 µs", (130,)),
    Target("64 KB copied, idle", STAGES, f"{K64} idle", "0.55x compiled graph", ((GRAPH, 0.55),)),
    Target("64 KB copied, hot", STAGES, K64, "45 µs", (45,), limit="copy 64 KB"),
    Target("64 KB copied, hot", STAGES, K64, "0.25x compiled graph", ((GRAPH, 0.25),), limit="copy 64 KB"),
    Target("1 MB copied, idle", STAGES, f"{M1} idle", "200 µs", (200,)),
    Target("1 MB copied, idle", STAGES, f"{M1} idle", "0.55x compiled graph", ((GRAPH, 0.55),)),
    Target("1 MB copied, hot", STAGES, M1, "110 µs", (110,), limit="copy 1 MB"),
    Target("1 MB copied, hot", STAGES, M1, "0.75x iceoryx2", (("iceoryx2", 0.75),), limit="copy 1 MB"),
    Target("16 MB copied", STAGES, M16, "2.2 ms", (2200,), limit="copy 16 MB"),
    Target("16 MB copied", STAGES, M16, "0.75x compiled graph", ((GRAPH, 0.75),), limit="copy 16 MB"),
    Target("16 MB copied", STAGES, M16, "0.1x dora, xoscar", (("dora", 0.1), ("xoscar", 0.1)), limit="copy 16 MB"),
    Target("16 MB copied", STAGES, M16, "0.1x torch queue", (("torch queue", 0.1),), limit="copy 16 MB"),
    Target("64 MB copied", STAGES, M64, "8 ms", (8000,), limit="copy 64 MB"),
    Target("64 MB streaming", LINK, "stream 64 MB", "0.85x copy", (("limit", 0.85),), "GB/s", True, "stream 64 MB"),
    Target("64 KB loaned, idle", LOANED, f"{K64} idle", "130 µs", (130,)),
    Target("64 KB loaned, hot", LOANED, K64, "45 µs", (45,)),
    Target("64 MB loaned, hot", LOANED, M64, "1.3x of 64 KB", ((LOANED, 1.3, K64),)),
    Target("64 MB loaned, hot", LOANED, M64, "1/7 of torch, shared", (("torch queue, shared tensor", 1 / 7),)),
    Target("own CPU, copied", LINK, "own CPU", "25 µs a hop", (25,), limit="copy 64 KB"),
    Target("own CPU, loaned", f"{LINK}, loaned", "own CPU", "25 µs a hop", (25,)),
    Target("8 stages up", STAGES, "start of 8", "0.4 s", (400e3,)),
    Target("idle CPU", STAGES, "idle CPU", "1 % of a core", (1.0,), "%"),
)
