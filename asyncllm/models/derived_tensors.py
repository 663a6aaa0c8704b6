"""Checkpoint tensors that no model needs: their contents follow from config.json or from the tokens."""

from __future__ import annotations

import re

__all__ = ["is_derived"]

_ROTARY_BUFFER = re.compile(r"(?:.+\.)?(?:rotary(?:_pos)?_emb\.\w+|(?:\w+_)?inv_freq|(?:cos|sin)_cached?)")
"""Names of frequencies, cosines and sines that older checkpoints store and that config.json determines."""

_CACHE_SCALE = re.compile(
    r"(?:.+\.)?(?:self_attn|attn|attention)\.(?:attn\.|[kv]_proj\.)?"
    r"(?:(?:k|v|kv)_(?:scale|zero_point)|(?<=[kv]_proj\.)output_scale)"
)
"""Names of per-layer scales for keys or values in 8-bit caches. Our caches are unquantized, or have a scale per
token."""


def is_derived(name: str) -> bool:
    """Return whether a tensor of this name is ignored."""
    return bool(_ROTARY_BUFFER.fullmatch(name) or _CACHE_SCALE.fullmatch(name))
