"""Chunked prefill: how many prompt tokens a step computes, and where prompts are cut."""

from __future__ import annotations

from dataclasses import dataclass

from asyncllm.engine.schedule.sequence import Sequence
from asyncllm.protocol import Limits, PrefillRow

__all__ = ["PrefillBudget", "chunk_row", "fit_budget", "fit_joint_tokens", "next_end"]

_MIN_ROUNDED_TILES = 3
"""Steps with fewer tiles are not rounded down: one tile would be a large part of them."""

_MIN_IMAGE_TOKENS = 128
"""Minimum number of tokens computed by a step that encodes an image, however long the encoding takes."""


@dataclass(frozen=True)
class PrefillBudget:
    """Bounds on the prompt tokens of a step."""

    max_tokens: int
    """Bound for any step: `max_prefill_token_num`."""
    limits: Limits

    def beside(self, decoding: list[Sequence]) -> int:
        """Return the maximum number of prompt tokens in a step in which these sequences decode.

        A long step would interrupt streamed answers. If none of the answers is streamed, small budgets would only delay
        them: prompts would begin and end one after another, and steps would have fewer rows.
        """
        whole = self.limits.tokens_beside_decode
        if whole is None or not any(sequence.request.delivery.streaming for sequence in decoding):
            return self.max_tokens
        # Prompts make progress however many rows decode.
        return min(self.max_tokens, max(whole - len(decoding), -(-whole // 4)))

    def whole_tiles(
        self, chunks: list[tuple[Sequence, int]], num_decode: int, num_waiting: int
    ) -> list[tuple[Sequence, int]]:
        """Return the chunks, at least one, with the last one cut so that the step's tokens fill whole tiles.

        If the cut prompt then takes a step more, it loses about the time of this one, while each other sequence,
        decoding, in the step or waiting, gains the time of a tile. It is cut if together they gain more.
        """
        tile = self.limits.token_tile
        total = num_decode + sum(length for _, length in chunks)
        excess = total % tile
        if total < _MIN_ROUNDED_TILES * tile or not excess:
            return chunks
        sequence, length = chunks[-1]
        shorter = fit_joint_tokens(sequence, length - excess, length - excess)
        if shorter <= 0:
            return chunks
        left = len(sequence.token_ids) - sequence.num_computed
        later = -(-(left - shorter) // self.max_tokens) > -(-(left - length) // self.max_tokens)
        others = num_decode + len(chunks) - 1 + num_waiting
        return chunks if later and others * tile < total else [*chunks[:-1], (sequence, shorter)]


def fit_budget(sequence: Sequence, length: int, budget: int, *, first: bool) -> tuple[int, int]:
    """Return how many of the next `length` known tokens fit the budget together with the encoding of their images, and
    how much of the budget the encoding takes, both in tokens.

    An image that does not fit is left to a later step. If it comes `first` in this step, its first tokens are computed
    anyway.
    """
    work, start = 0, sequence.num_computed
    for position, own in (each for image in sequence.request.images for each in image.encodings()):
        ahead = position - start
        if not 0 <= ahead < length:
            continue
        if ahead + work + own >= budget and (ahead or work or not first):
            return ahead, work
        work += own
        length = min(length, budget - work if ahead + work < budget else _MIN_IMAGE_TOKENS)
    return length, work


def fit_joint_tokens(sequence: Sequence, length: int, max_length: int) -> int:
    """Return the length of a chunk of about `length` tokens that does not separate tokens with attention to each other.

    It is shorter than `length`, or longer, up to `max_length`, if such tokens come first. It is 0 if `max_length` is
    too small.
    """
    span = _joint_around(sequence, sequence.num_computed + length)
    if span is None:
        return length
    start, stop = (each - sequence.num_computed for each in span)
    return start if start > 0 else stop if stop <= max_length else 0


def next_end(sequence: Sequence) -> int:
    """Return the position at which the shortest possible next chunk ends."""
    span = _joint_around(sequence, sequence.num_computed + 1)
    return sequence.num_computed + 1 if span is None else span[1]


def _joint_around(sequence: Sequence, end: int) -> tuple[int, int] | None:
    """Return (start, end) of the mutually visible image tokens that a chunk ending at `end` would cut, or None."""
    return next((span for image in sequence.request.images if (span := image.joint_around(end)) is not None), None)


def chunk_row(sequence: Sequence, length: int) -> PrefillRow:
    """Return the step row that computes the next `length` known tokens."""
    known, start, request = len(sequence.token_ids), sequence.num_computed, sequence.request
    end = start + length
    sample = end == known and sequence.remaining > 0
    wants_logprobs = sequence.index == 0 and not request.prompt_is_scored
    return PrefillRow(
        slot=sequence.slot,
        tokens=sequence.token_ids[start:end],
        position=start,
        sample=sample,
        prompt_logprobs=request.prompt_logprobs_asked if wants_logprobs else None,
        next_token=sequence.token_ids[end] if wants_logprobs and end < known else None,
        output_logits=request.output_logits,
        pooling=request.pooling if end == known or request.pooling == "mean" else None,
        images=request.images,
        forced=sequence.forced if sample else (),
    )
