"""The commands that talk to a server: chat, say, transcribe, bench serve."""

from __future__ import annotations

from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import urlsplit

import anyio
import typer

from omniflow.cli.machine import open_more_files
from omniflow.cli.tables import output_console
from omniflow.errors import ConfigError
from omniflow.server.scopes import unwrapped

if TYPE_CHECKING:
    from omniflow.client.connection import Server

bench = typer.Typer(help="Measure a server.")

Url = Annotated[str, typer.Option(envvar="OMNIFLOW_URL", help="The API of the server, with its version.")]
Key = Annotated[str | None, typer.Option(envvar=["OMNIFLOW_API_KEY", "OPENAI_API_KEY"], help="Its API key.")]
Model = Annotated[str | None, typer.Option(help="The model; else the first that the server lists.")]
Voice = Annotated[str | None, typer.Option(help="The voice; else the model's own.")]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same answer.")]
Output = Annotated[
    Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write the sound there instead of playing it.")
]
HERE = "http://127.0.0.1:8000/v1"


def chat(
    prompt: Annotated[str | None, typer.Argument(help="What to ask; without it a conversation begins.")] = None,
    url: Url = HERE,
    api_key: Key = None,
    model: Model = None,
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    attach: Annotated[
        list[Path] | None, typer.Option("-a", "--attach", metavar="FILE", help="Sound or an image. Repeatable.")
    ] = None,
    speak: Annotated[bool, typer.Option("--speak", help="Hear the answer.")] = False,
    output: Output = None,
    voice: Voice = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of an answer at most.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, max=2, help="0 is greedy.")] = None,
    seed: Seed = None,
) -> None:
    """Talk to a server: text streams as it is written, and with --speak or -o it is spoken."""
    from omniflow.cli import talking

    fields = _given(max_completion_tokens=max_tokens, temperature=temperature, seed=seed)
    asked = talking.Asked(model, system, tuple(attach or ()), speak, output, voice, fields)
    _run(talking.chat(_server(url, api_key), prompt, asked, output_console()))


def say(
    text: Annotated[str, typer.Argument(help="What to say; - reads it from standard input.")],
    url: Url = HERE,
    api_key: Key = None,
    model: Model = None,
    output: Output = None,
    voice: Voice = None,
    speed: Annotated[float | None, typer.Option(min=0.25, max=4, help="1 is the voice's own.")] = None,
    seed: Seed = None,
) -> None:
    """Say a text: aloud while it is made, or into a wav, mp3, opus, aac or flac file."""
    from omniflow.cli import talking

    spoken = typer.get_text_stream("stdin").read() if text == "-" else text
    asked = talking.Asked(model, None, (), True, output, voice, _given(speed=speed, seed=seed))
    _run(talking.say(_server(url, api_key), spoken, output, asked, output_console()))


def transcribe(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Sound: wav, mp3, flac, ogg, m4a, webm, ...")],
    url: Url = HERE,
    api_key: Key = None,
    model: Model = None,
    format_: Annotated[
        Literal["text", "json", "srt", "vtt", "verbose_json"], typer.Option("--format", help="How it is written.")
    ] = "text",
    language: Annotated[str | None, typer.Option(help="What is spoken: en, de, ...")] = None,
    prompt: Annotated[str | None, typer.Option(help="What came before: names and spellings are taken from it.")] = None,
) -> None:
    """Write down what is said in a file; as text it appears while it is heard."""
    from omniflow.cli import talking

    if not file.is_file():
        raise ConfigError(f"there is no file {file}")
    # As text it is streamed, and the events of a stream are the same for `text` and `json`.
    fields = {"stream": "true"} if format_ == "text" else {"response_format": format_}
    fields |= _given(language=language, prompt=prompt)
    _run(talking.transcribe(_server(url, api_key), file, fields, model))


@bench.command("serve")
def bench_serve(
    url: Url = HERE,
    api_key: Key = None,
    model: Model = None,
    kind: Annotated[
        Literal["chat", "chat-speech", "speech", "realtime"],
        typer.Option(help="Text from text, text and speech from text, speech from text, or spoken turns."),
    ] = "chat",
    concurrency: Annotated[list[int] | None, typer.Option(min=1, help="Turns at once (1). Repeatable.")] = None,
    num_turns: Annotated[int, typer.Option(min=1, help="Turns at each concurrency.")] = 20,
    rate: Annotated[float | None, typer.Option(min=0.001, help="Turns a second, at random; else at once.")] = None,
    prompts: Annotated[Path | None, typer.Option(metavar="FILE", help="What to ask or say, one a line.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer at most.")] = 128,
    voice: Voice = None,
    question: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A wav to say in spoken turns; else the server makes one.")
    ] = None,
    turn_end: Annotated[
        Literal["vad", "manual"], typer.Option(help="Spoken turns end by silence, or when the client says so.")
    ] = "vad",
    interrupt_after: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Interrupt spoken answers after so much sound.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the random times.")] = 0,
    json_: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the numbers there.")] = None,
) -> None:
    """Put load on any OpenAI-compatible server: TTFT, TTFA, ITL, TPOT, RTF, underruns, barge-in, throughput."""
    from omniflow.cli import benching

    open_more_files()
    plan = benching.BenchPlan(
        kind=kind,
        concurrency=tuple(concurrency or (1,)),
        num_turns=num_turns,
        rate_per_s=rate,
        prompts=benching.read_prompts(prompts),
        max_tokens=max_tokens,
        voice=voice,
        question=question,
        turn_end=turn_end,
        interrupt_after_s=interrupt_after,
        seed=seed,
    )
    _run(benching.bench(_server(url, api_key), model, plan, json_, output_console()))


def _given(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _server(url: str, api_key: str | None) -> Server:
    try:
        from omniflow.client.connection import Server
    except ImportError as error:
        raise ConfigError(f"this needs {error.name}: run `pip install 'omniflow[client]'`") from error
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url {url!r}: expected http://... or https://..., as in {HERE}")
    has_path = bool(urlsplit(url).path.strip("/"))
    return Server(url if has_path else url.rstrip("/") + "/v1", api_key)


def _run(work: Coroutine[Any, Any, None]) -> None:
    async def whole() -> None:
        with unwrapped():
            await work

    anyio.run(whole)
