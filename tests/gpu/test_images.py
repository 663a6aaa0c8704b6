"""Vision-language models on a GPU answer as they do on a CPU in float32, out of graphs and beside text."""

from __future__ import annotations

import pytest

from asyncllm import AsyncEngine, GenerationConfig
from tests.gpu.engines import device_config
from tests.vl.checkpoints import folder_of, picture, worst_difference
from tests.vl.kinds import KINDS

pytestmark = [pytest.mark.gpu, pytest.mark.anyio, pytest.mark.timeout(180)]

GREEDY = GenerationConfig(max_new_tokens=16, ignore_eos=True, logprobs=1)


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
