from __future__ import annotations

import io
import struct
import threading
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import Mock

import av
import numpy as np
import pytest
import soundfile

from actors import preprocess
from actors.clip import BLOCK_FRAMES, Clip
from actors.preprocess import Preprocess
from actors.roles import Preprocessed
from omniflow.errors import InvalidInputError, UnsupportedError
from omniflow.media import (
    AudioPart,
    Chat,
    ChatMessage,
    ImagePart,
    Images,
    Part,
    PromptMessage,
    TextPart,
    ToolCall,
    VideoPart,
)
from tests.doubles import counted_turns
from tests.speech import encoded, samples_of
from tests.waiting import HANGS_S

pytestmark = pytest.mark.anyio

PNG = b"\x89PNG\r\n\x1a\n" + b"rest"
JPEG = b"\xff\xd8\xff\xe0" + b"rest"
WEBP = b"RIFF\x00\x00\x00\x00WEBPVP8 "


def tone(seconds: float, rate_hz: int, channels: int = 1) -> np.ndarray:
    wave = 0.5 * np.sin(2 * np.pi * 440 * np.arange(int(seconds * rate_hz)) / rate_hz)
    return np.stack([wave] * channels, axis=1).astype(np.float32)


def file(samples: np.ndarray, rate_hz: int, format: str = "WAV", subtype: str | None = None) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate_hz, format=format, subtype=subtype)
    return buffer.getvalue()


def chat(*parts: Part) -> Chat:
    return Chat((ChatMessage("user", parts),))


@pytest.fixture
async def actor() -> AsyncIterator[Preprocess]:
    actor = Preprocess(max_audio_s=60)
    await actor.setup()
    yield actor
    await actor.close()


async def decoded(actor: Preprocess, data: bytes) -> np.ndarray:
    result = await actor.run(chat(AudioPart(data, "wav")))
    assert result.audio is not None
    assert result.audio.sample_rate_hz == 16_000
    (samples,) = result.audio.samples
    assert samples.dtype == np.float32 and samples.ndim == 1
    return samples


@pytest.mark.parametrize("seconds", [0.5, BLOCK_FRAMES / 16_000, 20])
async def test_a_flac_that_was_streamed_does_not_say_how_long_it_is(actor: Preprocess, seconds: float) -> None:
    samples = tone(seconds, 16_000)
    data = bytearray(file(samples, 16_000, "FLAC"))
    data[21] &= 0xF0  # 36 bits of STREAMINFO
    data[22:26] = bytes(4)
    assert np.abs(await decoded(actor, bytes(data)) - samples[:, 0]).max() < 1e-4


async def test_a_wav_that_was_streamed_may_say_that_it_is_empty(actor: Preprocess) -> None:
    samples = tone(0.5, 16_000)
    data = file(samples, 16_000)
    streamed = data[:4] + bytes(4) + data[8:40] + bytes(4) + data[44:]
    assert np.abs(await decoded(actor, streamed) - samples[:, 0]).max() < 1e-4
    assert "the audio holds no samples" in str(await refusal(actor, AudioPart(streamed[:44], "wav")))


async def refusal(actor: Preprocess, *parts: Part) -> InvalidInputError:
    with pytest.raises(InvalidInputError) as caught:
        await actor.run(chat(*parts))
    assert caught.value.param == "messages"
    return caught.value


async def test_text_passes_as_it_is(actor: Preprocess) -> None:
    system = ChatMessage("system", (TextPart("Be brief."),))
    user = ChatMessage("user", (TextPart(" one"), TextPart("two\n")))
    calls = (ToolCall("call_1", "weather", "{}"),)
    rest = (ChatMessage("assistant", (), calls), ChatMessage("tool", (TextPart("sun"),), tool_call_id="call_1"))
    result = await actor.run(Chat((system, user, *rest)))
    assert result == Preprocessed(result.prompt, None, None)
    assert result.prompt.messages == (
        PromptMessage("system", ("Be brief.",)),
        PromptMessage("user", (" one", "two\n")),
        PromptMessage("assistant", (), calls),
        PromptMessage("tool", ("sun",), tool_call_id="call_1"),
    )


