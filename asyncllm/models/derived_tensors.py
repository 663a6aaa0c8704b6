"""Tensors that checkpoints hold and no model needs: what they say follows from config.json, or from the tokens."""

from __future__ import annotations

import re

__all__ = ["is_derived"]

_ROTARY_BUFFER = re.compile(r"(?:.+\.)?(?:rotary(?:_pos)?_emb\.\w+|(?:\w+_)?inv_freq|(?:cos|sin)_cached?)")
"""Names of frequencies, cosines and sines that older checkpoints store, and config.json determines."""

_CACHE_SCALE = re.compile(
    r"(?:.+\.)?(?:self_attn|attn|attention)\.(?:attn\.|[kv]_proj\.)?"
    r"(?:(?:k|v|kv)_(?:scale|zero_point)|(?<=[kv]_proj\.)output_scale)"
)
"""Names of one scale for all keys or values of a layer, found for caches of 8 bits. Ours are plain, or each token has
its own."""


def is_derived(name: str) -> bool:
    """Return whether a tensor of this name is left out."""
    return bool(_ROTARY_BUFFER.fullmatch(name) or _CACHE_SCALE.fullmatch(name))
