"""Changes to the logits of individual slots: penalties, bias, bans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncllm.agent.device.streams import upload
from asyncllm.agent.sampling.params import ALLOWED, BAD_WORDS, BIAS, EARLY_STOPS, GRAMMAR, PENALTIES, SlotParams
from asyncllm.agent.sampling.token_history import TokenHistory
from asyncllm.kernels import sampling

__all__ = ["edit_logits"]


def edit_logits(
    logits: Tensor,
    slots: NDArray[np.int64],
    positions: NDArray[np.int64],
    params: SlotParams,
    history: TokenHistory,
) -> None:
    """Edit the float32 `logits` [R, V] of `slots` [R] in place according to their parameters, without waiting for the
    device.

    `positions` [R] are the positions of the tokens to be drawn.
    """
    device = logits.device
    edits = params.edits[slots]
    penalized = np.flatnonzero(edits & PENALTIES)
    if len(penalized):
        index, owners = upload(penalized, device), slots[penalized]
        seen, counts = history.counts(owners)
        penalties = upload(params.penalties[:, owners], device)
        logits[index] = sampling.penalize(logits[index], seen, counts, *penalties)
    biased = np.flatnonzero(edits & BIAS)
    if len(biased):
        entries = [params.bias[slot] for slot in slots[biased].tolist()]
        rows, ids = _flat(biased, [ids for ids, _ in entries], device)
        sampling.add_bias(logits, rows, ids, upload(np.concatenate([values for _, values in entries]), device))
    early = np.flatnonzero(((edits & EARLY_STOPS) != 0) & (positions < params.free_stop_position[slots]))
    if len(early) and params.grammars:
        # Where a grammar has ended, nothing else can be drawn.
        early = early[[not _has_ended(params, slot) for slot in slots[early].tolist()]]
    if len(early):
        sampling.ban(logits, *_flat(early, [params.stops[slot] for slot in slots[early].tolist()], device))
    worded = np.flatnonzero(edits & BAD_WORDS)
    if len(worded):
        sampling.ban(logits, *_flat(worded, [history.banned(slot) for slot in slots[worded].tolist()], device))
    limited = np.flatnonzero(edits & ALLOWED)
    if len(limited):
        allowed = np.stack([params.allowed[slot] for slot in slots[limited].tolist()])
        sampling.keep_only(logits, upload(limited, device), upload(allowed, device))
    constrained = np.flatnonzero(edits & GRAMMAR)
    if len(constrained):
        words = params.masks.compute(slots[constrained].tolist(), params.grammars)
        sampling.keep_only(logits, upload(constrained, device), upload(words, device))


def _has_ended(params: SlotParams, slot: int) -> bool:
    return slot in params.grammars and params.grammars[slot].ended


def _flat(rows: NDArray[Any], ids: Sequence[NDArray[np.int64]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return row and token id of every entry of `ids`, which has one array per row."""
    both = upload(np.stack([np.repeat(rows, [len(entry) for entry in ids]), np.concatenate(ids)]), device)
    return both[0], both[1]
