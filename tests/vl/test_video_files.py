"""Files of videos: which frames are shown, that they are those of the file, and what is refused."""

from __future__ import annotations

import base64
import sys
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from asyncllm import AsyncEngine, EngineConfig, GenerationConfig, InvalidMessage, InvalidParameter, UnsupportedFeature
from asyncllm.vl import video_files
from asyncllm.vl.processor import open_processor
from tests.server.serving import serving
from tests.vl.checkpoints import folder_of, picture

GREEDY = GenerationConfig(max_new_tokens=6, temperature=0, ignore_eos=True)
CONFIG = EngineConfig(block_size=8, num_gpu_blocks=256, max_prefill_token_num=48)
RATE = 10


def recorded(count: int, *, form: str = "mp4", size: tuple[int, int] = (64, 48)) -> bytes:
    """Return a file of so many frames, ten a second, each of another colour."""
    buffer = BytesIO()
    with av.open(buffer, "w", format=form) as container:
        stream: Any = container.add_stream("mpeg4", rate=RATE)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        for number in range(count):
            frame = av.VideoFrame.from_image(Image.new("RGB", size, (6 * number % 250, 200 - 4 * number % 200, 90)))
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return buffer.getvalue()


def decoded(data: bytes) -> list[Image.Image]:
    with av.open(BytesIO(data)) as container:
        return [frame.to_image() for frame in container.decode(video=0)]


def shown(kind: str, video: Any, options: dict[str, Any]) -> Any:
    processor: Any = open_processor(folder_of(kind))
    return processor.prepare_video(video, options)


def test_recordings_are_what_they_seem() -> None:
    frames = decoded(recorded(40))
    assert len(frames) == 40
    assert len({frame.tobytes() for frame in frames}) == 40


@pytest.mark.parametrize(
    ("kind", "options", "indices"),
    [
        # Two frames a second, in whole steps of two.
        ("qwen2_vl", {}, [0, 5, 10, 15, 20, 25, 30, 35]),
        ("qwen2_5_vl", {"fps": 1.0}, [0, 10, 20, 30]),
        ("qwen2_vl", {"num_frames": 5}, [0, 10, 20, 30]),
        # From the first frame to the last.
        ("qwen3_vl", {}, [0, 6, 11, 17, 22, 28, 33, 39]),
        ("qwen3_vl", {"num_frames": 3}, [0, 20, 39]),
        # The middles of equal parts.
        ("internvl", {}, [2, 7, 12, 17, 22, 27, 32, 37]),
        ("internvl", {"fps": 1}, [5, 15, 25, 35]),
        ("onevision", {"num_frames": 4}, [0, 10, 20, 30]),
        ("onevision", {"fps": 0.5}, [0, 20]),
    ],
)
def test_the_familys_frames_are_shown(kind: str, options: dict[str, Any], indices: list[int]) -> None:
    data = recorded(40)
    frames = decoded(data)
    expected = shown(kind, [frames[index] for index in indices], {})
    actual = shown(kind, data, options)
    assert np.array_equal(actual.pixels, expected.pixels)
    for name in ("length", "grid", "steps", "placeholder_rows"):
        assert getattr(actual, name) == getattr(expected, name)
    others = shown(kind, [frames[index - (index > 0)] for index in indices], {})
    assert not np.array_equal(actual.pixels, others.pixels)


def test_time_is_that_of_the_recording() -> None:
    data = recorded(40)
    assert shown("qwen2_5_vl", data, {"fps": 4}).interval == 4 * 2 / 4
    assert shown("qwen2_5_vl", data, {"num_frames": 8}).interval == 4 * 2 / 2
    times = shown("qwen3_vl", data, {"num_frames": 4}).text
    assert [each.partition(" ")[0] for each in times.split("<")[1::4]] == ["0.7", "3.2"]
    listed = shown("qwen3_vl", [picture(number) for number in range(3)], {"fps": 4}).text
    assert listed == "".join(
        f"<{seconds} seconds><|vision_start|><|video_pad|><|vision_end|>" for seconds in ("0.1", "0.5")
    )
    frames = shown("internvl", data, {"num_frames": 2}).text
    assert frames == "Frame1: <IMG_CONTEXT>\nFrame2: <IMG_CONTEXT>\n"


@pytest.mark.parametrize("form", ["mp4", "mov", "matroska", "avi"])
def test_containers_and_ways_in(form: str, tmp_path: Path) -> None:
    data = recorded(8, form=form)
    (tmp_path / "a video").write_bytes(data)
    expected = shown("qwen2_vl", data, {})
    ways: Sequence[Any] = (
        tmp_path / "a video",
        str(tmp_path / "a video"),
        "data:video/mp4;base64," + base64.b64encode(data).decode(),
    )
    for way in ways:
        assert shown("qwen2_vl", way, {}).digest == expected.digest


