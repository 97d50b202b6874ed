"""A graph that calls tools: the stages of ming_omni around a thinker that follows a script.

What it answers is decided by the last turn of the prompt that the real Merge wrote, token by token of the real
vocabulary, through the real Detokenize.
"""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np

from actors.catalogue import PACKAGED
from actors.detokenize import Detokenize
from actors.merge import Merge
from actors.preprocess import Preprocess
from actors.roles import ThinkerRole
from actors.tokenizer import load_tokenizer
from omniflow.actor import Actor, Context, Emit, Stream
from omniflow.graph import Graph
from omniflow.media import AudioChunk, Generated, TextDelta, TokenLogprob, TokenPrompt, Tokens
from omniflow.planner import Cluster, Plan, plan
from omniflow.weights import resolve

MODEL = "smollm2-135m-instruct"
LAST_TURN = re.compile(r".*<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>\n<\|im_start\|>assistant\n$", re.DOTALL)
RESPONSE = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)


def call(name: str, arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def answer(prompt: str, ctx: Context) -> str:
    """What to say: results of tools are read out, cities are looked up, `say X` says X."""
    found = LAST_TURN.match(prompt)
    assert found is not None, prompt
    last = found[2]
    if "<tool_response>" in last:
        turns = prompt.split("<|im_start|>")[1:-1]
        results = [response for turn in turns for response in RESPONSE.findall(turn)]
        return "It is " + " and ".join(results) + "."
    if ctx.options.json_schema is not None:
        return '{"city": "Paris", "days": 2}'
    cities = re.findall(r"[A-Z]\w+", last)
    if ctx.options.tools and cities and not last.startswith("say "):
        assert "<tools>" in prompt
        calls = "\n".join(call("weather", {"city": city}) for city in cities)
        return calls if ctx.options.tool_choice == "required" else "Let me look.\n" + calls
    return last.removeprefix("say ")


class ScriptedThinker(ThinkerRole):
    """Says what `answer` decides; with a seed, the seed, too."""

    async def setup(self) -> None:
        self._tokenizer = load_tokenizer(resolve(MODEL, PACKAGED).path())
        self._tokenizer.encode_special_tokens = True  # what it says is text

    async def run(self, prompt: TokenPrompt, emit: Emit[Tokens], ctx: Context) -> Generated:
        text = answer(self._tokenizer.decode(prompt.ids, skip_special_tokens=False), ctx)
        if ctx.options.seed is not None:
            text += f" {ctx.options.seed}"
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        limit = ctx.options.max_tokens or len(ids)
        wanted = ctx.options.top_logprobs
        for id in ids[:limit]:
            top = tuple((id + number, -1.0 - number) for number in range(wanted or 0))
            await emit.send(Tokens((id,), () if wanted is None else (TokenLogprob(id, -1.0, top),)))
        count = min(limit, len(ids))
        return Generated("length" if limit < len(ids) else "stop", len(prompt.ids), count)


class Hum(Actor):
    """Gives 10 samples a character."""

    async def run(self, texts: Stream[TextDelta], audio: Emit[AudioChunk]) -> None:
        async for delta in texts:
            await audio.send(AudioChunk(np.full(10 * len(delta.text), 0.25, np.float32), 24000))


def caller_plan() -> Plan:
    """All in the process of the runtime."""
    graph = Graph("caller")
    preprocess = graph.stage("preprocess", Preprocess)
    merge = graph.stage("merge", Merge, model=MODEL)
    thinker = graph.stage("thinker", ScriptedThinker)
    detokenize = graph.stage("detokenize", Detokenize, model=MODEL)
    hum = graph.stage("hum", Hum)
    graph.fan_in(merge, prompt=preprocess["prompt"])
    graph.result(merge, thinker)
    graph.stream(thinker, detokenize)
    graph.stream(detokenize["text"], hum)
    graph.input(chat=preprocess)
    graph.output(text=detokenize["text"], tool_calls=detokenize["tool_calls"], audio=hum, usage=thinker["result"])
    return plan(graph.spec(), Cluster("test", cpu_cores=2, memory_bytes=2**33, single_process=True))
