"""Settings: typed, addressable by `stage.field`, with one precedence, and every value knows where it came from.

Precedence, strongest first: command line > environment > file > --model > profile > graph. Keys are `runtime.x`,
`server.x`, or `<stage>.<field>`, where a field is a stage field (device, threads, ...) or a setting of its actor.
In the environment `OMNIFLOW__THINKER__MAX_TOKENS=64` sets `thinker.max_tokens`; `OMNIFLOW_API_KEYS` sets
`server.api_keys`. Text for a setting that is a list is split at its commas.
"""

from __future__ import annotations

import inspect
import tomllib
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from omniflow.actor import Actor
from omniflow.errors import ConfigError, GraphError
from omniflow.topology import STAGE_FIELDS, Budget, GraphSpec, Restart, Stage, nearest, parse_bytes

Seconds = Annotated[float, Meta(gt=0, description="seconds")]
Key = Annotated[str, Meta(pattern=r"^[!-+\--~]+$")]
"""What fits into a header, and between commas."""
SECRETS = frozenset({"server.api_keys", "server.ssl_keyfile_password"})
"""Settings whose values nobody is shown."""
_HIDDEN = "(hidden)"


class RuntimeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How requests are admitted, bounded and ended."""

    deadline_s: Annotated[float, Meta(gt=0, description="time that a request gets where it names none")] = 120.0
    max_in_flight: Annotated[int, Meta(ge=1, description="requests that run at once")] = 64
    max_queued: Annotated[int, Meta(ge=0, description="requests that may wait for a place; more get a 429")] = 256
    max_wait_share: Annotated[
        float,
        Meta(gt=0, description="a request that would wait longer for a place, in times to a first output, gets a 429"),
    ] = 0.5
    stream_bound: Annotated[int, Meta(ge=1, description="credits of a stream edge that names no bound")] = 16
    restart_wait_s: Annotated[
        float, Meta(ge=0, description="how long a request waits for a restarting stage before it gets a 503")
    ] = 15.0
    start_timeout_s: Annotated[float, Meta(gt=0, description="time for all stages to become ready")] = 180.0
    replay_bytes: Annotated[
        int, Meta(ge=0, description="inputs held in all, for stages whose `restart` says in_flight='replay'")
    ] = 2**26
    drain_s: Annotated[float, Meta(ge=0, description="time for running requests to finish on shutdown")] = 20.0
    hang_s: Annotated[float, Meta(gt=0, description="a host whose event loop is silent for so long is killed")] = 20.0
    step_s: Annotated[float, Meta(gt=0, description="a host with one blocking step longer than this is killed")] = 120.0
    shm_bytes: Annotated[int, Meta(ge=2**20, description="shared memory that one host may hold for its messages")] = (
        2**29
    )
    device_pool_bytes: Annotated[
        int,
        Meta(
            ge=0,
            description="size of a host's pool of GPU memory for tensors on their way; 0: they go through the host",
        ),
    ] = 2**28
    between_gpus: Annotated[
        Literal["cuda_ipc", "nccl"],
        Meta(description="how tensors go between hosts on different GPUs; nccl where the GPUs do not reach each other"),
    ] = "cuda_ipc"
    hot_window_us: Annotated[
        int,
        Meta(
            ge=0,
            le=10_000,
            description="how long a process looks for more traffic after some before it sleeps, at most; "
            "0: not at all, as where there are fewer cores than hosts",
        ),
    ] = 200
    uvloop: Annotated[
        bool | None, Meta(description="run event loops on uvloop: true, false, or (null) where it is installed")
    ] = None


class ServerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The HTTP server."""

    host: Annotated[str, Meta(description="address to listen on")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="port to listen on; 0 takes a free one")] = 8000
    model: Annotated[str, Meta(description="model id that clients see; empty: the name of the graph")] = ""
    api_keys: Annotated[
        tuple[Key, ...], Meta(description="callers must send one of them as `authorization: Bearer KEY`; none: all may")
    ] = ()
    guard_metrics: Annotated[bool, Meta(description="ask for an API key on /metrics, too")] = False
    cors_origins: Annotated[
        tuple[str, ...],
        Meta(description="origins of web pages that may call, like `https://chat.example`; `*`: any"),
    ] = ()
    ssl_certfile: Annotated[str, Meta(description="certificate chain (PEM); with it, the server speaks TLS only")] = ""
    ssl_keyfile: Annotated[str, Meta(description="key of the certificate (PEM); empty: in `ssl_certfile`")] = ""
    ssl_keyfile_password: Annotated[str, Meta(description="what the key is encrypted with")] = ""
    trusted_proxies: Annotated[
        tuple[str, ...], Meta(description="addresses whose `x-forwarded-for` and `-proto` are believed; `*`: all")
    ] = ("127.0.0.1", "::1")
    max_body_bytes: Annotated[int, Meta(ge=1024, description="larger request bodies get a 413")] = 64 * 2**20
    remote_media: Annotated[
        bool, Meta(description="fetch media that a chat names by http(s) URL, from public addresses only")
    ] = False
    max_header_bytes: Annotated[int, Meta(ge=1024, description="a longer head of a request gets a 431")] = 2**16
    header_s: Annotated[float, Meta(gt=0, description="time for the head of a request to come")] = 20.0
    body_s: Annotated[
        float, Meta(gt=0, description="time for a request body to come, and a second more for each 16 KiB of it")
    ] = 30.0
    send_s: Annotated[
        float, Meta(gt=0, description="a client that takes nothing of its reply for so long is cut off")
    ] = 60.0
    keep_alive_s: Annotated[
        float, Meta(gt=0, description="an idle connection is closed after; longer than clients and proxies keep theirs")
    ] = 75.0
    realtime_sessions: Annotated[
        int, Meta(ge=1, description="realtime sessions at once; more are told to try later")
    ] = 64
    realtime_session_s: Annotated[
        float, Meta(gt=0, description="the longest that a realtime session lasts; its client may connect again")
    ] = 3600.0
    realtime_idle_s: Annotated[
        float, Meta(gt=0, description="a realtime session in which nothing happens for so long is closed")
    ] = 600.0
    realtime_message_bytes: Annotated[
        int, Meta(ge=2**16, description="a larger message of a realtime client closes its session")
    ] = 2**24
    realtime_buffer_s: Annotated[
        float, Meta(gt=0, description="sound in the input buffer of a realtime session, in seconds: one turn")
    ] = 120.0
    realtime_items: Annotated[
        int, Meta(ge=2, description="items in the conversation of a realtime session; the oldest go")
    ] = 1000
    access_log: Annotated[bool, Meta(description="log each request and WebSocket session, but no probes")] = True
    log_format: Annotated[Literal["text", "json"], Meta(description="of the log on stderr")] = "text"