def test_short_and_cut_recordings() -> None:
    assert shown("qwen2_vl", recorded(1), {}).steps == 1
    assert shown("qwen3_vl", recorded(1), {}).steps == 1
    assert shown("internvl", recorded(3), {}).placeholder_rows == (4, 4, 4)
    whole = recorded(40, form="matroska")
    cut = shown("qwen3_vl", whole[: len(whole) // 2], {"num_frames": 4})
    assert cut.steps == 2


@pytest.mark.parametrize(
    ("video", "options", "error", "says"),
    [
        (b"", {}, InvalidMessage, "no container"),
        (b"#EXTM3U\nhttp://127.0.0.1/x.ts", {}, InvalidMessage, "no container"),
        (b"\x00\x00\x00\x18ftypmp42" + bytes(300), {}, InvalidMessage, "broken"),
        ("/nowhere/x.mp4", {}, InvalidMessage, "The video .* cannot be read"),
        (12, {}, InvalidMessage, "not int"),
        (None, {"fps": 1, "num_frames": 2}, InvalidParameter, "both say"),
        (None, {"num_frames": 0}, InvalidParameter, "num_frames=0"),
        (None, {"num_frames": 12}, InvalidParameter, "the video has 8"),
        (None, {"fps": True}, InvalidParameter, "fps=True"),
        (None, {"detail": "low"}, InvalidParameter, "detail"),
        ([picture(1)], {"num_frames": 1}, InvalidParameter, "shown as it is"),
    ],
)
def test_what_is_wrong_is_refused(video: Any, options: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        shown("qwen2_vl", recorded(8) if video is None else video, options)


def test_what_is_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = recorded(40)
    monkeypatch.setattr(video_files, "MAX_VIDEO_PIXELS", 36 * 64 * 48)
    assert shown("qwen2_vl", data, {}).steps == 4
    with pytest.raises(InvalidMessage, match="at most 110592 pixels"):
        shown("qwen3_vl", data, {})
    monkeypatch.setattr(video_files, "MAX_VIDEO_SECONDS", 3)
    with pytest.raises(InvalidMessage, match="longer than 3 seconds"):
        shown("qwen2_vl", data, {})
    monkeypatch.setattr(video_files, "MAX_IMAGE_BYTES", 100)
    with pytest.raises(InvalidMessage, match="more than 100 bytes"):
        shown("qwen2_vl", data, {})
    monkeypatch.setattr("asyncllm.vl.processing.frames.MAX_NUMBERS", 100)
    with pytest.raises(InvalidMessage, match="is shown as 2 frames"):
        shown("qwen2_vl", [picture(1), picture(2)], {})


def test_without_pyav(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(UnsupportedFeature, match=r"pip install asyncllm\[video\]"):
        shown("qwen2_vl", b"\x1a\x45\xdf\xa3", {})
    assert shown("qwen2_vl", [picture(1), picture(2)], {}).steps == 1


@pytest.mark.anyio
@pytest.mark.one_loop
@pytest.mark.parametrize("kind", ["qwen3_vl", "internvl"])
async def test_an_answer_about_a_file(kind: str) -> None:
    """The same as about its frames, in the library and over HTTP."""
    data = recorded(21)
    frames = decoded(data)
    indices = [0, 20] if kind == "qwen3_vl" else [5, 15]

    def question(video: Any, **options: Any) -> list[dict[str, Any]]:
        part = {"type": "video_url", "video_url": {"url": video, **options}}
        return [{"role": "user", "content": [part, {"type": "text", "text": "what happens?"}]}]

    # 20 frames behind the first at ten a second.
    listed = question([frames[index] for index in indices], **({"fps": 0.5} if kind == "qwen3_vl" else {}))
    engine = AsyncEngine(str(folder_of(kind)), CONFIG)
    async with serving(engine) as server:
        expected = await engine.generate(listed, GREEDY)
        answer = await engine.generate(question(data, num_frames=2), GREEDY)
        assert answer.token_ids == expected.token_ids
        assert answer.cached_token_len > 0
        assert answer.num_images == 1
        url = "data:video/mp4;base64," + base64.b64encode(data).decode()
        body = {"messages": question(url, num_frames=2), "max_tokens": 6, "temperature": 0, "ignore_eos": True}
        status, reply = await server.post("/v1/chat/completions", body)
        assert status == 200, reply
        assert reply["choices"][0]["message"]["content"] == expected.text
        engine.check_idle()
