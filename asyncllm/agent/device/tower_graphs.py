"""TowerGraphs: a vision tower's launches as CUDA graphs, one for each recurring combination of image shapes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from asyncllm.agent.device.graphs import capture
from asyncllm.prompt_image import PromptImage
from asyncllm.vl.tower import CapturableTower, TowerInputs

__all__ = ["MAX_CAPTURED_VALUES", "TowerGraphs"]

_MAX_GRAPHS = 16
_MAX_SHAPES = 256
"""Maximum number of shapes remembered, including those seen once."""

MAX_CAPTURED_VALUES = 4096 * 588
"""Maximum pixel values in a captured batch, 4,096 patches of 14 x 14: larger batches take longer than their
launches."""


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    inputs: TowerInputs
    """The tensors that the graph reads."""
    features: Tensor
    """The tensor that it writes."""


class TowerGraphs:
    """Runs a tower on images. A batch is captured when its shapes occur for the second time, and replayed from then on.
    The graphs share their memory, because they run one after another. Used by the thread that launches steps."""

    def __init__(self, tower: CapturableTower) -> None:
        self._tower = tower
        self._pool: Any = None
        self._graphs: OrderedDict[Hashable, _Captured | None] = OrderedDict()
        """By shape, most recent last; None for a shape seen once."""

    def encode(self, images: Sequence[PromptImage]) -> list[Tensor]:
        """Return what the tower's `encode` returns, in memory that the next call overwrites."""
        inputs = self._tower.upload_inputs(images)
        return list(torch.split(self._encode(inputs), [image.num_features for image in images]))

    def clear(self) -> None:
        """Forget all graphs and free their memory."""
        self._graphs.clear()
        self._pool = None

    def _encode(self, inputs: TowerInputs) -> Tensor:
        first = inputs.tensors[0]
        if not first.is_cuda or first.numel() > MAX_CAPTURED_VALUES:
            return self._tower.encode_inputs(inputs)
        key = _shape_of(inputs)
        if key not in self._graphs:
            self._graphs[key] = None
            self._evict()
            return self._tower.encode_inputs(inputs)
        self._graphs.move_to_end(key)
        captured = self._graphs[key]
        if captured is None:
            captured = self._graphs[key] = self._capture(inputs)
            self._evict()
        else:
            for own, new in zip(_tensors(captured.inputs), _tensors(inputs), strict=True):
                own.copy_(new)
        captured.graph.replay()
        return captured.features

    def _capture(self, inputs: TowerInputs) -> _Captured:
        """Capture what has already been launched once, so that nothing is compiled during the capture."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        with capture(self._pool) as graph:
            features = self._tower.encode_inputs(inputs)
        return _Captured(graph, inputs, features)

    def _evict(self) -> None:
        """Keep only the most recent shapes and graphs."""
        captured = [key for key, each in self._graphs.items() if each is not None]
        for key in captured[: max(len(captured) - _MAX_GRAPHS, 0)]:
            del self._graphs[key]
        if len(self._graphs) > _MAX_SHAPES:
            self._graphs.popitem(last=False)


def _tensors(inputs: TowerInputs) -> list[Tensor]:
    return [*inputs.tensors, *(each.tiles for each in inputs.segments if each.tiles is not None)]


def _shape_of(inputs: TowerInputs) -> Hashable:
    """Return everything that the launches depend on."""
    shapes = tuple((each.shape, each.dtype) for each in _tensors(inputs))
    return shapes, tuple((each.length, each.rows) for each in inputs.segments)
