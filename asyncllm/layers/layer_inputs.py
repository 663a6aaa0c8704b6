"""Per-layer embeddings (Gemma 3n): a token's features for every layer, and the block that adds them."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor, nn

from asyncllm import kernels
from asyncllm.kernels import RoundedRows
from asyncllm.layers.block import SandwichBlock, SandwichParts
from asyncllm.layers.embedding import Embedding
from asyncllm.layers.layer import Layer, ParameterOwner
from asyncllm.layers.linear import Linear
from asyncllm.layers.norm import Norm
from asyncllm.layers.normed_experts import NormedMoE
from asyncllm.layers.step_inputs import SampledRows, StepInputs

__all__ = ["GatedLayerInput", "LayerInputBlock", "LayerInputs", "LayerScale"]


class LayerInputs(Layer):
    """ids [T] and embeddings [T, hidden] -> [T, layers, size]: rows of a per-layer table plus a normalised product of
    the embeddings, divided by sqrt(2)."""

    def __init__(self, hidden_size: int, num_layers: int, size: int, *, vocab_size: int, norm: Norm) -> None:
        super().__init__()
        self.embed = Embedding(vocab_size, num_layers * size, scale=size**0.5)
        self.project = Linear(hidden_size, num_layers * size, shard="replicated")
        self.norm = norm
        self.vocab_size, self.size, self.scale = vocab_size, size, hidden_size**-0.5

    def forward(self, ids: Tensor, embedded: Tensor, step: StepInputs) -> Tensor:
        known = ids.masked_fill(ids >= self.vocab_size, 0)
        table = self.embed(known, step).unflatten(1, (-1, self.size))
        projected = self.project(embedded, step).mul_(self.scale).unflatten(1, (-1, self.size))
        normed: Tensor = self.norm(projected.contiguous())
        return normed.add_(table).mul_(2**-0.5)


class GatedLayerInput(Layer):
    """x [T, hidden] -> [T, hidden]: the token's features for this layer, gated by x, widened to the stream and
    normalised."""

    def __init__(self, layer: int, hidden_size: int, size: int, *, norm: Norm) -> None:
        super().__init__()
        self.layer = layer
        self.gate = Linear(hidden_size, size, shard="replicated")
        self.project = Linear(size, hidden_size, shard="replicated")
        self.norm = norm

    def forward(self, x: Tensor, step: StepInputs, sampled: SampledRows | None = None) -> Tensor:
        """`step` covers all tokens; x has only the `sampled` rows if given."""
        assert step.layer_inputs is not None, "the model writes them before its first layer"
        given, here = step.layer_inputs[:, self.layer], step
        if sampled is not None:
            given, here = kernels.gather_rows(given.contiguous(), sampled.indices), sampled.inputs
        gated = kernels.activate(self.gate(x, here), "gelu_tanh") * given
        normed: Tensor = self.norm(self.project(gated, here))
        return normed


class LayerScale(ParameterOwner):
    """One number that multiplies the stream after a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.empty(1), requires_grad=False)


class LayerInputBlock(SandwichBlock):
    """Like `SandwichBlock`; then the layer's own input is added, if it has one, and the stream is scaled (Gemma 4).

    `experts` read the stream in parallel with the MLP; the MLP's output is normalised by `beside_norm` and added to
    theirs, before the norm of the sum.
    """

    def __init__(
        self,
        *,
        layer_input: GatedLayerInput | None,
        experts: NormedMoE | None = None,
        beside_norm: Norm | None = None,
        **parts: Unpack[SandwichParts],
    ) -> None:
        """`experts` and `beside_norm`: both or neither."""
        super().__init__(**parts)
        self.layer_input = layer_input
        self.experts, self.beside_norm = experts, beside_norm
        self.stream_scale = LayerScale()

    def forward(
        self, branch: Tensor | None, residual: Tensor, step: StepInputs, sampled: SampledRows | None = None
    ) -> tuple[Tensor, Tensor]:
        added, residual = super().forward(branch, residual, step, sampled)
        if self.layer_input is not None:
            residual = residual + added
            added = self.layer_input(residual, step, sampled)
        return added * self.stream_scale.value, residual * self.stream_scale.value

    def _mlp_branch(self, normed: Tensor | RoundedRows, residual: Tensor, step: StepInputs) -> Tensor:
        fed: Tensor = self.mlp(normed, step)
        if self.experts is not None and self.beside_norm is not None:
            fed = self.beside_norm(fed) + self.experts(residual, step)
        fed = self.mlp_post_norm(fed)
        return fed
