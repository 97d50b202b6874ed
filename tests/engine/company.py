"""Requests of many kinds that come, go and are aborted at any step, and what each of them must have got."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import torch

from omniflow.engine.base import Engine, EngineOutput, EngineRequest, Sampling
from tests.engine.tiny import HIDDEN, VOCAB, drain, ids_of, prompt

NUM_PROMPTS, NUM_ROWS = 6, 3
"""So few that requests share beginnings: of tokens, of embeddings, or of tokens under other embeddings."""


def any_request(random: Random, id: str, *, penalized: bool = True, seeds: bool = False) -> EngineRequest:
    """A prompt around the sizes of chunks, and one or two tokens or many to make."""
    length = random.choice([1, 2, 5, 30, 63, 64, 65, 100, 129])
    sampling: dict[str, object] = {"max_tokens": random.choice([1, 2, 3, 17, 40]), "top_logprobs": 2}
    if random.random() < 0.2:
        sampling["stop_token_ids"] = frozenset(random.sample(range(VOCAB), 10))
    if penalized and random.random() < 0.3:
        sampling |= {"frequency_penalty": random.random(), "repetition_penalty": random.uniform(0.8, 1.5)}
    if seeds and random.random() < 0.5:
        sampling |= {"temperature": 1.0, "seed": random.randrange(10)}
    rows, positions = None, ()
    if random.random() < 0.4:
        positions = tuple(sorted(random.sample(range(length), random.randint(1, length))))
        noise = torch.Generator().manual_seed(random.randrange(NUM_ROWS))
        rows = torch.randn(length, HIDDEN, generator=noise)[: len(positions)]
    return EngineRequest(
        id=id,
        ids=prompt(length, random.randrange(NUM_PROMPTS)),
        embeds=rows,
        positions=positions,
        stop=(chr(32 + random.randrange(VOCAB)),) if random.random() < 0.2 else (),
        sampling=Sampling(**sampling),  # type: ignore[arg-type]
    )


def any_requests(random: Random, count: int, **kinds: bool) -> list[EngineRequest]:
    """Their ids begin with each other's: a, aa, aaa, ..."""
    return [any_request(random, "a" * number, **kinds) for number in range(1, count + 1)]


def in_company(engine: Engine, requests: Sequence[EngineRequest], random: Random) -> dict[str, list[EngineOutput]]:
    """Start them at random steps, abort some (twice, before they run, or too late), and step until all have ended."""
    todo, told = list(requests), dict[str, list[EngineOutput]]()
    aborted = set[str]()
    while todo or engine.has_work():
        while todo and random.random() < 0.5:
            engine.start(todo.pop(0))
        if random.random() < 0.1:
            chosen = random.choice(requests)
            engine.abort(chosen.id)
            if chosen not in todo:
                aborted.add(chosen.id)
        for output in engine.step():
            before = told.setdefault(output.id, [])
            assert not before or before[-1].finish_reason is None, "nothing follows the end"
            before.append(output)
    for id, outputs in told.items():
        assert outputs[-1].finish_reason is not None
        assert outputs[-1].finish_reason != "abort" or id in aborted, "only who is named is aborted"
    return told


def aborted_after(
    steps: int, id: str, engine: Engine, requests: Sequence[EngineRequest]
) -> dict[str, list[EngineOutput]]:
    """What `requests` are told of which the one named `id` is aborted, twice, after so many steps."""
    outputs: dict[str, list[EngineOutput]] = {}
    for each in requests:
        engine.start(each)
    for _ in range(steps):
        for output in engine.step():
            outputs.setdefault(output.id, []).append(output)
    engine.abort(id)
    engine.abort(id)
    for other, last in drain(engine).items():
        outputs.setdefault(other, []).extend(last)
    return outputs


def cut_as(outputs: list[EngineOutput], whole: list[EngineOutput]) -> list[EngineOutput]:
    """Of `whole`, one token an output, as many as an aborted request with `outputs` has got, and its end."""
    if outputs[-1].finish_reason != "abort":
        return whole
    return [*whole[: len(ids_of(outputs))], EngineOutput(outputs[-1].id, (), "abort")]
