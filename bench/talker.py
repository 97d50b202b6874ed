"""The tiny talker: steps on one core, the codes that other engines must give, and both talkers end to end.

    python -m bench.talker steps [--rounds 5]       milliseconds a step and RTF for 1 to 8 requests that step together
    python -m bench.talker codes FILE [--seed N]    codes of 8 sentences as JSON, float32; greedy, or drawn with a seed
    python -m bench.talker e2e [--rounds 6]         first audio and RTF of the profiles embedded and embedded-vits

`e2e` starts both servers and asks them in turns, so that what else the machine does disturbs both alike.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from actors.tiny_talker import TINY_TALKER
from actors.tiny_talker.model import load_model
from actors.tiny_talker.talker import TinyTalkerScript
from bench.e2e import PORT, PROMPTS, ask, start_server
from omniflow.engine.base import EngineRequest, Sampling
from omniflow.engine.frames import FrameEngine

SENTENCES = [
    "Good morning, everyone, and thank you for coming.",
    "The train to the coast leaves at a quarter past nine.",
    "Could you please close the window behind you?",
    "My brother repairs old clocks in a small workshop.",
    "It rained all night, but the garden is still dry.",
    "We planted tomatoes and beans along the fence.",
    "She left her umbrella on the bus again.",
    "How many people live in this village?",
]
STEP_S = 1024 / 22050


def requests(texts: Sequence[str], seed: int | None) -> list[EngineRequest]:
    """One for each of `texts`, greedy without a seed; the ids of embeddings are phonemes', then codes'."""
    script = TinyTalkerScript(TINY_TALKER.path())
    made = []
    for number, text in enumerate(texts):
        (prompt,) = script.prompts(text)
        sampling = Sampling(max_tokens=prompt.max_steps) if seed is None else script.sampling
        drawn = Sampling(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            seed=None if seed is None else seed + number,
            max_tokens=prompt.max_steps,
        )
        made.append(EngineRequest(id=str(number), ids=prompt.ids, sampling=drawn))
    return made


def reference_codes(texts: Sequence[str] = SENTENCES, seed: int | None = None) -> list[list[list[int]]]:
    """The codes [num_steps][8] of each of `texts`, by the reference engine in float32 on the CPU.

    Without a seed greedy, which does not always end by itself: then the codes go on to the cap.
    """
    engine = FrameEngine(load_model(TINY_TALKER.path()))
    codes: dict[str, list[list[int]]] = {}
    for request in requests(texts, seed):
        engine.start(request)
    while engine.has_work():
        for output in engine.step():
            codes.setdefault(output.id, []).extend([] if output.frames is None else output.frames.tolist())
    return [codes[str(number)] for number in range(len(texts))]


def steps(rounds: int) -> None:
    """Print the best of `rounds` for each number of requests; the rounds take turns."""
    engine = FrameEngine(load_model(TINY_TALKER.path()))
    each = requests(SENTENCES, seed=1)
    best: dict[int, tuple[float, float]] = {}
    for _ in range(rounds):
        for count in (1, 2, 4, 8):
            median_s, prefill_s = _step_s(engine, each[:count])
            old = best.get(count, (1e9, 1e9))
            best[count] = min(old[0], median_s), min(old[1], prefill_s)
    for count, (median_s, prefill_s) in best.items():
        print(
            json.dumps(
                {
                    "requests": count,
                    "step_ms": round(median_s * 1e3, 2),
                    "first_step_ms": round(prefill_s * 1e3, 2),
                    "rtf_of_each": round(median_s / STEP_S, 3),
                    "rtf_in_all": round(median_s / STEP_S / count, 3),
                    "load": round(os.getloadavg()[0], 1),
                }
            )
        )


def _step_s(engine: FrameEngine, each: list[EngineRequest]) -> tuple[float, float]:
    """(median seconds of the steps in which all of `each` make a frame, seconds of the first step)."""
    for request in each:
        engine.start(request)
    took: list[float] = []
    first_s = 0.0
    while engine.has_work():
        began = time.perf_counter()
        outputs = engine.step()
        seconds = time.perf_counter() - began
        first_s = first_s or seconds
        # A step that reads a prompt, too, is not one of these: every request made a frame in the step before.
        if len(outputs) == len(each):
            took.append(seconds)
    return statistics.median(took[1:]), first_s


def e2e(rounds: int) -> None:
    """Print medians of both profiles, and the median ratio of a pair asked one after the other."""
    import openai

    profiles = {"embedded-vits": PORT, "embedded": PORT + 1}
    servers = [start_server(port, "--profile", profile) for profile, port in profiles.items()]
    try:
        clients = {
            profile: openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
            for profile, port in profiles.items()
        }
        for kind, asked in (("chat", _chat), ("speech", _speech)):
            rows: dict[str, list[dict[str, float]]] = {profile: [] for profile in profiles}
            for number in range(-1, rounds):
                for profile, client in clients.items():
                    row = asked(client, max(0, number))
                    if number >= 0:
                        rows[profile].append(row)
            _print_rows(kind, rows)
    finally:
        for server in servers:
            server.send_signal(signal.SIGTERM)
        for server in servers:
            server.wait(30)


def _print_rows(kind: str, rows: dict[str, list[dict[str, float]]]) -> None:
    for profile, each in rows.items():
        medians = {key: round(statistics.median(row[key] for row in each), 3) for key in each[0]}
        print(json.dumps({"kind": kind, "profile": profile, **medians, "load": round(os.getloadavg()[0], 1)}))
    plain, ar = rows.values()
    ratios = {
        key: round(statistics.median(b[key] / a[key] for a, b in zip(plain, ar, strict=True)), 2) for key in plain[0]
    }
    print(json.dumps({"kind": kind, "embedded over embedded-vits": ratios}))


def _chat(client: Any, number: int) -> dict[str, float]:
    times = ask(client, PROMPTS[number % len(PROMPTS)], 40, True)["times"]
    return {"ttfa_s": times.ttfa_s, "rtf": times.rtf, "underrun_s": times.underrun_s + 1e-3}


def _speech(client: Any, number: int) -> dict[str, float]:
    began = time.monotonic()
    first_s, num_bytes = 0.0, 0
    with client.audio.speech.with_streaming_response.create(
        model="ming_omni",
        voice="joe",
        input=" ".join(SENTENCES[number % 4 : number % 4 + 3]),
        response_format="pcm",
        extra_body={"seed": number},
    ) as reply:
        for data in reply.iter_bytes(4096):
            first_s = first_s or time.monotonic() - began
            num_bytes += len(data)
    return {"ttfa_s": first_s, "rtf": (time.monotonic() - began) / (num_bytes / 2 / 24000)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["steps", "codes", "e2e"])
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.what == "codes":
        options.file.write_text(json.dumps(reference_codes(seed=options.seed)))
        return
    measure: Callable[[int], None] = {"steps": steps, "e2e": e2e}[options.what]
    measure(options.rounds)


if __name__ == "__main__":
    main()
