"""Scores of a prompt's tokens, computed without waiting and read once the step is over."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from asyncllm.agent.sampler import NOT_FINITE
from asyncllm.batch import PrefillRow, StepOutput, TokenLogprobs
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
        self._pinned = hidden.is_cuda
        self._finite: list[Tensor] = []
        self._logits: list[Tensor] = []
        self._ranked: list[tuple[list[int], Tensor, Tensor, Tensor]] = []
        """Known tokens, their log-probabilities, those of the most likely ones and their ids, piece by piece."""
        successors = row.tokens[1:] if row.next_token is None else [*row.tokens[1:], row.next_token]
        length = len(hidden) if row.output_logits else len(successors)
        for begin in range(0, length, _SCORED_POSITIONS):
            piece = logits(hidden[begin : begin + _SCORED_POSITIONS])
            self._finite.append(self._fetch(piece.amax().isfinite()))
            if row.output_logits:
                # In the model's type: pinned memory is dear, and the host widens them without loss.
                self._logits.append(self._fetch(piece))
            known = successors[begin : begin + len(piece)]
            if row.prompt_logprobs is not None and known:
                tokens = self._send(known, piece.device)
                ranked = sampling.token_logprobs(piece[: len(known)].float(), tokens, row.prompt_logprobs)
                chosen, top, ids = (self._fetch(part) for part in ranked)
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
            for piece in self._logits:
                whole[begin : begin + len(piece)] = piece
                begin += len(piece)
            output.logits[row.slot] = whole
        if row.prompt_logprobs is not None:
            output.prompt_logprobs[row.slot] = [entry for part in self._ranked for entry in _entries(*part)]

    def _fetch(self, tensor: Tensor) -> Tensor:
        if not self._pinned:
            return tensor.clone()
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def _send(self, tokens: list[int], device: torch.device) -> Tensor:
        known = torch.tensor(tokens, dtype=torch.int64, device="cpu", pin_memory=self._pinned)
        return known.to(device, non_blocking=True)


def _entries(known: list[int], chosen: Tensor, top: Tensor, ids: Tensor) -> list[TokenLogprobs]:
    return [
        [(token, logprob), *zip(row_ids, row_top, strict=True)]
        for token, logprob, row_ids, row_top in zip(known, chosen.tolist(), ids.tolist(), top.tolist(), strict=True)
    ]
