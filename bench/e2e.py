"""End to end: the real server with the embedded models, a chat with speech, as a client sees it.

    python bench/e2e.py [--repeat 5] [--concurrency 1 4 8] [--json FILE]

Starts `omniflow run graphs/ming_omni.py`, asks for text and speech, streamed, and prints TTFT, TTFA, RTF and underrun
(definitions in omniflow/telemetry.py), tokens per second, and the memory of each process. In the same run, after the
server has stopped, bare `transformers.generate` answers the same prompts, for the ratio.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import httpx
import openai
from rich.console import Console
from rich.table import Table

from omniflow.telemetry import RequestTimes, Sound

ROOT = Path(__file__).parents[1]
PROMPTS = [
    "What is the capital of France?",
    "Tell me two things about the sea.",
    "Why do people sleep at night?",
    "Describe a small house in the woods.",
]
PORT = 8971


def ask(client: openai.OpenAI, prompt: str, max_tokens: int, speech: bool) -> dict[str, Any]:
    """One streamed request; the times of its pieces as they are read."""
    times = RequestTimes()
    tokens = 0
    extra: dict[str, Any] = {}
    if speech:
        extra = {"modalities": ["text", "audio"], "audio": {"voice": "joe", "format": "pcm16"}}
    stream = client.chat.completions.create(
        model="ming_omni",
        messages=[{"role": "user", "content": prompt}],
        temperature=0,
        max_completion_tokens=max_tokens,
        stream=True,
        stream_options={"include_usage": True},
        **extra,
    )
    for chunk in stream:
        now = time.monotonic()
        if chunk.usage:
            tokens = chunk.usage.completion_tokens
        for choice in cast("list[dict[str, Any]]", chunk.to_dict()["choices"]):
            delta: dict[str, Any] = choice["delta"]
            audio = delta.get("audio") or {}
            if delta.get("content") or audio.get("transcript"):
                times.text_s.append(now)
            if audio.get("data"):
                times.sounds.append(Sound(now, len(base64.b64decode(audio["data"])) / 2 / 24000))
    return {"times": times, "tokens": tokens, "seconds": time.monotonic() - times.started_s}


def measure(client: openai.OpenAI, concurrency: int, repeat: int, max_tokens: int, speech: bool) -> dict[str, Any]:
    """`repeat` rounds of `concurrency` requests at once."""
    replies: list[dict[str, Any]] = []
    began = time.monotonic()
    with ThreadPoolExecutor(concurrency) as pool:
        for _ in range(repeat):
            prompts = [PROMPTS[number % len(PROMPTS)] for number in range(concurrency)]
            replies += pool.map(lambda prompt: ask(client, prompt, max_tokens, speech), prompts)
    wall = time.monotonic() - began
    times = [reply["times"] for reply in replies]
    return {
        "concurrency": concurrency,
        "requests": len(replies),
        "ttft_s": statistics.median(t.ttft_s for t in times),
        "ttfa_s": statistics.median(t.ttfa_s for t in times) if speech else None,
        "rtf": statistics.median(t.rtf for t in times) if speech else None,
        "underrun_s": max(t.underrun_s for t in times) if speech else None,
        "audio_s": sum(t.audio_s for t in times) if speech else None,
        "tokens_per_s": sum(reply["tokens"] for reply in replies) / wall,
    }


def memory(url: str, main_pid: int) -> dict[str, float]:
    """Resident MiB of the main process and of each host."""
    pids = {"main": main_pid}
    for stage in httpx.get(f"{url}/health").json()["stages"]:
        pids[stage["host"]] = stage["pid"]
    return {name: _rss_mib(pid) for name, pid in pids.items()}


def _rss_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    return 0.0


def bare_generate(prompts: list[str], max_tokens: int) -> float:
    """Tokens per second of `transformers.generate`, one prompt after the other, one thread."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from actors.catalogue import PACKAGED

    folder = PACKAGED["smollm2-135m-instruct"].path()
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    total = 0
    began = 0.0
    for number, prompt in enumerate([prompts[0], *prompts]):
        if number == 1:
            began, total = time.monotonic(), 0
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        output = model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False)
        total += output.shape[1] - inputs["input_ids"].shape[1]
    return total / (time.monotonic() - began)


def start_server(port: int = PORT, *arguments: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-m", "omniflow", "run", "graphs/ming_omni.py", "--port", str(port), *arguments],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
    )
    guard = threading.Timer(900, process.kill)
    guard.daemon = True
    guard.start()
    began = time.monotonic()
    while True:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200:
                print(f"ready after {time.monotonic() - began:.1f} s")
                return process
        except httpx.TransportError:
            pass
        if process.poll() is not None:
            raise SystemExit("the server did not start")
        time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=4)
    parser.add_argument("--concurrency", type=int, nargs="*", default=[1, 4, 8])
    parser.add_argument("--max-tokens", type=int, default=40)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    server = start_server()
    url = f"http://127.0.0.1:{PORT}"
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    try:
        ask(client, PROMPTS[0], 8, True)
        speech = [measure(client, c, options.repeat, options.max_tokens, True) for c in options.concurrency]
        text = [measure(client, c, options.repeat, options.max_tokens, False) for c in options.concurrency]
        mib = memory(url, server.pid)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(30)
    bare = bare_generate(PROMPTS, options.max_tokens)
    report(speech, text, mib, bare)
    if options.json:
        options.json.write_text(
            json.dumps(
                {
                    "machine": platform.processor() or platform.machine(),
                    "cores": len(os.sched_getaffinity(0)),
                    "load": os.getloadavg(),
                    "speech": speech,
                    "text": text,
                    "pss_mib": mib,
                    "bare_generate_tokens_per_s": bare,
                },
                indent=2,
            )
        )


def report(speech: list[dict[str, Any]], text: list[dict[str, Any]], mib: dict[str, float], bare: float) -> None:
    console = Console()
    table = Table(title="chat with speech, streamed")
    for column in ("clients", "TTFT s", "TTFA s", "RTF", "underrun s", "tokens/s"):
        table.add_column(column, justify="right")
    for row in speech:
        keys = ("ttft_s", "ttfa_s", "rtf", "underrun_s")
        table.add_row(str(row["concurrency"]), *(f"{row[key]:.3f}" for key in keys), f"{row['tokens_per_s']:.1f}")
    console.print(table)
    table = Table(title="chat, text only")
    for column in ("clients", "TTFT s", "tokens/s", "against 1 client", "against bare generate"):
        table.add_column(column, justify="right")
    for row in text:
        rate = row["tokens_per_s"]
        table.add_row(
            str(row["concurrency"]),
            f"{row['ttft_s']:.3f}",
            f"{rate:.1f}",
            f"{rate / text[0]['tokens_per_s']:.2f}x",
            f"{rate / bare:.2f}x",
        )
    console.print(table)
    console.print(f"bare transformers.generate: {bare:.1f} tokens/s")
    console.print("memory (PSS MiB): " + ", ".join(f"{name} {size:.0f}" for name, size in mib.items()))
    console.print(f"load average {os.getloadavg()[0]:.1f} on {len(os.sched_getaffinity(0))} cores")


if __name__ == "__main__":
    main()
