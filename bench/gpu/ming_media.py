"""What Ming hears and sees, and the chat around it, on GPUs: `python -m bench.gpu.ming_media PART FOLDER --json FILE`.

write      the checkpoint that the other parts read: random weights at the real sizes, the thinker's of `--layers`
attention  what one call of attention takes, by kernel: the first of a new length, and the next; many images at once
towers     clips of sound, images and video through their actors, alone and 8 at once: host work and GPU work, beside
           the fewest operations; with --profile also which kernels
chat       text, sound or an image in, text and sound out, through planner and host processes: first text and first
           sound by clients; on one GPU, and where there are more, spread over them

A random thinker does not stop by itself: each answer is `--tokens` long (its end is drawn once in 157,184 tokens, and
how many answers ended before is told). A random talker's segments last as long as their text takes to say at 14 letters
a second. With `--device cpu` all but `attention` runs on the tiny checkpoint, to see that it runs.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import io
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import numpy as np
import soundfile
import torch
from PIL import Image

from actors.attention import attend_apart
from actors.encoding import bounded
from actors.ming import hearing, seeing
from actors.ming.config import Vision, Whisper
from actors.ming.hearing import MingAudioEncoder
from actors.ming.pixels import Shown, clip_size, cut, frames_to_see, show_clip, show_image
from actors.ming.seeing import MingImageEncoder
from actors.ming.tiny import write_checkpoint
from actors.pictures import read_picture
from actors.video import VideoClip
from bench.gpu.ming import profile, timed
from bench.gpu.ming_media_graph import declare, write_media
from bench.gpu.report import Report, need
from graphs.ming_omni import graph
from omniflow import Runtime, plan
from omniflow.cli.machine import this_machine
from omniflow.config import RuntimeConfig
from omniflow.media import AudioPart, Chat, ChatMessage, ImagePart, Images, Options, Part, TextPart, Waveforms

TFLOPS, TB_PER_S = 780.0, 4.23
"""Of an H200: a large product in bfloat16, and a large copy."""
SECONDS = (5, 30, 120)
SIZES = {0.3: (640, 480), 1.0: (1152, 864), 4.0: (2304, 1728)}
CLIP_S, CLIP_HZ, CLIP_SIZE = 10, 24, (640, 480)
COMPANY = (1, 8)
HAS_AV = importlib.util.find_spec("av") is not None


def sound(seconds: float, seed: int, rate_hz: int = 16_000) -> np.ndarray:
    """Noise that swells four times a second."""
    count = int(seconds * rate_hz)
    swell = np.abs(np.sin(np.arange(count) * 4 * np.pi / rate_hz))
    return (0.1 * swell * np.random.default_rng(seed).standard_normal(count)).astype(np.float32)


def picture(width: int, height: int, seed: int) -> Image.Image:
    """Soft shapes under the noise of a camera."""
    random = np.random.default_rng(seed)
    soft = Image.fromarray(random.integers(0, 256, (height // 32 + 1, width // 32 + 1, 3), dtype=np.uint8))
    noise = random.normal(0, 6, (height, width, 1))
    pixels = np.asarray(soft.resize((width, height), Image.Resampling.BICUBIC)) + noise
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def jpeg(size: tuple[int, int], seed: int) -> bytes:
    file = io.BytesIO()
    picture(*size, seed).save(file, "JPEG", quality=88)
    return file.getvalue()


def mp4(seed: int) -> bytes:
    import av

    file = io.BytesIO()
    shown = np.asarray(picture(2 * CLIP_SIZE[0], CLIP_SIZE[1], seed))
    with av.open(file, "w", format="mp4") as output:
        stream: Any = output.add_stream("mpeg4", rate=CLIP_HZ)
        stream.width, stream.height, stream.pix_fmt, stream.bit_rate = *CLIP_SIZE, "yuv420p", 4_000_000
        for number in range(CLIP_S * CLIP_HZ):  # it pans over the picture
            frame = np.ascontiguousarray(shown[:, 2 * number : 2 * number + CLIP_SIZE[0]])
            output.mux(stream.encode(av.VideoFrame.from_ndarray(frame, "rgb24")))
        output.mux(stream.encode(None))
    return file.getvalue()


class Floor(NamedTuple):
    """The fewest operations of some passes, and how many bytes of weights they read, each once a pass."""

    flops: float
    read: float

    @property
    def ms(self) -> float:
        return 1e3 * max(self.flops / TFLOPS / 1e12, self.read / TB_PER_S / 1e12)


def floor_of_sound(tower: Any, passes: Sequence[Sequence[np.ndarray]]) -> Floor:
    sizes: Whisper = tower.sizes
    d, hidden = sizes.n_state, tower.linear_proj_audio[0].out_channels
    flops = 0.0
    for mel in itertools.chain.from_iterable(passes):
        frames = mel.shape[1]
        places, rows = (frames + 1) // 2, (frames + 3) // 4
        flops += 2 * 3 * d * (frames * sizes.n_mels + places * d)
        flops += sizes.n_layer * (2 * places * 12 * d * d + 4 * places**2 * d)
        flops += 2 * rows * hidden * (3 * d + (len(tower.linear_proj_audio) > 2) * hidden)
    return Floor(flops, len(passes) * _bytes(tower))


def floor_of_sight(tower: Any, passes: Sequence[Sequence[Shown]]) -> Floor:
    sizes: Vision = tower.sizes
    d, square = sizes.hidden_size, sizes.spatial_merge_size**2
    merged, hidden = d * square, tower.linear_proj[0].out_features
    flops = 0.0
    for shown in itertools.chain.from_iterable(passes):
        patches, (frames, rows, columns) = len(shown.values), shown.grid
        flops += 2 * patches * sizes.patch_dim * d
        attention = 4 * frames * (rows * columns) ** 2 * d
        flops += sizes.depth * (2 * patches * d * (4 * d + 2 * sizes.intermediate_size) + attention)
        projector = sizes.out_hidden_size * hidden + (len(tower.linear_proj) > 1) * hidden**2
        flops += 2 * patches // square * (merged**2 + merged * sizes.out_hidden_size + projector)
    return Floor(flops, len(passes) * _bytes(tower))


def _bytes(tower: Any) -> float:
    return float(sum(each.numel() * each.element_size() for each in tower.parameters()))


def seconds_of(rounds: int, call: Callable[..., object], *args: Any) -> float:
    """By the wall; the median, after one that does not count. What `call` gives is on the host, so the GPU is done."""
    call(*args)
    taken = []
    for _ in range(rounds):
        began = time.perf_counter()
        call(*args)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


async def seconds_of_actor(rounds: int, run: Callable[..., Any], asked: list[Any]) -> float:
    taken = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        await run(asked)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])


def all_of(steps: Iterator[Any]) -> Any:
    """The result of a pass."""
    *_, result = steps
    return result


def through(tower: Any, passes: Sequence[Sequence[Any]]) -> list[Any]:
    return [all_of(tower.rows(each)) for each in passes]


def mels_of(ears: MingAudioEncoder, clips: Sequence[np.ndarray]) -> list[np.ndarray]:
    return [ears._mel(clip) for clip in clips]


def decoded(files: Sequence[bytes]) -> list[Image.Image]:
    return [read_picture(file, "image") for file in files]


def shrunk(pictures: Sequence[Image.Image], eyes: MingImageEncoder) -> list[Shown]:
    return [all_of(show_image(each, "image", eyes._tower.sizes, eyes._pixels)) for each in pictures]


def clips_of(files: Sequence[bytes], sizes: Vision) -> list[Shown]:
    return [all_of(show_clip(VideoClip(file, "clip"), "clip", sizes, 256)) for file in files]


def row_of(whole_s: float, host_s: float, gpu_s: float, floor: Floor, items: int) -> dict[str, float]:
    found = {
        "whole_ms": 1e3 * whole_s,
        "host_ms": 1e3 * host_s,
        "gpu_ms": 1e3 * gpu_s,
        "items_per_s": items / whole_s,
        "tflop": floor.flops / 1e12,
        "floor_ms": floor.ms,
        "gpu_over_floor": 1e3 * gpu_s / floor.ms,
    }
    return {name: round(value, 3) for name, value in found.items()}


async def measure_hearing(ears: MingAudioEncoder, arguments: argparse.Namespace, report: Report) -> None:
    rounds = arguments.rounds
    for seconds, company in itertools.product(arguments.seconds, COMPANY):
        name = f"{seconds} s of sound, {company} at once"
        clips = [sound(seconds, seed) for seed in range(company)]
        mels = mels_of(ears, clips)
        frames = {number: mel.shape[1] for number, mel in enumerate(mels)}
        passes = [[mels[number] for number in batch] for batch in bounded(frames, hearing.MAX_FRAMES)]
        host = seconds_of(rounds, mels_of, ears, clips)
        gpu = seconds_of(rounds, through, ears._tower, passes)
        whole = await seconds_of_actor(rounds, ears.run, [Waveforms([clip], (0,)) for clip in clips])
        row = row_of(whole, host, gpu, floor_of_sound(ears._tower, passes), company)
        report.add(row | {"passes": len(passes)}, name)


async def measure_seeing(eyes: MingImageEncoder, arguments: argparse.Namespace, report: Report) -> None:
    rounds = arguments.rounds
    for mpx, company in itertools.product(arguments.mpx, COMPANY):
        name = f"{mpx} Mpx, {company} at once"
        files = [jpeg(SIZES[mpx], seed) for seed in range(company)]
        pictures = decoded(files)
        passes = passes_of(shrunk(pictures, eyes))
        decode = seconds_of(rounds, decoded, files)
        shrink = seconds_of(rounds, shrunk, pictures, eyes)
        gpu = seconds_of(rounds, through, eyes._tower, passes)
        whole = await seconds_of_actor(rounds, eyes.run, [Images([file], (0,)) for file in files])
        row = row_of(whole, decode + shrink, gpu, floor_of_sight(eyes._tower, passes), company)
        row |= {"decode_ms": round(1e3 * decode, 3), "resize_ms": round(1e3 * shrink, 3), "passes": len(passes)}
        report.add(row, name)
        if arguments.profile and (mpx, company) == (1.0, 1):
            profile(functools.partial(through, eyes._tower, passes))


def passes_of(shown: Sequence[Shown]) -> list[list[Shown]]:
    """As the actor puts them together."""
    sizes = {number: len(each.values) for number, each in enumerate(shown)}
    return [[shown[number] for number in batch] for batch in bounded(sizes, seeing.MAX_PATCHES)]


async def measure_clips(eyes: MingImageEncoder, arguments: argparse.Namespace, report: Report) -> None:
    """Without PyAV, which decodes, the GPU's part alone: of frames that come from no file."""
    rounds, sizes = arguments.rounds, eyes._tower.sizes
    for company in COMPANY:
        name = f"{CLIP_S} s of video, {company} at once"
        passes = passes_of([made_up_clip(sizes, seed) for seed in range(company)])
        whole = gpu = seconds_of(rounds, through, eyes._tower, passes)
        host = 0.0
        if HAS_AV:
            files = [mp4(seed) for seed in range(company)]
            host = seconds_of(rounds, clips_of, files, sizes)
            whole = await seconds_of_actor(rounds, eyes.run, [Images([file], (0,), (0,)) for file in files])
        row = row_of(whole, host, gpu, floor_of_sight(eyes._tower, passes), company)
        report.add(row | {"passes": len(passes), "decoded": HAS_AV}, name)


