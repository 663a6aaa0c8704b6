"""Reads the rotary settings of a config.json: the kinds of scaling that are implemented, and the entries of each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from asyncllm.errors import UnsupportedModel
from asyncllm.layers.rotary import RopeConfig, RopeKind
from asyncllm.models.typed_fields import MAX_NUMBER, MAX_POSITION, TypedFields

__all__ = ["read_rope", "rope_fields", "yarn_term"]

_ROPE_KINDS: Mapping[str, RopeKind] = {
    "default": "default",
    "linear": "linear",
    "dynamic": "dynamic",
    "yarn": "yarn",
    "llama3": "llama3",
    "longrope": "longrope",
    "proportional": "proportional",
    "su": "longrope",
}
"""Names in config.json; "su" is longrope in early Phi-3 files."""

_ROPE_KEYS = frozenset(
    {
        "rope_type",
        "type",
        "rope_theta",
        "factor",
        "original_max_position_embeddings",
        "low_freq_factor",
        "high_freq_factor",
        "beta_fast",
        "beta_slow",
        "truncate",
        "mscale",
        "mscale_all_dim",
        "attention_factor",
        "attn_factor",
        "extrapolation_factor",
        "short_factor",
        "long_factor",
        "short_mscale",
        "long_mscale",
        "partial_rotary_factor",
        "finetuned",
    }
)
"""Entries that are read, plus `finetuned`, a remark in early YaRN files. Any other may change the computation."""

_UNREAD_FACTORS = ("attn_factor", "extrapolation_factor")
"""Multipliers of the YaRN authors' code that transformers ignores; only 1 means the same to both."""


