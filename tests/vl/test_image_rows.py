"""What images' tokens have of their own in a decoder's layers: among ranks, in parts of a step, and in plain steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncllm.distributed.group import RankGroup
from asyncllm.layers.image_rows import INNER_ROWS
from asyncllm.layers.images import IMAGE_ROWS
from asyncllm.models.build import open_model
from tests.ranks.threads import in_ranks
from tests.vl.checkpoints import folder_of

KINDS = ["cogvlm2", "xcomposer2_4khd"]
NUM_TOKENS = 7
ROWS = torch.tensor([-1, 0, 1, 2, -1, 3, 4])
INNER = torch.tensor([0, 1, 1, 0, 0, 1, 0])


class Step(SimpleNamespace):
    def __getitem__(self, column: object) -> Tensor:
        return {IMAGE_ROWS: ROWS, INNER_ROWS: INNER}[column]  # type: ignore[index]


def step_of(num_image_tokens: int | None, *, shown: bool = True) -> Any:
    features = torch.zeros(5, 1) if shown else None
    return Step(image_features=features, num_image_tokens=num_image_tokens, image_tokens=None, adapted=False)


def products(kind: str, step: Any, group: RankGroup | None = None) -> tuple[Tensor, Tensor]:
    """What the first layer's MLP and projections give: the latter are a rank's own."""
    model: Any = open_model(folder_of(kind), dtype=torch.float32, device=torch.device("cpu"), group=group)
    block = model.layers[0]
    x = torch.randn(NUM_TOKENS, model.config.hidden_size, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        return block.mlp(x, step), block.attn.qkv(x, step)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_add_up_to_the_whole(kind: str) -> None:
    whole, qkv = products(kind, step_of(5))
    shares = in_ranks(2, lambda group: products(kind, step_of(5), group))
    for mlp, _ in shares:
        torch.testing.assert_close(mlp, whole, atol=1e-4, rtol=1e-4)
    # Of two query heads each rank has one, and both have the one key head.
    queries = torch.cat([own[:, :16] for _, own in shares], 1)
    torch.testing.assert_close(queries, qkv[:, :32], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(shares[1][1][:, 16:], qkv[:, 32:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_of_a_step_is_computed_alike(kind: str) -> None:
    for known, unknown in zip(products(kind, step_of(5)), products(kind, step_of(None)), strict=True):
        torch.testing.assert_close(known, unknown, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_only_images_tokens_differ(kind: str) -> None:
    own = INNER > 0 if "cogvlm" in kind else ROWS >= 0
    for typed, plain in zip(products(kind, step_of(5)), products(kind, step_of(5, shown=False)), strict=True):
        moved = (typed - plain).abs().amax(1) > 1e-3
        assert moved.tolist() == own.tolist()
