"""Images that are asked about again: prepared and encoded once, whatever they are given as, and never mistaken."""

from __future__ import annotations

import base64
import threading
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from asyncllm import AsyncEngine, EngineConfig, GenerationConfig, InvalidMessage
from asyncllm.agent.image_features import ImageFeatures
from asyncllm.prompt_image import PromptImage
from asyncllm.vl.prepared_images import PreparedImages
from asyncllm.vl.processing.settings import PictureSettings
from asyncllm.vl.processing.video import QwenVideoProcessor
from tests.vl.checkpoints import folder_of, picture


def qwen() -> QwenVideoProcessor:
    settings = PictureSettings({"patch_size": 4, "min_pixels": 64, "max_pixels": 8 * 8 * 60}, "x")
    return QwenVideoProcessor(
        settings,
        token_id=1,
        placeholder="<image>",
        video_settings=settings,
        video_token_id=2,
        video_placeholder="<video>",
        tokens_per_second=None,
    )


class Counted:
    """A family's processor that counts its calls."""

    before = after = ()
    joint = 0
    placeholder, token_id, video_token_id = "<image>", 1, 2

    def __init__(self) -> None:
        self.calls = 0
        self._own = qwen()

    def prepare(self, image: Any, options: Mapping[str, Any]) -> PromptImage:
        self.calls += 1
        return self._own.prepare(image, options)

    def prepare_video(self, video: Any, options: Mapping[str, Any]) -> PromptImage:
        self.calls += 1
        return self._own.prepare_video(video, options)


def png(image: Image.Image) -> bytes:
    buffer = BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def url_of(image: Image.Image) -> str:
    return f"data:image/png;base64,{base64.b64encode(png(image)).decode()}"


@pytest.mark.parametrize("spelled", [png, url_of, lambda image: image])
def test_an_image_is_prepared_once(spelled: Any) -> None:
    counted = Counted()
    images = PreparedImages(counted)
    first = images.prepare(spelled(picture(1)), {})
    again = images.prepare(spelled(picture(1)), {})
    assert counted.calls == 1
    assert again is first
    assert first.digest == qwen().prepare(picture(1), {}).digest
    others = [
        images.prepare(spelled(picture(2)), {}),
        images.prepare(spelled(picture(1)), {"max_pixels": 640}),
        images.prepare(spelled(picture(1)), {}, "one"),
        images.prepare(spelled(picture(1)), {}, "two"),
    ]
    assert counted.calls == 5
    assert len({each.digest for each in (first, *others)}) == 5
    assert images.prepare(spelled(picture(1)), {}, "two") is others[-1]


def test_what_changes_is_another_image(tmp_path: Path) -> None:
    images, file = PreparedImages(qwen()), tmp_path / "image.png"
    digests = []
    for number in (1, 2):
        file.write_bytes(png(picture(number)))
        digests += [images.prepare(each, {}).digest for each in (file, str(file), f"file://{file}")]
    assert [digests[0]] * 3 + [digests[3]] * 3 == digests
    image = picture(3)
    before = images.prepare(image, {}).digest
    image.putpixel((0, 0), (1, 2, 3))
    assert images.prepare(image, {}).digest != before
    wide, tall = (Image.fromarray(np.zeros((*shape, 3), np.uint8)) for shape in ((20, 40), (40, 20)))
    assert images.prepare(wide, {}).grid != images.prepare(tall, {}).grid, "of equal bytes"


def test_a_video_is_prepared_once() -> None:
    counted = Counted()
    images = PreparedImages(counted)
    frames = [picture(number, 40, 30) for number in range(4)]
    first = images.prepare(frames, {}, is_video=True)
    assert images.prepare([*frames], {}, is_video=True) is first
    assert counted.calls == 1
    assert images.prepare(frames[::-1], {}, is_video=True).digest != first.digest
    assert images.prepare(frames[:2], {}, is_video=True).steps == 1


def test_what_is_kept_is_bounded() -> None:
    counted = Counted()
    size = qwen().prepare(picture(0), {}).pixels.nbytes
    images = PreparedImages(counted, 3 * size)
    for number in (0, 1, 2, 0, 3):
        images.prepare(picture(number), {})
    assert counted.calls == 4
    images.prepare(picture(0), {})
    assert counted.calls == 4, "the one that was not asked for longest has gone"
    images.prepare(picture(1), {})
    assert counted.calls == 5
    none = PreparedImages(counted, size - 1)
    for _ in range(2):
        none.prepare(picture(0), {})
    assert counted.calls == 7


def test_what_fails_is_not_kept() -> None:
    images = PreparedImages(qwen())
    for _ in range(2):
        for broken in (png(picture(1))[:60], "data:image/png;base64,?", 7):
            with pytest.raises(InvalidMessage):
                images.prepare(broken, {})
    images.prepare(picture(1), {})


@pytest.mark.anyio
async def test_a_hundred_questions_about_an_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """The image is decoded, scaled and encoded for the first one, and the others' steps compute what text alone would
    be: their own tokens, and the rest of the block that the image ends in."""
    counts, loops_thread = {"prepared": 0, "encoded": 0}, threading.current_thread()
    encode = ImageFeatures._encoded

    def encoded(self: ImageFeatures, images: list[PromptImage]) -> Any:
        counts["encoded"] += len(images)
        return encode(self, images)

    monkeypatch.setattr(ImageFeatures, "_encoded", encoded)
    config = EngineConfig(block_size=4, num_gpu_blocks=512, max_prefill_token_num=64)
    greedy = GenerationConfig(max_new_tokens=1, temperature=0, ignore_eos=True)
    async with AsyncEngine(str(folder_of("qwen2_5_vl")), config) as engine:
        preparation = engine._lifecycle.files.images
        assert preparation is not None
        prepare = preparation.processor.prepare

        def prepared(image: Any, options: Any) -> PromptImage:
            assert threading.current_thread() is not loops_thread
            counts["prepared"] += 1
            return prepare(image, options)

        monkeypatch.setattr(preparation.processor, "prepare", prepared)
        url, part = url_of(picture(1, 60, 60)), {"type": "image_url"}
        for number in range(100):
            content = [{**part, "image_url": {"url": url}}, {"type": "text", "text": f"number {number}?"}]
            answer = await engine.generate([{"role": "user", "content": content}], greedy)
            assert answer.image_token_len > 40
            if number:
                text = answer.input_token_len - answer.image_token_len
                assert answer.input_token_len - answer.cached_token_len <= text + 3
        assert counts == {"prepared": 1, "encoded": 1}
        engine.check_idle()
        for salt in ("one", "two", "one"):
            await engine.generate(("salted", url), greedy, cache_salt=salt)
        assert counts == {"prepared": 3, "encoded": 3}
