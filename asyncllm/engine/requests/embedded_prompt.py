"""Prompts that hold embeddings from the caller instead of some or all tokens."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncllm.errors import InvalidParameter, short
from asyncllm.prompt_image import PromptImage

__all__ = ["num_values", "placed_embeddings"]

NAME, RANGES = "input_embeddings", "input_embedding_ranges"
UNKNOWN = (2**20,)
"""Assumed shape of nested lists."""
STAND_IN = 0
"""Token id of a position that has an embedding only."""


def num_values(embeddings: Any) -> int:
    """Return about how many numbers there are to check, without checking them."""
    parts = embeddings if isinstance(embeddings, list | tuple) else [embeddings]
    return sum(math.prod(getattr(part, "shape", UNKNOWN)) for part in parts)


def placed_embeddings(
    embeddings: Any, ranges: Any, token_ids: list[int] | None, hidden_size: int
) -> tuple[list[int], list[PromptImage]]:
    """Return the token ids of the prompt, and the embeddings that replace those of some of them.

    `embeddings`: an array [tokens, hidden], which is the whole prompt; or with checked `token_ids` a list of arrays
    [end - start, hidden] for a list of `ranges` (start, end). Arrays are numpy's or torch's, of any floating-point
    dtype, or nested lists, and are copied. Raises InvalidParameter.
    """
    if token_ids is None:
        if ranges is not None:
            raise InvalidParameter(f"{RANGES} are places in input_ids, and there are none. Pass input_ids.", RANGES)
        values = _checked(embeddings, NAME, hidden_size)
        return [STAND_IN] * len(values), [_placed(0, values)]
    placed, last = [], 0
    parts = _list_of(embeddings, NAME)
    for index, (start, end) in enumerate(_pairs(ranges)):
        if index == len(parts) or not last <= start < end <= len(token_ids):
            raise InvalidParameter(
                f"{RANGES}[{index}] is ({start}, {end}), after one that ends at {last}; there are {len(parts)} arrays "
                f"and {len(token_ids)} input_ids. Give each array its range (start, end), in order.",
                RANGES,
            )
        values = _checked(parts[index], f"{NAME}[{index}]", hidden_size)
        if len(values) != end - start:
            raise InvalidParameter(
                f"{NAME}[{index}] has {len(values)} rows, and its range ({start}, {end}) takes {end - start}. Make "
                f"them equal.",
                NAME,
            )
        placed.append(_placed(start, values))
        last = end
    if len(placed) != len(parts):
        raise InvalidParameter(
            f"There are {len(parts)} arrays in {NAME} and {len(placed)} ranges. Give each array a range.", RANGES
        )
    return token_ids, placed


def _placed(position: int, values: NDArray[np.float32]) -> PromptImage:
    digest = hashlib.sha256(b"embeddings" + values.shape[1].to_bytes(4, "little"))
    digest.update(values.data)
    return PromptImage(position=position, length=len(values), digest=digest.digest(), pixels=values, given=True)


def _list_of(given: Any, name: str) -> Sequence[Any]:
    if not isinstance(given, list | tuple):
        raise InvalidParameter(
            f"{name} must be a list with an entry for each range, not {short(type(given).__name__)}. Put it into one.",
            name,
        )
    return given


def _pairs(ranges: Any) -> Iterator[tuple[int, int]]:
    pairs = ranges.tolist() if isinstance(ranges, np.ndarray) else ranges
    for index, pair in enumerate(_list_of(pairs, RANGES)):
        if not (
            isinstance(pair, list | tuple)
            and len(pair) == 2
            and all(isinstance(each, int) and not isinstance(each, bool) for each in pair)
        ):
            raise InvalidParameter(f"{RANGES}[{index}] is {short(pair)}. A range is (start, end).", RANGES)
        yield pair[0], pair[1]


def _checked(given: Any, name: str, hidden_size: int) -> NDArray[np.float32]:
    """Return a copy in float32. Raises InvalidParameter unless it is [tokens, hidden] and finite."""
    try:
        # A tensor of torch may be on a GPU, have a gradient, or be bfloat16, which numpy lacks.
        given = given.detach().cpu().float().numpy() if hasattr(given, "detach") else given
        values = np.array(given, np.float32, order="C")
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise InvalidParameter(f"{name} is no array of numbers ({error}). Pass [tokens, hidden].", NAME) from None
    if values.ndim != 2 or values.shape[1] != hidden_size or not len(values):
        raise InvalidParameter(
            f"{name} has the shape {list(values.shape)}, and the model's embeddings are [tokens, {hidden_size}]. Pass "
            f"one row for each token.",
            NAME,
        )
    if not np.isfinite(values).all():
        raise InvalidParameter(f"{name} has numbers that are not finite. Correct them.", NAME)
    return values
