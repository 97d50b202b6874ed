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
import sys
import threading
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


def tried(port: int) -> dict[str, Any]:
    """All that one server is asked: alone, then four at once."""
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    answers = [answer(client, question) for question in QUESTIONS]
    with ThreadPoolExecutor(len(QUESTIONS)) as pool:
        together = list(pool.map(lambda question: answer(client, question), QUESTIONS))
    pairs = [(set(words(sentence)), heard(client, sentence)) for sentence in SENTENCES]
    measure(client, 1, 1, TOKENS, True)  # what is compiled or allocated on first use
    text, speech = (measure(client, 1, 6, TOKENS, spoken) for spoken in (False, True))
    four = measure(client, 4, 3, TOKENS, True)
    return {
        "answers": answers,
        "equal_together": sum(a == b for a, b in zip(answers, together, strict=True)),
        "heard": [text for _, text in pairs],
        "words_heard": statistics.mean(len(said & set(words(text))) / len(said) for said, text in pairs),
        "text": text,
        "speech": speech,
        "speech_of_4": four,
    }


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
        for name in servers:
            try:
                report.add(tried(PORT + list(SETTINGS).index(name)), name)
            except (openai.OpenAIError, httpx.HTTPError) as error:
                report.add({"failed": f"{type(error).__name__}: {error}"}, name)
    finally:
        for server in servers.values():
            server.send_signal(signal.SIGTERM)
        for server in servers.values():
            server.wait(30)
    return verdict(report, arguments.only)


def verdict(report: Report, names: list[str]) -> int:
    found = {name: report.found[name] for name in names}
    failed = [name for name, row in found.items() if "failed" in row or row["words_heard"] < 0.5]
    equal = {}
    if "cpu" in found and "failed" not in found["cpu"]:
        theirs = found["cpu"]["answers"]
        ours = {name: row["answers"] for name, row in found.items() if name != "cpu" and "failed" not in row}
        equal = {name: sum(a == b for a, b in zip(theirs, each, strict=True)) for name, each in ours.items()}
    failed += [name for name, count in equal.items() if "float32" in name and count < len(QUESTIONS)]
    report.add({"equal_to_cpu": equal, "of": len(QUESTIONS), "failed": failed}, "verdict")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
