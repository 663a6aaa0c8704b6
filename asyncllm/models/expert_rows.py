"""Experts with a module each in a checkpoint: their rows in a weight table, and their names by such rows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import takewhile

from asyncllm.models.name_tree import tree_of, walk

__all__ = ["expert_rows", "name_of_experts", "stacked_rows"]

_TARGET = re.compile(r"(?P<module>[^\[\]:]+)\[(?:(?P<part>\w+),)?\{(?P<index>\w+)\}\]")


def expert_rows(
    experts: str, layer: str = "layers.{i}.mlp", *, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> dict[str, str]:
    """Return the rows of experts that a checkpoint has under `experts`, such as "model.layers.{i}.mlp.experts".

    `names`: of the gate, the up and the down projection. Families whose checkpoints hold all experts in one tensor have
    these rows too: quantized files hold each expert by itself.
    """
    gate, up, down = (f"{experts}.{{e}}.{name}" for name in names)
    return {gate: f"{layer}.gate_up[gate,{{e}}]", up: f"{layer}.gate_up[up,{{e}}]", down: f"{layer}.down[{{e}}]"}


def stacked_rows(experts: str, layer: str = "layers.{i}.mlp") -> dict[str, str]:
    """Return the rows of experts that a checkpoint holds under `experts` in one tensor for each product, as
    transformers 5 has them in memory."""
    return {
        f"{experts}.gate_up_proj": f"{layer}.gate_up:weight[gate+up:stacked]",
        f"{experts}.down_proj": f"{layer}.down:weight[:stacked]",
    }


def name_of_experts(rows: Mapping[str, str], module: str, part: str | None, *, like: str) -> str | None:
    """Return the name of the checkpoint's modules that hold a part of one expert of our `module` each, with {e} for the
    expert; of several names the one that begins most like `like`. None if a table of these rows has none."""
    names, segments = [], module.split(".")
    for pattern, target in rows.items():
        match = _TARGET.fullmatch(target)
        if match is None or match["part"] != part:
            continue
        for depth, _, numbers in walk(tree_of([(match["module"], None)]), segments):
            if depth == len(segments):
                names.append(pattern.format(**numbers, **{match["index"]: "{e}"}))
    return max(names, key=lambda name: _shared_segments(name, like), default=None)


def _shared_segments(one: str, other: str) -> int:
    """Return how many leading segments two names share."""
    pairs = zip(one.split("."), other.split("."), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
