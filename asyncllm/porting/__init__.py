"""Tools for adding a model: what goes into a module and out of it, a step for a layer alone, and the comparison
with transformers layer by layer."""

from __future__ import annotations

from asyncllm.porting.compare import Comparison, Difference, compare
from asyncllm.porting.module_io import Call, ModuleIOExtractor, recorded
from asyncllm.porting.step_context import continuous_tensor, make_step_context

__all__ = [
    "Call",
    "Comparison",
    "Difference",
    "ModuleIOExtractor",
    "compare",
    "continuous_tensor",
    "make_step_context",
    "recorded",
]
