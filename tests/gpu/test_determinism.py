"""The same tokens from run to run; with batch_invariant=True also alone, in any batch, preempted or from the cache.

The models are wide enough that libraries split matrix products by batch size, and answers are long: where bits differ,
tokens soon do, all the more when they are sampled at a high temperature.
"""

from __future__ import annotations

import msgspec
import pytest

from asyncllm import AsyncEngine, GenerationConfig
from tests.gpu.engines import answer_all, device_config, random_prompts, wide_checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.anyio, pytest.mark.timeout(240)]

FAMILIES = {
    "llama": {},
    "gemma2": {"num_key_value_heads": 8, "sliding_window": 100},
    # Without a window, as rows that hold no more blocks as they grow are never preempted.
    "qwen3_moe": {
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 512,
        "use_sliding_window": False,
    },
}


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("wide") / request.param
    return str(wide_checkpoint(request.param, folder, **FAMILIES[request.param]))


def settings(count: int, longest: int) -> list[GenerationConfig]:
    """Greedy and sampled answers in turn, of many lengths."""
    return [
        GenerationConfig(
            max_new_tokens=longest // 2 + index % (longest // 2),
            ignore_eos=True,
            top_k=1 if index % 2 else 0,
            temperature=1.0,
            random_seed=index,
        )
        for index in range(count)
    ]


async def test_two_runs_from_cold_give_the_same_tokens(checkpoint: str) -> None:
    prompts, configs = random_prompts(1, 200, 300), settings(200, 64)
    runs = []
    for _ in range(2):
        config = device_config(dtype="bfloat16", num_gpu_blocks=512, max_batch_size=48, max_prefill_token_num=1000)
        async with AsyncEngine(checkpoint, config) as engine:
            runs.append([each.token_ids for each in await answer_all(engine, prompts, configs)])
    assert runs[0] == runs[1]


async def test_a_request_gets_the_same_tokens_whatever_runs_beside_it(checkpoint: str) -> None:
    watched = 6
    prompts, configs = random_prompts(2, 256, 300), settings(256, 300)
    prompts[0] = random_prompts(3, 1, 300)[0] * 6  # longer than a chunk
    config = device_config(
        dtype="bfloat16",
        batch_invariant=True,
        max_batch_size=256,
        num_gpu_blocks=2560,
        max_prefill_token_num=1000,
        enable_prefix_caching=False,
    )
    async with AsyncEngine(checkpoint, config) as engine:
        alone = [
            (await engine.generate(input_ids=prompt, gen_config=chosen)).token_ids
            for prompt, chosen in zip(prompts[:watched], configs[:watched], strict=True)
        ]
        together = [each.token_ids for each in await answer_all(engine, prompts, configs)]
        assert engine.stats().preemptions == 0
        # In other rows, beside other neighbours.
        backwards = [each.token_ids for each in await answer_all(engine, prompts[200::-1], configs[200::-1])]
    assert together[:watched] == alone
    assert backwards[::-1] == together[:201]

    async with AsyncEngine(
        checkpoint, msgspec.structs.replace(config, num_gpu_blocks=200, enable_prefix_caching=True)
    ) as engine:
        tight = [each.token_ids for each in await answer_all(engine, prompts, configs)]
        assert engine.stats().preemptions > 0
        for _ in range(2):
            again = await answer_all(engine, prompts[-6:], configs[-6:])
            assert [each.token_ids for each in again] == together[-6:]
        assert any(each.cached_token_len for each in again)
    assert tight == together
