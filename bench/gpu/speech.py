"""The tiny talker's own weights on SGLang: is it understood, and does it say what the CPU says?

    python -m bench.gpu.speech prompts FILE     here: the corpus as prompts, and codes of the reference engine
    python -m bench.gpu.speech say FILE --out CODES [--dtype float32]        on the GPU: codes, drawn and greedy
    python -m bench.gpu.speech hear FILE CODES  here: word error rate, and how far the codes agree

So the GPU's machine needs neither the dictionary, nor the vocoder, nor Whisper. Each sentence is drawn with two seeds,
from the noise that the reference engine has for them. `hear` says where codes differ for the first time;
`tests/engine/test_sglang_talker.py` says whether that was a near tie.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from actors.tiny_talker import TINY_TALKER
from actors.tiny_talker.model import load_model
from bench.gpu.report import machine, need
from omniflow.engine.base import Engine, EngineRequest, Sampling
from omniflow.engine.frames import FrameEngine

CORPUS = Path(__file__).parents[2] / "tests/actors/spoken_sentences.txt"
SEEDS = (1, 2)
GREEDY = 16
"""Sentences whose greedy codes are compared, and the steps of each."""
GREEDY_STEPS = 60
STEP_S = 1024 / 22050


def prompts(file: Path) -> None:
    from actors.tiny_talker.talker import TinyTalkerScript

    script = TinyTalkerScript(TINY_TALKER.path())
    texts = [line.strip() for line in CORPUS.read_text().splitlines() if line.strip()]
    made: dict[str, Any] = {
        "texts": texts,
        "prompts": [[[prompt.ids, prompt.max_steps] for prompt in script.prompts(text)] for text in texts],
        "first": [script.sampling.temperature, script.sampling.top_k, script.sampling.top_p],
        "later": [script.later_codes.temperature, script.later_codes.top_k, script.later_codes.top_p],
    }
    engine = FrameEngine(load_model(TINY_TALKER.path()))
    drawn = requests(made)[:GREEDY]
    made["reference"] = codes_of(engine, [*greedy(made), *drawn])
    file.write_text(json.dumps(made))


def requests(made: dict[str, Any]) -> list[EngineRequest]:
    """Every piece of every sentence, with each seed."""
    found = []
    (temperature, top_k, top_p), later = made["first"], made["later"]
    for seed in SEEDS:
        for number, pieces in enumerate(made["prompts"]):
            for piece, (ids, most) in enumerate(pieces):
                sampling = Sampling(
                    temperature=temperature, top_k=top_k, top_p=top_p, seed=1000 * seed + number, max_tokens=most
                )
                others = Sampling(temperature=later[0], top_k=later[1], top_p=later[2])
                name = f"{seed}.{number}.{piece}"
                found.append(EngineRequest(id=name, ids=ids, sampling=sampling, later_codes=others))
    return found


def greedy(made: dict[str, Any]) -> list[EngineRequest]:
    sampling = Sampling(temperature=0.0, max_tokens=GREEDY_STEPS)
    firsts = [pieces[0][0] for pieces in made["prompts"][:GREEDY]]
    return [EngineRequest(id=f"greedy.{number}", ids=ids, sampling=sampling) for number, ids in enumerate(firsts)]


def codes_of(engine: Engine, asked: list[EngineRequest], most: int = 16) -> dict[str, list[list[int]]]:
    """Codes [num_steps][num_codes] by request; `most` run at a time."""
    codes: dict[str, list[Any]] = {each.id: [] for each in asked}
    waiting, running = list(reversed(asked)), 0
    while waiting or engine.has_work():
        while waiting and running < most:
            engine.start(waiting.pop())
            running += 1
        for output in engine.step():
            if output.frames is not None:
                codes[output.id].append(output.frames)
            running -= output.finish_reason is not None
    return {name: torch.cat(steps).tolist() if steps else [] for name, steps in codes.items()}


def say(file: Path, out: Path, dtype: str, device: str) -> None:
    from omniflow.engine.sglang_frames import load_frame_engine

    made = json.loads(file.read_text())
    began = time.perf_counter()
    engine = load_frame_engine(
        load_model(TINY_TALKER.path()), device=device, dtype=dtype, max_running=16, kv_tokens=16384
    )
    found: dict[str, Any] = {"dtype": dtype, "start_s": round(time.perf_counter() - began, 2)}
    codes_of(engine, requests(made)[:2])
    began = time.perf_counter()
    found["codes"] = codes_of(engine, requests(made))
    took = time.perf_counter() - began
    spoken = sum(map(len, found["codes"].values())) * STEP_S
    found["corpus"] = {"spoken_s": round(spoken, 1), "took_s": round(took, 2), "times_real": round(spoken / took, 1)}
    found["codes"] |= codes_of(engine, greedy(made))
    found["step_ms"] = {str(count): round(step_ms(engine, made, count), 3) for count in (1, 8, 16)}
    found["machine"] = machine()
    engine.close()
    out.write_text(json.dumps(found))
    print(json.dumps({name: value for name, value in found.items() if name != "codes"}), flush=True)


def step_ms(engine: Engine, made: dict[str, Any], count: int) -> float:
    """The median of the steps in which all of `count` requests make a frame."""
    for number, (ids, _) in enumerate(pieces[0] for pieces in made["prompts"][:count]):
        sampling = Sampling(temperature=0.9, top_k=50, seed=number, max_tokens=60)
        engine.start(EngineRequest(id=f"t{number}", ids=ids, sampling=sampling))
    took = []
    while engine.has_work():
        began = time.perf_counter()
        outputs = engine.step()
        if len(outputs) == count and all(output.frames is not None for output in outputs):
            took.append(time.perf_counter() - began)
    return 1e3 * statistics.median(took[2:])


def hear(file: Path, codes_file: Path) -> None:
    from actors.piper import PIPER_JOE
    from actors.piper.vocoder import PiperDecoder
    from actors.tiny_talker.talker import TinyTalkerScript
    from actors.whisper.transcriber import transcribe
    from tests.e2e.hearing import word_errors

    made, said = json.loads(file.read_text()), json.loads(codes_file.read_text())
    script, decoder = TinyTalkerScript(TINY_TALKER.path()), PiperDecoder(PIPER_JOE.path())
    rates = {}
    for seed in SEEDS:
        errors, total = 0, 0
        for number, text in enumerate(made["texts"]):
            pieces = [said["codes"][f"{seed}.{number}.{piece}"] for piece in range(len(made["prompts"][number]))]
            frames = [script.frames(np.array(each, np.int64).reshape(-1, 8)) for each in pieces if each]
            samples = decoder.decode(np.concatenate(frames))
            wrong, words = word_errors(text, transcribe(samples, decoder.sample_rate_hz))
            errors, total = errors + wrong, total + words
        rates[f"seed {seed}"] = {"errors": errors, "words": total, "wer": round(errors / total, 4)}
        print(json.dumps(rates), flush=True)
    print(json.dumps({"agreement with the reference engine": agreement(made["reference"], said["codes"])}))


def agreement(theirs: dict[str, list[list[int]]], ours: dict[str, list[list[int]]]) -> dict[str, Any]:
    """Of greedy and of drawn requests: steps that are equal from the first on, of those that there are."""
    found: dict[str, Any] = {}
    for kind in ("greedy", "drawn"):
        names = [name for name in theirs if name.startswith("greedy") == (kind == "greedy")]
        equal = [common(theirs[name], ours[name]) for name in names]
        steps = [min(len(theirs[name]), len(ours[name])) for name in names]
        found[kind] = {
            "requests": len(names),
            "wholly_equal": sum(one == other for one, other in zip(equal, steps, strict=True)),
            "equal_steps": sum(equal),
            "steps": sum(steps),
            "first_difference_at": sorted(one for one, other in zip(equal, steps, strict=True) if one < other),
        }
    return found


def common(one: list[list[int]], other: list[list[int]]) -> int:
    """Steps that are equal from the first on."""
    for number, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return number
    return min(len(one), len(other))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["prompts", "say", "hear"])
    parser.add_argument("file", type=Path)
    parser.add_argument("codes", type=Path, nargs="?")
    parser.add_argument("--out", type=Path, default=Path("codes.json"))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="gpu")
    arguments = parser.parse_args()
    if arguments.what == "say" and arguments.device == "gpu":
        need(sglang=True)
    if arguments.what == "prompts":
        prompts(arguments.file)
    elif arguments.what == "say":
        say(arguments.file, arguments.out, arguments.dtype, arguments.device)
    else:
        hear(arguments.file, arguments.codes)


if __name__ == "__main__":
    main()
