"""StepInputs: the single typed argument through which layers see the step, and its columns."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncllm.kernels import (
    ChosenTokens,
    DecodePlan,
    IndexTile,
    PrefillPlan,
    Rotation,
    RowGroups,
    StatePlan,
    States,
    plan_states,
)
from asyncllm.protocol import Batch, SlotStart

__all__ = [
    "BLOCK_TABLES",
    "INPUT_IDS",
    "KV_LENS",
    "PLACES",
    "POSITIONS",
    "Column",
    "GroupTables",
    "JointTokens",
    "SampledRows",
    "StepInputs",
    "places_of",
]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Column:
    """One input of a step: a number for each of its tokens, or for each of its rows.

    A further input needs nothing but this declaration. The agent computes its values on the host, uploads them with the
    step, pads them to the size of a captured step, and splits them with a step that needs too much memory; a layer that
    lists the column in its `columns` reads it as `step[column]`.
    """

    name: str
    dtype: torch.dtype
    """int32, int64, float32 or float64."""
    per: Literal["token", "row"]
    padding: int = 0
    """Value of the tokens and rows that only pad a captured step."""
    absent: int | None = None
    """Value of a decode row that is absent from a captured step; `padding` unless given."""
    of_slot: Callable[[SlotStart], int | float] | None = None
    """Returns the value of a sequence for as long as it has its slot; all its tokens and rows have this value."""
    of_step: Callable[[Batch, NDArray[Any]], NDArray[Any]] | None = None
    """Returns the values of a step, from its batch and the absolute positions of its tokens [T]. Decode rows come
    first."""
    of_tables: bool = False
    """Whether `agent.step` computes the values from its per-slot tables, as for the columns that every model reads."""

    def __post_init__(self) -> None:
        sources = (self.of_slot is not None) + (self.of_step is not None) + self.of_tables
        if sources != 1:
            raise ValueError(
                f"The column {self.name!r} needs one of of_slot and of_step to compute it, and has {sources}."
            )


INPUT_IDS = Column(name="input_ids", dtype=torch.int64, per="token", of_tables=True)
POSITIONS = Column(name="positions", dtype=torch.int64, per="token", of_tables=True)
PLACES = Column(name="places", dtype=torch.int64, per="token", padding=-1, of_tables=True)
KV_LENS = Column(name="kv_lens", dtype=torch.int32, per="row", absent=-1, of_tables=True)
BLOCK_TABLES = Column(name="block_tables", dtype=torch.int32, per="row", of_tables=True)


@cache
def places_of(group: int) -> Column:
    """Return the column of the places of the step's tokens in a block group."""
    return PLACES if group == 0 else dataclasses.replace(PLACES, name=f"places_{group}")


class JointTokens(NamedTuple):
    """Consecutive tokens of a prefill row that all attend to each other, and the tokens before them."""

    row: int
    start: int
    """Index of the first one among the step's tokens."""
    stop: int
    """Index after the last one."""
    kv_len: int
    """Number of tokens in the row up to the last of them."""


class GroupTables(NamedTuple):
    """The places of a step's tokens and the block tables of its rows in one block group."""

    places: Tensor
    """[T] int64."""
    block_tables: Tensor
    """[B, N] int32."""


