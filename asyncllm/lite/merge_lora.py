"""`merge_lora`: merge an adapter into a checkpoint's weights, also one of a kind that cannot be served unmerged.

In addition to the adapters of `adapter_files`, it supports DoRA, factors of embeddings and experts, trained
tokens, and whole modules (`modules_to_save`). It works tensor by tensor, in float32, rounded once to the checkpoint's
dtype.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asyncllm.config import LITE_TOOLS, LiteConfig
from asyncllm.errors import InvalidCheckpoint, InvalidParameter, UnsupportedModel, short
from asyncllm.lite.expert_factors import ExpertFactors, expert_factors
from asyncllm.locate import locate, locate_adapter
from asyncllm.models.build import open_unfilled
from asyncllm.models.loading.adapter_files import AdapterConfig, names_in_files, read_tensors
from asyncllm.models.loading.checkpoint import Checkpoint
from asyncllm.models.loading.output_folder import check_free, copy_companions, output_folder, write_shards
from asyncllm.models.loading.stream import FLOAT_DTYPES

__all__ = ["merge_lora"]

_MERGED = frozenset({"use_dora", "modules_to_save", "bias", "target_parameters", "trainable_token_indices"})
"""Entries of adapter_config.json that are supported for merging only."""

_PREFIX, _BASE, _SAVED = "base_model.model.", "base_layer.", "modules_to_save."
_TOKENS = ".token_adapter.trainable_tokens_delta"

_DECODERS = ("model.language_model.", "language_model.model.", "model.text_model.", "language_model.", "model.", "")
"""Prefixes of a decoder's modules, which differ between versions of transformers and from files."""

_PARTS = {
    "lora_A.weight": "a",
    "lora_B.weight": "b",
    "lora_embedding_A": "embedding a",
    "lora_embedding_B": "embedding b",
    "lora_magnitude_vector": "magnitude",
    "lora_magnitude_vector.weight": "magnitude",
}
"""Suffix of a tensor's name -> its role."""


def merge_lora(
    model: str | os.PathLike[str], work_dir: str = LiteConfig().work_dir, *, adapter: str = "", **options: Any
) -> Path:
    """Write the unquantized checkpoint `model` with `adapter` merged into it, and return the folder.

    Args:
        model: name, folder or hub id of a checkpoint.
        work_dir: folder to write.
        adapter: folder or hub id of a PEFT adapter.
        options: `overwrite`, `revision` and `download_dir` of `LiteConfig`.

    Raises InvalidParameter, ModelNotFound, InvalidCheckpoint for an adapter of another model, and UnsupportedModel for
    an unsupported kind of adapter. If it raises, nothing is written.
    """
    known = LITE_TOOLS["merge_lora"].options
    unknown = [name for name in options if name not in known]
    if unknown:
        raise InvalidParameter(f"merge_lora has no option {unknown[0]!r}. Its options: {', '.join(known)}.", unknown[0])
    config = LiteConfig.from_dict({**options, "work_dir": str(work_dir), "adapter": adapter}).checked()
    if not config.adapter:
        raise InvalidParameter("adapter is not given. Name the folder or hub id of an adapter.", "adapter")
    destination = check_free(Path(config.work_dir), "work_dir", overwrite=config.overwrite)
    folder = locate(model, revision=config.revision, download_dir=config.download_dir)
    if folder.resolve() == destination.resolve():
        raise InvalidParameter("work_dir is the folder of the model. Give another one.", "work_dir")
    checkpoint = Checkpoint.open(folder)
    changes = _Changes(locate_adapter(config.adapter, download_dir=config.download_dir), checkpoint)
    with output_folder(destination, checkpoint.num_bytes) as partial:
        write_shards(changes.applied(), partial)
        copy_companions(folder, partial)
    return destination


