"""Architectures by their names in config.json. Every module of `asyncllm.models` is scanned for families."""

from __future__ import annotations

import importlib
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

from asyncllm.errors import InvalidCheckpoint, ModelError, UnsupportedModel, short
from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.extrapolation import with_log_scaling
from asyncllm.models.head import SCORING
from asyncllm.models.loading.checkpoint import Checkpoint
from asyncllm.models.loading.stream import FLOAT_DTYPES
from asyncllm.models.module_map import MODULE_MAP
from asyncllm.models.refused import REFUSED_MODELS
from asyncllm.models.vision.parts import Composed
from asyncllm.models.vision_language import VISION_MODELS, composed
from asyncllm.quant.scheme import Scheme, refuse_mlx, scheme_of
from asyncllm.text.checkpoint_files import BY_MODEL_TYPE

__all__ = [
    "ModelOptions",
    "configure",
    "described",
    "families",
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
    return configure(path, **options)[1]


def configure(
    path: Path,
    *,
    session_len: int | None = None,
    rope_scaling_factor: float = 0.0,
    hf_overrides: Mapping[str, Any] | None = None,
    model_format: str | None = None,
    use_logn_attn: bool = False,
) -> tuple[type[DecoderLM], ModelConfig, Scheme | None]:
    """Return the family, the config and the quantization of the checkpoint in folder `path`. The other arguments are
    those of `ModelOptions`. Raises InvalidCheckpoint, UnsupportedModel."""
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