@dataclass(slots=True, kw_only=True)
class StepInputs:
    """The tensors of one step, all on the model's device. Written by `agent.step`, read by layers, which also store
    their plans here.

    T tokens belong to B rows. Decode rows (one token each) come first, then prefill rows. A captured step may be partly
    empty: its last decode rows may be absent, without a token, and the padding tokens form a prefill row. N is the
    width of the block tables: at least the blocks of the longest row; entries past a row's own blocks are unspecified
    but valid ids.
    """

    input_ids: Tensor
    """[T] int64."""
    positions: Tensor
    """[T] int64, absolute."""
    places: Tensor
    """[T] int64: block id * block_size + offset in the block, where the token's K and V are written. This and
    `block_tables` are those of the first block group; `of_layer` returns a layer's own."""
    num_decode: int
    """How many of the B rows, the first ones, have a single token and read their whole context, or are absent."""
    q_offsets: Tensor
    """[B + 1] int32: row b owns tokens q_offsets[b] to q_offsets[b + 1]."""
    kv_lens: Tensor
    """[B] int32: tokens of the row in the cache once this step has written its own; 0 for padding, -1 for an absent
    decode row."""
    block_tables: Tensor
    """[B, N] int32."""
    max_q_len: int
    """Maximum number of tokens of a prefill row; 1 if there is none."""
    caches: Sequence[Any]
    """By layer: its cache, as returned by `CacheSpec.cache`."""
    more_groups: Sequence[GroupTables] = ()
    """Tables of the block groups after the first."""
    layer_groups: Sequence[int] = ()
    """By layer: its block group. Empty if there is only one."""
    more: Mapping[Column, Tensor] = field(default_factory=dict)
    """The columns that the model's layers list, [T] or [B] each."""
    prompts: Sequence[tuple[int, int]] | None = None
    """Number of tokens of each prefill row, and of its context; None if the host does not know them, as in a captured
    step."""
    contexts: NDArray[np.int32] | None = None
    """[B]: `kv_lens` in host memory; None if the host does not know them, as in a captured step."""
    image_features: Tensor | None = None
    """[F, hidden]: the features of the step's image tokens, in order; several times as wide if layers add theirs.
    `layers.images` computes each token's row."""
    num_image_tokens: int | None = None
    """F, if all features belong to the step's own tokens; None for parts of a step made by `select`."""
    joint: Sequence[JointTokens] = ()
    """Image tokens that attend to each other. Empty for parts of a step made by `select`."""
    adapted: bool = False
    """Whether any token has an adapter, so that layers with adapters have to add theirs."""
    batch_invariant: bool = False
    """Whether a row's result may depend only on the row: attention then computes every row alike."""
    rotations: tuple[Rotation, ...] = field(default=(), init=False)
    """The rotation of the tokens, for each of the model's rotary embeddings. Written by the model before its first
    layer. This field and the following ones are empty in a copy with other fields."""
    query_scale: Tensor | None = field(default=None, init=False)
    """[T, 1, 1] float32: factors of the tokens' queries, in models that scale them by position. Written by the model
    before its first layer."""
    layer_inputs: Tensor | None = field(default=None, init=False)
    """[T, layers, features]: each layer's own inputs besides the stream, in models with per-layer embeddings; or
    [T, 1, hidden], the embeddings, where layers read them beside the stream. Written by the model before its first
    layer."""
    adapter_groups: RowGroups | None = field(default=None, init=False)
    """The first rows, by adapter, if they are many. Written by the model before its first layer."""
    image_tokens: Tensor | None = field(default=None, init=False)
    """[F] int64: the tokens with features, in order. Written by the first layer that needs it."""
    attention_plans: dict[Hashable, tuple[DecodePlan | None, PrefillPlan | None]] = field(
        default_factory=dict, init=False
    )
    """Attention window, or another property that layers share -> their plans, for decode rows and for prefill rows.
    Written by the first such layer."""
    cache_writes: dict[int, Tensor] = field(default_factory=dict, init=False)
    """Number of KV heads -> `kernels.plan_cache_write` of the places. Written by the first layer with that number."""
    state_plan: StatePlan | None = field(default=None, init=False)
    """Where rows' states are read and written. Written by the first layer with a state."""
    index_tiles: list[IndexTile] | None = field(default=None, init=False)
    """How indices score the tokens of the rows' contexts. Written by the first layer with an index."""
    chosen: ChosenTokens | None = field(default=None, init=False)
    """What the tokens attend to in the latest layer with an index, which the following layers may share."""
    group_steps: dict[int, StepInputs] = field(default_factory=dict, init=False)
    """Block group after the first -> the step as its layers see it. Written by the first such layer."""

    def __getitem__(self, column: Column) -> Tensor:
        """Return the values of a column that a layer of this model lists."""
        return self.more[column]

    def states(self, cache: States) -> StatePlan:
        """Return where the rows' states are in a cache of this block group."""
        plan = self.state_plan
        if plan is None:
            plan = plan_states(
                self.places,
                self.q_offsets,
                self.kv_lens,
                self.block_tables,
                cache.block_size,
                # Pieces end where a step ends: with them, a token's exact result would depend on how prompts are cut.
                num_serial=len(self.kv_lens) if self.batch_invariant else self.num_decode,
            )
            self.state_plan = plan
        return plan

    def of_layer(self, layer: int) -> StepInputs:
        """Return the step with the places, block tables and plans of the layer's block group."""
        group = self.layer_groups[layer] if self.layer_groups else 0
        if group == 0:
            return self
        step = self.group_steps.get(group)
        if step is None:
            places, block_tables = self.more_groups[group - 1]
            step = dataclasses.replace(self, places=places, block_tables=block_tables, more_groups=(), layer_groups=())
            self.group_steps[group] = step
        step.rotations, step.query_scale = self.rotations, self.query_scale
        step.adapter_groups = self.adapter_groups
        return step

    def select(
        self,
        tokens: Tensor | slice,
        rows: Tensor | slice,
        *,
        num_decode: int,
        q_offsets: Tensor,
        max_q_len: int,
        kv_lens: Tensor | None = None,
    ) -> StepInputs:
        """Return a step with only these tokens and rows. `kv_lens`: lengths that replace those of the rows."""

        def taken(column: Column, values: Tensor) -> Tensor:
            return values[tokens if column.per == "token" else rows]

        own: dict[str, Any] = {column.name: taken(column, getattr(self, column.name)) for column in _OWN}
        if kv_lens is not None:
            own["kv_lens"] = kv_lens
        more = {column: taken(column, values) for column, values in self.more.items()}
        more_groups = [GroupTables(group.places[tokens], group.block_tables[rows]) for group in self.more_groups]
        return dataclasses.replace(
            self,
            **own,
            more=more,
            more_groups=more_groups,
            num_decode=num_decode,
            q_offsets=q_offsets,
            max_q_len=max_q_len,
            prompts=None,
            contexts=None,
            num_image_tokens=None,
            joint=(),
        )


_OWN = (INPUT_IDS, POSITIONS, PLACES, KV_LENS, BLOCK_TABLES)
"""The columns that every model reads, as fields."""


@dataclass(slots=True, kw_only=True)
class SampledRows:
    """The tokens of a step whose hidden states are needed, one for each of R rows. Other tokens are not needed once the
    last layer has written their keys and values, so the rest of that layer is a decode step of these rows."""

    indices: Tensor
    """[R] int64: their indices among the step's tokens."""
    inputs: StepInputs
    """The R rows as a decode step. The last layer reads only its kv_lens, block tables and `more`."""
