"""Settings: one precedence, typed values, nearest names, and where each value came from."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniflow.actor import Actor, Count, Emit, Stream
from omniflow.config import (
    Configured,
    Layer,
    RuntimeConfig,
    arguments_of,
    configure,
    environment_layer,
    file_layer,
    set_layer,
    settings_of,
)
from omniflow.errors import ConfigError
from omniflow.graph import Budget, Graph, GraphSpec, Restart, absent, bind
from omniflow.media import TextDelta


class Writer(Actor):
    def __init__(
        self,
        *,
        model: str = "small",
        max_tokens: Count = 16,
        temperature: float = 0.5,
        echo: bool = False,
        mode: Literal["fast", "exact"] = "fast",
        seed: int | None = None,
        stops: tuple[str, ...] = (),
    ) -> None:
        self.max_tokens = max_tokens

    async def run(self, text: TextDelta, emit: Emit[TextDelta]) -> None: ...


class Needy(Writer):
    def __init__(self, *, path: str) -> None:
        super().__init__()


class Reader(Actor):
    async def run(self, text: Stream[TextDelta]) -> TextDelta: ...


class Pass(Actor):
    async def run(self, text: TextDelta) -> TextDelta: ...


def graph() -> Graph:
    found = Graph("g")
    first = found.stage("first", Writer, model="graph", max_tokens=1)
    read = found.stage("read", Reader)
    value = found.stage("value", Pass)
    second = found.stage("second", Writer)
    found.stream(first, read)
    found.result(value, second)
    found.input(text=first, other=value)
    found.output(read=read, out=second)
    found.profile("p", "why", first=bind(max_tokens=2, device="gpu"), second=bind(temperature=0.9))
    found.profile("q", "why", second=absent("none here"), value=absent("none here"))
    return found


def spec(profile: str = "p") -> GraphSpec:
    return graph().spec(profile)


def setting(configured: Configured, stage: str, name: str) -> Any:
    return configured.spec.stage(stage).settings.get(name)


def one(key: str, value: Any, source: str = "x") -> Layer:
    return Layer(source, {key: value})


# -- precedence and origins --------------------------------------------------------------------------------------------

KEY = "first.max_tokens"


@pytest.mark.parametrize(
    ("layers", "expected", "origin"),
    [
        ([], 2, "profile p"),
        ([one(KEY, 3, "file f")], 3, "file f"),
        ([one(KEY, 3, "file f"), one(KEY, "4", "environment")], 4, "environment"),
        (
            [one(KEY, 3, "file f"), one(KEY, "4", "environment"), one(KEY, "5", "command line")],
            5,
            "command line",
        ),
    ],
)
def test_precedence(layers: list[Layer], expected: int, origin: str) -> None:
    configured = configure(spec(), layers)
    assert setting(configured, "first", "max_tokens") == expected
    assert configured.origins[KEY] == origin


def test_origins_name_what_was_set_and_nothing_else() -> None:
    configured = configure(spec(), [one("runtime.deadline_s", "5", "environment"), one("server.port", 1, "file f")])
    assert configured.origins == {
        "first.model": "graph",
        "first.max_tokens": "profile p",
        "first.device": "profile p",
        "second.temperature": "profile p",
        "runtime.deadline_s": "environment",
        "server.port": "file f",
    }
    assert (configured.runtime.deadline_s, configured.server.port) == (5.0, 1)
    assert "first.max_tokens" in configure(spec("q")).origins


def test_the_graph_itself_is_never_changed() -> None:
    before = graph().spec("p")
    built = spec()
    configure(built, [one(KEY, 9), one("first.device", "cpu")])
    assert built == before


# -- values ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "text", "value"),
    [
        ("max_tokens", "64", 64),
        ("temperature", "0.25", 0.25),
        ("temperature", "1", 1.0),
        ("echo", "true", True),
        ("echo", "0", False),
        ("mode", "exact", "exact"),
        ("seed", "7", 7),
        ("seed", "null", None),
        ("model", "5", "5"),
    ],
)
def test_text_is_read_as_the_type_of_its_key(field: str, text: str, value: Any) -> None:
    configured = configure(spec(), [set_layer([f"first.{field}={text}"])])
    assert setting(configured, "first", field) == value
    assert type(setting(configured, "first", field)) is type(value)


def test_stage_fields() -> None:
    layer = Layer("f", {"first.device": "cpu", "first.tp": "2", "first.isolate": "true", "first.near": "second"})
    more = Layer("f", {"first.memory": {"weights": "2 GiB"}, "first.restart": {"strategy": "one_for_one"}})
    stage = configure(spec(), [layer, more]).spec.stage("first")
    assert (stage.device, stage.tp, stage.isolate, stage.near) == ("cpu", 2, True, "second")
    assert (stage.memory, stage.restart) == (Budget(weights="2 GiB"), Restart("one_for_one"))


def test_fields_of_a_table_one_by_one() -> None:
    layers = [
        Layer("f", {"first.memory": {"weights": "2 GiB", "heads": 8}}),
        set_layer(["first.memory.workspace=1 GiB", "first.memory.kv_tokens=5", "first.restart.strategy=one_for_one"]),
    ]
    configured = configure(spec(), layers)
    stage = configured.spec.stage("first")
    assert stage.memory == Budget(weights="2 GiB", workspace="1 GiB", kv_tokens=5, heads=8)
    assert stage.restart == Restart("one_for_one")
    assert configured.origins["first.memory"] == "command line"


class Thinks(Writer):
    def __init__(self, *, kv_tokens: Count = 16) -> None:
        super().__init__()


def test_a_budget_counts_the_kv_tokens_that_are_set() -> None:
    """Else a plan that fits would be of another start; where a budget counts none, it goes on counting none."""
    found = Graph("g")
    counted = found.stage("counted", Thinks, memory=Budget("1 GiB", kv_tokens=16, kv_bytes_per_token=2))
    plain = found.stage("plain", Thinks, memory=Budget("1 GiB"))
    found.input(text=counted, other=plain)
    found.output(out=counted, more=plain)
    layers = [Layer("profile", {"counted.kv_tokens": 8}), set_layer(["counted.kv_tokens=100", "plain.kv_tokens=100"])]
    configured = configure(found.spec(), layers)
    stage = configured.spec.stage("counted")
    assert (stage.settings["kv_tokens"], stage.memory.kv_tokens, stage.memory.total_bytes) == (100, 100, 2**30 + 200)
    assert configured.origins["counted.memory"] == "command line"
    assert configured.spec.stage("plain").memory == Budget("1 GiB")


def test_a_value_with_an_equals_sign() -> None:
    assert setting(configure(spec(), [set_layer(["first.model=a=b"])]), "first", "model") == "a=b"


REFUSED = [
    ("first.max_tokens", "many", "x: first.max_tokens='many': Expected `int`, got `str`"),
    ("first.max_tokens", 1.5, "x: first.max_tokens=1.5: Expected `int`, got `float`"),
    ("first.max_tokens", "0", "x: first.max_tokens='0': Expected `int` >= 1"),
    ("first.mode", "slow", "x: first.mode='slow': Invalid enum value 'slow'; write fast or exact"),
    ("first.echo", "maybe", "x: first.echo='maybe': Expected `bool`, got `str`; write true or false"),
    ("first.max_tokns", 1, "x: stage 'first' has no setting 'max_tokns'; did you mean 'max_tokens'?"),
    ("first.devise", "gpu", "x: stage 'first' has no setting 'devise'; did you mean 'device'?"),
    ("first.tp", "two", "x: first.tp='two': Expected `int`, got `str`"),
    ("first.tp", 0, "x: first.tp=0: Expected `int` >= 1"),
    ("first.threads", "-2", "x: first.threads='-2': Expected `int` >= 1"),
    ("frist.model", "a", "x: unknown key 'frist.model'; did you mean 'first'?"),
    ("nothing", "a", "x: unknown key 'nothing'; known: first, read, runtime, second, server, value"),
    ("runtime.deadline", 5, "x: unknown key runtime.deadline; did you mean 'deadline_s'?"),
    ("runtime.deadline_s", 0, "x: runtime.deadline_s=0: Expected `float` > 0.0"),
    ("runtime.max_queued", "-1", "x: runtime.max_queued='-1': Expected `int` >= 0"),
    ("runtime.shm_bytes", 1, "x: runtime.shm_bytes=1: Expected `int` >= 1048576"),
    ("server.port", 70000, "x: server.port=70000: Expected `int` <= 65535"),
    (
        "first.memory",
        "4 GiB",
        "x: first.memory='4 GiB': Expected `object`, got `str`; set its fields: "
        "first.memory.weights, first.memory.workspace, first.memory.kv_tokens, first.memory.kv_bytes_per_token, "
        "first.memory.heads, first.memory.kv_heads",
    ),
    (
        "first.memory.weights",
        "much",
        "first.memory.weights: 'much' is no size; write a number of bytes or text like '4 GiB'",
    ),
    (
        "first.memory",
        {"workspace": "much"},
        "first.memory.workspace: 'much' is no size; write a number of bytes or text like '4 GiB'",
    ),
    ("first.memory.weight", "1", "x: unknown key 'first.memory.weight'; did you mean 'weights'?"),
    ("first.memory.kv_tokens", "all", "x: first.memory.kv_tokens='all': Expected `int`, got `str`"),
    ("first.device.kind", "gpu", "x: first.device is one value and has no 'kind'"),
    ("first.memory", {"weight": 1}, "x: first.memory={'weight': 1}: Object contains unknown field `weight`"),
]


@pytest.mark.parametrize(("key", "value", "message"), REFUSED, ids=[f"{key}={value}" for key, value, _ in REFUSED])
def test_what_is_refused_is_named_with_what_would_pass(key: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        configure(spec(), [one(key, value)])
    assert str(caught.value) == message


def changed(**values: Any) -> GraphSpec:
    """A graph whose own declarations are wrong."""
    found = Graph("g")
    stage = found.stage("first", values.pop("actor", Writer), **values)
    found.input(text=stage)
    found.output(out=stage)
    return found.spec()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_tokns": 5}, "stage 'first': Writer has no setting 'max_tokns'; did you mean 'max_tokens'?"),
        ({"max_tokens": "5"}, "graph: first.max_tokens='5': Expected `int`, got `str`"),
        ({"tp": "4"}, "graph: first.tp='4': Expected `int`, got `str`"),
        ({"memory": "4 GiB"}, "graph: first.memory='4 GiB': Expected `object`, got `str`"),
        ({"actor": Needy}, "stage 'first': Needy needs a value for 'path'"),
    ],
)
def test_what_a_graph_declares_is_checked_as_well(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        configure(changed(**values))
    assert str(caught.value) == message


def test_a_required_setting_may_come_from_a_layer() -> None:
    assert configure(changed(actor=Needy), [one("first.path", "/x")]).spec.stage("first").settings == {"path": "/x"}


def test_settings_are_read_from_the_signature() -> None:
    assert settings_of(Writer)["max_tokens"] == (Count, 16)
    assert settings_of(Pass) == {}
    assert list(settings_of(Needy)) == ["path"]


# -- places ------------------------------------------------------------------------------------------------------------


def test_a_file(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(
        '[first]\nmax_tokens = 7\nstops = ["a", "b"]\n[first.memory]\nweights = 5\n[runtime]\ndrain_s = 1\n'
    )
    layer = file_layer(file)
    configured = configure(spec(), [layer])
    assert configured.origins[KEY] == f"file {file}"
    assert (setting(configured, "first", "max_tokens"), setting(configured, "first", "stops")) == (7, ("a", "b"))
    assert configured.runtime.drain_s == 1
    assert configured.spec.stage("first").memory.weights == 5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "max_tokens = 5",
            "{file}: 'max_tokens' stands outside a table; write it under [runtime], [server] or a stage",
        ),
        ("[first", "{file} is no valid TOML: Expected ']' at the end of a table declaration (at end of document)"),
    ],
)
def test_a_broken_file(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "c.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        file_layer(file)
    assert str(caught.value) == message.format(file=file)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none.toml: No such file or directory"):
        file_layer(tmp_path / "none.toml")


def test_the_environment() -> None:
    layer = environment_layer(
        {"OMNIFLOW__FIRST__MAX_TOKENS": "8", "OMNIFLOW__RUNTIME__DEADLINE_S": "3", "OMNIFLOW_CACHE": "x", "PATH": "y"}
    )
    assert layer == Layer("environment", {"first.max_tokens": "8", "runtime.deadline_s": "3"})
    layer = environment_layer({"OMNIFLOW__FIRST__MEMORY__WEIGHTS": "2 GiB"})
    assert configure(spec(), [layer]).spec.stage("first").memory == Budget(weights="2 GiB")


@pytest.mark.parametrize("pair", ["first.max_tokens", "max_tokens=5", ""])
def test_a_set_argument_without_key_or_value(pair: str) -> None:
    with pytest.raises(ConfigError) as caught:
        set_layer([pair])
    assert str(caught.value) == f"--set {pair!r}: write it as stage.field=value"


@given(st.lists(st.tuples(st.sampled_from(["graph", "file", "env", "set"]), st.integers(1, 99)), max_size=8))
def test_the_last_layer_that_names_a_key_wins(given_: list[tuple[str, int]]) -> None:
    layers = [one("runtime.max_in_flight", value, source) for source, value in given_]
    configured = configure(changed(), layers)
    if given_:
        assert configured.runtime.max_in_flight == given_[-1][1]
        assert configured.origins["runtime.max_in_flight"] == given_[-1][0]
    else:
        assert configured.runtime == RuntimeConfig()


def test_config_structs_are_frozen() -> None:
    with pytest.raises(AttributeError):
        RuntimeConfig().deadline_s = 5  # type: ignore[misc]
    assert msgspec.structs.asdict(RuntimeConfig())["hang_s"] == 20


class Threaded(Writer):
    def __init__(self, *, threads: int = 1, device: str = "cpu", max_tokens: int = 16) -> None:
        super().__init__(max_tokens=max_tokens)


def test_an_actor_gets_the_fields_of_its_stage_that_it_takes() -> None:
    found = Graph("g")
    writer = found.stage("writer", Threaded, max_tokens=5)
    found.input(text=writer)
    found.output(text=writer)
    configured = configure(found.spec(), [set_layer(["writer.threads=3"])])
    assert arguments_of(configured.spec.stage("writer")) == {"threads": 3, "device": "cpu", "max_tokens": 5}
    assert arguments_of(msgspec.structs.replace(configured.spec.stage("writer"), actor=Writer)) == {"max_tokens": 5}


def test_fields_that_an_actor_takes_too_are_named_once() -> None:
    found = Graph("g")
    writer = found.stage("writer", Threaded)
    found.input(text=writer)
    found.output(text=writer)
    known = "device, isolate, max_tokens, memory, near, restart, threads, tp"
    with pytest.raises(ConfigError, match=f"no setting 'quux'; known: {known}$"):
        configure(found.spec(), [set_layer(["writer.quux=1"])])
