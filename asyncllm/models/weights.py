"""Weight tables: how the names of checkpoint tensors map to our modules, and the parts that they fill.

A row maps a checkpoint *module* to one of ours: "model.layers.{i}.self_attn.q_proj" -> "layers.{i}.attn.qkv[q]". The
rest of a tensor's name after the module ("weight", "bias", later "qweight" or "lora_A.weight") is the suffix, which
belongs to the receiving module. Brackets name the part of a fused parameter:

    layers.{i}.attn.qkv[q]                   part q
    layers.{i}.mlp.experts.gate_up[up,{e}]   part up of expert e
    layers.{i}.mlp.experts.down[{e}]         expert e
    layers.{i}.attn.qkv[q+k+v]               one tensor holds q, k and v, concatenated along axis 0
    layers.{i}.attn.qkv[q+k+v:grouped]       one tensor holds, per KV head, its query heads, then k, then v
    layers.{i}.attn.qkv[q+gate:by_head]      one tensor holds, per head, its part of q, then of the gate
    layers.{i}.attn.qkv[q+k+v:by_group]      one tensor holds, per group of heads, its part of q, then of k, then of v
    layers.{i}.attn.qkv[q+k+v:transposed]    q, k and v, concatenated along axis 1: a weight is [in, out]
    layers.{i}.mlp.down[:transposed]         a single weight [in, out]
    layers.{i}.attn.qkv[q+k+v:quarters]      one tensor holds, four times, a quarter of q, of v and of k
    layers.{i}.mlp.gate_up[gate+up:stacked]  one tensor [experts, out, in] holds all experts, with gate and up of each;
                                             `fused.STACKS` has other orders

A tensor that is not named by its module and a suffix has a row of its own, whose target ends in the suffix:
"model.layers.{i}.mlp.gate.e_score_correction_bias" -> "layers.{i}.mlp.correction:bias".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from asyncllm.errors import InvalidCheckpoint, short
from asyncllm.layers.layer import PartKey
from asyncllm.models.derived_tensors import is_derived
from asyncllm.models.fused import LAYOUTS, STACKS, Stack
from asyncllm.models.name_tree import PLACEHOLDER, tree_of, walk

__all__ = ["PartKey", "Target", "WeightMap"]

_TARGET = re.compile(
    r"(?P<module>[^\[\]:]+)(?::(?P<suffix>\w+))?"
    r"(?:\[(?:(?P<parts>\w+(?:\+\w+)*)(?::(?P<layout>\w+))?(?:,\{(?P<index>\w+)\})?"
    r"|\{(?P<alone>\w+)\}|:(?P<whole>\w+))\])?"
)


@dataclass(frozen=True, slots=True)
class Target:
    """Where a checkpoint tensor goes: it fills the parts `keys` of module `module`, in order along the output
    features."""

    module: str
    keys: tuple[PartKey, ...]
    layout: str | None = None

    @property
    def stack(self) -> Stack | None:
        """The order of stacked experts, if the tensor holds all of them."""
        return STACKS.get(self.layout or "")

    def of_experts(self, count: int) -> Target:
        """Return the target with its parts for each of `count` experts."""
        keys = tuple((suffix, part, expert) for expert in range(count) for suffix, part, _ in self.keys)
        return Target(self.module, keys, self.layout)

    @property
    def transposed(self) -> bool:
        """Whether the tensor is a matrix [in, out]. Quantized tensors in its place are not transposed."""
        return self.layout == "transposed" and self.keys[0][0] == "weight"


@dataclass(frozen=True, slots=True)
class _Row:
    """A parsed row: `module` still has its placeholders; `index` names the placeholder that is the part's index;
    `suffix` is set for a row of a single tensor."""

    module: str
    suffix: str | None
    parts: tuple[str | None, ...]
    layout: str | None
    index: str | None

    @staticmethod
    def parse(pattern: str, target: str) -> _Row:
        match = _TARGET.fullmatch(target)
        if match is None:
            raise ValueError(f"weight table: {target!r} is not of the form module[part,{{index}}]")
        unbound = set(PLACEHOLDER.findall(target)) - set(PLACEHOLDER.findall(pattern))
        if unbound:
            raise ValueError(f"weight table: {target!r} uses {sorted(unbound)}, which {pattern!r} does not bind")
        parts, layout, index = match["parts"], match["layout"] or match["whole"], match["index"] or match["alone"]
        if layout is not None and layout not in LAYOUTS and layout not in STACKS:
            raise ValueError(f"weight table: {target!r} asks for the unknown layout {layout!r}")
        names: tuple[str | None, ...] = (None,) if parts is None else tuple(parts.split("+"))
        return _Row(match["module"], match["suffix"], names, layout or ("flat" if len(names) > 1 else None), index)


class WeightMap:
    """The weight table of a family. Immutable.

    `rows` maps patterns of checkpoint module names to targets in our model. `ignored` are patterns of tensor names that
    the model does not need, `skipped` patterns of modules to skip entirely; both take precedence over rows. A
    placeholder such as {i} stands for one decimal number.

    Raises ValueError for a malformed table, which is a mistake in a family file.
    """

    __slots__ = ("_ignored", "_modules", "_names", "_rows", "_skipped", "_tree")

    def __init__(self, rows: Mapping[str, str], *, ignored: Iterable[str] = (), skipped: Iterable[str] = ()) -> None:
        self._rows = MappingProxyType(dict(rows))
        self._ignored = tuple(dict.fromkeys(ignored))
        self._skipped = tuple(dict.fromkeys(skipped))
        self._modules = tree_of((pattern, True) for pattern in self._skipped)
        self._tree = tree_of((pattern, _Row.parse(pattern, target)) for pattern, target in self._rows.items())
        self._names = tree_of((pattern, True) for pattern in self._ignored)

    @property
    def rows(self) -> Mapping[str, str]:
        """Checkpoint module pattern -> target, as written."""
        return self._rows

    @property
    def ignored(self) -> tuple[str, ...]:
        """Patterns of tensor names that are skipped."""
        return self._ignored

    @property
    def skipped(self) -> tuple[str, ...]:
        """Patterns of modules that are skipped entirely."""
        return self._skipped

    def replaced(self, rows: Mapping[str, str]) -> WeightMap:
        """Return this table with `rows` added; a row replaces the one with the same pattern."""
        return WeightMap({**self._rows, **rows}, ignored=self._ignored, skipped=self._skipped)

    def without(self, *patterns: str) -> WeightMap:
        """Return this table without the rows of these patterns. Raises KeyError for an unknown pattern."""
        rows = dict(self._rows)
        for pattern in patterns:
            del rows[pattern]
        return WeightMap(rows, ignored=self._ignored, skipped=self._skipped)

    def ignoring(self, *patterns: str) -> WeightMap:
        """Return this table with more ignored tensor names; a tied head adds "lm_head.weight"."""
        return WeightMap(self._rows, ignored=(*self._ignored, *patterns), skipped=self._skipped)

    def skipping(self, *patterns: str) -> WeightMap:
        """Return this table with more modules to skip entirely, such as layers that only predict further tokens."""
        return WeightMap(self._rows, ignored=self._ignored, skipped=(*self._skipped, *patterns))

    def with_optional_prefix(self, prefix: str) -> WeightMap:
        """Return this table for names with and without `prefix`, which files of a model saved without its head lack."""
        bare = {pattern.removeprefix(prefix): target for pattern, target in self._rows.items()}
        ignored = [pattern.removeprefix(prefix) for pattern in self._ignored]
        return WeightMap({**bare, **self._rows}, ignored=(*self._ignored, *ignored), skipped=self._skipped)

    def skipped_module(self, name: str) -> str | None:
        """Return the skipped module that tensor `name` belongs to, or None."""
        segments = name.split(".")
        depths = [depth for depth, _, _ in walk(self._modules, segments)]
        return ".".join(segments[: depths[0]]) if depths else None

    def resolve(self, name: str) -> Target | None:
        """Return where tensor `name` goes, or None if it is skipped, like rotary buffers and cache scales. The longest
        matching row wins.

        Raises InvalidCheckpoint when no row matches.
        """
        segments = name.split(".")
        ignored = any(depth == len(segments) for depth, _, _ in walk(self._names, segments))
        if ignored or is_derived(name) or self.skipped_module(name):
            return None
        found = [
            match
            for match in walk(self._tree, segments)
            if (match[0] == len(segments)) == (match[1].suffix is not None) and all(segments)
        ]
        if not found:
            raise InvalidCheckpoint(
                f"Tensor {short(name)} matches no row of the model's weight table. Check that config.json belongs to "
                f"these weights, and that the model is not quantized or an adapter."
            )
        depth, row, numbers = max(found, key=lambda match: match[0])
        suffix = row.suffix or ".".join(segments[depth:])
        module = PLACEHOLDER.sub(lambda match: str(numbers[match[1]]), row.module)
        index = None if row.index is None else numbers[row.index]
        return Target(module, tuple((suffix, part, index) for part in row.parts), row.layout)
