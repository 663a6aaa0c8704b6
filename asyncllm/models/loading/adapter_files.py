"""LoRA adapters in PEFT's format: adapter_config.json and adapter_model.safetensors, or .bin, in one folder.

A tensor is named `base_model.model.<module of the checkpoint>.lora_A.weight`, so the family's weight table tells which
layer, and which part of it, the module is. The tensors determine which modules are adapted; the config determines how
they are scaled. PEFT features that are not implemented are refused by the name of their entry, never ignored.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from asyncllm.errors import InvalidCheckpoint, ModelError, ModelNotFound, UnsupportedModel, short
from asyncllm.kernels.lora import MAX_PARTS
from asyncllm.layers.linear import Linear
from asyncllm.layers.moe import ExactRouter
from asyncllm.locate import WHOLE_MODULES
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.fused import LAYOUTS
from asyncllm.models.loading.adapter_copies import BaseEmbeddings
from asyncllm.models.loading.checkpoint import Checkpoint, read_header
from asyncllm.models.loading.convert import load_pickle
from asyncllm.models.typed_fields import MAX_NUMBER
from asyncllm.models.weights import Target

__all__ = ["MAX_RANK", "AdapterConfig", "AdapterFiles", "Factors", "names_in_files", "read_tensors", "takes_adapters"]

CONFIG_NAME, WEIGHTS_NAME, PICKLE_NAME = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"

MAX_RANK = 1024

_MAX_CONFIG_BYTES = 2**20

_PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"
_NAMED = ".default."
"""PEFT's name for an adapter during training, omitted from saved files."""