async def test_media_are_numbered_in_order(actor: Preprocess) -> None:
    sound = AudioPart(encoded("hello"), "wav")
    first = ChatMessage("user", (ImagePart(PNG), TextPart("and"), sound))
    second = ChatMessage("user", (sound, ImagePart(JPEG), ImagePart(WEBP)))
    result = await actor.run(Chat((first, second)))
    assert result.prompt.messages == (PromptMessage("user", (0, "and", 1)), PromptMessage("user", (2, 3, 4)))
    assert result.audio is not None and result.audio.index == (1, 2)
    assert np.array_equal(result.audio.samples[0], samples_of("hello"))
    assert result.image is not None and result.image.index == (0, 3, 4)
    assert result.image.data == [PNG, JPEG, WEBP]


@pytest.mark.parametrize(
    ("format", "subtype", "rate_hz", "channels"),
    [
        ("WAV", "PCM_16", 16_000, 1),
        ("WAV", "PCM_U8", 8_000, 1),
        ("WAV", "FLOAT", 44_100, 2),
        ("WAVEX", "PCM_24", 48_000, 6),
        ("MP3", "MPEG_LAYER_III", 44_100, 2),
        ("FLAC", "PCM_16", 22_050, 1),
        ("OGG", "VORBIS", 48_000, 2),
        ("OGG", "OPUS", 48_000, 1),
    ],
)
async def test_every_format_becomes_mono_16_khz(
    actor: Preprocess, format: str, subtype: str, rate_hz: int, channels: int
) -> None:
    samples = await decoded(actor, file(tone(1.5, rate_hz, channels), rate_hz, format, subtype))
    assert len(samples) == pytest.approx(1.5 * 16_000, abs=0.08 * 16_000)  # codecs pad by up to 80 ms
    middle = samples[4000:20_000]
    spectrum = np.abs(np.fft.rfft(middle))
    assert spectrum.argmax() == 440
    assert np.sqrt(np.square(middle).mean()) == pytest.approx(0.5 / np.sqrt(2), rel=0.03)


async def test_blocks_join_without_a_seam(actor: Preprocess) -> None:
    wave = tone(2.5 * BLOCK_FRAMES / 44_100, 44_100)
    samples = await decoded(actor, file(wave, 44_100))
    expected = 0.5 * np.sin(2 * np.pi * 440 * np.arange(len(samples)) / 16_000)
    assert len(samples) == pytest.approx(len(wave) / 44_100 * 16_000, abs=1)
    assert np.abs(samples - expected)[100:-100].max() < 1e-3


async def test_samples_out_of_range_are_clipped(actor: Preprocess) -> None:
    loud = file(np.array([[1e38, 0.5], [-3.0, -3.0]], np.float32), 16_000, subtype="FLOAT")
    assert np.array_equal(await decoded(actor, loud), np.array([1, -1], np.float32))


async def test_name_of_the_format_does_not_matter(actor: Preprocess) -> None:
    result = await actor.run(chat(AudioPart(file(tone(1, 16_000), 16_000, "FLAC"), "mp3")))
    assert result.audio is not None and len(result.audio.samples[0]) == 16_000


async def test_what_is_odd_in_an_mp3_is_not_written_to_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    """It is heard as far as it goes, behind tags, too."""
    data = file(tone(2, 44_100), 44_100, "MP3")
    tag = b"ID3\x04\0\0\0\0\0\x10" + bytes(16)
    for odd in (data[: len(data) // 2], tag + data[: len(data) // 2]):
        result = await Preprocess().run(chat(AudioPart(odd, "mp3")))
        assert result.audio is not None and 0.8 < len(result.audio.samples[0]) / 16_000 < 1.2
    error = await refusal(Preprocess(), AudioPart(tag + b"no audio at all" * 100, "mp3"))
    assert "cannot be decoded" in str(error)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "the audio is empty (0 bytes)"),
        (file(tone(0, 16_000), 16_000), "the audio holds no samples"),
        (b"no audio at all" * 100, "the audio cannot be decoded (Format not recognised.); send wav, mp3, flac or ogg"),
        (PNG, "the audio cannot be decoded (Format not recognised.); send wav, mp3, flac or ogg"),
        (
            file(tone(1, 16_000), 16_000, "AIFF"),
            "audio in the format AIFF is not taken; send wav, mp3, flac or ogg",
        ),
        (
            file(np.array([[0.0], [np.nan]], np.float32), 16_000, subtype="FLOAT"),
            "the audio holds samples that are not numbers (NaN or infinite)",
        ),
        (
            file(np.zeros((10, 9), np.float32), 16_000),
            "audio of 16000 Hz with 9 channels is not taken; send 4000 to 384000 Hz and at most 8 channels",
        ),
        (
            file(np.zeros((10, 1), np.float32), 1),
            "audio of 1 Hz with 1 channels is not taken; send 4000 to 384000 Hz and at most 8 channels",
        ),
    ],
    ids=["empty", "no samples", "text", "image", "aiff", "nan", "channels", "rate"],
)
async def test_bad_audio_names_part_and_reason(actor: Preprocess, data: bytes, reason: str) -> None:
    error = await refusal(actor, TextPart("listen"), AudioPart(data, "wav"))
    assert str(error) == f"messages[0].content[1]: {reason}"


