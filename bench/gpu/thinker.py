"""The real thinker in a host of its own: `python -m bench.gpu.thinker --engine sglang --device gpu --compare cpu.json`.

Greedy answers to a few prompts, alone and all at once, through graph, planner, host process and detokenizer. `--write`
keeps them; `--compare` says where they differ from those that another engine has written.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import anyio

from actors.detokenize import Detokenize
from actors.thinker import Thinker
from actors.tokenizer import load_tokenizer
from bench.gpu.report import folder_of, machine, need, replace
from omniflow import Graph, Runtime, plan
from omniflow.cli.machine import this_machine
from omniflow.config import RuntimeConfig
from omniflow.media import Options, TokenPrompt

QUESTIONS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "Explain in two sentences why the sky is blue.",
    "Name three fruits.",
    "What is seven times eight?",
    "Who wrote Hamlet?",
    "How do bees make honey?",
    "Give me a short rule for spelling 'receive'.",
)


def prompt_ids(model: str) -> list[list[int]]:
    """The questions in SmolLM2's chat format."""
    tokenizer = load_tokenizer(Path(model))
    system = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    form = system + "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    return [tokenizer.encode(form.format(question), add_special_tokens=False).ids for question in QUESTIONS]


def thinker_graph(arguments: argparse.Namespace) -> Graph:
    graph = Graph("thinker")
    thinker = graph.stage(
        "thinker",
        Thinker,
        model=arguments.model,
        device=arguments.device,
        engine=arguments.engine,
        dtype=arguments.dtype,
    )
    detokenize = graph.stage("detokenize", Detokenize, near="thinker", model=arguments.model)
    graph.stream(thinker, detokenize, bound=64)
    graph.input(chat=thinker)
    graph.output(text=detokenize["text"], usage=thinker["result"])
    return graph


async def answer(runtime: Runtime, ids: list[int], tokens: int) -> dict[str, Any]:
    options = Options(temperature=0.0, max_tokens=tokens)
    begin = time.perf_counter()
    first, text, usage = None, "", None
    async with await runtime.submit("chat", TokenPrompt(ids), outputs={"text", "usage"}, options=options) as reply:
        async for output in reply:
            if output.name == "text":
                first = first or time.perf_counter() - begin
                text += output.value.text
            else:
                usage = output.value.completion_tokens
    return {
        "text": text,
        "tokens": usage,
        "first_ms": 1e3 * (first or 0),
        "all_ms": 1e3 * (time.perf_counter() - begin),
    }


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    asked = prompt_ids(arguments.model)
    config = RuntimeConfig(start_timeout_s=300.0, step_s=120.0)
    begin = time.perf_counter()
    async with Runtime(plan(thinker_graph(arguments).spec(), this_machine(), config), config) as runtime:
        print(f"started in {time.perf_counter() - begin:.1f} s", flush=True)
        await answer(runtime, asked[0], 8)  # what is compiled or allocated on first use
        alone = [await answer(runtime, ids, arguments.tokens) for ids in asked]
        together: dict[int, dict[str, Any]] = {}

        async def one(number: int) -> None:
            together[number] = await answer(runtime, asked[number], arguments.tokens)

        begin = time.perf_counter()
        async with anyio.create_task_group() as tasks:
            for number in range(len(asked)):
                tasks.start_soon(one, number)
        took = time.perf_counter() - begin
    total = sum(each["tokens"] for each in together.values())
    return {
        "engine": arguments.engine,
        "device": arguments.device,
        "dtype": arguments.dtype,
        "alone": alone,
        "together": [together[number] for number in range(len(asked))],
        "together_tokens_per_s": total / took,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="name, or folder of a checkpoint")
    parser.add_argument("--engine", default="sglang", choices=["transformers", "sglang"])
    parser.add_argument("--device", default="gpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--compare", type=Path)
    arguments = parser.parse_args()
    if arguments.device != "cpu":
        need(sglang=arguments.engine == "sglang")
    arguments.model = folder_of(arguments.model)
    found = anyio.run(measure, arguments)
    if arguments.write is not None:
        replace(arguments.write, {"machine": machine()} | found)
    for name in ("alone", "together"):
        firsts = sorted(each["first_ms"] for each in found[name])
        print(f"{name}: first text after {firsts[len(firsts) // 2]:.1f} ms (median)")
    print(f"together: {found['together_tokens_per_s']:.0f} tokens/s")
    if arguments.compare is not None:
        theirs = [each["text"] for each in json.loads(arguments.compare.read_text())["alone"]]
        for name in ("alone", "together"):
            ours = [each["text"] for each in found[name]]
            same = sum(our == their for our, their in zip(ours, theirs, strict=True))
            print(f"{name}: {same} of {len(theirs)} answers are equal to those in {arguments.compare}")
            for our, their in zip(ours, theirs, strict=True):
                if our != their:
                    print(f"  here: {our!r}\n  there: {their!r}")


if __name__ == "__main__":
    main()