_UNUSED_ENTRIES = frozenset(
    {
        *("auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode", "task_type"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "lora_dropout"),
        *("megatron_core", "qalora_group_size", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
        *("ensure_weight_tying", "merge_weights", "runtime_config", "fan_in_fan_out"),
        *("lora_dtype", "lorap_lr_ratio", "lorap_emb_lr"),
    }
)
"""Entries without effect here: about training, about which modules have tensors, about how a base weight is stored."""

_READ_ENTRIES = frozenset({"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias"})

_REASONS: Mapping[str, str] = {
    "use_dora": "DoRA scales every output by the norm of the merged weight",
    "modules_to_save": "whole modules of an adapter's own would be copies for each adapter",
    "lora_bias": "biases of B are not added",
    "trainable_token_indices": "embeddings are the base model's",
    "target_parameters": "experts and routers have no adapters",
}

_MERGE = "Merge the adapter into its base model (`asyncllm lite merge_lora`)."
_MERGE_WITH_PEFT = "Merge the adapter into its base model with PEFT."
_SAVE_AGAIN = "Save the adapter again with PEFT."

_CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initialisations that change the base's weights too."""

_REFUSED_SUFFIXES: Mapping[str, str] = {
    ".lora_magnitude_vector": "use_dora: " + _REASONS["use_dora"],
    ".lora_magnitude_vector.weight": "use_dora: " + _REASONS["use_dora"],
    ".lora_embedding_A": "embeddings have no adapters",
    ".lora_embedding_B": "embeddings have no adapters",
    ".base_layer.weight": "it is PEFT's copy of an embedding or head that target_modules name, and those have no "
    "adapters",
    ".lora_B.bias": "lora_bias: " + _REASONS["lora_bias"],
    ".trainable_tokens_delta": "trainable_token_indices: " + _REASONS["trainable_token_indices"],
}

_WRAPPERS = re.compile(r"\b_(?:orig_mod|fsdp_wrapped_module|checkpoint_wrapped_module)\.")
"""Name segments left by compiled and sharded training."""

_RENAMED = (
    (".mlp.", ".block_sparse_moe."),
    (".shared_experts.", ".shared_mlp."),
    (".shared_experts.", ".shared_expert."),
    (".self_attn.g_proj", ".self_attn.gate_proj"),
)
"""Parts of names in transformers 5, and in files (Mixtral, Hunyuan 3, Laguna, LFM3)."""

_PATTERN = re.compile(r"(?:[\w.\-^$|()\[\]\\]|\(\?:|[\w.\]](?:[*+?]|\{\d{1,3}(?:,\d{0,3})?\}))*")
"""Patterns on which no module name causes excessive backtracking: files may be untrusted."""

_MAX_REPEATS = 3


@dataclass(frozen=True, slots=True)
class Factors:
    """The addition of an adapter to one part of a layer: `b` @ `a`, with the scale in `b`. This rank's share, in
    float32."""

    part: str | None
    a: Tensor
    """[r, in]"""
    b: Tensor
    """[out, r]"""


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """The contents of an adapter that fits its model."""

    layers: Mapping[str, list[Factors]]
    """Factors by the path of a `Linear` in the model."""
    digest: str
    """Digest of the bytes of its files."""

    @property
    def rank(self) -> int:
        """The highest rank among its layers."""
        return max(len(factors.a) for parts in self.layers.values() for factors in parts)

    @staticmethod
    def read(folder: Path, model: DecoderLM, base: Path) -> AdapterFiles:
        """Read the adapter in `folder` for `model`, whose own folder is `base`.

        Raises ModelNotFound if there is none, InvalidCheckpoint if it is malformed or belongs to another model, and
        UnsupportedModel for what is not implemented.
        """
        if not folder.is_dir():
            raise ModelNotFound(f"{folder} is not a folder. Give the folder that holds {CONFIG_NAME} and the weights.")
        digest = _digest(folder)
        config = AdapterConfig(folder / CONFIG_NAME)
        embeddings = BaseEmbeddings(model, base)
        found: dict[str, dict[str, Tensor]] = {}
        for name, tensor in read_tensors(folder):
            end = _A if name.endswith(_A) else _B
            if not name.endswith(end):
                if embeddings.have(_names(model, name.removeprefix(_PREFIX)), tensor):
                    continue
                raise _refusal(folder, name)
            _check_matrix(folder, name, tensor)
            # The source is a view of a file.
            factors = found.setdefault(name.removesuffix(end), {})
            if end in factors:
                raise InvalidCheckpoint(f"{folder}: there are two tensors {short(name)}. Save the adapter with PEFT.")
            factors[end] = tensor.to(torch.float32, copy=True)
        layers: dict[str, list[Factors]] = {}
        for module, pair in found.items():
            if set(pair) != {_A, _B}:
                raise InvalidCheckpoint(
                    f"{folder}: {short(module)} has no {', '.join({_A, _B} - set(pair))}. Download it again."
                )
            name = module.removeprefix(_PREFIX)
            scale = config.scale(name, len(pair[_A]))
            placed = _factors_in_model(folder, model, name, pair[_A], pair[_B] * scale)
            if placed is not None:
                layers.setdefault(placed[0], []).extend(placed[1])
        if not layers:
            raise InvalidCheckpoint(f"{folder} holds no tensor of an adapter. Download it again.")
        for path, parts in layers.items():
            if len({factors.part for factors in parts}) < len(parts):
                raise InvalidCheckpoint(f"{folder}: two modules of the adapter are the same part of {path}.")
        return AdapterFiles(layers, digest)


def takes_adapters(layer: object, path: str) -> TypeGuard[Linear]:
    """Return whether the module at `path` can have adapters: whether it is a linear layer of one decoder block."""
    if not isinstance(layer, Linear) or isinstance(layer, ExactRouter) or layer.has_several_uses:
        return False
    return len(layer.rows) <= MAX_PARTS and path.startswith("layers.")


def read_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor of each tensor of the adapter in `folder`, some of them views of a file. Names are in
    PEFT's form even if a trainer wrote its own. Raises InvalidCheckpoint, and UnsupportedModel if there are weights in
    other files."""
    for file in WHOLE_MODULES:
        if (folder / file).exists():
            raise UnsupportedModel(
                f"{folder}: {file} holds whole modules that were trained with the adapter, and adapters consist of "
                f"{WEIGHTS_NAME} here. Merge both into the base model, by what they were trained with."
            )
    tensors: Iterable[tuple[str, Tensor]]
    if (folder / WEIGHTS_NAME).is_file():
        tensors = Checkpoint(folder, read_header(folder / WEIGHTS_NAME).values()).read()
    elif (folder / PICKLE_NAME).is_file():
        tensors = load_pickle(folder / PICKLE_NAME).items()
    else:
        raise InvalidCheckpoint(
            f"{folder} has neither {WEIGHTS_NAME} nor {PICKLE_NAME}. Give a folder that PEFT has saved an adapter to."
        )
    for name, tensor in tensors:
        name = _WRAPPERS.sub("", name).replace(_NAMED, ".")
        yield name if name.startswith(_PREFIX) else f"{_PREFIX}{name}", tensor


def _digest(folder: Path) -> str:
    """Return the digest of the files that `AdapterFiles.read` reads; empty if they cannot be read."""
    total = hashlib.sha256()
    for name in (CONFIG_NAME, WEIGHTS_NAME if (folder / WEIGHTS_NAME).is_file() else PICKLE_NAME):
        try:
            with (folder / name).open("rb") as file:
                total.update(hashlib.file_digest(file, "sha256").digest())
        except OSError:
            return ""
    return total.hexdigest()


def _check_matrix(folder: Path, name: str, tensor: Tensor) -> None:
    if not tensor.numel():
        raise InvalidCheckpoint(
            f"{folder}: {short(name)} is empty, as it is where weights were not gathered from the processes that "
            f"trained them (DeepSpeed's stage 3). Save the adapter again with all weights gathered."
        )
    if not tensor.is_floating_point():
        raise InvalidCheckpoint(f"{folder}: {short(name)} is not a matrix of floats. Download it again.")
    if tensor.dim() != 2:
        raise UnsupportedModel(
            f"{folder}: {short(name)} is {list(tensor.shape)}, of a convolution, and linear layers take adapters. "
            f"Merge the adapter into its base model."
        )


def _refusal(folder: Path, name: str) -> ModelError:
    """Return the error for a tensor that is neither lora_A nor lora_B."""
    for end, why in _REFUSED_SUFFIXES.items():
        if name.endswith(end):
            return UnsupportedModel(f"{folder}: {short(name)} is not implemented: {why}. {_MERGE}")
    return UnsupportedModel(
        f"{folder}: {short(name)} is another method's, or a weight of its own (modules_to_save or bias), and "
        f"adapters consist of lora_A and lora_B here, and of copies of embeddings that are the base's. {_MERGE}"
    )


def _factors_in_model(
    folder: Path, model: DecoderLM, name: str, a: Tensor, b: Tensor
) -> tuple[str, list[Factors]] | None:
    """Return the layer that the checkpoint's module `name` is, or is parts of, and the additions to them; None if it
    takes no adapter and needs none, because training has left `b` at zero."""
    target, layer = _find_layer(folder, model, name)
    of_expert = target is not None and any(expert is not None for _, _, expert in target.keys)
    if target is None or of_expert or not takes_adapters(layer, target.module):
        if not b.any():  # towers in training on texts alone, keys of layers that read another layer's
            return None
        raise UnsupportedModel(
            f"{folder}: {short(name)} takes no adapter. Linear layers of attention and MLPs do; experts, routers in "
            f"float32, embeddings, heads, vision towers, kv_b_proj of latent attention and blocks that several layers "
            f"share do not. {_MERGE}"
        )
    names = [part for _, part, _ in target.keys]
    shapes = [layer.whole_shapes[part] for part in names]
    out = sum(shape[0] for shape in shapes)
    if len(a) != b.shape[1] or a.shape[1] != shapes[0][1] or len(b) != out or not len(a):
        raise InvalidCheckpoint(
            f"{folder}: {short(name)} has lora_A {list(a.shape)} and lora_B {list(b.shape)}, and the model's layer is "
            f"[{out}, {shapes[0][1]}]. Check that the adapter was trained on this model."
        )
    if len(a) > MAX_RANK:
        raise UnsupportedModel(f"{folder}: {short(name)} has rank {len(a)}, and the highest is {MAX_RANK}. {_MERGE}")
    pieces = LAYOUTS[target.layout or "flat"].split(b, [shape[0] for shape in shapes], layer)
    shares = [layer.share_of_factors(part, a, piece) for part, piece in zip(names, pieces, strict=True)]
    return target.module, [Factors(part, *share) for part, share in zip(names, shares, strict=True)]


def _find_layer(folder: Path, model: DecoderLM, name: str) -> tuple[Target | None, nn.Module | None]:
    """Return the layer that the checkpoint's module `name` is; None if it is left out. Raises InvalidCheckpoint."""
    for each in _names(model, name):
        with suppress(InvalidCheckpoint, AttributeError):
            target = model.weight_map.resolve(f"{each}.weight")
            return target, None if target is None else model.get_submodule(target.module)
    raise InvalidCheckpoint(
        f"{folder}: the model has no module {short(name)}. Check that the adapter was trained on this model."
    )


def _names(model: DecoderLM, name: str) -> Iterator[str]:
    """Yield what the model's files may call a module or tensor."""
    # transformers names its module `model` where the files have names of their own.
    inner = name.removeprefix("model.")
    yield from names_in_files(name if inner == name else model.base_prefix + inner)


def names_in_files(name: str) -> Iterator[str]:
    """Yield what files may call a module or tensor that transformers calls so."""
    yield name
    for new, old in _RENAMED:
        if new in name:
            yield name.replace(new, old)


class AdapterConfig:
    """adapter_config.json, checked."""

    def __init__(self, file: Path, *, allowed: frozenset[str] = frozenset()) -> None:
        """Read `file`. `allowed`: entries not to refuse, because the caller handles them. Raises InvalidCheckpoint, and
        UnsupportedModel for what is not implemented."""
        self._file = file
        entries = self._read()
        if "lora_parameters" in entries:
            raise UnsupportedModel(
                f"{file}: this is an adapter of mlx-lm, which stores factors in another layout. Fuse it with mlx-lm, "
                f"or convert it to PEFT's form."
            )
        if entries.get("peft_type") != "LORA":
            raise UnsupportedModel(
                f"{file}: peft_type is {short(entries.get('peft_type'))}, and only LORA is implemented. "
                f"{_MERGE_WITH_PEFT}"
            )
        for name, value in entries.items():
            if value and name not in _UNUSED_ENTRIES | _READ_ENTRIES | allowed:
                self._check_other(name, value)
        if entries.get("bias", "none") != "none" and "bias" not in allowed:
            raise UnsupportedModel(
                f"{file}: bias is {short(entries['bias'])}, and adapters have no biases here ('none'). {_MERGE}"
            )
        self._rank = self._number("r", entries.get("r"), whole=True)
        self._alpha = self._number("lora_alpha", entries.get("lora_alpha"))
        self._rslora = self._flag("use_rslora", entries.get("use_rslora"))
        self.transposed = self._flag("fan_in_fan_out", entries.get("fan_in_fan_out"))
        """Whether the base's weights are [in, out]."""
        self._ranks = self._patterns("rank_pattern", entries.get("rank_pattern"), whole=True)
        self._alphas = self._patterns("alpha_pattern", entries.get("alpha_pattern"))
        self.trained_tokens = entries.get("trainable_token_indices")
        """Tokens whose embeddings were trained, or by module; unchecked."""
        parameters = entries.get("target_parameters")
        self._parameters = parameters if isinstance(parameters, list) else []
        targets = entries.get("target_modules")
        self._targets = targets if isinstance(targets, list) else None
        """Names; None if a pattern or "all-linear" stands for them, which the tensors determine anyway."""

    def _read(self) -> dict[str, Any]:
        file = self._file
        try:
            if file.stat().st_size > _MAX_CONFIG_BYTES:
                raise InvalidCheckpoint(f"{file} is larger than {_MAX_CONFIG_BYTES} bytes: it is not PEFT's.")
            entries = json.loads(file.read_bytes())
        except FileNotFoundError:
            raise InvalidCheckpoint(f"{file.parent} has no {file.name}. Give the folder of a PEFT adapter.") from None
        except (OSError, ValueError, RecursionError) as error:
            raise InvalidCheckpoint(f"{file} cannot be read as JSON ({error}). Download it again.") from error
        if not isinstance(entries, dict):
            raise InvalidCheckpoint(f"{file} is not a JSON object. Download it again.")
        return entries

    def _check_other(self, name: str, value: Any) -> None:
        if name == "init_lora_weights" and not (isinstance(value, str) and value.lower().startswith(_CHANGED_BASE)):
            return
        if name == "init_lora_weights":
            why = "the base's weights were changed with it. Let PEFT convert it when it is saved."
        elif name in _REASONS:
            why = f"{_REASONS[name]}. {_MERGE}"
        else:
            why = f"it is not known here. {_MERGE_WITH_PEFT}"
        raise UnsupportedModel(f"{self._file}: {short(name)} = {short(value)} is not implemented: {why}")

    def _flag(self, name: str, value: Any) -> bool:
        if value not in (None, False, True) or isinstance(value, float):
            raise InvalidCheckpoint(
                f"{self._file}: {name} is {short(value)}, and has to be true or false. {_SAVE_AGAIN}"
            )
        return bool(value)

    def _number(self, name: str, value: Any, *, whole: bool = False) -> float:
        number = type(value) is int or (type(value) is float and not whole)
        if not number or not abs(value) <= MAX_NUMBER or (whole and value < 1):
            kind = "an integer from 1 on" if whole else "a finite number"
            raise InvalidCheckpoint(f"{self._file}: {name} is {short(value)}, and has to be {kind}. {_SAVE_AGAIN}")
        return float(value)

    def _patterns(self, name: str, value: Any, *, whole: bool = False) -> list[tuple[re.Pattern[str], float]]:
        if not isinstance(value or {}, dict):
            raise InvalidCheckpoint(f"{self._file}: {name} is {short(value)}, and has to be an object. {_SAVE_AGAIN}")
        patterns = []
        for key, number in (value or {}).items():
            if not _PATTERN.fullmatch(key) or len(re.findall(r"[*+{]|[^(]\?", key)) > _MAX_REPEATS:
                raise UnsupportedModel(
                    f"{self._file}: the pattern {short(key)} of {name} is too involved to be searched. "
                    f"Name the modules one by one."
                )
            try:
                patterns.append((re.compile(rf"(.*\.)?({key})$"), self._number(name, number, whole=whole)))
            except re.error as error:
                raise InvalidCheckpoint(
                    f"{self._file}: {short(key)} in {name} is not a pattern ({error}). Correct the file."
                ) from None
        return patterns

    def targets_parameter(self, name: str) -> bool:
        """Return whether target_parameters name a parameter."""
        return any(name == each or name.endswith(f".{each}") for each in self._parameters)

    def scale(self, module: str, rank: int) -> float:
        """Return the factor on the product of a module's or parameter's factors, whose tensors have this rank."""
        if self.targets_parameter(f"{module}.weight"):
            module = f"{module}.weight"
        if not (self._targets is None or self.targets_parameter(module)) and not any(
            module == name or (isinstance(name, str) and module.endswith(f".{name}")) for name in self._targets
        ):
            raise InvalidCheckpoint(
                f"{self._file}: target_modules {short(self._targets)} do not name {short(module)}, which has tensors. "
                f"Take both files from the same adapter."
            )
        expected = next((number for pattern, number in self._ranks if pattern.match(module)), self._rank)
        if rank != expected:
            raise InvalidCheckpoint(
                f"{self._file}: {short(module)} is of rank {expected:g} by r and rank_pattern, and its tensors "
                f"are of rank {rank}. Take both files from the same adapter."
            )
        alpha = next((number for pattern, number in self._alphas if pattern.match(module)), self._alpha)
        return alpha / (math.sqrt(rank) if self._rslora else rank)
