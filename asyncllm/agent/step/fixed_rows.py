"""FixedRows: the rows of captured decode steps, for which graphs write logits and tokens to fixed addresses."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from asyncllm import kernels
from asyncllm.agent.sampling.logprobs import PendingLogprobs
from asyncllm.agent.sampling.sampler import Sampler
from asyncllm.agent.step.slots import StepRows
from asyncllm.agent.step.tables import SlotTables
from asyncllm.models.decoder import DecoderLM

__all__ = ["FixedRows"]


class FixedRows:
    """Memory for `max_rows` rows. A step uses the first ones: `compute`, then `draw`, both of which are captured, then
    `read`. Written by the kernels of the steps, in order."""

    def __init__(
        self, model: DecoderLM, tables: SlotTables, sampler: Sampler, *, max_rows: int, dtype: torch.dtype
    ) -> None:
        """`dtype`: dtype of hidden states."""
        self._model, self._tables, self._sampler = model, tables, sampler
        device = tables.last_tokens.device
        self._tokens = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._positions = torch.zeros(max_rows, dtype=torch.int32, device=device)
        """Positions of the tokens that are drawn."""
        self._flags = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._results = torch.zeros(2 * max_rows, dtype=torch.int32, device=device)
        # A model with a final softcap produces float32.
        logits = model.rank_logits(torch.zeros(1, model.config.hidden_size, dtype=dtype, device=device))
        self._logits = torch.zeros(max_rows, logits.shape[1], dtype=logits.dtype, device=device)
        self._own_logits = self._logits
        """Where ranks put the whole logits of their rows, if the draw uses them."""
        if sampler.ranks is not None:
            self._own_logits = logits.new_zeros(sampler.ranks.count(max_rows), model.config.vocab_size)

    def compute(self, num_rows: int, *, adapted: bool = False) -> None:
        """Compute the logits of the first `num_rows` rows."""
        hidden = self._model(self._tables.decode_inputs(num_rows, adapted=adapted))
        self._model.rank_logits(hidden, self._logits[:num_rows])

    def draw(self, num_rows: int, *, lists: bool = False) -> None:
        """Draw the rows' tokens; as a rank, from `lists` if set."""
        slots, positions = self._tables.decode_slots[:num_rows], self._tables.decode_positions[:num_rows]
        tokens, flags = self._tokens[:num_rows], self._flags[:num_rows]
        drawn = torch.add(positions, 1, out=self._positions[:num_rows])
        logits = self._logits[:num_rows]
        if lists:
            self._sampler.draw_from_lists(logits, slots, drawn, tokens, flags)
        else:
            row_logits = self._sampler.own_rows(logits, self._of_rank(num_rows))
            self._sampler.draw(row_logits, slots, drawn, tokens, flags)
        kernels.record_tokens(tokens, flags, slots, self._tables.last_tokens, self._results_of(num_rows))

    def read(self, rows: StepRows, num_rows: int, *, lists: bool) -> tuple[Tensor, PendingLogprobs | None]:
        """Draw again for those of `rows` whose logits are edited, unless all were drawn from `lists`. Return tokens and
        flags [2, num_rows] int32, and the requested log-probabilities. Rows after those of the step are padding."""
        results = self._results_of(num_rows)
        if lists:
            return results, None
        slots, tokens, flags = self._tables.decode_slots[:num_rows], self._tokens[:num_rows], self._flags[:num_rows]
        logits = self._of_rank(num_rows)
        # All rows of the graph: ranks divide them by their number.
        host_slots, host_positions = np.full(num_rows, -1), np.zeros(num_rows, np.int64)
        count = len(rows.slots)
        host_slots[:count], host_positions[:count] = rows.slots, rows.positions
        if self._sampler.edit_and_redraw(
            logits, host_slots, host_positions, slots, self._positions[:num_rows], tokens, flags
        ):
            kernels.record_tokens(tokens, flags, slots, self._tables.last_tokens, results)
        return results, self._sampler.logprobs(logits, host_slots, tokens)

    def _results_of(self, num_rows: int) -> Tensor:
        return self._results[: 2 * num_rows].view(2, num_rows)

    def _of_rank(self, num_rows: int) -> Tensor:
        """Return where the whole logits of this rank's share of the rows are, unless a draw did without them."""
        ranks = self._sampler.ranks
        return self._own_logits[: num_rows if ranks is None else ranks.count(num_rows)]
