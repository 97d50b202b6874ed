"""The document is true: every route is in it, and the server takes and gives what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import hypothesis
import pytest
import schemathesis
from starlette.routing import Route
from starlette.types import ASGIApp

from omniflow.actor import Actor, Emit, NamedVoice, Stream
from omniflow.config import ServerConfig
from omniflow.graph import Graph
from omniflow.media import AudioChunk, Transcript
from omniflow.planner import Cluster, plan
from omniflow.runtime import Output
from omniflow.server import schema_notes
from omniflow.server.app import build_app
from omniflow.server.keys import Keys
from omniflow.server.openapi import document
from omniflow.server.operations import OPERATIONS
from omniflow.server.serve import serve
from omniflow.server.service import Service
from omniflow.server.transcripts import Transcripts

from .scripted import HELLO, Hum, Parrot, ScriptedRuntime, parrot_plan

BEYOND_SCHEMAS = re.compile(
    r"messages\[\d+\]\.(audio\.id|tool_call_id|content\[\d+\]\.file\.file_data)|tools|tool_choice"
    r"|file|stream|timestamp_granularities\[\]"
)
"""Of what only the conversation, or the bytes, can tell: ids that are known, names that are different; and of fields of
forms that do not fit together, for schemathesis 4.32 fails on a form with both a file and conditions."""


class Ear(Actor):
    """Declares what it would take and give; what it says is in the script."""

    async def run(self, audio: Stream[AudioChunk], emit: Emit[Transcript]) -> None: ...


def capable() -> ScriptedRuntime:
    """A runtime whose graph can do all that there are routes for."""
    graph = Graph("capable")
    parrot, hum, ear = graph.stage("parrot", Parrot), graph.stage("hum", Hum), graph.stage("ear", Ear)
    graph.stream(parrot["text"], hum)
    graph.input(chat=parrot, speech=hum, transcription=ear)
    graph.output(text=parrot["text"], usage=parrot["result"], audio=hum, transcript=ear)
    cluster = Cluster("test", cpu_cores=2, memory_bytes=2**30, single_process=True)
    said = Output("transcript", Transcript("Hello.", 0.0, 1.0, "en", (), (1,), -0.5, 0.1))
    return ScriptedRuntime([*HELLO, said], plan(graph.spec(), cluster))


def app(**config: Any) -> ASGIApp:
    return build_app(capable(), model="tiny", config=ServerConfig(**config))  # type: ignore[arg-type]


def written(runtime: ScriptedRuntime | None = None, *api_keys: str, **config: Any) -> dict[str, Any]:
    settings = ServerConfig(**config)
    return document(
        Service(runtime or capable(), "tiny", frozenset({"nick"}), Transcripts(), Keys(api_keys), settings)  # type: ignore[arg-type]
    )


def routes_of(guarded: Any) -> set[tuple[str, str]]:
    """Method and path of every route, less those that come with another."""
    while not hasattr(guarded, "routes"):
        guarded = guarded._app
    found = set()
    for route in guarded.routes:
        if isinstance(route, Route):
            path = re.sub(r":path}", "}", route.path)
            found |= {(method.lower(), path) for method in (route.methods or ["GET"]) if method != "HEAD"}
    return found


def test_every_route_is_in_the_document() -> None:
    assert {(each.method, each.path) for each in OPERATIONS} == routes_of(app())
    names = [each.name for each in OPERATIONS]
    assert len(set(names)) == len(names)


def test_the_document_is_of_this_server() -> None:
    found = written()
    assert found["components"]["schemas"]["ChatRequest"]["properties"]["model"]["enum"] == ["tiny", "nick"]
    assert "/v1/audio/speech" in found["paths"] and "/v1/chat/completions" in found["paths"]
    mute = written(ScriptedRuntime(plan=parrot_plan(inputs=["chat"], outputs=["text"])))
    assert "/v1/audio/speech" not in mute["paths"] and "SpeechRequest" not in mute["components"]["schemas"]


def test_voices_are_named_where_they_are_known() -> None:
    assert written()["components"]["schemas"]["SpeechRequest"]["properties"]["voice"]["anyOf"][0]["type"] == "string"
    service = Service(capable(), "tiny", frozenset(), Transcripts(), voices=(NamedVoice("joe", "en"),))  # type: ignore[arg-type]
    schemas = document(service)["components"]["schemas"]
    for name in ("SpeechRequest", "AudioOptions"):
        assert {"joe", "alloy"} < set(schemas[name]["properties"]["voice"]["anyOf"][0]["enum"])


def test_it_says_where_keys_are_asked_for() -> None:
    found = written(None, "key")["paths"]
    assert found["/v1/models"]["get"]["security"] == [{"key": []}] and "401" in found["/v1/models"]["get"]["responses"]
    assert found["/live"]["get"]["security"] == found["/metrics"]["get"]["security"] == []
    assert written(None, "key", guard_metrics=True)["paths"]["/metrics"]["get"]["security"] == [{"key": []}]
    assert all(each["get"]["security"] == [] for each in written()["paths"].values() if "get" in each)


def test_notes_are_of_fields_that_there_are() -> None:
    schemas = written()["components"]["schemas"]
    for notes in (schema_notes.FIELD_TEXTS, schema_notes.NARROWED, schema_notes.REFUSED):
        for name, fields in notes.items():
            assert set(fields) <= set(schemas[name]["properties"]), name
    assert {*schema_notes.RULES, *schema_notes.TAG_MAY_BE_LEFT_OUT} <= set(schemas)
    for each in OPERATIONS:
        if each.body is not None and each.body.__name__ in schema_notes.FIELD_TEXTS:
            properties = schemas[each.body.__name__]["properties"]
            assert [name for name, field in properties.items() if not field.get("description")] == []


# -- schemathesis: requests made from the document, right and wrong ones, and replies compared with it -----------------


async def run_schemathesis(num_examples: int, phases: str) -> None:
    """All of its checks, but what a schema cannot promise, against a real server that asks for a key."""
    config = ServerConfig(port=0, api_keys=("sesame",))
    async with serve(build_app(capable(), model="tiny", config=config), config) as address:  # type: ignore[arg-type]
        ran = await anyio.run_process(
            [sys.executable, "-m", "schemathesis.cli", "run", f"{address.url}/openapi.json", "--no-color"]
            + ["--header", "Authorization: Bearer sesame", "--exclude-checks", "positive_data_acceptance"]
            + ["--phases", phases, "--max-examples", str(num_examples), "--seed", "1", "--no-shrink"]
            + ["--suppress-health-check", "all"],
            check=False,
            stderr=subprocess.STDOUT,
        )
    assert ran.returncode == 0, ran.stdout.decode()
    selected = re.search(rb"(\d+) selected", ran.stdout)
    assert selected is not None and int(selected[1]) >= len(OPERATIONS) - 1  # the document itself is read before


@pytest.mark.anyio
async def test_schemathesis_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    await run_schemathesis(3, "coverage,fuzzing")


@pytest.mark.anyio
@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_schemathesis_passes_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    await run_schemathesis(300, "examples,coverage,fuzzing,stateful")


@pytest.fixture(scope="module")
def api() -> schemathesis.BaseSchema:
    return schemathesis.openapi.from_asgi("/openapi.json", app())


def operations(api: Any) -> Iterator[Any]:
    yield from (result.ok() for result in api.get_all_operations())


@pytest.mark.parametrize("name", [each.name for each in OPERATIONS if each.path != "/openapi.json"])
def test_what_the_document_allows_is_done(api: schemathesis.BaseSchema, name: str) -> None:
    operation = next(each for each in operations(api) if each.definition.raw["operationId"] == name)

    # Without shrinking, which may take minutes where something fails.
    @hypothesis.settings(
        max_examples=8,
        phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=operation.as_strategy())
    def ask(case: Any) -> None:
        response = case.call()
        if response.status_code != 200:
            error = response.json()["error"]
            is_beyond = response.status_code == 400 and BEYOND_SCHEMAS.match(error["param"] or "")
            is_path = case.path_parameters and response.status_code == 404
            assert is_beyond or is_path or name == "createVoice", (case.body, error)

    ask()
