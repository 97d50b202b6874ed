"""`omniflow run` from a plan to the end of its server: start, serve until told to stop, drain."""

from __future__ import annotations

import errno
import ipaddress
import json
import logging
import signal
import socket
import time
from collections.abc import AsyncIterable, AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager

import anyio
import msgspec
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from omniflow.config import RuntimeConfig, ServerConfig
from omniflow.errors import ConfigError, StartError
from omniflow.planner import Plan
from omniflow.recording import Recorder
from omniflow.runtime import Runtime
from omniflow.server.app import build_app
from omniflow.server.logs import JsonFormatter
from omniflow.server.realtime.sockets import Sockets
from omniflow.server.scopes import unwrapped
from omniflow.server.serve import Address, serve, tls_context

_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Addresses to listen on that are none to call, and what to call instead."""


async def serve_graph(
    plan: Plan, runtime_config: RuntimeConfig, config: ServerConfig, console: Console, recorder: Recorder | None = None
) -> None:
    """Serve `plan` until SIGTERM or SIGINT, then drain it; a second signal stops it at once.

    The socket is open while the stages start: /live and /ready answer, requests get a 503. Raises StartError, naming
    the stage, where the graph cannot start or fails for good.
    """
    runtime = Runtime(plan, runtime_config, recorder)
    sockets = Sockets()
    app = build_app(runtime, model=config.model or plan.name, config=config, sockets=sockets)
    stopping = anyio.Event()
    failure = None
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals, unwrapped():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_obey, signals, runtime, stopping, tasks.cancel_scope, console)
            async with serve(app, config) as address, _started(runtime, console):
                _announce(plan, config, address, console)
                failure = await _stopped_or_failed(runtime, stopping)
                if failure is None:
                    async with anyio.create_task_group() as draining:
                        draining.start_soon(sockets.drain, runtime_config.drain_s)
                        draining.start_soon(runtime.drain)
            tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure


def write_log(config: ServerConfig) -> None:
    """From now on, write the log on stderr in the form that `config` asks for, with a line for each request."""
    text = logging.Formatter("%(asctime)s.%(msecs)03d %(levelname)s %(name)s: %(message)s", "%H:%M:%S")
    for handler in logging.getLogger().handlers:
        handler.setFormatter(JsonFormatter() if config.log_format == "json" else text)
    logging.getLogger("python_multipart").setLevel(logging.ERROR)  # it warns of each form that a client got wrong
    of_requests = logging.DEBUG if logging.getLogger().level <= logging.INFO else logging.INFO  # --debug: probes, too
    logging.getLogger("omniflow.access").setLevel(of_requests if config.access_log else logging.WARNING)


def refuse_what_cannot_be_served(config: ServerConfig) -> None:
    """Raises ConfigError where the address cannot be listened on, or the certificate cannot be used: before anything
    is fetched or loaded.
    """
    tls_context(config)
    where = f"{config.host}:{config.port}"
    try:
        # `serve` binds again, once there is a runtime to serve.
        socket.create_server(
            (config.host, config.port), family=socket.AF_INET6 if ":" in config.host else socket.AF_INET
        ).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            what = "is in use; stop what listens there, or choose another --port (0 takes a free one)"
            raise ConfigError(f"{where} {what}") from None
        raise ConfigError(f"cannot listen on {where}: {error.strerror}; choose another --host or --port") from None


async def _obey(
    signals: AsyncIterable[signal.Signals],
    runtime: Runtime,
    stopping: anyio.Event,
    everything: anyio.CancelScope,
    console: Console,
) -> None:
    async for received in signals:
        if stopping.is_set() or runtime.state == "starting":
            console.print(f"{received.name}: stopping now")
            everything.cancel()
            continue
        num_running = runtime.status().in_flight
        if num_running:
            within = f"within {runtime.config.drain_s:g} s; a second signal stops now"
            console.print(f"{received.name}: {num_running} under way, which may end {within}")
        else:
            console.print(f"{received.name}: stopping")
        stopping.set()


async def _stopped_or_failed(runtime: Runtime, stopping: anyio.Event) -> StartError | None:
    """Waits until somebody asks to stop (None), or the graph has failed for good."""
    failure: StartError | None = None

    async def watch() -> None:
        nonlocal failure
        failure = await runtime.wait_failed()
        tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch)
        await stopping.wait()
        tasks.cancel_scope.cancel()
    return failure


@asynccontextmanager
async def _started(runtime: Runtime, console: Console) -> AsyncIterator[None]:
    """The runtime, running; each stage is shown while it starts."""
    stages = _Starting(runtime)
    async with AsyncExitStack() as running:
        try:
            with _errors_only("omniflow.supervisor"), Live(stages, console=console, transient=True):
                await running.enter_async_context(runtime)
        finally:
            console.print(stages)
        yield


@contextmanager
def _errors_only(logger: str) -> Iterator[None]:
    """A host that dies while it starts ends the command with its own error: a warning would say it twice."""

    def loud(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR

    logging.getLogger(logger).addFilter(loud)
    try:
        yield
    finally:
        logging.getLogger(logger).removeFilter(loud)


class _Starting:
    """One line a stage while the runtime starts. Drawn from rich's own thread, which only reads."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._began = time.monotonic()

    def __rich__(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for stage in self._runtime.status().stages:
            seconds = self._runtime.stage_seconds.get(stage.name)
            if seconds is not None:
                state = Text(f"ready in {seconds:.1f} s", style="green")
            elif stage.state in ("starting", "ready"):
                state = Text(f"starting, {time.monotonic() - self._began:.0f} s", style="dim")
            else:
                state = Text(stage.state, style="bold red")
            process = Text(f"process {stage.pid}" if stage.pid else "", style="dim")
            table.add_row(Text(stage.name, style="bold"), state, process)
        return table


def _announce(plan: Plan, config: ServerConfig, address: Address, console: Console) -> None:
    called = msgspec.structs.replace(address, host=_EVERYWHERE.get(address.host, address.host))
    model = config.model or plan.name
    console.print(
        Text.assemble("\n", (model, "bold"), " is ready at ", (address.url, "bold green"), " (Ctrl-C stops it)")
    )
    if not config.api_keys and not _is_loopback(address.host):
        note = "anybody who reaches this address may call: OMNIFLOW_API_KEYS=KEY,... asks for keys"
        console.print(Text(note, style="yellow"), soft_wrap=True)
    for what, line in _calls(plan, model, called.url, with_key=bool(config.api_keys)):
        console.print(Text.assemble("\n", (f"# {what}", "dim"), "\n", line), soft_wrap=True)
    console.print()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _calls(plan: Plan, model: str, url: str, *, with_key: bool) -> Iterator[tuple[str, str]]:
    """Lines for a shell that call what this graph can do."""
    key = '-H "Authorization: Bearer $OMNIFLOW_API_KEY" ' if with_key else ""
    post = f"{key}-H 'Content-Type: application/json' -d"
    if "speech" in plan.inputs and "audio" in plan.outputs_of("speech"):
        body: dict[str, object] = {"model": model, "input": "Hello there.", "response_format": "wav"}
        yield "speech", f"curl -s {url}/v1/audio/speech {post} '{json.dumps(body)}' -o hello.wav"
    if "chat" in plan.inputs and "text" in plan.outputs_of("chat"):
        body = {"model": model, "messages": [{"role": "user", "content": "Who are you?"}]}
        yield "chat", f"curl -s {url}/v1/chat/completions {post} '{json.dumps(body)}'"
