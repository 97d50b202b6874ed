"""What docs/gpu.md lets one try first: `python -m bench.gpu.first --json FILE`.

Starts `omniflow run graphs/ming_omni.py` four times, with the embedded weights: on the CPU, with the thinker on SGLang
in float32 and as it comes, and with the talker there, too. Each answers the same questions, greedily, speaks, and hears
what it has said. Said are the answers, how many are those of the CPU, how many words were heard, and the times that a
client sees. Fails where float32 on the GPU says anything else than the CPU, or where one of them says nothing.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai

from bench.e2e import PROMPTS, measure, start_server
from bench.gpu.report import Report, need

THINKER = ("thinker.engine=sglang", "thinker.device=gpu")
TALKER = ("talker.engine=sglang", "talker.device=gpu", "talker.memory.workspace=2.9 GB")
SETTINGS = {
    "cpu": (),
    "thinker, float32": (*THINKER, "thinker.dtype=float32"),
    "thinker": THINKER,
    "thinker and talker": (*THINKER, *TALKER),
}
"""Of `--set`, by what runs on a GPU."""
PORT = 8981
TOKENS = 48
QUESTIONS = (
    *PROMPTS,
    "Name three fruits.",
    "Who wrote Hamlet?",
    "What is seven times eight?",
    "How do bees make honey?",
)
SENTENCES = (
    "The quick brown fox jumps over the lazy dog near the river.",
    "She opened the old wooden door and walked into the garden.",
    "We will meet at the station tomorrow morning before the train leaves.",
)
"""Of 12, 11 and 12 words."""


def answer(client: openai.OpenAI, question: str) -> str:
    messages: list[Any] = [{"role": "user", "content": question}]
    reply = client.chat.completions.create(
        model="ming_omni", messages=messages, temperature=0, max_completion_tokens=TOKENS
    )
    return reply.choices[0].message.content or ""


def heard(client: openai.OpenAI, sentence: str) -> str:
    """What the server hears of what it has said."""
    spoken = client.audio.speech.create(model="ming_omni", voice="joe", input=sentence, response_format="wav").content
    return client.audio.transcriptions.create(model="ming_omni", file=("said.wav", spoken)).text


def words(text: str) -> list[str]:
    return "".join(letter for letter in text.lower() if letter.isalpha() or letter.isspace()).split()


def answers(client: openai.OpenAI) -> dict[str, Any]:
    """To all questions, alone; how many are the same when all are asked at once."""
    alone = [answer(client, question) for question in QUESTIONS]
    with ThreadPoolExecutor(len(QUESTIONS)) as pool:
        together = list(pool.map(lambda question: answer(client, question), QUESTIONS))
    return {"answers": alone, "equal_together": sum(a == b for a, b in zip(alone, together, strict=True))}


def hearing(client: openai.OpenAI) -> dict[str, Any]:
    """What it hears of the sentences as it says them."""
    texts = [heard(client, sentence) for sentence in SENTENCES]
    pairs = [(set(words(sentence)), set(words(text))) for sentence, text in zip(SENTENCES, texts, strict=True)]
    shares = [len(said & known) / len(said) for said, known in pairs]
    return {"heard": texts, "words_heard": statistics.mean(shares)}


def times(client: openai.OpenAI) -> dict[str, Any]:
    """As bench/e2e.py has them: a text, speech, and the speech of four at once."""
    measure(client, 1, 1, TOKENS, True)  # what is compiled or allocated on first use
    text, speech = (measure(client, 1, 6, TOKENS, spoken) for spoken in (False, True))
    return {"text": text, "speech": speech, "speech_of_4": measure(client, 4, 3, TOKENS, True)}


def tried(ask: Callable[[openai.OpenAI], dict[str, Any]], port: int) -> dict[str, Any]:
    """What came of it, or `failed`."""
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    try:
        return ask(client)
    except (openai.OpenAIError, httpx.HTTPError) as error:
        return {"failed": f"{ask.__name__}: {type(error).__name__}: {error}"}


def flags(settings: tuple[str, ...]) -> list[str]:
    return [part for setting in settings for part in ("--set", setting)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    arguments = parser.parse_args()
    if arguments.only != ["cpu"]:
        need(sglang=True)
    report = Report(arguments.json, "first")
    servers: dict[str, Any] = {}

    def start(name: str) -> None:
        port = PORT + list(SETTINGS).index(name)
        try:
            servers[name] = start_server(port, *flags(SETTINGS[name]))
        except SystemExit as error:
            report.add({"failed": str(error)}, name)

    starts = [threading.Thread(target=start, args=(name,)) for name in arguments.only]
    for each in starts:
        each.start()
    for each in starts:
        each.join()
    try:
        for ask in (answers, hearing, times):
            for name in arguments.only:
                if "failed" not in report.found.get(name, {}):
                    report.add(tried(ask, PORT + list(SETTINGS).index(name)), name)
    finally:
        for server in servers.values():
            server.send_signal(signal.SIGTERM)
        for server in servers.values():
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                server.kill()
    return verdict(report, arguments.only)


def verdict(report: Report, names: list[str]) -> int:
    found = {name: report.found[name] for name in names}
    failed = [name for name, row in found.items() if "failed" in row or row["words_heard"] < 0.5]
    equal = {}
    if "answers" in found.get("cpu", {}):
        theirs = found["cpu"]["answers"]
        ours = {name: row["answers"] for name, row in found.items() if name != "cpu" and "answers" in row}
        equal = {name: sum(a == b for a, b in zip(theirs, each, strict=True)) for name, each in ours.items()}
    failed += [name for name, count in equal.items() if "float32" in name and count < len(QUESTIONS)]
    report.add({"equal_to_cpu": equal, "of": len(QUESTIONS), "failed": failed}, "verdict")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
