"""Opens a model for an agent: chooses device and dtype, loads the checkpoint, and describes it as `Limits`."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch

from asyncllm.agent.cpu_threads import set_threads
from asyncllm.agent.device.streams import MAX_STEPS_IN_FLIGHT
from asyncllm.config import EngineConfig
from asyncllm.distributed.group import RankGroup
from asyncllm.errors import InvalidParameter, UnsupportedFeature
from asyncllm.kernels.cache import GPU_BLOCK_MULTIPLE
from asyncllm.kernels.quantized_kv import FORMATS
from asyncllm.layers.cache_spec import CacheSpec
from asyncllm.layers.quantized_cache import quantized
from asyncllm.models.build import open_model
from asyncllm.models.config import ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.given_embeddings import take_embeddings
from asyncllm.models.plugins import load_plugins
from asyncllm.models.registry import ModelOptions, read_config
from asyncllm.models.unread_overrides import refuse_unread
from asyncllm.protocol import Limits, StartTimes

__all__ = ["OpenedModel", "check_block_size", "choose_device"]

logger = logging.getLogger(__name__)

_LOOK_AHEAD_BYTES = 16 * 10**9
"""Bytes of weights that the steps in flight should read: about 4 ms of an H200's memory bandwidth."""

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class OpenedModel(NamedTuple):
    """A loaded model, its device and dtype, and the length of its sequences."""

    model: DecoderLM
    device: torch.device
    dtype: torch.dtype
    """Dtype of weights and activations."""
    cache_specs: list[CacheSpec]
    """Cache specs of the layers, in order."""
    max_position: int
    """Maximum number of positions in a session."""
    path: Path
    group: RankGroup | None = None
    """The group of ranks in which this one holds its share of the model."""

    @staticmethod
    def open(
        config: EngineConfig,
        path: Path,
        *,
        times: StartTimes,
        model: DecoderLM | None = None,
        group: RankGroup | None = None,
    ) -> OpenedModel:
        """Load the checkpoint in the folder `path`, or this rank's share of it, unless its `model` is given. `times`
        records the duration.

        Raises ModelError if the checkpoint cannot be loaded, UnsupportedFeature if the model or the device does not
        support `batch_invariant`, `enable_prompt_embeds` or the cache that `quant_policy` asks for, and
        InvalidParameter if `session_len`
        exceeds positions that cannot be extended or the device does not support this block size.
        """
        options: ModelOptions = {
            "session_len": config.session_len,
            "rope_scaling_factor": config.rope_scaling_factor,
            "hf_overrides": config.hf_overrides,
            "model_format": config.model_format,
            "use_logn_attn": config.use_logn_attn,
        }
        device = choose_device(config)
        check_block_size(config, device)
        if device.type == "cuda":
            # The first allocation creates the device's context.
            torch.empty(1, device=device)
        times.lap("device")
        load_plugins(config.plugin or ())
        model_config = read_config(path, **options) if model is None else model.config
        refuse_unread(path, **options)
        max_position = _max_position(config, model_config)
        dtype = _dtype(config, model_config, device)

        def accept(model: DecoderLM) -> list[CacheSpec]:
            return _cache_specs(config, model, dtype, device)

        if model is None:
            by_expert = config.ep > 1
            model = open_model(
                path, dtype=dtype, device=device, group=group, by_expert=by_expert, accept=accept, **options
            )
        if config.enable_prompt_embeds:
            take_embeddings(model)
        set_threads(config, model, device)
        if group is not None:
            rows, row_bytes = config.prefill_budget + config.max_batch_size, model.config.hidden_size * dtype.itemsize
            group.prepare_sums(rows, row_bytes, batch_invariant=config.batch_invariant)
        times.lap("load")
        return OpenedModel(model, device, dtype, accept(model), max_position, path, group)

    def min_over_ranks(self, count: int) -> int:
        """Return the smallest count over all ranks."""
        return count if self.group is None else self.group.all_reduce_min(count)

    def steps_ahead(self) -> int:
        """Return how many steps to launch before the oldest is read: two, or more if steps are so short that the host
        would be late.

        A step reads all weights once. The result depends neither on the rows nor on any measurement, so that batches
        are the same from run to run: a finished row stays in the batch until its last launched step.
        """
        num_bytes = sum(parameter.nbytes for parameter in self.model.parameters())
        return self.min_over_ranks(max(2, min(MAX_STEPS_IN_FLIGHT, math.ceil(_LOOK_AHEAD_BYTES / num_bytes))))

    def limits(self, num_blocks: int, block_size: int, num_slots: int, **more: Any) -> Limits:
        """Return the model's `Limits`, with `more` of their fields."""
        config = self.model.config
        return Limits(
            num_blocks=num_blocks,
            block_size=block_size,
            max_position=self.max_position,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            takes_grammars=config.has_head,
            takes_images=config.vision is not None,
            takes_embeddings=self.model.takes_embeddings,
            has_head=config.has_head,
            labels=config.labels,
            num_slots=num_slots,
            dynamic_rope_from=config.dynamic_rope_from,
            device=str(self.device),
            dtype=str(self.dtype).removeprefix("torch."),
            architecture=config.architecture,
            num_parameters=config.num_parameters or sum(parameter.numel() for parameter in self.model.parameters()),
            model_path=str(self.path),
            **more,
        )