class _Changes:
    """The changes of an adapter to a checkpoint. They are all checked before the checkpoint's tensors are read."""

    def __init__(self, folder: Path, checkpoint: Checkpoint) -> None:
        self._folder, self._checkpoint = folder, checkpoint
        self._config = AdapterConfig(folder / "adapter_config.json", allowed=_MERGED)
        self._replaced: dict[str, Tensor] = {}
        """Name in the checkpoint -> replacement of the tensor."""
        self._parts: dict[str, dict[str, Tensor]] = {}
        """Name of a weight in the checkpoint -> its factors."""
        self._modules: dict[str, str] = {}
        """Name of a weight in the checkpoint -> its module in the adapter."""
        self._wrappers: dict[str, dict[str, Tensor]] = {}
        """Module in the adapter -> factors for all of its experts."""
        self._rows: dict[str, tuple[Tensor, Tensor]] = {}
        """Name of an embedding in the checkpoint -> tokens, and the replacements of their rows."""
        self._experts: dict[str, ExpertFactors] = {}
        """Name of a tensor in the checkpoint -> the factors of its change."""
        for name, tensor in read_tensors(folder):
            self._take(name, tensor)
        for name, parts in self._parts.items():
            self._check(name, parts)
        self._take_experts()
        if not (self._parts or self._replaced or self._rows or self._experts):
            raise InvalidCheckpoint(f"{folder} holds no tensor of an adapter. Download it again.")

    def _take(self, name: str, tensor: Tensor) -> None:
        """Keep one tensor of the adapter for the weight that it changes or replaces. Raises InvalidCheckpoint,
        UnsupportedModel."""
        if not tensor.is_floating_point():
            raise InvalidCheckpoint(f"{self._folder}: {short(name)} does not hold floats. Download it again.")
        bare = name.removeprefix(_PREFIX)
        for end, part in _PARTS.items():
            if bare.endswith(f".{end}"):
                module = bare.removesuffix(f".{end}")
                # Copied, because the source is a view of a file.
                factor = tensor.to(torch.float32, copy=True)
                if module.replace(_BASE, "").endswith("experts") or module.endswith(_BASE[:-1]):
                    self._wrappers.setdefault(module, {})[part] = factor
                    return
                weight = self._stored(f"{module}.weight")
                self._parts.setdefault(weight, {})[part] = factor
                self._modules[weight] = module
                return
        if bare.endswith(_TOKENS):
            self._take_rows(bare.removesuffix(_TOKENS), tensor)
            return
        if ".lora_" in bare:
            raise UnsupportedModel(f"{self._folder}: {short(name)} is not merged: its kind of adapter is not known.")
        stored = self._stored(bare.replace(_BASE, "").replace(_SAVED, ""))
        if tuple(tensor.shape) != self._checkpoint.tensors[stored].shape:
            raise UnsupportedModel(
                f"{self._folder}: {short(name)} is {list(tensor.shape)}, and the checkpoint has "
                f"{list(self._checkpoint.tensors[stored].shape)}. A vocabulary of another size is not merged."
            )
        self._replaced[stored] = tensor.clone()

    def _take_rows(self, module: str, rows: Tensor) -> None:
        """Keep the rows of single tokens of an embedding or head."""
        stored = self._stored(f"{module}.weight")
        tokens = self._config.trained_tokens
        if isinstance(tokens, dict):
            tokens = next((each for name, each in tokens.items() if f".{module}".endswith(f".{name}")), None)
        shape = self._checkpoint.tensors[stored].shape
        if (
            not isinstance(tokens, list)
            or not all(type(token) is int and 0 <= token < shape[0] for token in tokens)
            or rows.shape != (len(set(tokens)), *shape[1:])
        ):
            raise InvalidCheckpoint(
                f"{self._folder}: trainable_token_indices are not the tokens of {short(module)}, of which there are "
                f"{list(rows.shape)} numbers."
            )
        # Copied, because the source is a view of a file.
        self._rows[stored] = torch.tensor(tokens), rows.to(torch.float32, copy=True)

    def _take_experts(self) -> None:
        """Find the tensors that are changed by factors of all experts."""
        if not self._wrappers:
            return
        pairs = {}
        for module, parts in self._wrappers.items():
            if set(parts) != {"a", "b"} or any(factor.dim() != 2 for factor in parts.values()):
                raise InvalidCheckpoint(f"{self._folder}: {short(module)} has not both of its factors.")
            pairs[module] = parts["a"], parts["b"]
        model, _ = open_unfilled(self._checkpoint.folder)
        self._experts = expert_factors(self._folder, self._config, pairs, model, self._checkpoint)

    def _stored(self, name: str) -> str:
        """Return the checkpoint's name of an adapter's tensor. Models without a head lack the first part of the name,
        and vision-language models have other parts. Raises InvalidCheckpoint, UnsupportedModel."""
        tensors = self._checkpoint.tensors
        inner = [name.removeprefix(prefix) for prefix in _DECODERS if name.startswith(prefix)]
        others = (name.partition(".")[2], *(first + rest for rest in inner for first in _DECODERS))
        for candidate in (*names_in_files(name), *others):
            if candidate in tensors:
                if tensors[candidate].dtype not in FLOAT_DTYPES:
                    raise UnsupportedModel(
                        f"{self._checkpoint.folder}: {short(candidate)} is quantized. Merge the adapter into the "
                        f"checkpoint that it was made of."
                    )
                return candidate
        raise InvalidCheckpoint(
            f"{self._folder}: the checkpoint has no {short(name)}. Check that the adapter was trained on this model, "
            f"that its weights are not quantized, and that its head is not its embedding."
        )

    def _check(self, name: str, parts: Mapping[str, Tensor]) -> None:
        shape, module = self._checkpoint.tensors[name].shape, self._modules[name]
        kinds = set(parts) - {"magnitude"}
        if kinds not in ({"a", "b"}, {"embedding a", "embedding b"}) or (kinds != {"a", "b"} and "magnitude" in parts):
            raise InvalidCheckpoint(f"{self._folder}: {short(module)} has not both of its factors. Download it again.")
        added = self._product(name, parts).shape if self._fit(parts) else None
        if len(shape) != 2 or added is None or tuple(added) not in (shape, shape[::-1]):
            raise InvalidCheckpoint(
                f"{self._folder}: the factors of {short(module)} do not make up {list(shape)}, the shape of the "
                f"checkpoint's. Check that the adapter was trained on this model."
            )

    @staticmethod
    def _fit(parts: Mapping[str, Tensor]) -> bool:
        a, b = (parts[each] for each in sorted(set(parts) - {"magnitude"}))
        return a.dim() == 2 == b.dim() and len(a) == b.shape[1] > 0

    def _product(self, name: str, parts: Mapping[str, Tensor]) -> Tensor:
        """Return the change of a weight [out, in] or of an embedding [tokens, hidden]."""
        if "a" in parts:
            return parts["b"] @ parts["a"] * self._config.scale(self._modules[name], len(parts["a"]))
        a, b = parts["embedding a"], parts["embedding b"]
        return (b @ a).t() * self._config.scale(self._modules[name], len(a))

    def applied(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor of the checkpoint by name, with its changes."""
        for name, tensor in self._checkpoint.read():
            base = self._replaced.get(name, tensor).to(tensor.dtype)
            if name in self._rows:
                tokens, rows = self._rows[name]
                base = base.index_copy(0, tokens, rows.to(base.dtype))
            if name in self._experts:
                base = (base.float() + self._experts[name].product()).to(base.dtype)
            parts = self._parts.get(name)
            if parts is None:
                yield name, base
                continue
            product = self._product(name, parts)
            # Conv1D weights are [in, out]. For a square one the config says whether it is such a weight.
            square = product.shape[0] == product.shape[1]
            transposed = product.shape != base.shape or (square and self._config.transposed)
            weight = (base.t() if transposed else base).float() + product
            if "magnitude" in parts:
                weight = weight * (parts["magnitude"].view(-1, 1) / weight.norm(dim=1, keepdim=True))
            yield name, (weight.t() if transposed else weight).to(tensor.dtype).contiguous()
