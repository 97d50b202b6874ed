"""A thinker with tp=2 on SGLang, as it is planned and run: greedy answers of the reference engine, before and after the
death of each rank. On two GPUs, or on a CPU through the shim, where SGLang's collectives are gloo's.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import time
from pathlib import Path

import anyio
import multiprocess.resource_tracker
import pytest
import torch

from omniflow.engine.transformers import TransformersEngine
from omniflow.errors import StageDiedError
from omniflow.media import Options, TokenPrompt
from omniflow.planner import Cluster, Gpu
from omniflow.runtime import Runtime
from tests.engine.tiny import BYTES_END, BYTES_VOCAB, byte_llama, byte_tokenizer, ids_of, request, run
from tests.running import running, up_again

NUM_GPUS = torch.cuda.device_count()
MARGIN = 0.05 if NUM_GPUS else 0.0
"""Where two tokens are as near as this (logprob), other arithmetic may choose the other."""
MACHINE = Cluster("gpus", 8, 0, gpus=(Gpu("any", 2**36),) * 2)

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.gpu if NUM_GPUS else pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed"),
    pytest.mark.skipif(NUM_GPUS == 1, reason="needs two GPUs, or none"),
    pytest.mark.timeout(600),  # three starts of two ranks, 10 to 25 s each, which import sglang
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of random weights whose token i is byte i."""
    multiprocess.resource_tracker.ensure_running()
    folder = tmp_path_factory.mktemp("bytes")
    byte_llama().save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": BYTES_END}))
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, 256, (5 + 9 * n,), generator=generator).tolist() for n in range(count)]


async def answer(runtime: Runtime, ids: list[int], found: list[int], **options: object) -> None:
    asked = Options(temperature=0.0, **{"max_tokens": 24, **options})
    async with await runtime.submit("ask", TokenPrompt(ids), outputs={"tokens", "end"}, options=asked) as reply:
        async for output in reply:
            if output.name == "tokens":
                found += output.value.ids


async def same_as_the_reference(runtime: Runtime) -> None:
    """Answers at once, of which some are left: what the others draw is what the reference engine draws."""
    asked = prompts(6)
    answers: list[list[int]] = [[] for _ in asked]
    async with anyio.create_task_group() as tasks:
        for ids, found in zip(asked, answers, strict=True):
            tasks.start_soon(answer, runtime, ids, found)
        with anyio.move_on_after(0.05):
            await answer(runtime, asked[0], [], max_tokens=200)
    stop = frozenset([BYTES_END])
    wanted = [request(str(n), ids, max_tokens=24, stop_token_ids=stop, top_logprobs=2) for n, ids in enumerate(asked)]
    theirs = run(TransformersEngine(byte_llama()), wanted)
    for number, found in enumerate(answers):
        outputs = theirs[str(number)]
        margins = [each.top[0][1] - each.top[1][1] for output in outputs for each in output.logprobs]
        decided = next((place for place, margin in enumerate(margins) if margin < MARGIN), len(margins))
        assert found[:decided] == ids_of(outputs)[:decided]
        assert decided < len(margins) or len(found) == len(ids_of(outputs))


async def kill(runtime: Runtime, rank: int) -> float:
    """Kill a rank while requests run; milliseconds until the first of them has its error."""
    child = runtime._supervisor.children["thinker"]
    processes = [child.process, *(follower.process for follower in child.followers)]
    times: list[float] = []
    found: list[int] = []

    async def dies() -> None:
        with pytest.raises(StageDiedError):
            await answer(runtime, prompts(1)[0], found, max_tokens=200, logit_bias=((BYTES_END, -100.0),))
        times.append(time.perf_counter())

    async with anyio.create_task_group() as tasks:
        for _ in range(4):
            tasks.start_soon(dies)
        while not found:
            await anyio.sleep(0.001)
        began = time.perf_counter()
        os.kill(processes[rank].pid, signal.SIGKILL)
    return 1e3 * (min(times) - began)


async def test_two_ranks_answer_as_one_and_die_as_one(
    folder: Path, nothing_left: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.graphs import split_thinker

    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|0")
    assert BYTES_VOCAB % 2 == 0
    async with running(split_thinker.build(folder), MACHINE, start_timeout_s=180, deadline_s=120) as runtime:
        await same_as_the_reference(runtime)
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
        found: list[int] = []
        await answer(runtime, prompts(1)[0], found, json_schema=json.dumps(schema), max_tokens=64)
        json.loads(bytes(found))
        for rank in (1, 0):
            took = await kill(runtime, rank)
            with capsys.disabled():
                print(f"\nkill -9 of rank {rank}: the first error after {took:.0f} ms")
            await up_again(runtime, 180)
            await same_as_the_reference(runtime)