def choose_device(config: EngineConfig) -> torch.device:
    """Return the device that `device_type` selects. Raises InvalidParameter if it is missing."""
    available = torch.cuda.is_available()
    if config.device_type == "cuda" and not available:
        raise InvalidParameter(
            "device_type is 'cuda', but torch finds no CUDA device here. Use device_type='cpu' or 'auto'.",
            "device_type",
        )
    return torch.device("cuda" if available and config.device_type != "cpu" else "cpu")


def check_block_size(config: EngineConfig, device: torch.device) -> None:
    """Raise InvalidParameter for a block size that attention on this device cannot read
    (`kernels.plan_decode_attention`)."""
    if device.type == "cuda" and config.tokens_per_block % GPU_BLOCK_MULTIPLE:
        raise InvalidParameter(
            f"block_size is {config.tokens_per_block}, and attention on a GPU reads blocks of a multiple of "
            f"{GPU_BLOCK_MULTIPLE} tokens. Leave it at 64, or round it up.",
            "block_size",
        )


def _dtype(config: EngineConfig, model: ModelConfig, device: torch.device) -> torch.dtype:
    """Return the dtype of the weights: `auto` means float32 on a CPU and the checkpoint's own dtype on a GPU."""
    name = config.dtype
    if name == "auto":
        return torch.float32 if device.type == "cpu" else _DTYPES[model.dtype]
    return _DTYPES[name]


def _cache_specs(config: EngineConfig, model: DecoderLM, dtype: torch.dtype, device: torch.device) -> list[CacheSpec]:
    """Return the cache specs of the model's layers, in the format of `quant_policy`."""
    chosen = model.captured_context
    if config.batch_invariant and chosen is not None:
        raise UnsupportedFeature(
            f"batch_invariant: the model attends to {chosen} chosen tokens of a longer context, and rounds differently "
            f"in batches with such contexts. Use batch_invariant=False, or a session_len of at most {chosen}.",
            "batch_invariant",
        )
    if config.kv_format is None:
        return model.cache_specs
    if device.type == "cuda" and dtype == torch.float32:
        raise UnsupportedFeature(
            "quant_policy: on a GPU, attention over a quantized cache is computed in 16 bits, and this model in 32. "
            "Use dtype='bfloat16' or quant_policy=0.",
            "quant_policy",
        )
    if device.type == "cuda" and config.kv_format == "fp8" and torch.cuda.get_device_capability(device) < (8, 9):
        raise UnsupportedFeature(
            "quant_policy: this GPU has no numbers of fp8, which take compute capability 8.9 or more. Use "
            "quant_policy=8, which takes as much memory.",
            "quant_policy",
        )
    return [quantized(spec, FORMATS[config.kv_format]) for spec in model.cache_specs]


def _max_position(config: EngineConfig, model: ModelConfig) -> int:
    """Return `session_len` if given, otherwise the number of positions that the model has. Rotary positions have no
    end, and dynamic scaling, whose base grows with the prompt, keeps answers good beyond it."""
    limit = model.max_position
    if config.session_len is None:
        return limit
    if config.session_len > limit and model.dynamic_rope_from is None:
        if model.rope is None or model.position_offset is not None or model.beyond:
            more = f", beyond which {model.beyond}, which is not implemented" if model.beyond else ""
            raise InvalidParameter(
                f"session_len is {config.session_len}, but the model has {limit} positions{more}. Lower session_len.",
                "session_len",
            )
        logger.warning(
            "session_len is %d, and the model is made for %d positions: answers are worse beyond them. Lower it, or "
            "extend the model with rope_scaling_factor.",
            config.session_len,
            limit,
        )
    return config.session_len