class Layer(msgspec.Struct, frozen=True):
    """Values from one place. Text values are converted to the type of their key."""

    source: str
    values: dict[str, Any]


class Configured(msgspec.Struct, frozen=True):
    """A graph with all overrides applied. `origins` says for each key that was set where its value came from."""

    spec: GraphSpec
    runtime: RuntimeConfig
    server: ServerConfig
    origins: dict[str, str]


class Setting(NamedTuple):
    """One setting: its address, its value, and where that comes from; `default` where nobody set it."""

    key: str
    value: Any
    origin: str


def settings_of(actor: type[Actor]) -> dict[str, tuple[Any, Any]]:
    """The settings of an actor class: name -> (type, default); the default of a required one is `inspect._empty`."""
    if actor.__init__ is object.__init__:
        return {}
    hints = typing.get_type_hints(actor.__init__, include_extras=True)
    found = {}
    for parameter in list(inspect.signature(actor.__init__).parameters.values())[1:]:
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        found[parameter.name] = (hints.get(parameter.name, Any), parameter.default)
    return found


def arguments_of(stage: Stage) -> dict[str, Any]:
    """What the stage's actor is made with: its settings, and the stage's `threads` and `device` where it takes them.

    The device is `cpu` or `gpu`: a host's process sees its own GPUs alone.
    """
    fields = {"threads": stage.threads, "device": stage.device.partition(":")[0]}
    known = settings_of(stage.actor)
    return {name: value for name, value in fields.items() if name in known} | stage.settings


def file_layer(path: Path) -> Layer:
    """Read a TOML file: tables are stages (or runtime, server), keys their fields."""
    try:
        tables = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is no valid TOML: {error}") from None
    values: dict[str, Any] = {}
    for table, entries in tables.items():
        if not isinstance(entries, dict):
            raise ConfigError(
                f"{path}: {table!r} stands outside a table; write it under [runtime], [server] or a stage"
            )
        values |= {f"{table}.{key}": value for key, value in entries.items()}
    return Layer(f"file {path}", values)


