"""A burst of images beside a text that streams: a step encodes no more than its tokens reach into, the text goes on
with each step, and images of requests that were left are not encoded."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asyncllm import AsyncEngine, EngineConfig, GenerationConfig
from asyncllm.agent.image_features import ImageFeatures
from tests.vl.checkpoints import folder_of, picture

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop]

SHORT = GenerationConfig(max_new_tokens=3, temperature=0, ignore_eos=True)
LONG = GenerationConfig(max_new_tokens=150, temperature=0, ignore_eos=True)
IMAGE_TOKENS = 16
BUDGET = 64


async def test_a_burst_of_images_does_not_hold_up_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[tuple[int, int]] = []
    """For each step that encodes: images, and tokens that the text had by then."""
    streamed = 0
    encode = ImageFeatures._encoded

    def counted(self: ImageFeatures, images: Any) -> Any:
        encoded.append((len(images), streamed))
        return encode(self, images)

    monkeypatch.setattr(ImageFeatures, "_encoded", counted)
    config = EngineConfig(block_size=8, num_gpu_blocks=256, max_prefill_token_num=BUDGET, max_batch_size=6)
    async with AsyncEngine(str(folder_of("llava")), config) as engine:
        begun = asyncio.Event()

        async def stream() -> None:
            nonlocal streamed
            async for chunk in engine.generate("say", LONG):
                streamed = chunk.generate_token_len
                begun.set()

        text = asyncio.create_task(stream())
        await begun.wait()
        asked = [asyncio.create_task(engine.generate(("what?", picture(n)), SHORT).response()) for n in range(40)]
        await asked[3]
        left, kept = asked[20:], asked[:20]
        for task in left:
            task.cancel()
        answers = await asyncio.gather(*kept)
        await asyncio.gather(*left, return_exceptions=True)
        await text
        assert all(answer.num_images == 1 for answer in answers)
        assert streamed == 150
        engine.check_idle()
    steps = [(count, when) for count, when in encoded if count]
    assert max(count for count, _ in steps) <= BUDGET // IMAGE_TOKENS + 1
    assert 20 <= sum(count for count, _ in steps) < 36, "what was left in the queue is not encoded"
    assert len({when for _, when in steps}) >= len(steps) // 2, "the text goes on between the steps that encode"
