"""Steps with images' tokens are captured as others are, but for families whose images take more than embeddings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from asyncllm import AsyncEngine, EngineConfig, kernels
from asyncllm.agent.model_agent import ModelAgent
from asyncllm.kernels import PagedKV
from tests.agent.test_steps_in_flight import EagerGraphs
from tests.vl.checkpoints import folder_of, greedy, picture, worst_difference

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop]

GREEDY = greedy()


class Graphs(EagerGraphs):
    """Knows its agent's features too."""

    def __init__(self, agent: ModelAgent) -> None:
        super().__init__(agent)
        self.features = agent._mixed._captured_features


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Graphs]:
    """The stand-ins for graphs of each agent. What padding writes goes to the last block of a pool, which no prompt of
    these tests comes to."""
    made: list[Graphs] = []
    plan = kernels.plan_cache_write

    def plan_with_padding(places: Tensor, cache: PagedKV) -> Tensor:
        block_size = cache.k.shape[2]
        return plan(torch.where(places < 0, (len(cache.k) - 1) * block_size, places), cache)

    def capture(agent: ModelAgent) -> Any:
        made.append(Graphs(agent))
        return made[-1]

    monkeypatch.setattr(kernels, "plan_cache_write", plan_with_padding)
    monkeypatch.setattr(ModelAgent, "_capture", capture)
    return made


@pytest.mark.parametrize(("kind", "captured"), [("qwen3_vl", True), ("gemma3", False), ("cogvlm2", False)])
async def test_answers_out_of_graphs_are_those_of_transformers(kind: str, captured: bool, graphs: list[Graphs]) -> None:
    prompts: list[tuple[str, list[Image.Image]]] = [
        ("what?", [picture(1)]),
        ("text alone", []),
        ("<IMAGE_TOKEN> or <IMAGE_TOKEN>?", [picture(2, 90, 31), picture(3, 30, 60)]),
    ]
    config = EngineConfig(block_size=16, num_gpu_blocks=256, max_prefill_token_num=48, max_batch_size=4)
    async with AsyncEngine(str(folder_of(kind)), config) as engine:
        (fake,) = graphs
        response = await engine.generate(("?", picture(4, 20, 20)), GREEDY)
        ids = await engine.encode(("?", picture(4, 20, 20)))
        assert worst_difference(kind, ids, [picture(4, 20, 20)], response) < 1e-4  # type: ignore[arg-type]
        assert len(fake.sizes("mixed")) == captured, "a prompt of one chunk"
        for _ in range(2 if captured else 0):  # the second time the prefix cache has the images
            asked = [prompt if prompt[1] else prompt[0] for prompt in prompts]
            responses = await engine.batch_infer(asked, GREEDY)  # type: ignore[arg-type]
            assert isinstance(responses, list)
            for prompt, (_, images), answer in zip(asked, prompts, responses, strict=True):
                ids = await engine.encode(prompt)  # type: ignore[arg-type]
                assert worst_difference(kind, ids, images, answer) < 1e-4  # type: ignore[arg-type]
        engine.check_idle()


async def test_what_is_left_of_an_image_harms_no_text(graphs: list[Graphs]) -> None:
    """Not even what is no number."""
    config = EngineConfig(block_size=16, num_gpu_blocks=64, max_batch_size=4)
    async with AsyncEngine(str(folder_of("qwen3_vl")), config) as engine:
        features = graphs[0].features
        assert features is not None
        await engine.generate(("what?", picture(1)), GREEDY)
        assert features.count_nonzero()
        with torch.inference_mode():
            features.fill_(torch.nan)
        response = await engine.generate("text alone", GREEDY)
        ids = await engine.encode("text alone")
        assert worst_difference("qwen3_vl", ids, [], response) < 1e-4  # type: ignore[arg-type]