def environment_layer(environ: Mapping[str, str]) -> Layer:
    """Take `OMNIFLOW__STAGE__FIELD` variables as values, and `OMNIFLOW_API_KEYS`."""
    prefix = "OMNIFLOW__"
    values = {}
    for name, value in environ.items():
        if name.startswith(prefix):
            values[name.removeprefix(prefix).lower().replace("__", ".")] = value
    if keys := environ.get("OMNIFLOW_API_KEYS"):
        values["server.api_keys"] = keys
    return Layer("environment", values)


def set_layer(pairs: Iterable[str]) -> Layer:
    """Take `--set stage.field=value` arguments as values."""
    values = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or "." not in key:
            raise ConfigError(f"--set {pair!r}: write it as stage.field=value")
        values[key.strip()] = value
    return Layer("command line", values)


def configure(spec: GraphSpec, layers: Iterable[Layer] = ()) -> Configured:
    """Apply `layers`, weakest first, to a graph. Raises ConfigError with the nearest key for an unknown one."""
    stages = {stage.name: stage for stage in spec.stages}
    origins = _declared_origins(spec)
    tables: dict[str, dict[str, Any]] = {"runtime": {}, "server": {}}
    for layer in layers:
        for key, value in layer.values.items():
            table, _, field = key.partition(".")
            if table in stages:
                was = stages[table]
                stages[table] = _override(was, field, value, layer.source)
                if stages[table].memory != was.memory:
                    origins[f"{table}.memory"] = layer.source
            elif table in tables:
                tables[table][field] = _field_value(_config_type(table), table, field, value, layer.source)
            else:
                raise ConfigError(f"{layer.source}: unknown key {key!r}{nearest(table, [*stages, *tables])}")
            origins[key] = layer.source
    checked = tuple(_checked(stage) for stage in stages.values())
    return Configured(
        msgspec.structs.replace(spec, stages=checked),
        RuntimeConfig(**tables["runtime"]),
        ServerConfig(**tables["server"]),
        origins,
    )


def settings(configured: Configured) -> list[Setting]:
    """Every setting, set or not: those of each stage that is there, in the graph's order, then runtime and server."""
    found: dict[str, Any] = {}
    for stage in configured.spec.stages:
        if stage.name not in configured.spec.absent:
            fields = {key: value for key, value in msgspec.structs.asdict(stage).items() if key in STAGE_FIELDS}
            known = {key: default for key, (_, default) in settings_of(stage.actor).items() if key not in fields}
            found |= {f"{stage.name}.{key}": value for key, value in (fields | known | stage.settings).items()}
    for table, values in (("runtime", configured.runtime), ("server", configured.server)):
        found |= {f"{table}.{key}": value for key, value in msgspec.structs.asdict(values).items()}
    found |= {key: _HIDDEN for key in SECRETS if found[key]}
    return [Setting(key, value, configured.origins.get(key, "default")) for key, value in found.items()]


def _config_type(table: str) -> type[RuntimeConfig | ServerConfig]:
    return RuntimeConfig if table == "runtime" else ServerConfig


def _declared_origins(spec: GraphSpec) -> dict[str, str]:
    origins = {f"{stage.name}.{key}": "graph" for stage in spec.stages for key in (*stage.settings, *_own(stage))}
    for name, binding in (spec.profile.bindings if spec.profile else {}).items():
        if name not in spec.absent and spec.profile:
            values = msgspec.structs.asdict(binding)
            for key in [*values["fields"], *values["settings"]]:
                origins[f"{name}.{key}"] = f"profile {spec.profile.name}"
    return origins


def _own(stage: Stage) -> list[str]:
    """The fields of a stage that are not as a stage has them by itself."""
    plain, values = msgspec.structs.asdict(Stage(stage.name, stage.actor)), msgspec.structs.asdict(stage)
    return [key for key in STAGE_FIELDS if values[key] != plain[key]]


def _override(stage: Stage, field: str, value: Any, source: str) -> Stage:
    where = f"{stage.name}.{field}"
    outer, dot, inner = field.partition(".")
    if dot and outer in STAGE_FIELDS:
        return _override_inner(stage, outer, inner, value, source)
    if field in STAGE_FIELDS:
        converted = convert(value, STAGE_FIELDS[field], where, source)
        return msgspec.structs.replace(stage, **{field: converted})
    known = settings_of(stage.actor)
    if field not in known:
        raise ConfigError(
            f"{source}: stage {stage.name!r} has no setting {field!r}{nearest(field, [*known, *STAGE_FIELDS])}"
        )
    converted = convert(value, known[field][0], where, source)
    settings = stage.settings | {field: converted}
    if field != "kv_tokens" or not stage.memory.kv_tokens:
        return msgspec.structs.replace(stage, settings=settings)
    # What a budget counts is what the engine reserves: else the plan would be of another start than that which comes.
    memory = msgspec.structs.replace(stage.memory, kv_tokens=converted)
    return msgspec.structs.replace(stage, settings=settings, memory=memory)


