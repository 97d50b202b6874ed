"""The weights of all graphs that ship, and what of them is here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table
from rich.text import Text

from omniflow.cli.chosen import Need, choose, needs_of
from omniflow.cli.tables import new_table, size_text
from omniflow.config import configure
from omniflow.loader import load_graph, shipped_graphs
from omniflow.planner import Plan
from omniflow.server.realtime.silero import SILERO_VAD
from omniflow.weights import NamedWeights, Weights, resolve

_STATUS_STYLES = {"present": "green", "missing": "yellow", "broken": "red"}


SERVER_NEEDS = (Need(SILERO_VAD, ("/v1/realtime",)),)
"""What the server reads, beside the stages of a graph."""


def server_needs(plan: Plan) -> list[Need]:
    """What a server of `plan` reads itself."""
    return list(SERVER_NEEDS) if {"chat", "transcription"} & plan.inputs.keys() else []


def needs_everywhere() -> list[Need]:
    """The weights of every graph that ships, under all of its profiles, and of the server; each once."""
    found = {need.weights.name: need for need in SERVER_NEEDS}
    for name in shipped_graphs():
        graph = load_graph(name)
        for profile in graph.profiles or [None]:
            for need in needs_of(configure(graph.spec(profile)).spec):
                found.setdefault(need.weights.name, need)
    return list(found.values())


def weights_named(names: Sequence[str], profile: str | None) -> list[Weights]:
    """The weights that `names` (graphs, weights, hf:owner/repo) stand for.

    Without `names`, those of all graphs that are a catalogue's. Raises GraphError or WeightsError for a name that is
    neither.
    """
    if not names:
        return [need.weights for need in needs_everywhere() if isinstance(need.weights, NamedWeights)]
    shipped = shipped_graphs()
    found: dict[str, Weights] = {}
    for name in names:
        if name in shipped or ".py" in name:
            each: Iterable[Weights] = [need.weights for need in needs_of(choose(name, profile, []).spec)]
        else:
            each = [_single(name)]
        found |= {weights.name: weights for weights in each}
    return list(found.values())


def _single(name: str) -> Weights:
    if name.startswith("hf:"):
        return resolve(name, {})
    known = [need.weights for need in needs_everywhere()]
    return resolve(name, {weights.name: weights for weights in known if isinstance(weights, NamedWeights)})


def models_table(needs: Iterable[Need]) -> Table:
    """One row for each weights: name and the stages that read them, where from and under which licence, state, size."""
    table = new_table("weights", "from", "state", "size")
    table.columns[3].justify = "right"
    for need in needs:
        state = need.weights.state()
        name = Text.assemble((state.name, "bold"), (f"\nfor {', '.join(need.stages)}", "dim"))
        source = Text(state.source)
        if isinstance(need.weights, NamedWeights):
            source.append(f"\n{need.weights.license}", style="dim")
        size = size_text(state.size_bytes) if state.size_bytes else "?"
        table.add_row(name, source, Text(state.status, style=_STATUS_STYLES[state.status]), size)
    return table
