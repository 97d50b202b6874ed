"""`omniflow bench serve`: loads of several sizes one after the other, as a table and as JSON."""

from __future__ import annotations

import datetime
import json
import wave
from pathlib import Path
from typing import Literal

import anyio
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from omniflow.cli.tables import new_table
from omniflow.client import load, realtime, turns
from omniflow.client.connection import Connection, Server
from omniflow.client.load import Load, Take
from omniflow.client.turns import SPEECH_HZ, Turn
from omniflow.errors import ConfigError

PROMPTS = (
    "What is the capital of France?",
    "Tell me two things about the sea.",
    "Why do people sleep at night?",
    "Describe a small house in the woods.",
    "How does bread rise?",
    "What should I see in Rome on one day?",
    "Give me a short recipe for soup.",
    "Why is the sky dark at night?",
)
QUESTION = "Please tell me two things about the sea."
_SCALES = {"rtf": ("RTF", 1.0, ""), "itl_s": ("ITL", 1e3, "ms"), "tpot_s": ("TPOT", 1e3, "ms")}
_NAMES = {"ttft_s": "TTFT", "ttfa_s": "TTFA", "e2el_s": "E2EL", "underrun_s": "underrun", "barge_in_s": "barge-in"}


class BenchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What to load a server with."""

    kind: Literal["chat", "chat-speech", "speech", "realtime"]
    concurrency: tuple[int, ...]
    num_turns: int
    rate_per_s: float | None
    prompts: tuple[str, ...]
    max_tokens: int
    voice: str | None
    question: Path | None
    turn_end: Literal["vad", "manual"]
    interrupt_after_s: float | None
    seed: int


def read_prompts(file: Path | None) -> tuple[str, ...]:
    """The lines of `file` that are not empty, or ours. Raises ConfigError where there are none."""
    if file is None:
        return PROMPTS
    try:
        found = tuple(line.strip() for line in file.read_text().splitlines() if line.strip())
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    if not found:
        raise ConfigError(f"{file} holds no prompt: write one a line")
    return found


async def bench(server: Server, model: str | None, plan: BenchPlan, file: Path | None, console: Console) -> None:
    """Run each load, show one table, write the JSON."""
    loads: list[Load] = []
    async with server.connect(max(plan.concurrency)) as connection:
        named = await connection.model(model)
        take = await taker(connection, named, plan)
        console.print(Text.assemble((plan.kind, "bold"), f" turns of {named} at {server.url}"))
        await take(0)  # unmeasured: connections, caches and kernels are warm afterwards
        for concurrency in plan.concurrency:
            with console.status(f"{plan.num_turns} turns, {concurrency} at once"):
                loads.append(
                    await load.generate(
                        take,
                        num_turns=plan.num_turns,
                        concurrency=concurrency,
                        rate_per_s=plan.rate_per_s,
                        seed=plan.seed,
                    )
                )
    console.print(loads_table(loads))
    if file is not None:
        await anyio.Path(file).write_text(json.dumps(_report(server, named, plan, loads), indent=1) + "\n")
        console.print(f"written to {file}", style="dim")


async def taker(connection: Connection, model: str, plan: BenchPlan) -> Take:
    """The function that runs turn n."""
    if plan.kind == "realtime":
        speech = await _speech(connection, model, plan)

        async def spoken(number: int) -> Turn:
            async with realtime.session(connection.server, model, plan.turn_end, plan.max_tokens) as socket:
                return await realtime.spoken_turn(socket, speech, plan.turn_end, plan.interrupt_after_s)

        return spoken

    async def written(number: int) -> Turn:
        turn = turns.new_turn()
        prompt = plan.prompts[number % len(plan.prompts)]
        if plan.kind == "speech":
            body = {"model": model, "input": prompt, "voice": plan.voice or "alloy"}
            async for _ in turns.say(connection, body, turn):
                pass
            return turn
        messages = [{"role": "user", "content": prompt}]
        chat = {"model": model, "messages": messages, "max_completion_tokens": plan.max_tokens, "temperature": 0}
        if plan.kind == "chat-speech":
            chat |= {"modalities": ["text", "audio"], "audio": {"format": "pcm16", "voice": plan.voice or "alloy"}}
        async for _ in turns.chat(connection, chat, turn):
            pass
        return turn

    return written


async def _speech(connection: Connection, model: str, plan: BenchPlan) -> bytes:
    """What is said in spoken turns, as PCM of the API."""
    if plan.question is not None:
        return await anyio.to_thread.run_sync(_read_wav, plan.question)
    turn = turns.new_turn()
    body = {"model": model, "input": QUESTION, "voice": plan.voice or "alloy", "speed": 1.0}
    return b"".join([piece.data async for piece in turns.say(connection, body, turn)])


def _read_wav(path: Path) -> bytes:
    try:
        with wave.open(str(path), "rb") as file:
            form = (file.getnchannels(), file.getsampwidth(), file.getframerate())
            if form != (1, 2, SPEECH_HZ):
                raise ConfigError(f"{path}: expected 16-bit mono at {SPEECH_HZ} Hz")
            return file.readframes(file.getnframes())
    except (OSError, EOFError, wave.Error) as error:
        raise ConfigError(f"{path} is no wav file: {error}") from error


def loads_table(loads: list[Load]) -> Table:
    """One column a load; times as median, 90th and 99th percentile."""
    table = new_table("", *(_head(each) for each in loads))
    for column in table.columns[1:]:
        column.justify = "right"
    table.add_row("turns/s", *(f"{each.turns_per_s:.2f}" for each in loads))
    if any(each.tokens_per_s for each in loads):
        table.add_row("tokens/s", *(f"{each.tokens_per_s:.1f}" for each in loads))
    if any(each.audio_s_per_s for each in loads):
        table.add_row("audio s/s", *(f"{each.audio_s_per_s:.2f}" for each in loads))
    for name in dict.fromkeys(name for each in loads for name in each.metrics):
        title, scale, unit = _SCALES.get(name, (_NAMES.get(name, name), 1.0, "s"))
        table.add_row(f"{title} {unit}".strip(), *(_spread(each, name, scale) for each in loads))
    failures = [", ".join(f"{count} {code}" for code, count in each.failures.items()) for each in loads]
    if any(failures):
        table.add_row(Text("failed", style="red"), *failures)
    table.caption = "times: p50 / p90 / p99"
    return table


def _head(each: Load) -> str:
    rate = f", {each.rate_per_s:g}/s" if each.rate_per_s else ""
    return f"{each.concurrency} at once{rate}"


def _spread(each: Load, name: str, scale: float) -> str:
    metric = each.metrics.get(name)
    if metric is None:
        return "-"
    return " / ".join(f"{value * scale:.3g}" for value in (metric.p50, metric.p90, metric.p99))


def _report(server: Server, model: str, plan: BenchPlan, loads: list[Load]) -> dict[str, object]:
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "url": server.url,
        "model": model,
        "plan": msgspec.to_builtins(msgspec.structs.replace(plan, question=None)),
        "loads": msgspec.to_builtins(loads),
    }
