"""Architectures by their names in config.json. Every module of `asyncllm.models` is scanned for families."""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypedDict, TypeVar, Unpack

import msgspec
import torch

from asyncllm.distributed.group import RankGroup
from asyncllm.errors import InvalidCheckpoint, ModelError, UnsupportedModel, short
from asyncllm.layers.layer import Layer, cache_members
from asyncllm.layers.linear_method import Weighted
from asyncllm.layers.moe import MoE
from asyncllm.layers.rank_sums import sum_in_norms
from asyncllm.models.checkpoint import Checkpoint
from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.extrapolation import check_log_scaling, with_log_scaling
from asyncllm.models.head import SCORING, resolve_head
from asyncllm.models.load_plan import expected_numbers, load
from asyncllm.models.module_map import MODULE_MAP, replace_layers
from asyncllm.models.quantized import attach, open_checkpoint
from asyncllm.models.refused import REFUSED_MODELS
from asyncllm.models.stream import FLOAT_DTYPES
from asyncllm.models.vision.parts import Composed
from asyncllm.models.vision_language import VISION_MODELS, composed
from asyncllm.quant.scheme import Scheme, refuse_mlx, scheme_of
from asyncllm.text.checkpoint_files import BY_MODEL_TYPE

__all__ = [
    "ModelOptions",
    "described",
    "families",
    "open_model",
    "open_unfilled",
    "read_config",
    "register",
    "register_all_or_nothing",
]

Family = TypeVar("Family", bound=type[DecoderLM])

_FAMILIES: dict[str, type[DecoderLM]] = {}
_MODELS: dict[str, str] = {}
"""Architecture -> the models that use it."""

_WITH_HEAD, _WITHOUT_HEAD = ("ForCausalLM", "LMHeadModel"), "Model"
"""Endings of the class names of one decoder: Qwen3ForCausalLM or GPT2LMHeadModel, Qwen3Model or GPT2Model."""


_WRITTEN_AS: Mapping[tuple[str, str], str] = {
    ("exaone", "LlamaForCausalLM"): "ExaoneForCausalLM",
    ("sarvam_moe", "Glm4MoeForCausalLM"): "SarvamMoEForCausalLM",
}
"""(model_type, class) -> the class that published files name, where transformers 5.24 names another in files whose
tensors have the published names."""


def register(*architectures: str, **models: str) -> Callable[[Family], Family]:
    """Decorate a family that serves checkpoints whose config.json names one of `architectures`, or of `models`, each
    with the models that use it. Raises ValueError for a name that another family has."""

    def enter(family: Family) -> Family:
        for architecture in (*architectures, *models):
            other = _FAMILIES.setdefault(architecture, family)
            if other is not family:
                raise ValueError(f"{architecture} is registered by {other.__module__} and {family.__module__}")
        _MODELS.update(models)
        return family

    return enter


@contextmanager
def register_all_or_nothing() -> Iterator[None]:
    """Keep what is registered in the block, unless the block raises."""
    tables: list[dict[Any, Any]] = [_FAMILIES, _MODELS, MODULE_MAP]
    kept = [(each, dict(each)) for each in tables]
    try:
        yield
    except BaseException:
        for now, before in kept:
            now.clear()
            now.update(before)
        raise
    families.cache_clear()


@cache
def families() -> Mapping[str, type[DecoderLM]]:
    """Return architecture name -> family, of every module in `asyncllm.models` and of those that installed packages
    name as entry points of the group `asyncllm.models`. Raises ModelError if one of the latter cannot be imported."""
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        importlib.import_module(f"asyncllm.models.{module.name}")
    for point in entry_points(group="asyncllm.models"):
        try:
            point.load()
        except Exception as error:
            package = point.dist.name if point.dist is not None else "an installed package"
            raise ModelError(
                f"{package} names {point.value} as a module with families of models, which cannot be imported: "
                f"{error!r}. Mend or uninstall it."
            ) from error
    return dict(sorted(_FAMILIES.items()))


def described() -> Mapping[str, str]:
    """Return architecture name -> the models that use it, where given."""
    families()
    return _MODELS


class ModelOptions(TypedDict, total=False):
    """Options of a checkpoint in addition to its files. The fields are those of `EngineConfig`."""

    session_len: int | None
    """A longrope model uses its long divisors if and only if this exceeds the original context."""
    rope_scaling_factor: float
    """Above 0: dynamic NTK scaling by that factor."""
    hf_overrides: Mapping[str, Any] | None
    """Entries that replace those of config.json."""
    model_format: str | None
    """See `quant.scheme_of`."""
    use_logn_attn: bool
    """Whether to scale queries with `LogScaling`."""


def read_config(path: Path, **options: Unpack[ModelOptions]) -> ModelConfig:
    """Return the config that `open_model` would build from the folder `path`, without weights. Raises the same
    errors."""
    return _configure(path, **options)[1]


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
    family, config, scheme = _configure(path, **options)
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
    family, config, scheme = _configure(path)
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


