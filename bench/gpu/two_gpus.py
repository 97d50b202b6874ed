"""A graph over several GPUs and on one: `python -m bench.gpu.two_gpus --model FOLDER --vocoder FOLDER`.

    thinker (SGLang) ~> detokenize ~> segment ~> talker (SGLang, the tiny talker) ~> vocoders (CPU)

The thinker is on the first GPU, a talker on each of the others: with N GPUs there are N - 1 talkers. A vocoder takes a
core and makes 10 s of sound a second, so each talker has some; clients take turns. Said are the plan, what each GPU
holds, the first text and first sound of a client, and how much is said in all, for 1, 4 and 16 clients at once. The
dictionary is not needed here: the talker reads text letter by letter.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any, ClassVar

import anyio

from actors.detokenize import Detokenize
from actors.piper.vocoder import PiperVocoder
from actors.segmenter import Segmenter
from actors.thinker import Thinker
from actors.tiny_talker.talker import TinyTalker, TinyTalkerScript
from bench.gpu.kills import memory_used
from bench.gpu.report import Report, folder_of, need
from bench.gpu.thinker import prompt_ids
from omniflow import Budget, Graph, Runtime, plan
from omniflow.cli.machine import this_machine
from omniflow.config import RuntimeConfig
from omniflow.media import Options, TokenPrompt

CLIENTS = (1, 4, 16)
SOUNDS = dict(
    zip("abcdefghijklmnopqrstuvwxyz", "æ b k d ɛ f ɡ h ɪ dʒ k l m n ɑ p k ɹ s t ʌ v w ks j z".split(), strict=True)
)


def spelled(text: str) -> str:
    """As many sounds as letters: what the talker has to do is the same."""
    words = [
        "".join(SOUNDS.get(letter, letter if letter in ".,!?;:" else "") for letter in word)
        for word in text.lower().split()
    ]
    return " ".join(word for word in words if word.strip(".,!?;:"))


class SpelledTalker(TinyTalker):
    """The tiny talker without its dictionary."""

    preload: ClassVar[tuple[str, ...]] = ("torch", "actors.tiny_talker.model")  # type: ignore[assignment]

    def load_script(self, folder: Path) -> TinyTalkerScript:
        return TinyTalkerScript(folder, spelled)


def build(arguments: argparse.Namespace, talkers: list[str]) -> Graph:
    """The graph with a talker on each of these devices."""
    graph = Graph("several_gpus")
    engine: dict[str, Any] = {"engine": "transformers"}
    if arguments.device == "gpu":
        engine = {"engine": "sglang", "dtype": "bfloat16"}
    thinker = graph.stage(
        "thinker",
        Thinker,
        model=arguments.model,
        device="gpu:0" if arguments.device == "gpu" else "cpu",
        max_running=16,
        kv_tokens=32768,
        memory=Budget(weights="600 MB", workspace="2.4 GB", kv_tokens=32768, kv_bytes_per_token=23040),
        **engine,
    )
    detokenize = graph.stage("detokenize", Detokenize, near="thinker", model=arguments.model)
    graph.stream(thinker, detokenize, bound=64)
    graph.output(text=detokenize["text"], usage=thinker["result"])
    for number, device in enumerate(talkers):
        segment = graph.stage(f"segment{number}", Segmenter, near=f"talker{number}")
        talker = graph.stage(
            f"talker{number}",
            SpelledTalker,
            model="tiny-talker",
            device=device,
            max_running=16,
            memory=Budget(weights="100 MB", workspace="2.9 GB"),
            engine="sglang" if arguments.device == "gpu" else "reference",
        )
        graph.stream(detokenize["text"], segment, bound=64)
        graph.stream(segment, talker, bound=8)
        for core in range(arguments.vocoders):
            vocoder = graph.stage(f"vocoder{number}_{core}", PiperVocoder, model=arguments.vocoder)
            graph.stream(talker, vocoder, bound=8)
            graph.output(**{f"audio{core}_{number}": vocoder})
    graph.input(chat=thinker)
    return graph


class Heard:
    """What one client got."""

    def __init__(self) -> None:
        self.first_text_s = self.first_sound_s = 0.0
        self.sound_s = 0.0
        self.tokens = 0


async def listen(runtime: Runtime, ids: list[int], tokens: int, audio: str) -> Heard:
    heard, began = Heard(), time.perf_counter()
    options = Options(temperature=0.0, max_tokens=tokens, seed=None)
    async with await runtime.submit(
        "chat", TokenPrompt(ids), outputs={"text", "usage", audio}, options=options
    ) as reply:
        async for output in reply:
            passed = time.perf_counter() - began
            if output.name == "text":
                heard.first_text_s = heard.first_text_s or passed
            elif output.name == "usage":
                heard.tokens = output.value.completion_tokens
            else:
                heard.first_sound_s = heard.first_sound_s or passed
                heard.sound_s += output.value.duration_s
    return heard


async def together(
    runtime: Runtime, asked: list[list[int]], arguments: argparse.Namespace, count: int
) -> dict[str, Any]:
    """`count` clients at once, `rounds` questions each, one after the other."""
    all_heard: list[Heard] = []
    outputs = sorted(name for name in runtime.plan.outputs if name.startswith("audio"))

    async def client(number: int) -> None:
        for turn in range(arguments.rounds):
            ids = asked[(number + turn) % len(asked)]
            all_heard.append(await listen(runtime, ids, arguments.tokens, outputs[number % len(outputs)]))

    began = time.perf_counter()
    async with anyio.create_task_group() as tasks:
        for number in range(count):
            tasks.start_soon(client, number)
    took = time.perf_counter() - began
    return {
        "first_text_ms": round(1e3 * statistics.median(each.first_text_s for each in all_heard), 1),
        "first_sound_ms": round(1e3 * statistics.median(each.first_sound_s for each in all_heard), 1),
        "first_sound_last_ms": round(1e3 * max(each.first_sound_s for each in all_heard), 1),
        "tokens_per_s": round(sum(each.tokens for each in all_heard) / took, 1),
        "sound_s_per_s": round(sum(each.sound_s for each in all_heard) / took, 2),
    }


async def measure(name: str, talkers: list[str], arguments: argparse.Namespace, report: Report) -> None:
    asked = prompt_ids(arguments.model)
    config = RuntimeConfig(start_timeout_s=120.0, step_s=60.0, deadline_s=120.0)
    gpus = sorted({"gpu:0", *talkers}) if arguments.device == "gpu" else []
    before = {gpu: memory_used(int(gpu[4:])) for gpu in gpus}
    planned = plan(build(arguments, talkers).spec(), this_machine(), config)
    found = {
        "hosts": {host.name: [*host.devices, f"{host.device_bytes / 1e9:.2f} GB"] for host in planned.hosts},
        "edges": sorted({f"{edge.source}>{edge.target}: {edge.transport}" for edge in planned.edges}),
    }
    report.add(found, name)
    began = time.perf_counter()
    async with Runtime(planned, config) as runtime:
        report.add({"start_s": round(time.perf_counter() - began, 2)}, name)
        for count in (1, 16):
            await together(runtime, asked, arguments, count)  # what is compiled or allocated on first use
        report.add({"gpus_mb": {gpu: round(memory_used(int(gpu[4:])) - before[gpu]) for gpu in gpus}}, name)
        for count in CLIENTS:
            report.add(await together(runtime, asked, arguments, count), name, f"{count} clients")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="folder of a thinker, or its name")
    parser.add_argument("--vocoder", default="piper-joe", help="folder of a Piper voice, or its name")
    parser.add_argument("--device", default="gpu", choices=["gpu", "cpu"])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vocoders", type=int, default=8, help="of each talker")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.device == "gpu":
        need(sglang=True)
    arguments.model, arguments.vocoder = folder_of(arguments.model), folder_of(arguments.vocoder)
    num_gpus = len(this_machine().gpus)
    plans = {"one GPU": ["gpu:0"]}
    if num_gpus > 1:
        plans[f"{num_gpus} GPUs"] = [f"gpu:{number}" for number in range(1, num_gpus)]
    if arguments.device == "cpu":
        plans = {"CPU": ["cpu"]}
    report = Report(arguments.json, "several_gpus")
    for name, talkers in plans.items():
        anyio.run(measure, name, talkers, arguments, report)


if __name__ == "__main__":
    main()
