"""Scores of a prompt's tokens, computed without waiting and read once the step is over."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from asyncllm.agent.sampler import NOT_FINITE, list_logprobs
from asyncllm.agent.transfers import fetch
from asyncllm.agent.upload import upload
from asyncllm.batch import PrefillRow, StepOutput
from asyncllm.kernels import sampling

__all__ = ["PromptScores"]

_SCORED_POSITIONS = 512
"""Most positions whose logits are on the device at once."""


class PromptScores:
    """Log-probabilities and logits that one prefill row asks for. Made in inference mode on the computing stream, which
    also brings the results to the host; `write` may be called when the stream has come so far."""

    def __init__(self, row: PrefillRow, hidden: Tensor, logits: Callable[[Tensor], Tensor]) -> None:
        """`hidden` [chunk, H] are the row's hidden states, `logits` turns some of them into logits."""
        self._row = row
        self._finite: list[Tensor] = []
        self._logits: list[Tensor] = []
        self._ranked: list[tuple[list[int], Tensor, Tensor, Tensor]] = []
        """Known tokens, their log-probabilities, those of the most likely ones and their ids, piece by piece."""
        successors = row.tokens[1:] if row.next_token is None else [*row.tokens[1:], row.next_token]
        length = len(hidden) if row.output_logits else len(successors)
        for begin in range(0, length, _SCORED_POSITIONS):
            piece = logits(hidden[begin : begin + _SCORED_POSITIONS])
            self._finite.append(fetch(piece.amax().isfinite()))
            if row.output_logits:
                # In the model's type: pinned memory is dear, and the host widens them without loss.
                self._logits.append(fetch(piece))
            known = successors[begin : begin + len(piece)]
            if row.prompt_logprobs is not None and known:
                tokens = upload(np.array(known, np.int64), piece.device)
                ranked = sampling.token_logprobs(piece[: len(known)].float(), tokens, row.prompt_logprobs)
                chosen, top, ids = (fetch(part) for part in ranked)
                self._ranked.append((known, chosen, top, ids))

    def write(self, output: StepOutput) -> None:
        """Put the scores where the engine looks for them."""
        row = self._row
        if not all(finite.item() for finite in self._finite):
            output.errors.setdefault(row.slot, NOT_FINITE)
        if row.output_logits:
            with torch.inference_mode(False):
                # A tensor made in inference mode would refuse the user's in-place operations.
                whole = torch.empty(len(row.tokens), self._logits[0].shape[1], dtype=torch.float32, device="cpu")
            begin = 0
            while self._logits:
                # Let go of each piece once it is copied: together they are as large as the whole.
                piece = self._logits.pop(0)
                whole[begin : begin + len(piece)] = piece
                begin += len(piece)
            output.logits[row.slot] = whole
        if row.prompt_logprobs is not None:
            num_top = row.prompt_logprobs
            output.prompt_logprobs[row.slot] = [
                entry for part in self._ranked for entry in list_logprobs(*part, [num_top] * len(part[0]))
            ]
