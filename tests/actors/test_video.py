from __future__ import annotations

import io
import wave

import numpy as np
import pytest

from actors import video
from actors.video import VideoClip
from omniflow.errors import InvalidInputError
from tests.videos import clip, number_of, rotated


def seen(data: bytes, wanted: list[int]) -> list[np.ndarray]:
    return [np.asarray(each) for each in VideoClip(data, "clip 1").pictures(wanted) if each is not None]


@pytest.mark.parametrize(
    ("container", "codec"),
    [("mp4", "mpeg4"), ("mov", "mpeg4"), ("matroska", "mpeg4"), ("avi", "mpeg4"), ("webm", "libvpx")],
)
def test_frames_are_counted_and_found(container: str, codec: str) -> None:
    data = clip(15, rate_hz=10, container=container, codec=codec)
    made = VideoClip(data, "clip 1")
    assert made.count == 15
    assert made.rate_hz == pytest.approx(10, rel=0.01) and made.seconds == pytest.approx(1.5, rel=0.01)
    pictures = seen(data, [0, 4, 5, 14])
    assert [number_of(each) for each in pictures] == [0, 4, 5, 14]
    assert all(each.shape == (64, 96, 3) and each.dtype == np.uint8 for each in pictures)


def test_left_and_top_stay_where_they_are() -> None:
    (picture,) = seen(clip(1), [0])
    red, _, blue = (picture[..., colour].astype(int) for colour in range(3))
    assert red[:, :40].mean() > red[:, 56:].mean() + 40
    assert blue[:24].mean() > blue[40:].mean() + 25


@pytest.mark.parametrize("quarter", [1, 2, 3])
def test_a_clip_is_turned_as_its_head_says(quarter: int) -> None:
    (plain,), (turned,) = seen(clip(1), [0]), seen(rotated(clip(1), quarter), [0])
    assert np.array_equal(turned, np.rot90(plain, -quarter))


def test_others_may_go_between_frames_that_are_not_wanted() -> None:
    steps = list(VideoClip(clip(10), "clip 1").pictures([3, 6]))
    assert [step is None for step in steps] == [True, True, True, False, True, True, False]


def test_what_is_counted_but_not_shown_is_the_last_that_is_shown() -> None:
    """As of a codec whose packets may hold no frame: here the numbers go beyond the end."""
    assert [number_of(each) for each in seen(clip(4), [2, 3, 5, 6])] == [2, 3, 3, 3]


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"", "is empty"),
        (b"no clip at all", "cannot be read as a clip"),
        (b"#EXTM3U\n#EXTINF:1,\nhttp://127.0.0.1/secret.ts\n", "cannot be read as a clip"),
        (b"ffconcat version 1.0\nfile '/etc/hostname'\n", "cannot be read as a clip"),
    ],
)
def test_what_is_no_clip_is_refused(data: bytes, named: str) -> None:
    with pytest.raises(InvalidInputError, match=f"^clip 3.*{named}") as refused:
        VideoClip(data, "clip 3")
    assert refused.value.param == "messages"


def test_a_cut_off_clip_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"^clip 1: .*(clip|broken)"):
        seen(clip(10)[:1500], [0])


def test_sound_alone_is_no_clip() -> None:
    file = io.BytesIO()
    with wave.open(file, "wb") as output:
        output.setparams((1, 2, 8000, 0, "NONE", ""))
        output.writeframes(bytes(8000))
    with pytest.raises(InvalidInputError, match="cannot be read as a clip"):
        VideoClip(file.getvalue(), "clip 1")


def test_too_many_frames_and_too_large_ones_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = clip(12)
    monkeypatch.setattr(video, "MAX_FRAMES", 11)
    with pytest.raises(InvalidInputError, match="has 12 frames; 1 to 11 are taken"):
        VideoClip(data, "clip 1")
    monkeypatch.setattr(video, "MAX_PIXELS", 96 * 64 - 1)
    with pytest.raises(InvalidInputError, match="frames have 6144 pixels; at most"):
        VideoClip(data, "clip 1")


def test_a_head_that_tells_of_more_frames_than_there_are_bytes_is_refused() -> None:
    data = bytearray(clip(15))
    sizes = data.index(b"stsz")
    data[sizes + 8 : sizes + 16] = (1).to_bytes(4, "big") + (10**8).to_bytes(4, "big")
    with pytest.raises(InvalidInputError, match="clip 1: the clip's head tells of more frames than there are bytes"):
        VideoClip(bytes(data), "clip 1")
