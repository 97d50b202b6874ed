"""GET /live, /ready, /health and /metrics: what an orchestrator and an operator ask.

/live    is it worth keeping?       503 only once the graph has failed for good: restart the process
/ready   may requests be sent here? 503 while it starts, drains, or a stage is down; with the state of every stage
/health  what runs here?            the same, with the graph and the processes
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from omniflow.engine.stats import EngineStats
from omniflow.server.service import Service
from omniflow.telemetry import Metrics

if TYPE_CHECKING:
    from omniflow.runtime import RuntimeStatus


class Liveness(Struct, frozen=True):
    """What the runtime does."""

    status: str


class StageReadiness(Struct, frozen=True):
    """One stage: requests that need it, calls of its `run` under way, and what waits for it."""

    name: str
    state: str
    restarts: int
    in_flight: int
    running: int
    queued: int


class Readiness(Struct, frozen=True):
    """`reason` names why the graph has failed, the stages that are not up, or what the runtime does instead."""

    status: str
    in_flight: int
    queued: int
    reason: str | None
    stages: tuple[StageReadiness, ...]


class StageHealth(StageReadiness, frozen=True, kw_only=True):
    """One stage, where it runs, and what its engine holds."""

    host: str
    pid: int | None
    engine: EngineStats | None


class Health(Struct, frozen=True):
    """`Readiness`, and of what."""

    status: str
    model: str
    graph: str
    in_flight: int
    queued: int
    reason: str | None
    stages: tuple[StageHealth, ...]


async def live(service: Service, request: Request) -> Response:
    """Alive unless the graph has failed for good."""
    state = service.runtime.status().state
    return _json(Liveness(state), 503 if state == "failed" else 200)


async def ready(service: Service, request: Request) -> Response:
    """Ready while every stage takes requests."""
    status = service.runtime.status()
    reason = _not_ready(status)
    stages = tuple(StageReadiness(s.name, s.state, s.restarts, s.in_flight, s.running, s.queued) for s in status.stages)
    return _json(Readiness(status.state, status.in_flight, status.queued, reason, stages), 503 if reason else 200)


async def health(service: Service, request: Request) -> Response:
    """`ready` with the state of every stage."""
    status = service.runtime.status()
    reason = _not_ready(status)
    stages = tuple(StageHealth(**s._asdict()) for s in status.stages)
    graph = service.runtime.plan.name
    body = Health(status.state, service.model, graph, status.in_flight, status.queued, reason, stages)
    return _json(body, 503 if reason else 200)


async def metrics(metrics: Metrics, request: Request) -> Response:
    """Prometheus text."""
    return Response(metrics.exposition(), media_type=CONTENT_TYPE_LATEST)


def _not_ready(status: RuntimeStatus) -> str | None:
    """Why no requests should be sent here now; None where they may."""
    if status.reason is not None:
        return status.reason
    down = [f"stage {stage.name!r} is {stage.state}" for stage in status.stages if stage.state != "ready"]
    if down:
        return ", ".join(down)
    return None if status.state == "ready" else f"the runtime is {status.state}"


def _json(body: object, status: int) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")