def _override_inner(stage: Stage, outer: str, inner: str, value: Any, source: str) -> Stage:
    """One field of a field that is a table, as `memory.weights`; the others stay."""
    kind = STAGE_FIELDS[outer]
    if kind not in (Budget, Restart):
        raise ConfigError(f"{source}: {stage.name}.{outer} is one value and has no {inner!r}")
    table = msgspec.structs.asdict(stage)[outer] or kind()
    hints = typing.get_type_hints(kind, include_extras=True)
    where = f"{stage.name}.{outer}.{inner}"
    if inner not in hints:
        raise ConfigError(f"{source}: unknown key {where!r}{nearest(inner, hints)}")
    converted = convert(value, hints[inner], where, source)
    return msgspec.structs.replace(stage, **{outer: msgspec.structs.replace(table, **{inner: converted})})


def _field_value(config: type[msgspec.Struct], table: str, field: str, value: Any, source: str) -> Any:
    hints = typing.get_type_hints(config, include_extras=True)
    if field not in hints:
        raise ConfigError(f"{source}: unknown key {table}.{field}{nearest(field, hints)}")
    return convert(value, hints[field], f"{table}.{field}", source)


def convert(value: Any, hint: Any, where: str, source: str, *, lax: bool = True) -> Any:
    """`value` as type `hint`; text is parsed where `lax`. Raises ConfigError that names the key and what would pass."""
    is_text = lax and isinstance(value, str)
    given = [part.strip() for part in value.split(",") if part.strip()] if is_text and _is_list(hint) else value
    try:
        return msgspec.convert(given, hint, strict=not is_text)
    except msgspec.ValidationError as error:
        shown = _HIDDEN if where in SECRETS else repr(value)
        raise ConfigError(f"{source}: {where}={shown}: {error}{_what_passes(hint, where, is_text)}") from None


def _what_passes(hint: Any, where: str, is_text: bool) -> str:
    """What msgspec does not say of a value that it refused: the words that there are, and how a table is written."""
    inner = typing.get_args(hint)[0] if typing.get_origin(hint) is Annotated else hint
    if typing.get_origin(inner) is Literal:
        words = [str(word) for word in typing.get_args(inner)]
        return f"; write {' or '.join(filter(None, [', '.join(words[:-1]), words[-1]]))}"
    if is_text and inner is bool:
        return "; write true or false"
    if is_text and isinstance(inner, type) and issubclass(inner, msgspec.Struct):
        return f"; set its fields: {', '.join(f'{where}.{field}' for field in inner.__struct_fields__)}"
    return ""


def _is_list(hint: Any) -> bool:
    inner = typing.get_args(hint)[0] if typing.get_origin(hint) is Annotated else hint
    return typing.get_origin(inner) in (tuple, list)


def _checked(stage: Stage) -> Stage:
    """Check what graph and profile gave, too: fields of the stage, and settings against its actor's signature."""
    known = settings_of(stage.actor)
    fields = msgspec.structs.asdict(stage)
    for field, hint in STAGE_FIELDS.items():
        if fields[field] is not None:
            convert(fields[field], hint, f"{stage.name}.{field}", "graph", lax=False)
    for field in ("weights", "workspace", "kv_bytes_per_token"):
        try:
            parse_bytes(msgspec.structs.asdict(stage.memory)[field])
        except GraphError as error:
            raise ConfigError(f"{stage.name}.memory.{field}: {error}") from None
    for field, value in stage.settings.items():
        if field not in known:
            raise ConfigError(
                f"stage {stage.name!r}: {stage.actor.__name__} has no setting {field!r}"
                f"{nearest(field, [*known, *STAGE_FIELDS])}"
            )
        convert(value, known[field][0], f"{stage.name}.{field}", "graph", lax=False)
    for field, (_, default) in known.items():
        if default is inspect.Parameter.empty and field not in stage.settings:
            raise ConfigError(f"stage {stage.name!r}: {stage.actor.__name__} needs a value for {field!r}")
    return stage
