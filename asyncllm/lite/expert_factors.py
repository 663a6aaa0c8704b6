"""An adapter's factors for the experts of a layer, as PEFT stores them for `target_parameters`: one pair for all
experts, however the checkpoint stores their weights.

PEFT wraps a module once for each of its parameters, the first one innermost, without naming the parameter in the files:
`...experts.base_layer.lora_A` belongs to gate_up_proj and `...experts.lora_A` to down_proj, if both are targets.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from asyncllm.errors import InvalidCheckpoint, UnsupportedModel, short
from asyncllm.layers.linear_method import Weighted
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.loading.adapter_files import AdapterConfig
from asyncllm.models.loading.checkpoint import Checkpoint
from asyncllm.models.weights import Target

__all__ = ["ExpertFactors", "expert_factors"]

_PARAMETERS = ("gate_up_proj", "up_proj", "down_proj")
"""Parameters of transformers' experts, in the order of their definition."""

_INNER = ".base_layer"


class ExpertFactors(NamedTuple):
    """The change of a tensor that holds the weight of one expert, or of all experts of a layer."""

    a: Tensor
    """[r, in], or [experts, r, in]."""
    b: Tensor
    """[out, r], or [experts, out, r], scaled."""
    transposed: bool = False
    """Whether the tensor is [experts, in, out]."""

    def product(self) -> Tensor:
        """Return the change, in the tensor's shape."""
        added = self.b @ self.a
        return added.transpose(-1, -2) if self.transposed else added


def expert_factors(
    folder: Path,
    config: AdapterConfig,
    wrappers: Mapping[str, tuple[Tensor, Tensor]],
    model: DecoderLM,
    checkpoint: Checkpoint,
) -> dict[str, ExpertFactors]:
    """Return name of a tensor in the checkpoint -> its change by the adapter in `folder`. `wrappers`: module -> lora_A
    and lora_B. `model`: the checkpoint's model without weights.

    Raises InvalidCheckpoint for factors that do not fit, and UnsupportedModel for unknown parameters.
    """
    found: dict[str, ExpertFactors] = {}
    tensors = _tensors_of_experts(model, checkpoint)
    for module, (a, b) in wrappers.items():
        parameter = _parameter(folder, config, module, wrappers)
        layer = re.findall(r"\.(\d+)\.", parameter)
        part = "down" if parameter.endswith(".down_proj") else "gate_up"
        targets = tensors.get(f"{layer[0]} {part}" if layer else "")
        if not targets:
            raise InvalidCheckpoint(
                f"{folder}: the model has no experts where the adapter has {short(parameter)}. Check that it was "
                f"trained on this model."
            )
        owner = model.get_submodule(next(iter(targets.values())).module)
        assert isinstance(owner, Weighted)
        count = owner.stored_experts or 1
        outputs = sum(shape[0] for shape in owner.whole_shapes.values())
        if len(a) % count or a.shape[1] != owner.in_features or tuple(b.shape) != (outputs, len(a)):
            raise InvalidCheckpoint(
                f"{folder}: {short(parameter)} has lora_A {list(a.shape)} and lora_B {list(b.shape)}, and the model "
                f"has {count} experts of [{outputs}, {owner.in_features}]. Check that it was trained on this model."
            )
        rank = len(a) // count
        scaled = b * config.scale(parameter, rank)
        by_expert = a.view(count, rank, -1), scaled.view(outputs, rank, count).permute(2, 0, 1)
        for name, target in targets.items():
            found[name] = _share(target, owner, checkpoint.tensors[name].shape, *by_expert)
    return found


def _parameter(folder: Path, config: AdapterConfig, module: str, wrappers: Mapping[str, object]) -> str:
    """Return the name of the parameter that `module` wraps. Raises UnsupportedModel for an unknown one."""
    container = module.replace(_INNER, "")
    targets = [name for each in _PARAMETERS if config.targets_parameter(name := f"{container}.{each}")]
    if len(targets) != sum(each.replace(_INNER, "") == container for each in wrappers):
        raise UnsupportedModel(
            f"{folder}: target_parameters that {short(module)} has are not known here, of which "
            f"{', '.join(_PARAMETERS)} are. Merge the adapter with PEFT."
        )
    return targets[-1 - module.count(_INNER)]


def _tensors_of_experts(model: DecoderLM, checkpoint: Checkpoint) -> Mapping[str, dict[str, Target]]:
    """Return "LAYER gate_up" or "LAYER down" -> name -> target of the tensors of experts' weights."""
    found: defaultdict[str, dict[str, Target]] = defaultdict(dict)
    for name in checkpoint.tensors:
        target = model.weight_map.resolve(name)
        if target is None or target.keys[0][0] != "weight":
            continue
        if target.stack is not None or target.keys[0][2] is not None:
            _, layer, *_, part = target.module.split(".")
            found[f"{layer} {part}"][name] = target
    return found


def _share(target: Target, owner: Weighted, shape: tuple[int, ...], a: Tensor, b: Tensor) -> ExpertFactors:
    """Return the change of the tensor of a target, from factors [experts, ...] of all experts."""
    if target.stack is None:
        ((_, part, expert),) = target.keys
        return ExpertFactors(a[expert or 0], b[expert or 0, owner.rows[part]])
    straight = (len(a), b.shape[1], a.shape[2])
    transposed = shape != straight if target.layout == "stacked_either" else target.stack.transposed
    return ExpertFactors(a, b, transposed)
