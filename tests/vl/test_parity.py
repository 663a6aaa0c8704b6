"""Every family against transformers: answers to text, one image and several, in a batch of chunks that cut images."""

from __future__ import annotations

import pytest
import torch
from PIL import Image

from asyncllm import AsyncEngine, EngineConfig
from asyncllm.models.build import open_model
from asyncllm.vl.processor import open_processor
from tests.vl.checkpoints import ALL_KINDS, folder_of, greedy, picture, shared_oracle, worst_difference

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop]

CONFIG = EngineConfig(block_size=8, num_gpu_blocks=256, max_prefill_token_num=24, vision_max_batch_size=2)
GREEDY = greedy()
SIZES = [(40, 30), (30, 60), (28, 28), (90, 31)]


@pytest.mark.parametrize("kind", ALL_KINDS)
async def test_answers_are_those_of_transformers(kind: str) -> None:
    pictures = [picture(seed, *size) for seed, size in enumerate(SIZES)]
    cases: list[tuple[str, list[Image.Image]]] = [
        ("Tell me a story.", []),
        ("what is this?", pictures[:1]),
        ("<IMAGE_TOKEN> and then <IMAGE_TOKEN>: which?", pictures[1:3]),
        ("all", pictures),
    ]
    prompts = [(text, images) if images else text for text, images in cases]
    async with AsyncEngine(str(folder_of(kind)), CONFIG) as engine:
        responses = await engine.batch_infer(prompts, GREEDY)
        assert isinstance(responses, list)
        for (_, images), prompt, response in zip(cases, prompts, responses, strict=True):
            ids = await engine.encode(prompt)
            assert response.input_token_len == len(ids)
            assert worst_difference(kind, ids, images, response) < 1e-4  # type: ignore[arg-type]
        engine.check_idle()


@pytest.mark.parametrize("kind", ALL_KINDS)
async def test_the_oracle_would_notice(kind: str) -> None:
    first, second = picture(1), picture(2)
    async with AsyncEngine(str(folder_of(kind)), CONFIG) as engine:
        ids = await engine.encode(("which?", [first, second]))
    oracle = shared_oracle(kind)
    right, swapped, blank = (
        oracle(ids, images)[-1]  # type: ignore[arg-type]
        for images in ([first, second], [second, first], [first, Image.new("RGB", second.size)])
    )
    assert torch.max((right - swapped).abs()) > 1e-2
    assert torch.max((right - blank).abs()) > 1e-2


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_features_in_16_bits(kind: str) -> None:
    folder = folder_of(kind)
    processor = open_processor(folder)
    assert processor is not None
    images = [processor.prepare(picture(seed, *size), {}) for seed, size in enumerate(SIZES[:2])]
    encoded = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = open_model(folder, dtype=dtype, device=torch.device("cpu"))
        assert model.vision is not None
        with torch.inference_mode():
            features = model.vision.encode(images)
        assert {each.dtype for each in features} == {dtype}
        assert [len(each) for each in features] == [image.num_features for image in images]
        encoded[dtype] = torch.cat(features).float()
    exact, rounded = encoded[torch.float32], encoded[torch.bfloat16]
    assert (rounded - exact).norm() < 0.05 * exact.norm()
