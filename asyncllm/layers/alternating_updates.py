"""AltUp (Baykal et al., 2023): several parallel residual streams. Each layer computes the first stream and corrects the
others by the result. The S streams of T tokens are one tensor [T, S * hidden]."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor, nn

from asyncllm import kernels
from asyncllm.layers.block import SandwichBlock, SandwichParts
from asyncllm.layers.layer import Layer, ParameterOwner
from asyncllm.layers.layer_inputs import GatedLayerInput
from asyncllm.layers.linear import Linear
from asyncllm.layers.norm import Norm
from asyncllm.layers.step_inputs import SampledRows, StepInputs

__all__ = ["AltUp", "AltUpBlock", "LowRankResidual"]


class AltUp(ParameterOwner):
    """Predicts all streams before a layer, and corrects them after it."""

    def __init__(self, hidden_size: int, streams: int, *, norm: Norm) -> None:
        super().__init__()
        self.router = Linear(hidden_size, streams, shard="replicated")
        self.router_norm = norm
        self.prediction = Linear(streams, streams**2, shard="replicated")
        self.correction = Linear(streams, streams, shard="replicated")
        self.output_scale = nn.Parameter(torch.empty(hidden_size), requires_grad=False)
        self.hidden_size = hidden_size

    def predict(self, streams: Tensor, step: StepInputs) -> Tensor:
        """streams [T, S, hidden] -> predictions of the same shape, each a mixture of all streams."""
        count = streams.shape[1]
        mixture = self.prediction(self._routed(streams[:, 0], step), step).view(-1, count, count)
        return streams + torch.bmm(mixture, streams)

    def correct(self, predictions: Tensor, computed: Tensor, step: StepInputs) -> Tensor:
        """predictions [T, S, hidden] and the computed stream [T, hidden] -> the corrections to add to each stream."""
        weights = self.correction(self._routed(computed, step), step) + 1.0
        added: Tensor = (computed - predictions[:, 0])[:, None] * weights[..., None]
        return added

    def _routed(self, x: Tensor, step: StepInputs) -> Tensor:
        normed = self.router_norm(x.contiguous()) * (1 / self.hidden_size)
        routed: Tensor = self.router(normed, step)
        return routed.float().tanh().to(x.dtype)


class LowRankResidual(Layer):
    """LAuReL (Menghani et al., 2024): x [T, hidden] -> x + norm(low-rank product of x)."""

    def __init__(self, hidden_size: int, rank: int, *, norm: Norm) -> None:
        super().__init__()
        self.left = Linear(hidden_size, rank, shard="replicated")
        self.right = Linear(rank, hidden_size, shard="replicated")
        self.norm = norm

    def forward(self, x: Tensor, step: StepInputs) -> Tensor:
        added: Tensor = self.norm(self.right(self.left(x, step), step))
        return x + added


class AltUpBlock(SandwichBlock):
    """Gemma 3n's block: attention with a parallel low-rank product, an MLP, and the layer's own input for the streams
    that were not computed."""

    def __init__(
        self, *, altup: AltUp, laurel: LowRankResidual, layer_input: GatedLayerInput, **parts: Unpack[SandwichParts]
    ) -> None:
        super().__init__(**parts)
        self.altup, self.laurel, self.layer_input = altup, laurel, layer_input

    def forward(
        self, branch: Tensor | None, residual: Tensor, step: StepInputs, sampled: SampledRows | None = None
    ) -> tuple[Tensor, Tensor]:
        streams = residual if branch is None else residual + branch
        predictions = self.altup.predict(streams.view(len(streams), -1, self.altup.hidden_size), step)
        normed, here = self.attn_norm(predictions[:, 0].contiguous()), step
        attended = self.attn_post_norm(self.attn(normed, step, sampled))
        if sampled is not None:
            here, indices = sampled.inputs, sampled.indices
            predictions = kernels.gather_rows(predictions.flatten(1), indices).view(-1, *predictions.shape[1:])
            normed = kernels.gather_rows(normed, indices)
        stream = (predictions[:, 0] + attended + self.laurel(normed, here)) * 2**-0.5
        stream = stream + self.mlp_post_norm(self.mlp(self.mlp_norm(stream), here))
        added = self.altup.correct(predictions, stream, here)
        first = (predictions[:, 0] + added[:, 0]) * self.altup.output_scale
        added[:, 1:] += self.layer_input(first, step, sampled)[:, None]
        return added.flatten(1), predictions.flatten(1)
