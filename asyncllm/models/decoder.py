"""DecoderLM: embedding, blocks, final norm, output embedding. Families say what the blocks are."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from itertools import islice
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from asyncllm import kernels
from asyncllm.kernels import PagedKV, Rotation
from asyncllm.layers.block import Block
from asyncllm.layers.embedding import Embedding, OutputEmbedding, TiedOutputEmbedding
from asyncllm.layers.linear import Linear
from asyncllm.layers.norm import RMSNorm
from asyncllm.layers.rotary import RotaryEmbedding
from asyncllm.layers.step_inputs import SampledRows, StepInputs
from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.weights import WeightMap

__all__ = ["DecoderLM"]


class DecoderLM(nn.Module):
    """A decoder-only language model over a paged cache.

    `registry.open_model` builds it on the meta device, calls `allocate`, and fills it through `models.weights.load`.
    """

    weights: ClassVar[WeightMap]
    """Checkpoint modules -> ours."""
    tied_head: ClassVar[str] = "lm_head.weight"
    """The checkpoint's tensor that a tied model has no use for."""
    tiny: ClassVar[dict[str, Any]]
    """Entries of a config.json with every feature of the family switched on, small enough for tests."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = self.embedding()
        self.layers = nn.ModuleList(self.block(layer) for layer in range(config.num_layers))
        self.norm = self.final_norm()
        self.head = self.output()
        self.rotary: RotaryEmbedding

    @staticmethod
    @abstractmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        """Read config.json. Raises InvalidCheckpoint and UnsupportedModel."""

    @abstractmethod
    def block(self, layer: int) -> Block:
        """The block of layer `layer`, counted from 0."""

    def embedding(self) -> Embedding:
        return Embedding(self.config.vocab_size, self.config.hidden_size)

    def final_norm(self) -> RMSNorm:
        return RMSNorm(self.config.hidden_size, self.config.rms_eps)

    def output(self, softcap: float | None = None) -> nn.Module:
        if self.config.tied:
            return TiedOutputEmbedding(self.embed, softcap=softcap)
        return OutputEmbedding(self.config.hidden_size, self.config.vocab_size, softcap=softcap)

    @property
    def weight_map(self) -> WeightMap:
        """This model's table: a tied head needs no tensor, and ignores the copy that some checkpoints carry."""
        return self.weights.ignoring(self.tied_head) if self.config.tied else self.weights

    def allocate(self, dtype: torch.dtype, device: torch.device) -> None:
        """Replace the parameters by uninitialised ones of `dtype` on `device`; a layer may ask for its own."""
        for module in self.modules():
            own = getattr(module, "parameter_dtype", dtype)
            for name, parameter in list(module.named_parameters(recurse=False)):
                empty = torch.empty(parameter.shape, dtype=own, device=device)
                setattr(module, name, nn.Parameter(empty, requires_grad=False))
        self.rotary = RotaryEmbedding(self.config.rope, device)

    def make_batch_invariant(self) -> None:
        """Take products that round every row alike, whatever the batch."""
        for module in self.modules():
            if isinstance(module, Linear | TiedOutputEmbedding):
                module.product = kernels.linear_invariant

    def forward(self, inputs: StepInputs, caches: Sequence[PagedKV]) -> Tensor:
        """One step: writes the T tokens' keys and values into the caches, one per layer.

        -> hidden states after the final norm [T, hidden].
        """
        branch, residual = self._layers(inputs, caches, len(self.layers))
        return self.norm.add(branch, residual)[0]

    def before_last(self, inputs: StepInputs, caches: Sequence[PagedKV], out: Tensor | None = None) -> Tensor:
        """The same step up to its last layer -> the residual stream [T, hidden], in `out` if given.

        For callers who want the hidden states of some tokens and go on with `last_hidden`. The model has two layers or
        more.
        """
        branch, residual = self._layers(inputs, caches, len(self.layers) - 1)
        return torch.add(residual, branch, out=out)

    def last_hidden(
        self, residual: Tensor, inputs: StepInputs, caches: Sequence[PagedKV], sampled: SampledRows
    ) -> Tensor:
        """The last layer and the final norm, for some tokens: -> their hidden states [R, hidden].

        The other tokens stop where the last layer has their keys and values: a prompt saves most of one layer.
        """
        last: Block = self.layers[-1]  # type: ignore[assignment]
        branch, selected = last(None, residual, self._rotation(inputs), inputs, caches[-1], sampled)
        hidden: Tensor = self.norm.add(branch, selected)[0]
        return hidden

    def _rotation(self, inputs: StepInputs) -> Rotation:
        if inputs.rotation is None:
            inputs.rotation = self.rotary(inputs.positions, inputs.rope_lens)
        return inputs.rotation

    def _layers(self, inputs: StepInputs, caches: Sequence[PagedKV], count: int) -> tuple[Tensor, Tensor]:
        """The embedding and the first `count` layers -> (branch, residual)."""
        rotation = self._rotation(inputs)
        residual: Tensor = self.embed(inputs.input_ids)
        branch: Tensor | None = None
        for block, cache in islice(zip(self.layers, caches, strict=True), count):
            branch, residual = block(branch, residual, rotation, inputs, cache)
        if branch is None:
            raise ValueError("a decoder needs at least one layer")
        return branch, residual

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """hidden [R, hidden] of `forward` -> logits [R, vocab] after the family's final softcap, of the model's type or
        float32; in `out` if given, of that shape and type."""
        logits: Tensor = self.head(hidden, out)
        return logits