def _configure(
    path: Path,
    *,
    session_len: int | None = None,
    rope_scaling_factor: float = 0.0,
    hf_overrides: Mapping[str, Any] | None = None,
    model_format: str | None = None,
    use_logn_attn: bool = False,
) -> tuple[type[DecoderLM], ModelConfig, Scheme | None]:
    hf = HFConfig.open(path, overrides=hf_overrides, session_len=session_len, rope_scaling_factor=rope_scaling_factor)
    refuse_mlx(hf.fields, path)
    names = hf.fields.get("architectures")
    if names in (None, []):
        model_type = hf.fields.get("model_type")
        names = [_of_model_type(model_type)] if isinstance(model_type, str) else None
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise InvalidCheckpoint(
            f"{hf.source}: architectures must be a list of names, for example ['LlamaForCausalLM']. Correct the file."
        )
    names = [_WRITTEN_AS.get((str(hf.fields.get("model_type")), name), name) for name in names]

    def completed(config: ModelConfig) -> ModelConfig:
        named = hf.fields.get("id2label")
        if isinstance(named, dict):
            config = msgspec.structs.replace(config, label_names={str(key): str(name) for key, name in named.items()})
        return _with_dtype(with_log_scaling(config) if use_logn_attn else config, path)

    for name in names:
        refused = REFUSED_MODELS.get(name)
        if refused is not None:
            raise UnsupportedModel(
                f"{hf.source}: {name} ({refused.models}) is not implemented: {refused.why}. The nearest that is: "
                f"{refused.nearest}."
            )
        parts = composed(hf, name)
        if parts is not None:
            decoder, config = _composed_config(parts, name)
            return decoder, completed(config), scheme_of(parts.text.fields, path, model_format)
        family = _find(name)
        if family is not None:
            return family, completed(family.configure(hf, name)), scheme_of(hf.fields, path, model_format)
    remote = "Its own code (auto_map) is never run. " if hf.fields.get("auto_map") else ""
    every = [*families(), *VISION_MODELS]
    near = next((f"The nearest name is {each}. " for each in get_close_matches(names[0], every, 1)), "")
    raise UnsupportedModel(
        f"{hf.source}: architectures = {names} is not implemented. {remote}{near}Implemented: {', '.join(every)}."
    )


def _composed_config(parts: Composed, architecture: str) -> tuple[type[DecoderLM], ModelConfig]:
    """Return the family of a vision-language model's decoder, and its config with the tower's."""
    name = parts.decoder if _find(parts.decoder) is not None else _of_model_type(parts.decoder)
    family = _find(name)
    if family is None:
        raise UnsupportedModel(f"{parts.text.source}: a decoder of {short(parts.decoder)} is not implemented.")
    config = family.configure(parts.text, name)
    rope = config.rope
    if parts.axes and rope is not None:
        if 2 * len(parts.axes) != rope.dim:
            parts.text.invalid("rope_scaling", f"whose mrope_section does not add up to half of {rope.dim} features")
        rope = msgspec.structs.replace(rope, axes=parts.axes)
    return family, msgspec.structs.replace(config, architecture=architecture, vision=parts.vision, rope=rope)


def _with_dtype(config: ModelConfig, path: Path) -> ModelConfig:
    """Return a config that names the checkpoint's dtype."""
    return config if config.dtype else msgspec.structs.replace(config, dtype=_stored_dtype(path))


def _stored_dtype(path: Path) -> str:
    """Return the dtype of most bytes of the weights in `path`, not counting packed ones."""
    try:
        tensors = Checkpoint.open(path).tensors.values()
    except ModelError:
        # A caller that only needs the config may not have the weights yet; opening the model raises this error.
        return "float32"
    sizes: Counter[str] = Counter()
    for entry in tensors:
        if entry.dtype in FLOAT_DTYPES:
            sizes[entry.dtype] += entry.end - entry.start
    return {"BF16": "bfloat16", "F16": "float16"}.get(sizes.most_common(1)[0][0] if sizes else "", "float32")


def _of_model_type(model_type: str) -> str:
    """Return the architecture of a model type, the first that its family is registered for; or else the type itself."""
    families()
    own = (name for name, family in _FAMILIES.items() if family.tiny["model_type"] == model_type)
    return BY_MODEL_TYPE.get(model_type) or next(own, model_type)


def _find(name: str) -> type[DecoderLM] | None:
    """Return the family of an architecture, given by the name of its class with or without the head."""
    known = families()
    ending = next((end for end in SCORING if name.endswith(end)), None)
    if ending is not None:
        return next((known[each] for end in _WITH_HEAD if (each := name.removesuffix(ending) + end) in known), None)
    bare = name.removesuffix(_WITHOUT_HEAD)
    names = (name, *(bare + end for end in _WITH_HEAD if bare != name))
    return next((known[each] for each in names if each in known), None)
