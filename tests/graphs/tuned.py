"""A graph with profiles that serve a checkpoint of the user's: `small`, `large`, and one that does not."""

from __future__ import annotations

from collections.abc import Sequence

from omniflow import CHECKPOINT, Actor, Checkpoint, Graph, TextDelta, bind
from omniflow.weights import LocalWeights, Weights


class Needy(Actor):
    def __init__(self, *, model: str = "here") -> None:
        self.model = model

    def weights(self) -> Sequence[Weights]:
        return [LocalWeights(self.model)]

    async def run(self, text: TextDelta) -> TextDelta:
        return text


graph = Graph("tuned")
first, second = graph.stage("first", Needy), graph.stage("second", Needy)
graph.result(first, second)
graph.input(chat=first)
graph.output(text=second)
graph.profile("plain", "no checkpoint")
both = {"first": bind(Needy, model=CHECKPOINT), "second": bind(Needy)}
graph.profile("small", "a small one", Checkpoint("here", {"model_type": "ming", "size": range(1, 65)}), **both)
graph.profile("large", "a large one", Checkpoint("hf:own/er", {"model_type": "ming"}), **both)
