"""Run a model layer by layer, with the weights of only one layer on the device."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from asyncllm.errors import UnsupportedModel
from asyncllm.layers.block import AnyAttention, AnyBlock
from asyncllm.layers.layer_inputs import GatedLayerInput
from asyncllm.layers.linear import Linear
from asyncllm.layers.prompt_step import empty_cache, prompt_step
from asyncllm.layers.shared_block import HybridBlock
from asyncllm.layers.shared_keys import BorrowingAttention
from asyncllm.layers.sparse_latent_attention import SparseLatentAttention
from asyncllm.layers.step_inputs import StepInputs
from asyncllm.models.build import open_unfilled
from asyncllm.models.decoder import allocate
from asyncllm.models.loading.load_plan import plan_load

__all__ = ["Batch", "Comparison", "Walk"]

_BLOCK_SIZE = 64
"""Maximum number of tokens per block of the cache, which exists for one layer and batch."""


@dataclass(slots=True)
class Batch:
    """Sequences that run together, and their progress."""

    lens: Sequence[int]
    """Number of tokens of each sequence."""
    ids: Tensor
    """int64 [T]"""
    hidden: Tensor
    """[T, hidden]: the residual stream after the last layer that ran, in host memory."""


class Comparison(NamedTuple):
    """Means over the tokens of some texts."""

    loss_before: float
    """Negative log-likelihood."""
    loss_after: float
    divergence: float
    """Kullback-Leibler divergence of the new distribution from the old one, in nats."""


class Walk:
    """The model in a folder, with unquantized weights. Raises as `build.open_unfilled` and `load_plan.plan_load`
    do."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self.model, self.checkpoint = open_unfilled(folder)
        self.dtype, self.device = dtype, device
        # Chunks of attention begin with a block.
        self._block_size = math.gcd(_BLOCK_SIZE, *(each for each in self.model.config.chunks if each is not None))
        self.plan = plan_load(self.model, self.checkpoint, self.model.weight_map)
        self.model.place_rotaries(device)
        self._names: dict[str, list[str]] = defaultdict(list)
        for name, target in self.plan.targets.items():
            self._names[_part_of(target.module)].append(name)

    @property
    def layers(self) -> Sequence[AnyBlock]:
        return list(self.model.layers)  # type: ignore[arg-type]

    def names(self, layer: int) -> Sequence[str]:
        """Return the names of the checkpoint's tensors that fill a layer."""
        return self._names[f"layers.{layer}"]

    @property
    def modules_beside_layers(self) -> list[str]:
        """The checkpoint's modules with a matrix that is copied: those of products outside the layers, and of parts
        that the model leaves out, such as towers of sounds. Without embeddings, and the tower of images."""
        matrices = [name for name, entry in self.checkpoint.tensors.items() if len(entry.shape) == 2]
        return [name.removesuffix(".weight") for name in matrices if name.endswith(".weight") and self._is_beside(name)]

    def _is_beside(self, name: str) -> bool:
        target = self.plan.targets.get(name)
        if target is None:
            return not name.endswith(self.model.head_name)
        part = _part_of(target.module)
        return not part.startswith(("layers.", "head", "vision")) and isinstance(self.plan.owner(name), Linear)

    @torch.no_grad()
    def begin(self, sequences: Sequence[Sequence[int]], tokens: int) -> list[Batch]:
        """Return the sequences in batches of about `tokens` tokens, before the first layer. Raises UnsupportedModel for
        a model whose layers read the output of earlier layers or other parts of the model."""
        if not sequences:
            return []
        if any(_reads_earlier_layers(module) for module in self.model.modules()):
            raise UnsupportedModel(
                f"{self.checkpoint.folder}: layers read others' keys and values or index, or embeddings of their "
                f"own, or share weights, so they cannot run one at a time on texts. Use blocked_fp8, or "
                f"calib_samples = 0, which need no texts."
            )
        chosen: list[list[Sequence[int]]] = []
        room = 0
        for sequence in sequences:
            if not chosen or len(sequence) > room:
                chosen.append([])
                room = tokens
            chosen[-1].append(sequence)
            room -= len(sequence)
        parts = [part for part in ("embed", "positions", "embed_norm") if getattr(self.model, part) is not None]
        for part in parts:
            self.fill(part)
        batches = []
        for each in chosen:
            ids = torch.tensor([token for sequence in each for token in sequence])
            batch = Batch([len(sequence) for sequence in each], ids, torch.empty(0))
            batch.hidden = self.model.embedded(self._step(batch, [])).cpu()
            batches.append(batch)
        for part in parts:
            self.empty(part)
        return batches

    def fill(self, part: str) -> nn.Module:
        """Read the weights of a part of the model, such as "layers.3", and return the part."""
        module = self.model.get_submodule(part)
        allocate(module, self.dtype, self.device)
        with closing(self.checkpoint.read(self._names[part])) as tensors:
            for name, tensor in tensors:
                self.plan.copy(name, tensor)
        return module

    def empty(self, part: str) -> None:
        """Release the weights of a part."""
        allocate(self.model.get_submodule(part), self.dtype, torch.device("meta"))

    @torch.no_grad()
    def run(self, layer: int, batch: Batch) -> Tensor:
        """Return the residual stream of a batch after a filled layer [T, hidden], in host memory."""
        block = self.layers[layer]
        caches: list[object] = [None] * len(self.model.cache_specs)
        for module in block.modules():
            if isinstance(module, AnyAttention):
                caches[module.layer] = empty_cache(
                    module.cache_spec, batch.lens, block_size=self._block_size, dtype=self.dtype, device=self.device
                )
        step = self._step(batch, caches)
        self.model.place(step)
        branch, residual = block(None, batch.hidden.to(self.device, copy=True), step)
        hidden: Tensor = residual + branch
        return hidden.cpu()

    @torch.no_grad()
    def compare(self, before: Sequence[Batch], after: Sequence[Batch]) -> Comparison:
        """Compare the predictions of two runs of the same sequences after the last layer."""
        # A tied head is the embedding.
        parts = ("norm", "head" if "head" in self._names else "embed")
        for part in parts:
            self.fill(part)
        sums, count = torch.zeros(3, dtype=torch.float64), 0
        for batches in zip(before, after, strict=True):
            ids, start = batches[0].ids.to(self.device), 0
            for length in batches[0].lens:
                rows = slice(start, start + length - 1)
                first, second = (
                    self.model.logits(self.model.norm(batch.hidden[rows].to(self.device))).float().log_softmax(-1)
                    for batch in batches
                )
                wanted = ids[start + 1 : start + length]
                losses = [nn.functional.nll_loss(each, wanted, reduction="sum") for each in (first, second)]
                divergence = nn.functional.kl_div(second, first, reduction="sum", log_target=True)
                sums += torch.stack([*losses, divergence]).cpu()
                count, start = count + length - 1, start + length
        for part in parts:
            self.empty(part)
        return Comparison(*(float(each) / max(1, count) for each in sums))

    def _step(self, batch: Batch, caches: Sequence[object]) -> StepInputs:
        """Return all sequences of a batch as prompts, each with blocks of its own."""
        return prompt_step(batch.ids, batch.lens, caches, block_size=self._block_size, device=self.device)


def _reads_earlier_layers(module: nn.Module) -> bool:
    """Return whether a layer reads what an earlier one or another part of the model computes, or has its weights."""
    shares = isinstance(module, SparseLatentAttention) and module.index is None
    return shares or isinstance(module, BorrowingAttention | GatedLayerInput | HybridBlock)


def _part_of(path: str) -> str:
    """Return the part of the model that contains the module at `path`."""
    first, _, rest = path.partition(".")
    return f"{first}.{rest.partition('.')[0]}" if first == "layers" else first
