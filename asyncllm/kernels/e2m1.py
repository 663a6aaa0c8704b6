"""Experts whose weights are e2m1 numbers of 4 bits with an exponent for each group of 32 input features (MXFP4)."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncllm.kernels.dispatch import op
from asyncllm.kernels.moe import chosen_experts, fused_experts

__all__ = ["CHUNK", "E2M1", "E8M0_BIAS", "GROUP", "MAX_E8M0", "E2M1Weight", "e2m1_experts", "expand_e2m1", "pack_e2m1"]

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Numbers of the codes 0 to 15."""

E8M0_BIAS = 127
"""Bias of exponents."""

MAX_E8M0 = 136
"""Largest exponent that kernels accept: 2 ** 9."""

GROUP = 32
"""Input features with one exponent."""

CHUNK = 4 * GROUP
"""Input features of a run of 32 words."""

SIGNS = (15, 11, 9, 10)
"""The sign's bit of each of a word's four codes."""

MAGNITUDES = (6, 3, 0, 12)
"""The first of three bits of each code's magnitude. Code 0 is where a bfloat16 has its sign and the last bits of its
exponent. Code 2 comes there by one shift; the others, for which no such place is left, by two."""


class E2M1Weight(NamedTuple):
    """Weights [N, K] of E experts. Code i of word j is input feature 32 i + j of its chunk."""

    words: Tensor
    """int16 [E, C, N, 32]: four codes each, for C chunks of CHUNK input features, the last one padded."""
    exponents: Tensor
    """int32 [E, C, N]: four exponents (e8m0) of 8 bits, of code 0 in the lowest ones."""
    in_features: int

    @property
    def out_features(self) -> int:
        return self.words.shape[2]

    def expanded(self, dtype: torch.dtype) -> Tensor:
        """Return the weights [E, N, K], rounded once to `dtype`."""
        return expand_e2m1(self.words, self.exponents, in_features=self.in_features, dtype=dtype)


def pack_e2m1(codes: Tensor, exponents: Tensor) -> tuple[Tensor, Tensor]:
    """codes uint8 [N, K] below 16 and exponents uint8 [N, K / 32] -> words [C, N, 32] and exponents [C, N], as in
    `E2M1Weight`."""
    n, k = codes.shape
    planes = F.pad(codes, (0, -k % CHUNK)).view(n, -1, 4, GROUP).to(torch.int32)
    groups = F.pad(exponents, (0, -len(exponents[0]) % 4)).view(n, -1, 4).to(torch.int32)
    words, joined = torch.zeros_like(planes[:, :, 0]), torch.zeros_like(groups[:, :, 0])
    for index, (sign, magnitude) in enumerate(zip(SIGNS, MAGNITUDES, strict=True)):
        words |= (planes[:, :, index] >> 3 << sign) | ((planes[:, :, index] & 7) << magnitude)
        joined |= groups[:, :, index] << (8 * index)
    return words.to(torch.int16).transpose(0, 1).contiguous(), joined.t().contiguous()


@op("linear.e2m1_experts:expand_e2m1")
def expand_e2m1(words: Tensor, exponents: Tensor, *, in_features: int, dtype: torch.dtype) -> Tensor:
    """Return the weights [E, N, K], rounded once to `dtype`. The other arguments are fields of `E2M1Weight`."""
    values = torch.tensor(E2M1, device=words.device)
    planes = []
    for index, (sign, magnitude) in enumerate(zip(SIGNS, MAGNITUDES, strict=True)):
        codes = (words >> sign & 1) << 3 | (words >> magnitude & 7)
        powers = (exponents >> (8 * index) & 255) - E8M0_BIAS
        planes.append(torch.ldexp(values[codes.int()], powers[..., None]).to(dtype))
    return torch.cat(planes, -1).transpose(1, 2).flatten(2)[..., :in_features].contiguous()


@op("linear.e2m1_experts:e2m1_experts")
def e2m1_experts(
    x: Tensor,
    gate_up: E2M1Weight,
    down: E2M1Weight,
    weights: Tensor,
    expert_ids: Tensor,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    limit: float | None = None,
) -> Tensor:
    """`fused_experts` with weights of e2m1. Only the chosen experts are expanded, to x's dtype."""
    chosen, places = chosen_experts(expert_ids)
    dense = [
        each._replace(words=each.words[chosen], exponents=each.exponents[chosen]).expanded(x.dtype)
        for each in (gate_up, down)
    ]
    biases = [None if each is None else each[chosen] for each in (gate_up_bias, down_bias)]
    return fused_experts(
        x, dense[0], dense[1], weights, places, gate_up_bias=biases[0], down_bias=biases[1], limit=limit
    )
