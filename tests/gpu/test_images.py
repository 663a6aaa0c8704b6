"""Vision-language models on a GPU answer as they do on a CPU in float32, out of graphs and beside text."""

from __future__ import annotations

import pytest
import torch

from asyncllm import AsyncEngine, GenerationConfig
from asyncllm.agent.device.tower_graphs import TowerGraphs
from asyncllm.models.build import open_model
from asyncllm.vl.processor import open_processor
from asyncllm.vl.tower import CapturableTower
from tests.gpu.engines import device_config
from tests.vl.checkpoints import folder_of, greedy, picture, worst_difference
from tests.vl.kinds import KINDS

pytestmark = [pytest.mark.gpu, pytest.mark.anyio, pytest.mark.timeout(180)]

GREEDY = greedy(16)


@pytest.mark.parametrize("kind", KINDS)
async def test_answers_are_those_of_transformers(kind: str) -> None:
    pictures = [picture(1), picture(2, 90, 31), picture(3, 30, 60)]
    prompts = ["text alone", ("what?", pictures[:1]), ("<IMAGE_TOKEN> or <IMAGE_TOKEN>?", pictures[1:])]
    images = [[], pictures[:1], pictures[1:]]
    config = device_config(dtype="float32", block_size=16, max_prefill_token_num=48)
    async with AsyncEngine(str(folder_of(kind)), config) as engine:
        for _ in range(2):  # the second time the prefix cache has the images
            responses = await engine.batch_infer(prompts, GREEDY)
            assert isinstance(responses, list)
            for prompt, shown, response in zip(prompts, images, responses, strict=True):
                ids = await engine.encode(prompt)
                assert worst_difference(kind, ids, shown, response) < 1e-3
        engine.check_idle()


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_features_out_of_graphs_are_those_of_a_cpu(kind: str) -> None:
    """Each batch of shapes comes again with other images: it is launched, captured, replayed; others come between."""
    folder = folder_of(kind)
    processor = open_processor(folder)
    assert processor is not None
    towers = [open_model(folder, dtype=torch.float32, device=torch.device(device)).vision for device in ("cpu", "cuda")]
    assert towers[0] is not None
    assert towers[1] is not None
    encode = TowerGraphs(towers[1]).encode if isinstance(towers[1], CapturableTower) else towers[1].encode
    with torch.cuda.stream(torch.cuda.Stream()):
        for turn in range(4):
            for sizes in ([(40, 30)], [(90, 31), (30, 60), (30, 60)], [(64, 64), (64, 64)]):
                images = [
                    processor.prepare(picture(10 * turn + number, *size), {}) for number, size in enumerate(sizes)
                ]
                for actual, expected in zip(encode(images), towers[0].encode(images), strict=True):
                    error = (actual.cpu() - expected).norm() / expected.norm()
                    assert error < 1e-3, (turn, sizes, error)
    torch.cuda.synchronize()


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "internvl"])
async def test_a_burst_of_images_beside_a_stream(kind: str) -> None:
    """Each answer is what it is alone, and the encoder's graphs of both kinds of steps are used."""
    config = device_config(dtype="float32", block_size=16, max_prefill_token_num=48, num_gpu_blocks=256)
    prompts = [(f"what is {number}?", picture(number, 40, 30)) for number in range(12)]
    async with AsyncEngine(str(folder_of(kind)), config) as engine:
        stream = engine.generate("text alone", GenerationConfig(max_new_tokens=200, ignore_eos=True, temperature=0))
        first = await anext(stream)
        responses = await engine.batch_infer(prompts, GREEDY)
        rest = [chunk async for chunk in stream]
        assert len(first.token_ids) + sum(len(chunk.token_ids) for chunk in rest) == 200
        assert isinstance(responses, list)
        for prompt, response in zip(prompts, responses, strict=True):
            ids = await engine.encode(prompt)
            assert worst_difference(kind, ids, [prompt[1]], response) < 1e-3
        engine.check_idle()