def read_rope(
    file: TypedFields,
    head_dim: int,
    trained: int,
    default_theta: float,
    partial: float | None,
    *,
    session_len: int | None,
    scaling_factor: float,
) -> tuple[RopeConfig, int]:
    """Return the rotary embedding, and the number of positions that it allows a model trained on `trained`.

    `partial`: default of partial_rotary_factor; None if that entry is not allowed. `session_len`, `scaling_factor`: the
    engine's settings; the latter is 0 for the file's own scaling. Raises InvalidCheckpoint, UnsupportedModel.
    """
    scaling = rope_fields(file)
    dim = _rotated(file, scaling, head_dim, partial)
    theta = scaling.number("rope_theta", file.number("rope_theta", default_theta))
    if theta <= 1:
        file.invalid("rope_theta", "which must be above 1")
    rope = RopeConfig(kind=_kind_of(scaling), theta=theta, dim=dim)
    if scaling_factor > 0:
        if rope.kind not in ("default", "dynamic"):
            raise UnsupportedModel(
                f"rope_scaling_factor = {scaling_factor} asks for dynamic NTK scaling, and {file.source} already "
                f"scales by {rope.kind}. Set rope_scaling_factor=0."
            )
        return _stretched(replace(rope, kind="dynamic"), scaling_factor, trained)
    match rope.kind:
        case "default":
            return rope, trained
        case "proportional":
            factor = scaling.number("factor", 1.0)
            return replace(rope, dim=head_dim, factor=factor, rotated_pairs=dim // 2), trained
        case "linear" | "dynamic":
            factor = scaling.number("factor")
            if factor < 1:
                scaling.invalid("factor", "which must be at least 1")
            if rope.kind == "dynamic" and dim == 2:
                file.invalid("head_dim", "too small for dynamic rotary scaling")
            return _stretched(rope, factor, trained)
    # The file's own entry takes precedence over the one among its rotary settings, as in transformers.
    original = scaling.integer("original_max_position_embeddings", trained, maximum=MAX_POSITION)
    original = file.integer("original_max_position_embeddings", original, maximum=MAX_POSITION)
    rope = replace(rope, original_max_position=original)
    if rope.kind == "longrope":
        return _longrope(scaling, rope, trained, long=(session_len or trained) > original), trained
    rope = replace(rope, factor=scaling.number("factor", max(1.0, trained / original)))
    if rope.kind == "llama3":
        return _llama3(scaling, rope), trained
    return _yarn(scaling, rope), max(trained, min(int(original * rope.factor), MAX_POSITION))


def rope_fields(file: TypedFields) -> TypedFields:
    """Return `rope_parameters`, else InternLM's `rotary`, else `rope_scaling`; empty if there is none."""
    keys = ("rope_parameters", "rotary", "rope_scaling")
    # In GPT-J rotary is a boolean; in InternLM it is an object.
    key = next((key for key in keys if file.fields.get(key) not in (None, True)), keys[0])
    fields = _of_internlm(file) if key == "rotary" else file.fields.get(key)
    if fields is None:
        return TypedFields({}, source=f"{file.source}: {key}")
    if not isinstance(fields, dict):
        file.invalid(key, "where an object belongs")
    unknown = sorted(set(fields) - _ROPE_KEYS)
    if unknown:
        file.unsupported(key, f"Unknown entries: {', '.join(unknown)}.")
    scaling = TypedFields(fields, source=f"{file.source}: {key}")
    for name in _UNREAD_FACTORS:
        scaling.expect(name, 1, 1.0)
    return scaling


def _of_internlm(file: TypedFields) -> dict[str, Any]:
    """Return InternLM's {"base": 10000, "type": "dynamic", "scaling_factor": 1.0} under the usual names."""
    rotary = file.fields["rotary"]
    if not isinstance(rotary, dict) or rotary.get("type") not in ("origin", "dynamic"):
        file.unsupported("rotary", "Supported: an object of type 'origin' or 'dynamic'.")
    scaling = {"rope_type": "dynamic", "factor": rotary.get("scaling_factor", 1.0)}
    return {"rope_theta": rotary.get("base"), **(scaling if rotary["type"] == "dynamic" else {})}


def _kind_of(scaling: TypedFields) -> RopeKind:
    key = "rope_type" if scaling.fields.get("rope_type") else "type"
    kind = _ROPE_KINDS.get(str(scaling.fields.get(key) or "default"))
    if kind is None:
        scaling.unsupported(key, f"Supported: {', '.join(_ROPE_KINDS)}.")
    return kind


def _rotated(file: TypedFields, scaling: TypedFields, head_dim: int, partial: float | None) -> int:
    """Return the number of rotated features per head."""
    if partial is None:
        for each in (scaling, file):
            each.expect("partial_rotary_factor", 1.0, 1)
    source = scaling if scaling.fields.get("partial_rotary_factor") is not None else file
    factor = source.number("partial_rotary_factor", partial or 1.0)
    dim = int(head_dim * factor)
    if factor > 1 or dim < 2 or dim % 2:
        source.invalid("partial_rotary_factor", f"which turns {dim} of a head's {head_dim} features")
    return dim


def _stretched(rope: RopeConfig, factor: float, trained: int) -> tuple[RopeConfig, int]:
    """Return linear or dynamic scaling by `factor`, and the number of positions that it allows."""
    rope = replace(rope, factor=factor, original_max_position=trained)
    return rope, min(int(trained * factor), MAX_POSITION)


def _longrope(scaling: TypedFields, rope: RopeConfig, trained: int, *, long: bool) -> RopeConfig:
    """Return longrope with one set of divisors for the engine's lifetime, the long one if `long`: switching within a
    sequence would invalidate cached keys."""
    sets = {key: _divisors(scaling, key, rope.dim // 2) for key in ("short_factor", "long_factor")}
    original = rope.original_max_position
    ratio = scaling.number("factor", trained / original)
    grown = math.sqrt(1 + math.log(ratio) / math.log(original)) if ratio > 1 and original > 1 else 1.0
    derived = scaling.number("attention_factor", grown)
    return replace(
        rope,
        divisors=sets["long_factor" if long else "short_factor"],
        attention_factor=scaling.number("long_mscale" if long else "short_mscale", derived),
    )


def _divisors(scaling: TypedFields, key: str, count: int) -> tuple[float, ...]:
    values = scaling.fields.get(key)
    if not isinstance(values, list) or len(values) != count:
        scaling.invalid(key, f"where a list of {count} numbers belongs")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_NUMBER:
            scaling.invalid(key, "which must hold finite numbers above 0")
    return tuple(float(value) for value in values)


def _llama3(scaling: TypedFields, rope: RopeConfig) -> RopeConfig:
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    if low > high:
        scaling.invalid("low_freq_factor", f"which must not be above high_freq_factor = {high}")
    return replace(rope, low_freq_factor=low, high_freq_factor=high)


def _yarn(scaling: TypedFields, rope: RopeConfig) -> RopeConfig:
    return replace(
        rope,
        beta_fast=scaling.number("beta_fast", 32.0),
        beta_slow=scaling.number("beta_slow", 1.0),
        truncate=scaling.flag("truncate", True),
        attention_factor=_yarn_attention_factor(scaling, rope.factor),
    )


def yarn_term(factor: float, multiplier: float = 1.0) -> float:
    """Return 0.1 * multiplier * ln(factor) + 1, as in the YaRN paper; 1 if nothing is stretched."""
    return 0.1 * multiplier * math.log(factor) + 1.0 if factor > 1 else 1.0


def _yarn_attention_factor(scaling: TypedFields, factor: float) -> float:
    """Return the paper's term, or, with DeepSeek's mscale entries, the ratio of two such terms."""
    mscale = scaling.number("mscale", 0.0, positive=False)
    mscale_all_dim = scaling.number("mscale_all_dim", 0.0, positive=False)
    derived = yarn_term(factor)
    if mscale and mscale_all_dim:
        derived = yarn_term(factor, mscale) / yarn_term(factor, mscale_all_dim)
    return scaling.number("attention_factor", derived)
