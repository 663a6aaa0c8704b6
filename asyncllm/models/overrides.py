"""hf_overrides: entries that replace those of config.json, whichever schema the file has for rotary embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

from asyncllm.errors import InvalidParameter, short

__all__ = ["MOVED", "with_rotation"]

_KINDS: Mapping[str, str] = {
    "rope_theta": "full_attention",
    "rope_scaling": "full_attention",
    "rope_local_base_freq": "sliding_attention",
}
"""Entry of the legacy schema -> the layers that it is for, where rotations differ by kind of layer."""

_KEPT = ("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")
"""Entries of rope_parameters that a new rope_scaling leaves as they are unless it has its own."""


MOVED = frozenset({*_KINDS, *_KEPT, "rope_parameters", "dtype", "torch_dtype"})
"""Entries that `with_rotation` may move into others."""


def with_rotation(fields: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return a file's entries with those of `overrides`, which apply to either schema of the file.

    If a file has rotation entries of both schemas, rope_scaling takes precedence, as in transformers; rope_parameters
    supplies theta and the rotated part of a head where rope_scaling lacks them. Raises InvalidParameter for an entry
    that would have no effect.
    """
    replaced = {"torch_dtype": "dtype", "rope_parameters": "rope_scaling"}
    dropped = {other for key, other in replaced.items() if key in overrides} - set(overrides)
    changed = {**{key: value for key, value in fields.items() if key not in dropped}, **overrides}
    before, parameters = fields.get("rope_parameters"), changed.get("rope_parameters")
    if not isinstance(parameters, dict):
        return changed
    if _is_by_kind(before):
        return {**changed, "rope_parameters": _by_kind(before, parameters, overrides)}
    if _is_by_kind(parameters):
        return changed
    given = {} if "rope_parameters" in overrides else overrides
    if "rope_theta" in given:
        parameters = {**parameters, "rope_theta": given["rope_theta"]}
    if changed.get("rope_scaling") or "rope_scaling" in given:
        parameters, changed["rope_scaling"] = _scaled(parameters, changed.get("rope_scaling")), None
    return {**changed, "rope_parameters": parameters}


def _is_by_kind(parameters: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(parameters, dict) and any(isinstance(each, dict) for each in parameters.values())


def _by_kind(before: dict[str, Any], given: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return rope_parameters by kind of layer. `given`: those of the overrides, if they have any."""
    kinds = {**before, **(given if _is_by_kind(given) else {"full_attention": given})}
    for key, kind in _KINDS.items():
        if key not in overrides or "rope_parameters" in overrides:
            continue
        own = kinds.get(kind)
        if not isinstance(own, dict):
            raise InvalidParameter(
                f"hf_overrides: {key} is for layers of {kind}, and rope_parameters in config.json are for "
                f"{', '.join(map(short, before))}. Give rope_parameters.",
                "hf_overrides",
            )
        value = overrides[key]
        kinds[kind] = _scaled(own, value) if key == "rope_scaling" else {**own, "rope_theta": value}
    return kinds


def _scaled(own: dict[str, Any], scaling: Any) -> Any:
    """Return rope_parameters with another scaling; None: without."""
    if scaling is not None and not isinstance(scaling, dict):
        return scaling  # refused when it is read
    return {**{key: own[key] for key in _KEPT if key in own}, **(scaling or {"rope_type": "default"})}
