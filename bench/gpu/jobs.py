"""What `bench.gpu.all` runs: every test that wants a GPU and every measurement, as plain data.

In a command, {json} is the file of the job's results, {gpus} how many GPUs it has, {work} a folder that jobs share,
{smollm2} and {piper} are the folders of those weights. Seconds are those of an H200 with kernels that were compiled
before.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

TESTS = Path(__file__).parents[2] / "tests"


class Job(NamedTuple):
    """One process that uses GPUs."""

    name: str
    command: str
    """As one types it in the root of the repository; its `python` is the one that runs all of it."""
    seconds: int
    """It is expected to take: what it may take, and what runs first, follow from it."""
    shows: str
    gpus: Literal["1", "2", "all"] = "1"
    """How many it wants; "all" are at least two."""
    timed: bool = True
    """What it says is of use only if nothing else ran on its GPUs. Others share a GPU."""
    after: str = ""
    """The job whose files it reads."""
    late: bool = False
    """Begins when all that is not late has begun: it was measured before, and little has changed since."""

    @property
    def limit_s(self) -> float:
        """Seconds after which it is killed. Kernels that have to be compiled take a minute."""
        return 60 + 1.5 * self.seconds


PYTEST = "python -m pytest -q -p no:cacheprovider -W ignore"
ENGINE = "python -m bench.gpu.engine"
MING = "python -m bench.gpu.ming"
MEDIA = "python -m bench.gpu.ming_media"
MING_RANKS = "tests/actors/ming/test_thinker_sglang_group.py"


def test(name: str, files: str, seconds: int, shows: str, *, gpus: Literal["1", "2"] = "1", timed: bool = False) -> Job:
    return Job(f"tests.{name}", f"{PYTEST} {files}", seconds, shows, gpus, timed)


ROWS = (
    # Written once, read by those that name them in `after`.
    Job("ming.write", f"{MING} write {{work}}/ming", 20, "talker and vocoder of the real sizes", timed=False),
    Job("media.write", f"{MEDIA} write {{work}}/media", 60, "all of Ming but the thinker's weights", timed=False),
    # Is it right? These share GPUs.
    test("engine", "tests/engine/test_sglang.py", 45, "SGLang gives what the reference engine gives"),
    test("frames", "tests/engine/test_sglang_frames.py", 55, "frame heads do, as CUDA graphs"),
    test("seeds", "tests/engine/test_sglang_gpu.py", 65, "a seed draws the same alone and in company"),
    test("company", "tests/engine/test_sglang_company.py", 60, "answers in company are those that each has alone"),
    test("grammar", "tests/engine/test_sglang_grammar.py", 45, "constrained answers"),
    test("talker", "tests/engine/test_sglang_talker.py", 50, "the tiny talker's own weights say what a CPU says"),
    test("kernels", "tests/engine/test_kernels.py tests/engine/test_depth_kernels.py", 30, "kernels against torch's"),
    test(
        "slots",
        "-m gpu tests/engine/test_flow_slots.py tests/actors/ming/test_audio_slots.py",
        40,
        "steps of slots give what a CPU gives",
    ),
    test("reference", "tests/engine/test_transformers_gpu.py", 25, "the reference engine by names of GPUs"),
    test("towers", "-m gpu tests/actors/ming/test_towers_gpu.py", 50, "a GPU hears and sees what a CPU does"),
    test("ming", "tests/actors/ming/test_thinker_sglang.py", 80, "Ming's thinker in float32 as the reference"),
    test("ming_seeds", "tests/actors/ming/test_thinker_sglang_gpu.py", 40, "the same in bfloat16; seeds"),
    test("ming_graphs", "tests/actors/ming/test_thinker_sglang_graphs.py", 80, "the same with texts as CUDA graphs"),
    test("ming_graphs_16", "tests/actors/ming/test_thinker_sglang_graphs_gpu.py", 40, "those graphs in bfloat16"),
    test("ranks", "tests/engine/test_sglang_group.py", 110, "tp=2 answers as one; after each kill too", gpus="2"),
    test("ming_ranks", f"-k launches {MING_RANKS}", 50, "Ming's thinker on two GPUs", gpus="2"),
    test("ming_ranks_graphs", f"-k graphs {MING_RANKS}", 60, "the same with texts as CUDA graphs", gpus="2"),
    Job(
        "tp.equal",
        "python -m bench.gpu.tp equal --json {json}",
        75,
        "greedy answers of tp=2 beside those of tp=1",
        gpus="2",
        timed=False,
    ),
    test("hosts", "-m gpu tests/test_gpu_hosts.py", 45, "hosts on one GPU: tensors, kills, budgets", timed=True),
    test("hosts_2", "-m gpu -k 'between or nccl' tests/test_gpu_hosts.py", 60, "the same on two", gpus="2", timed=True),
    # What does it take?
    Job("engine.1b", f"{ENGINE} llama --sizes 1b --rounds 12 --json {{json}}", 150, "actor / bare loop, sgl.Engine"),
    Job(
        "engine.smollm2",
        f"{ENGINE} llama --sizes smollm2 --smollm2 {{smollm2}} --rounds 12 --json {{json}}",
        150,
        "the same with small real weights",
    ),
    Job(
        "engine.8b",
        f"{ENGINE} llama --sizes 8b --rounds 6 --json {{json}}",
        210,
        "the same where a step takes 5 ms",
        late=True,
    ),
    Job("budgets", "python -m bench.gpu.budgets --json {json}", 70, "two engines and a codec keep what they have"),
    Job("media.attention", f"{MEDIA} attention {{work}}/media --rounds 10 --json {{json}}", 30, "kernels of attention"),
    Job(
        "media.towers",
        f"{MEDIA} towers {{work}}/media --rounds 5 --profile --json {{json}}",
        100,
        "sound, images and clips beside their floors",
        after="media.write",
    ),
    Job(
        "media.chat",
        f"{MEDIA} chat {{work}}/media --gpus 1 --json {{json}}",
        130,
        "text, sound and images in, speech out, by clients",
        after="media.write",
    ),
    Job(
        "transports.one",
        "python -m bench.gpu.transports one --json {json}",
        75,
        "tensors between processes of one GPU",
    ),
    Job(
        "kills",
        "python -m bench.gpu.kills --model {smollm2} --json {json}",
        70,
        "kill -9 of a thinker under load",
    ),
    Job(
        "transports.two",
        "python -m bench.gpu.transports two --json {json}",
        120,
        "tensors between two GPUs, beside bare NCCL",
        gpus="2",
    ),
    Job(
        "transports.kills",
        "python -m bench.gpu.transports kills --json {json}",
        75,
        "kill -9 of either end",
        gpus="2",
    ),
    Job("tp.kills", "python -m bench.gpu.tp kills --sizes 1b --json {json}", 100, "kill -9 of a rank", gpus="2"),
    Job(
        "ming.thinker_32",
        "python -m bench.gpu.ming_thinker --layers 32 --ranks 2 --tokens 64 --json {json}",
        110,
        "all layers of Ming's thinker on two GPUs",
        gpus="2",
    ),
    Job(
        "media.chat_all",
        f"{MEDIA} chat {{work}}/media --gpus {{gpus}} --json {{json}}",
        120,
        "the chat spread over GPUs",
        gpus="all",
        after="media.write",
    ),
    Job("tp.rates", "python -m bench.gpu.tp rates --tp 2 --json {json}", 60, "tokens/s of tp=2", gpus="2"),
    Job("tp.rates_1", "python -m bench.gpu.tp rates --tp 1 --json {json}", 65, "tokens/s of tp=1"),
    Job(
        "graph",
        "python -m bench.gpu.two_gpus --model {smollm2} --vocoder {piper} --rounds 2 --tokens 40 --json {json}",
        75,
        "thinker and talkers on several GPUs",
        gpus="all",
        late=True,
    ),
    Job("engine.steps", f"{ENGINE} steps --sizes 1b --json {{json}}", 35, "where a step's time goes", late=True),
    Job("talker_step", "python -m bench.gpu.talker_step --json {json}", 65, "a talker's step beside eager", late=True),
    Job(
        "ming.thinker",
        "python -m bench.gpu.ming_thinker --layers 8 20 --tokens 96 --json {json}",
        110,
        "as many layers of Ming's thinker as fit, beside their floor",
        late=True,
    ),
    Job(
        "ming.thinker_graphs",
        "python -m bench.gpu.ming_thinker --layers 8 --batches 1 --tokens 32 --prompt-graphs on --json {json}",
        60,
        "first tokens of Ming's thinker with short texts as CUDA graphs",
        late=True,
    ),
    Job(
        "ming.steps",
        f"{MING} steps {{work}}/ming --profile --rounds 10 --json {{json}}",
        45,
        "the talker's step beside its floor",
        after="ming.write",
        late=True,
    ),
    Job(
        "ming.vae",
        f"{MING} vae {{work}}/ming --rounds 10 --json {{json}}",
        30,
        "the vocoder's step",
        after="ming.write",
        late=True,
    ),
    Job(
        "ming.check",
        f"{MING} check {{work}}/ming --json {{json}}",
        45,
        "latents against a CPU's, alone and in company",
        timed=False,
        after="ming.write",
        late=True,
    ),
    Job(
        "ming.serve",
        f"{MING} serve {{work}}/ming --json {{json}}",
        40,
        "text to speech: first sound, requests/s by clients",
        after="ming.write",
    ),
    Job(
        "ming.together",
        f"{MING} serve {{work}}/ming --together --turns 3 --json {{json}}",
        45,
        "the same in one process",
        after="ming.write",
        late=True,
    ),
    Job(
        "thinker.cpu",
        "python -m bench.gpu.thinker --model {smollm2} --engine transformers --device cpu --write {work}/cpu.json",
        60,
        "greedy answers of a CPU",
        timed=False,
        late=True,
    ),
    Job(
        "thinker.gpu",
        "python -m bench.gpu.thinker --model {smollm2} --write {json} --compare {work}/cpu.json",
        50,
        "are those of SGLang",
        after="thinker.cpu",
        late=True,
    ),
    Job("first", "python -m bench.gpu.first --json {json}", 130, "the first command of docs/gpu.md, by clients"),
    Job(
        "speech.write",
        "python -m bench.gpu.speech prompts {work}/speech.json",
        90,
        "sentences for the tiny talker",
        timed=False,
        late=True,
    ),
    *(
        Job(
            f"speech.{dtype}",
            f"python -m bench.gpu.speech say {{work}}/speech.json --dtype {dtype} --out {{json}}",
            40,
            "what it says on a GPU; bench.gpu.speech hear tells its errors",
            timed=False,
            after="speech.write",
            late=True,
        )
        for dtype in ("float32", "bfloat16")
    ),
)


def unnamed(rows: Sequence[Job]) -> list[Job]:
    """Tests that want a GPU and that no row names: they run, too."""
    named = {word for row in rows for word in row.command.split()}
    files = [path for path in sorted(TESTS.rglob("test_*.py")) if "pytest.mark.gpu" in path.read_text()]
    by_name = {path.stem.removeprefix("test_"): str(path.relative_to(TESTS.parent)) for path in files}
    return [test(name, f"-m gpu {file}", 60, "see the file") for name, file in by_name.items() if file not in named]


JOBS = (*ROWS, *unnamed(ROWS))
