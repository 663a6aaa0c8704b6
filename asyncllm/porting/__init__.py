"""Tools for adding a model: a module's inputs and outputs, a step for a single layer, and a layer-by-layer comparison
with transformers."""

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