async def test_wav_whose_header_promises_too_much_is_decoded_as_far_as_it_goes(actor: Preprocess) -> None:
    data = bytearray(file(tone(1, 16_000), 16_000, subtype="PCM_16"))
    data[40:44] = struct.pack("<I", 0xFFFFFFFF)
    assert len(await decoded(actor, bytes(data))) == 16_000


async def test_too_much_audio_is_refused_before_all_is_decoded(
    actor: Preprocess, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 2 hours of silence are 0.3 MB of FLAC.
    data = file(np.zeros(2 * 3600 * 8000, np.int16), 8000, "FLAC")
    read_block = Mock(side_effect=Clip.read_block)
    monkeypatch.setattr(Clip, "read_block", lambda clip: read_block(clip))
    error = await refusal(actor, AudioPart(data, "flac"))
    assert str(error) == (
        "messages[0].content[0]: the conversation holds more than 60 s of audio, which is the most that is taken"
    )
    assert read_block.call_count == 60 * 8000 // BLOCK_FRAMES + 1


async def test_limit_counts_all_clips_of_a_conversation(actor: Preprocess) -> None:
    clip = AudioPart(file(tone(31, 8000), 8000), "wav")
    assert (await actor.run(chat(clip))).audio is not None
    assert "messages[0].content[1]: the conversation holds more than 60 s" in str(await refusal(actor, clip, clip))


async def test_image_of_another_kind_is_refused(actor: Preprocess) -> None:
    error = await refusal(actor, ImagePart(b"GIF89a"))
    assert str(error) == "messages[0].content[0]: the image is not a png, jpeg or webp file"


async def test_video_is_not_supported(actor: Preprocess) -> None:
    error = await refusal(actor, VideoPart(b"\x00\x00\x00\x18ftypmp42"))
    assert isinstance(error, UnsupportedError)
    assert str(error) == "messages[0].content[0]: this model takes no video; send text, audio or images"


MP4 = b"\x00\x00\x00\x18ftypmp42rest"
WEBM = b"\x1a\x45\xdf\xa3rest"
AVI = b"RIFF\x00\x00\x00\x00AVI rest"


@pytest.mark.parametrize("clip", [MP4, WEBM, AVI])
async def test_clips_stay_encoded_among_the_images_where_the_model_takes_them(clip: bytes) -> None:
    sound = AudioPart(file(tone(0.1, 16_000), 16_000), "wav")
    parts = (ImagePart(PNG), VideoPart(clip), sound, TextPart("what?"), ImagePart(JPEG))
    result = await Preprocess(max_videos=1).run(chat(*parts))
    assert result.prompt.messages[0].pieces == (0, 1, 2, "what?", 3)
    where = tuple(f"messages[0].content[{number}]" for number in (0, 1, 4))
    assert result.image == Images([PNG, clip, JPEG], (0, 1, 3), videos=(1,), where=where)
    assert result.audio is not None and result.audio.index == (2,)
    assert result.audio.where == ("messages[0].content[2]",)


async def test_too_many_images_and_clips_are_refused_by_their_place() -> None:
    actor = Preprocess(max_images=2, max_videos=1)
    image, clip = ImagePart(PNG), VideoPart(MP4)
    assert (await actor.run(chat(clip, image, image))).image is not None
    error = await refusal(actor, image, clip, image, image)
    assert str(error) == (
        "messages[0].content[3]: the conversation holds more than 2 images, which is the most that is taken"
    )
    error = await refusal(actor, image, clip, clip)
    assert str(error).startswith("messages[0].content[2]: the conversation holds more than 1 video clips")


@pytest.mark.parametrize("data", [b"", b"GIF89a", PNG, b"RIFF\x00\x00\x00\x00WAVE"])
async def test_video_of_another_kind_is_refused(data: bytes) -> None:
    error = await refusal(Preprocess(max_videos=1), TextPart("look"), VideoPart(data))
    assert str(error) == "messages[0].content[1]: the video is not an mp4, mov, webm, mkv or avi file"


@pytest.mark.parametrize("messages", [(), (ChatMessage("user", ()),), (ChatMessage("user", (TextPart(" \n"),)),)])
async def test_empty_conversation_is_refused(actor: Preprocess, messages: tuple[ChatMessage, ...]) -> None:
    with pytest.raises(InvalidInputError) as caught:
        await actor.run(Chat(messages))
    assert str(caught.value) == ("the conversation is empty; send at least one message with text, audio or an image")
    assert caught.value.param == "messages"


async def test_event_loop_goes_on_while_audio_is_decoded(actor: Preprocess) -> None:
    data = file(tone(50, 48_000, 2), 48_000, "FLAC")
    async with counted_turns() as turns:
        await decoded(actor, data)
    assert turns.num > 2 * 50 * 48_000 // BLOCK_FRAMES, "two or more for each block"


async def test_recordings_are_decoded_beside_each_other_and_stay_in_order(
    actor: Preprocess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as there are decoders meet, which would break where they came one by one."""
    meeting, opened = threading.Barrier(4, timeout=HANGS_S), preprocess.Clip

    def met(*args: Any, **named: Any) -> Clip:
        meeting.wait()
        return opened(*args, **named)

    monkeypatch.setattr(preprocess, "Clip", met)
    sizes = [0.4, 0.1, 0.3, 0.2, 0.5, 0.7, 0.6, 0.8]
    parts = [AudioPart(file(tone(seconds, 16_000), 16_000), "wav") for seconds in sizes]
    result = await actor.run(chat(*parts))
    assert result.audio is not None
    assert [len(samples) / 16_000 for samples in result.audio.samples] == pytest.approx(sizes)


async def test_the_first_bad_recording_is_named_whichever_is_known_first(
    actor: Preprocess, monkeypatch: pytest.MonkeyPatch
) -> None:
    second_is_known, opened = threading.Event(), preprocess.Clip

    def slow_first(data: bytes, *, where: str, **named: Any) -> Clip:
        if where.endswith("[0]"):
            assert second_is_known.wait(HANGS_S)
        try:
            return opened(data, where=where, **named)
        finally:
            if where.endswith("[1]"):
                second_is_known.set()

    monkeypatch.setattr(preprocess, "Clip", slow_first)
    with pytest.raises(InvalidInputError, match=r"^messages\[0\]\.content\[0\]: ") as refused:
        await actor.run(chat(AudioPart(b"no sound", "wav"), AudioPart(b"nor this", "wav")))
    assert refused.value.param == "messages"


def test_layer_2_of_mpeg_has_its_loudness() -> None:
    """FFmpeg's decoder of it gives integers."""
    buffer = io.BytesIO()
    wave = (0.1 * np.sin(np.arange(44_100) / 8) * 2**15).astype(np.int16)
    with av.open(buffer, "w", format="mp2") as output:
        stream = output.add_stream("mp2", rate=44_100, layout="mono")
        for start in range(0, len(wave) - 1151, 1152):
            frame = av.AudioFrame.from_ndarray(wave[None, start : start + 1152], format="s16", layout="mono")
            frame.sample_rate = 44_100
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    clip = Clip(buffer.getvalue(), where="clip", param="messages", sample_rate_hz=16_000)
    blocks = []
    while not clip.ended:
        blocks.append(clip.read_block())
    assert 0.06 < np.concatenate(blocks).std() < 0.08
