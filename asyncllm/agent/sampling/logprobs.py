"""Log-probabilities of the tokens that a step drew or scored, while they are copied to the host."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor

from asyncllm.agent.device.streams import fetch
from asyncllm.protocol import TokenLogprobs

__all__ = ["PendingLogprobs", "list_logprobs"]


class PendingLogprobs:
    """Log-probabilities of a step, while they are copied to the host."""

    def __init__(self, slots: list[int], num_top: list[int], parts: tuple[Tensor, ...]) -> None:
        self._slots = slots
        self._num_top = num_top
        self._parts = tuple(fetch(part) for part in parts)

    def result(self, failed: Collection[int] = ()) -> dict[int, TokenLogprobs]:
        """Return slot -> log-probabilities, for slots that want them and are not among the `failed`.

        Call it after an event recorded after `Sampler.logprobs` on the same stream has happened.
        """
        tokens, chosen, top, ids = self._parts
        entries = list_logprobs(tokens.tolist(), chosen, top, ids, self._num_top)
        return {slot: entry for slot, entry in zip(self._slots, entries, strict=True) if slot not in failed}


def list_logprobs(
    tokens: Sequence[int], chosen: Tensor, top: Tensor, ids: Tensor, num_top: Sequence[int]
) -> list[TokenLogprobs]:
    """Return, for each row of the results of `sampling.token_logprobs` for `tokens` [R]: (id, log-probability) of its
    token, then of the `num_top[row]` most likely tokens in falling order, which may include the token again."""
    return [
        [(token, logprob), *zip(row_ids[:width], row_top[:width], strict=True)]
        for token, logprob, row_ids, row_top, width in zip(
            tokens, chosen.tolist(), ids.tolist(), top.tolist(), num_top, strict=True
        )
    ]
