"""Latent decode attention in Gluon: its kernel as a model on a CPU, and what comes of it compiled."""

from __future__ import annotations

import os

import pytest
import torch

from tests.kernels import gluon_model
from tests.kernels.device import DEVICE
from tests.kernels.latent_cases import LatentCase

if DEVICE.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1":
    from asyncllm.kernels.triton.attention.tile import LOG2_E
    from asyncllm.kernels.triton.latent import hopper, plan

SCALE = 0.2


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the model runs on a CPU")
@pytest.mark.parametrize(
    ("case", "min_tiles"),
    [
        (LatentCase([150], heads=16, rank=32, rope=16, block_size=64, dtype=torch.bfloat16), 1),
        (LatentCase([70, 0, 64, 1, -1], heads=5, rank=16, rope=8, block_size=64, dtype=torch.bfloat16), 4),
        (LatentCase([500, 3, 200, 129, 65], heads=20, rank=16, rope=8, block_size=128, dtype=torch.float16), 1),
        (LatentCase([900, 10], heads=3, rank=32, rope=16, block_size=192, dtype=torch.bfloat16), 2),
    ],
    ids=["split", "padding", "many heads", "long blocks"],
)
def test_the_model_attends(case: LatentCase, min_tiles: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config = plan.HopperDecodeConfig(16, 64, 1, min_tiles)
    monkeypatch.setattr(plan, "decode_config", lambda cache, num_heads: config)
    cache, tables, kv_lens = case.cache()
    latent, rope = case.queries()
    work = plan.plan_latent_decode(tables, kv_lens, cache, num_heads=case.heads)
    strides = (*latent.stride()[:2], *rope.stride()[:2], case.heads * case.rank)
    options = hopper.compile_options(work.shape, strides, config.heads)
    del options["maxnreg"]
    # From the middle of other numbers to where each begins, as a pointer does.
    memory = [
        part.as_strided((part.untyped_storage().nbytes() // part.itemsize - part.storage_offset(),), (1,))
        for part in (latent, rope)
    ]
    blocks = [gluon_model.Descriptor(cache.pages, (1, config.tile, width)) for width in (case.rank, case.rope)]
    results = []
    for _ in range(2):
        out = torch.full((len(latent) + 1, case.heads, case.rank), torch.nan, dtype=case.dtype)
        gluon_model.run(
            hopper.hopper_decode_kernel, (work.grid, 1, 1), *blocks, *memory, tables, out, work.work, work.partials,
            SCALE * LOG2_E.value, work.table_stride, **options, USE_PDL=False,
        )  # fmt: skip
        assert out[-1].isnan().all()
        results.append(out[:-1])
    expected = case.expected(SCALE)
    error = (results[0].double() - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-3)
    assert error.max() < 1.5e-2
    # The plan serves the next layer.
    assert torch.equal(*results)
