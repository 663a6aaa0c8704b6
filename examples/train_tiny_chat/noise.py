"""Perturbs weights by a relative amount, to check that the questions notice a damaged model."""

from __future__ import annotations

import torch
from torch import Tensor


def perturbed(tensors: dict[str, Tensor], noise: float, seed: int) -> dict[str, Tensor]:
    """Returns a copy of ``tensors`` in which every weight is multiplied by ``1 + noise * N(0, 1)``.

    The noise is relative to each single weight, so that 0.05 means an error of 5 % in every tensor
    whatever its scale, norm weights included. The names are visited in sorted order and the generator is
    seeded, so the result depends on nothing but the checkpoint and the seed.
    """
    generator = torch.Generator().manual_seed(seed)
    result = {}
    for name in sorted(tensors):
        tensor = tensors[name]
        factor = 1.0 + noise * torch.randn(tensor.shape, generator=generator)
        result[name] = (tensor.float().cpu() * factor).to(tensor.dtype).contiguous()
    return result
