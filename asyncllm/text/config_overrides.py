"""hf_overrides: replaces entries of a config.json, also in the parts of a model that consists of several."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from asyncllm.errors import InvalidParameter
from asyncllm.text.checkpoint_files import classes_of

__all__ = ["GROUPS", "overridden"]

_HOLDERS = ("thinker_config", "text_config", "llm_config", "language_config")
"""Parts that have entries of the language model, the outermost first."""
_PARTS = (*_HOLDERS, "vision_config", "high_res_vision_config", "projector_config")
GROUPS = (*_PARTS, "attn_config", "ffn_config")
"""Objects of which an override replaces single entries."""
_UNSAID_TOWERS = frozenset({"InternLMXComposer2ForCausalLM", "MolmoForCausalLM", "Phi4MMForCausalLM"})
"""Classes of models whose files lack a vision_config, and whose towers are nevertheless changed by one."""
_OF_LANGUAGE = ("rope_theta", "rope_scaling", "rope_parameters", "rope_local_base_freq", "max_position_embeddings")
"""Entries of config.json that only a language model has, even if its part leaves them out."""


def _replaced(fields: Mapping[str, Any], entries: Mapping[str, Any]) -> dict[str, Any]:
    return {**fields, **entries}


def overridden(
    fields: Mapping[str, Any],
    overrides: Mapping[str, Any],
    *,
    change: Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]] = _replaced,
) -> dict[str, Any]:
    """Return the entries of config.json with those of `overrides`.

    An object for a part of the model, such as text_config, replaces the entries of the part that it names; entries of
    the language model may be given without naming its part. `change` replaces entries of one object. Raises
    InvalidParameter for a part that the file does not have.
    """
    parts = [name for name in GROUPS if isinstance(fields.get(name), Mapping)]
    holder = next((name for name in _HOLDERS if name in parts), None)
    inner: dict[str, dict[str, Any]] = {}
    whole: dict[str, Any] = {}
    # Parts come first, so that what they name counts more than the same entry without its part.
    for key, value in sorted(overrides.items(), key=lambda each: each[0] not in parts):
        if key in parts and isinstance(value, Mapping):
            inner[key] = dict(value)
        elif holder and key not in fields and _belongs(key, fields[holder]):
            inner.setdefault(holder, {}).setdefault(key, value)
        elif key in _PARTS and isinstance(value, Mapping) and not _changes_a_tower(key, fields):
            raise InvalidParameter(
                f"hf_overrides: config.json has no {key} in this place, where its parts are "
                f"{', '.join(parts) or '(none)'}. Name one of these, or no part for entries of the language model.",
                "hf_overrides",
            )
        else:
            whole[key] = value
    changed = {name: overridden(fields[name], entries, change=change) for name, entries in inner.items()}
    return {**change(fields, whole), **changed}


def _belongs(key: str, holder: Mapping[str, Any]) -> bool:
    """Return whether an entry is one of this part or of a part in it."""
    inner = (holder[name] for name in _HOLDERS if isinstance(holder.get(name), Mapping))
    return key in holder or key in _OF_LANGUAGE or any(_belongs(key, part) for part in inner)


def _changes_a_tower(key: str, fields: Mapping[str, Any]) -> bool:
    return key == "vision_config" and not _UNSAID_TOWERS.isdisjoint(classes_of(fields))
