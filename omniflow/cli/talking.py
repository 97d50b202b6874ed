"""`omniflow chat`, `say` and `transcribe`: a server in the terminal."""

from __future__ import annotations

import base64
import sys
import wave
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

import anyio
import anyio.to_thread
from rich.console import Console

from omniflow.client import turns
from omniflow.client.connection import Server
from omniflow.client.turns import SPEECH_HZ, SoundPiece, TextPiece, Turn
from omniflow.errors import ConfigError

_CONTENT = {"wav": "input_audio", "mp3": "input_audio", "flac": "audio_url", "ogg": "audio_url"}
_IMAGES = {"png": "png", "jpg": "jpeg", "jpeg": "jpeg", "webp": "webp"}
_CODED = ("mp3", "opus", "aac", "flac")


class Player(Protocol):
    """Where sound goes."""

    async def play(self, pcm: bytes) -> None:
        """Take 16-bit PCM, mono, `SPEECH_HZ`."""

    async def finish(self) -> None:
        """Returns once all of it has been heard or written."""


class WavFile:
    """A wav file; its header is right at any moment."""

    def __init__(self, path: Path) -> None:
        self._file = _opened(path)
        self._wave = wave.open(self._file, "wb")
        self._wave.setparams((1, 2, SPEECH_HZ, 0, "NONE", ""))

    async def play(self, pcm: bytes) -> None:
        self._wave.writeframes(pcm)

    async def finish(self) -> None:
        self._wave.close()
        self._file.close()


class Speakers:
    """The sound card, through PortAudio."""

    def __init__(self) -> None:
        try:
            import sounddevice
        except (ImportError, OSError) as error:
            raise ConfigError(
                f"sound cannot be played here ({error}); write it to a file with -o out.wav, or install "
                "sounddevice and PortAudio (pip install sounddevice)"
            ) from error
        try:
            self._out = sounddevice.RawOutputStream(SPEECH_HZ, channels=1, dtype="int16")
            self._out.start()
        except sounddevice.PortAudioError as error:
            raise ConfigError(f"no sound card can be used ({error}); write to a file with -o out.wav") from error

    async def play(self, pcm: bytes) -> None:
        await anyio.to_thread.run_sync(self._out.write, pcm)

    async def finish(self) -> None:
        await anyio.to_thread.run_sync(self._out.stop)


class Asked(NamedTuple):
    """What a chat is to be like: `fields` are those of the API."""

    model: str | None
    system: str | None
    attachments: Sequence[Path]
    speak: bool
    output: Path | None
    voice: str | None
    fields: Mapping[str, Any]


async def chat(server: Server, prompt: str | None, asked: Asked, console: Console) -> None:
    """One answer to `prompt`, or a conversation where there is none: a line each, an empty one ends it."""
    async with server.connect() as connection, AsyncExitStack() as stack:
        player = await _player_for(asked, stack)
        model = await connection.model(asked.model)
        messages = [{"role": "system", "content": asked.system}] if asked.system else []
        attached = [part_of(path) for path in asked.attachments]
        alone = prompt is not None
        while prompt := prompt or await _next_line(console):
            content: Any = [*attached, {"type": "text", "text": prompt}] if attached else prompt
            messages.append({"role": "user", "content": content})
            turn = turns.new_turn()
            body = {"model": model, "messages": messages, **asked.fields, **_aloud(player, asked.voice)}
            await _show(turns.chat(connection, body, turn), player, console)
            console.print()
            if alone:
                break
            console.print(_took(turn), style="dim")
            messages.append({"role": "assistant", "content": turn.text})
            prompt, attached = None, []


async def say(server: Server, text: str, output: Path | None, asked: Asked, console: Console) -> None:
    """Say `text`: to the loudspeakers, or into a file, whose ending names its format."""
    async with server.connect() as connection, AsyncExitStack() as stack:
        body = {"model": await connection.model(asked.model), "input": text, **asked.fields}
        body |= {"voice": asked.voice} if asked.voice else {}
        coded = output.suffix.removeprefix(".").lower() if output is not None else ""
        if output is not None and coded in _CODED:
            data = await connection.post("/audio/speech", json={**body, "response_format": coded})
            with _opened(output) as file:
                await anyio.to_thread.run_sync(file.write, data)
            console.print(f"{output}: {len(data) / 1024:.0f} KiB")
            return
        player = await _player_for(asked._replace(speak=True, output=output), stack)
        turn = turns.new_turn()
        await _show(turns.say(connection, body, turn), player, console)
    console.print(f"{output or 'played'}: {_took(turn)}")


async def transcribe(server: Server, file: Path, fields: Mapping[str, str], model: str | None) -> None:
    """Write down what is said in `file`, as it is heard or in the format asked for."""
    async with server.connect() as connection:
        named = {"model": await connection.model(model), **fields}
        async for piece in turns.transcribe(connection, file, named):
            sys.stdout.write(piece)
            sys.stdout.flush()
    sys.stdout.write("\n")


def part_of(path: Path) -> dict[str, Any]:
    """A file as a part of a message. Raises ConfigError where its ending names no sound or image."""
    ending = path.suffix.removeprefix(".").lower()
    if not path.is_file():
        raise ConfigError(f"there is no file {path}")
    data = base64.b64encode(path.read_bytes()).decode()
    if ending in _IMAGES:
        return {"type": "image_url", "image_url": {"url": f"data:image/{_IMAGES[ending]};base64,{data}"}}
    if _CONTENT.get(ending) == "input_audio":
        return {"type": "input_audio", "input_audio": {"data": data, "format": ending}}
    if ending in _CONTENT:
        return {"type": "audio_url", "audio_url": {"url": f"data:audio/{ending};base64,{data}"}}
    raise ConfigError(f"{path}: attach {', '.join([*_CONTENT, *_IMAGES])}")


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("wb")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


async def _player_for(asked: Asked, stack: AsyncExitStack) -> Player | None:
    if not asked.speak and asked.output is None:
        return None
    if asked.output is not None and asked.output.suffix.lower() not in ("", ".wav"):
        raise ConfigError(f"{asked.output}: sound is written as .wav, and by `say` also as .{', .'.join(_CODED)}")
    player: Player = WavFile(asked.output) if asked.output is not None else Speakers()
    stack.push_async_callback(player.finish)
    return player


def _aloud(player: Player | None, voice: str | None) -> dict[str, Any]:
    if player is None:
        return {}
    return {"modalities": ["text", "audio"], "audio": {"format": "pcm16", **({"voice": voice} if voice else {})}}


async def _show(pieces: AsyncIterator[TextPiece | SoundPiece], player: Player | None, console: Console) -> None:
    """Text to the console as it comes, sound to the player, which may hold it up but loses none."""
    rest = b""
    async for piece in pieces:
        if isinstance(piece, TextPiece):
            console.print(piece.text, end="", soft_wrap=True)
        elif player is not None:
            data = rest + piece.data
            rest = data[len(data) // 2 * 2 :]
            await player.play(data[: len(data) // 2 * 2])


async def _next_line(console: Console) -> str:
    try:
        return (await anyio.to_thread.run_sync(console.input, "[bold]>[/bold] ", abandon_on_cancel=True)).strip()
    except EOFError:
        return ""


def _took(turn: Turn) -> str:
    times = turn.times
    parts = [f"first text {times.ttft_s:.2f} s"] if times.ttft_s is not None else []
    if times.ttfa_s is not None:
        parts += [f"first sound {times.ttfa_s:.2f} s", f"{times.audio_s:.1f} s of sound in {turn.seconds:.1f} s"]
    return ", ".join(parts) or f"{turn.seconds:.2f} s"
