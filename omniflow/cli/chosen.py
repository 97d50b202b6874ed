"""What the arguments of a command choose: a graph, its profile, its settings, and the weights that its stages need."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from omniflow.config import Configured, Layer, configure, environment_layer, file_layer, set_layer
from omniflow.errors import ConfigError, OmniflowError, StartError
from omniflow.graph import Graph
from omniflow.loader import load_graph, model_from_anywhere, profile_of
from omniflow.topology import GraphSpec
from omniflow.weights import Weights


class Chosen(msgspec.Struct, frozen=True):
    """A graph under a profile with all settings applied; `why` is the line that says which profile, and why."""

    graph: Graph
    configured: Configured
    why: str
    layers: tuple[Layer, ...]
    """The settings that were applied, weakest first."""

    @property
    def spec(self) -> GraphSpec:
        """The graph with its settings."""
        return self.configured.spec


def choose(reference: str, profile: str | None, layers: Sequence[Layer], model: str | None = None) -> Chosen:
    """Load the graph that `reference` names and apply `layers` to it, for the checkpoint `model` where there is one.

    Without a `profile` that is the one which serves `model`. Raises GraphError, WeightsError or ConfigError.
    """
    graph = load_graph(reference)
    reason = "by --profile" if profile is not None else None
    if model is not None:
        model = model_from_anywhere(model)
        if profile is None:
            found, reason = profile_of(graph, model)
            profile = found.name
    spec = graph.spec(profile)
    applied = (*_checkpoint_layers(graph, spec, model), *layers)
    return Chosen(graph, configure(spec, applied), _why(graph, spec, reason), applied)


def _checkpoint_layers(graph: Graph, spec: GraphSpec, model: str | None) -> list[Layer]:
    if model is None:
        return []
    if spec.profile is None or spec.profile.checkpoint is None:
        whose = f"profile {spec.profile.name}" if spec.profile else f"graph {spec.name}"
        takers = [profile.name for profile in graph.profiles.values() if profile.checkpoint]
        which = f"these take one: {', '.join(takers)}" if takers else "no profile takes one"
        raise ConfigError(f"{whose} takes no --model: its stages name their models themselves; {which}")
    return [Layer("--model", dict.fromkeys(spec.profile.of_checkpoint, model))]


def layers_of(config: Path | None, pairs: Sequence[str], shortcuts: dict[str, Any]) -> list[Layer]:
    """The layers of settings, weakest first: file, environment, command line (`shortcuts` are options like --port)."""
    given = {key: value for key, value in shortcuts.items() if value is not None}
    command_line = set_layer(pairs)
    return [
        *([file_layer(config)] if config else []),
        environment_layer(os.environ),
        Layer(command_line.source, command_line.values | given),
    ]


def _why(graph: Graph, spec: GraphSpec, reason: str | None) -> str:
    """`reason` is why this profile was asked for; None where it was not."""
    if spec.profile is None:
        return f"{spec.name} has no profiles: its stages name their actors themselves"
    others = [name for name in graph.profiles if name != spec.profile.name]
    if reason is None and others:
        reason = f"the default; --profile takes {', '.join(others)} too"
    elif reason is None:
        reason = f"the only one of {spec.name}"
    return f"profile {spec.profile.name} ({reason}): {spec.profile.why}"


def lacking(spec: GraphSpec) -> list[StartError]:
    """What is not installed here that the stages of a graph need, a stage each."""
    found = []
    for stage in spec.stages:
        why = None if stage.name in spec.absent else stage.actor.lacks(stage.settings, stage.device)
        if why is not None:
            found.append(StartError(why, stage=stage.name))
    return found


def refuse_what_lacks(spec: GraphSpec) -> None:
    """Raises StartError where a stage needs what is not installed: before anything is fetched."""
    for error in lacking(spec):
        raise error


class Need(msgspec.Struct, frozen=True):
    """Weights, and the stages that read them."""

    weights: Weights
    stages: tuple[str, ...]


def needs_of(spec: GraphSpec) -> list[Need]:
    """The weights of a graph's stages, each once, in the order of the stages."""
    found: dict[str, Need] = {}
    for stage in spec.stages:
        if stage.name in spec.absent:
            continue
        try:
            declared = stage.actor(**stage.settings).weights()
        except OmniflowError as error:
            error.stage = error.stage or stage.name
            raise
        except Exception as error:  # the boundary to actor code, which may raise anything
            raise StartError(
                f"{stage.actor.__name__} cannot say what weights it needs: {type(error).__name__}: {error}",
                stage=stage.name,
            ) from error
        for each in declared:
            stages = found[each.name].stages if each.name in found else ()
            found[each.name] = Need(each, (*stages, stage.name))
    return list(found.values())
