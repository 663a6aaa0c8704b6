"""Experts chosen by corrected logits."""

from __future__ import annotations

from torch import Tensor

from asyncllm import kernels
from asyncllm.layers.moe import MoE
from asyncllm.layers.step_inputs import StepInputs

__all__ = ["LogitCorrectedMoE"]


class LogitCorrectedMoE(MoE):
    """Like `MoE` with a correction, which is added to the logits instead of the scores; the scores are sigmoids
    (Kolibri)."""

    def _route(self, x: Tensor, step: StepInputs) -> tuple[Tensor, Tensor]:
        logits = self.router(x, step)
        corrected = logits if self.correction is None else logits + self.correction.bias
        _, expert_ids = kernels.route(corrected, self.routing)
        weights = kernels.sigmoid(logits.float().gather(1, expert_ids))
        if self.routing.renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights * self.routing.scale, expert_ids
