"""Results of prefill rows other than a token: scores of the prompt's tokens, and sums of hidden states.

Both are computed without waiting, and read after the step.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from asyncllm.agent.device.streams import fetch, upload
from asyncllm.agent.sampling.logprobs import list_logprobs
from asyncllm.agent.sampling.params import NOT_FINITE
from asyncllm.agent.sampling.rank_rows import RankRows
from asyncllm.agent.step.slots import StepRows
from asyncllm.kernels import sampling
from asyncllm.models.decoder import DecoderLM
from asyncllm.protocol import Batch, PrefillRow, StepOutput

__all__ = ["PooledHidden", "PromptScores", "concatenate"]

_SCORED_POSITIONS = 512
"""Maximum number of positions whose logits are on the device at once."""


class PromptScores:
    """The log-probabilities and logits of one prefill row. Created in inference mode on the computing stream, which
    also copies the results to the host; `write` may be called when the stream has completed that work."""

    def __init__(self, row: PrefillRow, hidden: Tensor, model: DecoderLM, ranks: RankRows | None = None) -> None:
        """`hidden` [chunk, H]: the row's hidden states, from which `model` computes logits; whole ones on all `ranks`
        if the row asks for them."""
        self._row = row
        self._finite: list[Tensor] = []
        self._logits: list[Tensor] = []
        self._ranked: list[tuple[list[int], Tensor, Tensor, Tensor]] = []
        """By piece: known tokens, their log-probabilities, those of the most likely tokens, and the ids of the
        latter."""
        successors = row.tokens[1:] if row.next_token is None else [*row.tokens[1:], row.next_token]
        length = len(hidden) if row.output_logits else len(successors)
        for begin in range(0, length, _SCORED_POSITIONS):
            if ranks is not None and not row.output_logits:
                some = hidden[begin : min(begin + _SCORED_POSITIONS, length)]
                self._score_own(ranks.whole(model.rank_logits(some)), successors[begin : begin + len(some)], ranks)
                continue
            piece = model.logits(hidden[begin : begin + _SCORED_POSITIONS])
            self._finite.append(fetch(piece.amax().isfinite()))
            if row.output_logits:
                # In the model's dtype: pinned memory is expensive, and the host widens the numbers without loss.
                self._logits.append(fetch(piece))
            known = successors[begin : begin + len(piece)]
            if row.prompt_logprobs is not None and known:
                tokens = upload(np.array(known, np.int64), piece.device)
                ranked = sampling.token_logprobs(piece[: len(known)].float(), tokens, row.prompt_logprobs)
                chosen, top, ids = (fetch(part) for part in ranked)
                self._ranked.append((known, chosen, top, ids))

    def _score_own(self, logits: Tensor, known: list[int], ranks: RankRows) -> None:
        """Score the `known` tokens, each on the rank that has its row of logits."""
        self._finite.append(fetch(ranks.all_gather(logits.amax().isfinite().view(1).to(torch.int32)).amin()))
        if self._row.prompt_logprobs is not None:
            tokens = ranks.own(upload(np.array(known, np.int64), logits.device))
            ranked = sampling.token_logprobs(logits.float(), tokens, self._row.prompt_logprobs)
            whole = ranks.gather_scores(ranks.scored(np.arange(len(known)), len(known)), ranked)
            chosen, top, ids = (fetch(part) for part in whole)
            self._ranked.append((known, chosen, top, ids))

    def write(self, output: StepOutput) -> None:
        """Write the scores into the step's output."""
        row = self._row
        if not all(finite.item() for finite in self._finite):
            output.errors.setdefault(row.slot, NOT_FINITE)
        if row.output_logits:
            with torch.inference_mode(False):
                # The user's in-place operations would fail on a tensor created in inference mode.
                whole = torch.empty(len(row.tokens), self._logits[0].shape[1], dtype=torch.float32, device="cpu")
            begin = 0
            while self._logits:
                # Drop each piece once it is copied, because together they are as large as the whole.
                piece = self._logits.pop(0)
                whole[begin : begin + len(piece)] = piece
                begin += len(piece)
            output.logits[row.slot] = whole
        if row.prompt_logprobs is not None:
            num_top = row.prompt_logprobs
            output.prompt_logprobs[row.slot] = [
                entry for part in self._ranked for entry in list_logprobs(*part, [num_top] * len(part[0]))
            ]


def concatenate(chunks: Sequence[Tensor]) -> Tensor:
    """Return the logits [chunk, vocab] of consecutive chunks, tensors or lists, as one tensor [tokens, vocab]."""
    return torch.cat([torch.as_tensor(chunk) for chunk in chunks])


class PooledHidden:
    """The pooled hidden states of a step's prefill rows, one float32 vector per row. Created in inference mode on the
    computing stream, which also copies them to the host; `write` may be called after that."""

    def __init__(
        self,
        batch: Batch,
        rows: StepRows,
        hidden: Tensor,
        row_hidden: Tensor,
        score: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """`hidden` [T, H]: hidden states of all tokens, after the final norm if a row `reads_all`. `row_hidden` [R + L,
        H]: those of `rows.indices`, always after the final norm. `score`: the head for rows with pooling 'score', [n,
        H] -> [n, labels]."""
        pooled = list(_pooled(batch, rows, hidden, row_hidden))
        scored = [(slot, states) for row, slot, states in pooled if row.pooling == "score"]
        summed = [(slot, states) for row, slot, states in pooled if row.pooling != "score"]
        self._found: list[tuple[list[int], Tensor]] = []
        """Slots and their vectors."""
        if scored:
            assert score is not None, "the engine asks a model without a head for scores"
            scores = score(torch.cat([states for _, states in scored]))
            self._found.append(([slot for slot, _ in scored], fetch(scores)))
        if summed:
            sums = torch.empty(len(summed), row_hidden.shape[1], dtype=torch.float32, device=hidden.device)
            for (_, states), out in zip(summed, sums, strict=True):
                torch.sum(states, 0, dtype=torch.float32, out=out)
            self._found.append(([slot for slot, _ in summed], fetch(sums)))

    def write(self, output: StepOutput) -> None:
        """Write the vectors into the step's output."""
        for slots, vectors in self._found:
            finite = vectors.isfinite().all(1).tolist()
            for slot, values, sound in zip(slots, vectors.numpy(), finite, strict=True):
                if sound:
                    # Making thousands of Python floats takes long, and a step may end many prompts at once.
                    output.pooled[slot] = array("f", values.tobytes())
                else:
                    output.errors.setdefault(slot, NOT_FINITE)


def _pooled(
    batch: Batch, rows: StepRows, hidden: Tensor, row_hidden: Tensor
) -> Iterator[tuple[PrefillRow, int, Tensor]]:
    """Yield each pooled row, its slot and its hidden states [n, H]."""
    place = len(rows.slots)
    for row, first in zip(batch.prefill, rows.prefill_starts, strict=True):
        if row.pooling == "mean":
            yield row, row.slot, hidden[first : first + len(row.tokens)]
        elif row.pooling is not None:
            yield row, row.slot, row_hidden[place : place + 1]
            place += 1
