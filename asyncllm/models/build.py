"""Opens a checkpoint: builds its model on the meta device, divides it among ranks, and fills it."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Unpack

import msgspec
import torch

from asyncllm.distributed.group import RankGroup
from asyncllm.errors import InvalidCheckpoint, UnsupportedModel
from asyncllm.layers.layer import Layer, cache_members
from asyncllm.layers.linear_method import Weighted
from asyncllm.layers.moe import MoE
from asyncllm.layers.rank_sums import sum_in_norms
from asyncllm.models.config import ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.extrapolation import check_log_scaling
from asyncllm.models.head import resolve_head
from asyncllm.models.loading.checkpoint import Checkpoint
from asyncllm.models.loading.load_plan import expected_numbers, load
from asyncllm.models.loading.quantized import attach, open_checkpoint
from asyncllm.models.loading.stream import FLOAT_DTYPES
from asyncllm.models.module_map import replace_layers
from asyncllm.models.registry import ModelOptions, configure, families

__all__ = ["divide", "open_model", "open_unfilled"]


def open_model(
    path: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    group: RankGroup | None = None,
    by_expert: bool = False,
    accept: Callable[[DecoderLM], object] = lambda model: None,
    **options: Unpack[ModelOptions],
) -> DecoderLM:
    """Build the model of folder `path` and fill it from the folder's safetensors files.

    In a group of several ranks, the model is this rank's share; `by_expert`: the share has whole experts instead of
    some features of each. `accept` gets the model before its weights are read, and raises to refuse it.

    Raises:
        InvalidCheckpoint: a file is missing, malformed or inconsistent with the others.
        UnsupportedModel: the architecture or one of its settings is not implemented.
        UnsupportedFeature: use_logn_attn, if the model's layers cannot scale their queries.
    """
    family, config, scheme = configure(path, **options)
    checkpoint = open_checkpoint(path, scheme)
    model = _unfilled(family, config, checkpoint)
    model.scheme = scheme
    if options.get("use_logn_attn"):
        check_log_scaling(model)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if scheme is not None:
        checkpoint = attach(model, checkpoint, scheme)
    wanted = expected_numbers(model)
    # Integers may be packed, with several weights in each.
    stored = sum(
        math.prod(entry.shape) if entry.dtype in FLOAT_DTYPES else 2 * (entry.end - entry.start)
        for entry in checkpoint.tensors.values()
    )
    if wanted > 2 * stored:
        # Such a file cannot load, and may need more memory than there is; load() reports smaller differences.
        raise InvalidCheckpoint(
            f"{path}: config.json describes {wanted:,} numbers, but the safetensors files hold {stored:,}. Check that "
            f"config.json belongs to these weights and that no shard is missing."
        )
    if group is not None:
        divide(model, group, by_expert=by_expert)
    accept(model)
    model.allocate(dtype, device)
    load(model, checkpoint, model.weight_map)
    model.config = msgspec.structs.replace(model.config, num_parameters=num_parameters)
    model.eval()
    cache_members(model)
    return model


def open_unfilled(path: Path) -> tuple[DecoderLM, Checkpoint]:
    """Return the model of folder `path`, on the meta device, and its checkpoint, whose weights are unquantized.

    For callers that fill it layer by layer. Raises like `open_model`, and UnsupportedModel for quantized weights.
    """
    family, config, scheme = configure(path)
    if scheme is not None:
        raise UnsupportedModel(f"{path}: the weights are quantized already. Use the checkpoint that they were made of.")
    checkpoint = Checkpoint.open(path)
    return _unfilled(family, config, checkpoint), checkpoint


def _unfilled(family: type[DecoderLM], config: ModelConfig, checkpoint: Checkpoint) -> DecoderLM:
    if config.vision is None:
        config = resolve_head(config, family, checkpoint, base_class=config.architecture not in families())
    elif any(name.endswith(family.head_name) for name in checkpoint.tensors):
        config = msgspec.structs.replace(config, tied=False)
    with torch.device("meta"):
        model = family(config)
    replace_layers(model)
    return model


def divide(model: DecoderLM, group: RankGroup, *, by_expert: bool = False) -> None:
    """Reduce a model on the meta device to the share of the group's rank, see `open_model`. Raises UnsupportedModel if
    it cannot be divided."""
    modules = list(model.modules())
    if by_expert:
        mixtures = [module for module in modules if isinstance(module, MoE)]
        if not mixtures:
            raise UnsupportedModel(f"ep={group.size}: {model.config.architecture} has no experts. Leave ep out.")
        for mixture in mixtures:
            mixture.divide_experts(group)
    # Weights first, because modules built from them ask how many heads are left.
    for module in sorted(modules, key=lambda module: not isinstance(module, Weighted)):
        if isinstance(module, Layer):
            module.divide(group)
    sum_in_norms(list(model.layers), model.norm, group)