def made_up_clip(sizes: Vision, seed: int) -> Shown:
    count = len(frames_to_see(CLIP_S * CLIP_HZ, CLIP_HZ, 256))
    height, width = clip_size(CLIP_SIZE[1], CLIP_SIZE[0], count, sizes.cell, "clip")
    frames = np.random.default_rng(seed).integers(0, 256, (count, height, width, 3), dtype=np.uint8)
    return cut(frames, sizes)


async def measure_towers(folder: Path, arguments: argparse.Namespace, report: Report) -> None:
    report.add({"device": arguments.device, "dtype": arguments.dtype, "av": HAS_AV})
    settings: dict[str, Any] = {"model": str(folder), "device": arguments.device, "dtype": arguments.dtype}
    began = time.perf_counter()
    ears, eyes = MingAudioEncoder(cache_mb=0, **settings), MingImageEncoder(cache_mb=0, **settings)
    await ears.setup()
    await eyes.setup()
    report.add({"start_s": round(time.perf_counter() - began, 2)})
    await measure_hearing(ears, arguments, report)
    await measure_seeing(eyes, arguments, report)
    await measure_clips(eyes, arguments, report)
    if torch.cuda.is_available():
        report.add({"gpu_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2)})


def measure_attention(arguments: argparse.Namespace, report: Report) -> None:
    """Whether a kernel takes heads of 64 (sound) and of 72 (sight), and what many images cost that are not alike."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kernels = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
    kernels["efficient"] = SDPBackend.EFFICIENT_ATTENTION
    for (heads, dim), (name, kernel) in itertools.product(((20, 64), (16, 72)), kernels.items()):
        for lengths in ([1500], [6000], [4096] * 4, [64] * 64, list(range(33, 97)), [1000, 1100] * 4):
            key = f"heads of {dim}, {name}, {len(lengths)} of {min(lengths)} to {max(lengths)}"
            x = torch.randn(sum(lengths), heads, dim, device="cuda", dtype=torch.bfloat16)
            attend = functools.partial(attend_apart, x, x, x, lengths)
            try:
                with sdpa_kernel(kernel):
                    row = calls_of(attend, 4 * heads * dim * sum(length**2 for length in lengths), arguments)
                    report.add(row, key)
            except RuntimeError as error:  # what torch says of a kernel that takes no such heads
                report.add({"refused": str(error)}, key)


def calls_of(attend: Callable[[], object], flops: float, arguments: argparse.Namespace) -> dict[str, float]:
    torch.cuda.synchronize()
    began = time.perf_counter()
    attend()
    torch.cuda.synchronize()
    first = time.perf_counter() - began
    again = timed(attend, arguments.rounds)
    row = {"first_ms": 1e3 * first, "ms": 1e3 * again, "tflops": flops / again / 1e12}
    return {name: round(value, 3) for name, value in row.items()}


def media(kind: str, number: int, is_tiny: bool) -> tuple[Part, ...]:
    """What a client sends; no two send the same, so nothing is known of it."""
    text = TextPart(f"{number}: tell of the boat on the river, and of the old house at its end.")
    if kind == "audio":
        file = io.BytesIO()
        soundfile.write(file, sound(1 if is_tiny else 5, number), 16_000, format="WAV")
        return AudioPart(file.getvalue(), "wav"), text
    if kind == "image":
        return ImagePart(jpeg((96, 64) if is_tiny else SIZES[1.0], number)), text
    return (text,)


async def one_answer(runtime: Runtime, parts: tuple[Part, ...], tokens: int) -> dict[str, float]:
    began, row = time.perf_counter(), {"text": 0.0, "audio": 0.0, "sound_s": 0.0, "cut": 0.0}
    chat = Chat((ChatMessage("user", parts),))
    outputs = {"text", "audio", "usage"}
    async with await runtime.submit("chat", chat, outputs=outputs, options=Options(max_tokens=tokens)) as reply:
        async for output in reply:
            passed = time.perf_counter() - began
            if output.name == "text":
                row["text"] = row["text"] or (passed if output.value.text else 0.0)
            elif output.name == "audio":
                row["audio"] = row["audio"] or passed
                row["sound_s"] += output.value.duration_s
            else:
                row["cut"] = float(output.value.completion_tokens < tokens)
                row["prompt"] = output.value.prompt_tokens
    return row | {"whole": time.perf_counter() - began}


async def answers(
    runtime: Runtime, kind: str, numbers: Iterator[int], clients: int, arguments: argparse.Namespace
) -> dict[str, float]:
    """Each client asks again as soon as it has heard its answer."""
    is_tiny = arguments.device == "cpu"
    asked = iter([media(kind, next(numbers), is_tiny) for _ in range(max(arguments.least, arguments.turns * clients))])
    rows: list[dict[str, float]] = []

    async def client() -> None:
        for parts in asked:
            row = await one_answer(runtime, parts, arguments.tokens)
            rows.append(row)

    began = time.perf_counter()
    async with anyio.create_task_group() as tasks:
        for _ in range(clients):
            tasks.start_soon(client)
    return summed_up(rows, time.perf_counter() - began) | {"clients": clients}


def summed_up(rows: Sequence[Mapping[str, float]], seconds: float) -> dict[str, float]:
    found: dict[str, float] = {"requests": len(rows), "requests_per_s": len(rows) / seconds}
    for name, key in (("first_text", "text"), ("first_sound", "audio"), ("whole", "whole")):
        times = sorted(row[key] for row in rows)
        found |= {f"{name}_p50_ms": 1e3 * statistics.median(times), f"{name}_last_ms": 1e3 * times[-1]}
    found["sound_s"] = statistics.fmean(row["sound_s"] for row in rows)
    found["prompt_tokens"] = statistics.fmean(row["prompt"] for row in rows)
    found["ended_by_themselves"] = sum(row["cut"] for row in rows)
    return {name: round(value, 2) for name, value in found.items()}


async def measure_chat_on(folder: Path, num_gpus: int, arguments: argparse.Namespace, report: Report) -> None:
    name, key = f"measured{num_gpus}", f"{num_gpus} GPU" if num_gpus else "cpu"
    declare(name, folder, num_gpus, max(arguments.clients))
    config = RuntimeConfig(start_timeout_s=300.0, step_s=120.0, deadline_s=300.0)
    planned = plan(graph.spec(name), this_machine(), config)
    found = {
        "hosts": {host.name: [*host.devices, f"{host.device_bytes / 1e9:.2f} GB"] for host in planned.hosts},
        "edges": sorted({f"{edge.source}>{edge.target}: {edge.transport}" for edge in planned.edges}),
    }
    report.add(found, key)
    numbers = itertools.count(1000 * num_gpus)
    began = time.perf_counter()
    async with Runtime(planned, config) as runtime:
        report.add({"start_s": round(time.perf_counter() - began, 1)}, key)
        for kind in arguments.kinds:  # what is compiled or allocated on first use
            await answers(runtime, kind, numbers, max(arguments.clients), arguments)
        for kind, clients in itertools.product(arguments.kinds, arguments.clients):
            report.add(await answers(runtime, kind, numbers, clients, arguments), key, f"{kind}, {clients} clients")


async def measure_chat(folder: Path, arguments: argparse.Namespace, report: Report) -> None:
    """On one GPU, and spread over as many as are of use, if no numbers of them are named."""
    most = 0 if arguments.device == "cpu" else min(3, len(this_machine().gpus))
    for num_gpus in sorted({min(number, most) for number in arguments.gpus or (1, most)}):
        await measure_chat_on(folder, num_gpus, arguments, report)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["write", "attention", "towers", "chat"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="gpu", choices=["gpu", "cpu"])
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"])
    parser.add_argument("--layers", type=int, default=4, help="of the thinker")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, nargs="+", default=list(SECONDS))
    parser.add_argument("--mpx", type=float, nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--kinds", nargs="+", default=["text", "audio", "image"], choices=["text", "audio", "image"])
    parser.add_argument("--gpus", type=int, nargs="+", help="of the chat: on how many")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--turns", type=int, default=2, help="questions of each client")
    parser.add_argument("--least", type=int, default=6, help="questions of all clients together at least")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.device == "gpu" or arguments.part == "attention":
        need(max(arguments.gpus or [1]), sglang=arguments.part == "chat")
    match arguments.part:
        case "write" if arguments.device == "cpu":
            write_checkpoint(arguments.folder)
            return
        case "write":
            write_media(arguments.folder, arguments.layers, "cuda")
            return
        case "attention":
            measure_attention(arguments, Report(arguments.json, "attention"))
        case "towers":
            anyio.run(measure_towers, arguments.folder, arguments, Report(arguments.json, "towers"))
        case _:
            anyio.run(measure_chat, arguments.folder, arguments, Report(arguments.json, "chat"))


if __name__ == "__main__":
    main()
