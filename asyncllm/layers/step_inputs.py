"""StepInputs: the one typed argument through which layers see the step, and the columns that it is made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncllm.kernels import DecodePlan, PrefillPlan, Rotation, StatePlan, States, plan_states
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

    This declaration is all that a further input takes. The agent computes its values on the host, brings them up with
    the step, pads them to the size of a captured step, and splits them with a step that needs too much memory; a layer
    that lists the column in its `columns` reads it as `step[column]`.
    """

    name: str
    dtype: torch.dtype
    """int32, int64, float32 or float64."""
    per: Literal["token", "row"]
    padding: int = 0
    """What tokens and rows get that only fill a captured step."""
    absent: int | None = None
    """What a decode row that is absent from a captured step gets; `padding` unless given."""
    of_slot: Callable[[SlotStart], int | float] | None = None
    """The value of a sequence for as long as it has its slot: all its tokens and rows have the same."""
    of_step: Callable[[Batch, NDArray[Any]], NDArray[Any]] | None = None
    """The values of a step, from its batch and the absolute positions of its tokens [T]. Decode rows come first."""
    of_tables: bool = False
    """Whether `agent.step` computes the values from its tables of slots: the columns that every model reads."""

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
    """Return the places of the step's tokens in a block group."""
    return PLACES if group == 0 else dataclasses.replace(PLACES, name=f"places_{group}")


class JointTokens(NamedTuple):
    """Tokens of a prefill row, one after the other, of which each sees all; and what is before them."""

    row: int
    start: int
    """The first one's index among the step's tokens, and"""
    stop: int
    """the index behind the last one's."""
    kv_len: int
    """Tokens of the row up to the last of them."""


class GroupTables(NamedTuple):
    """Where a step's tokens and rows are in one block group."""

    places: Tensor
    """[T] int64."""
    block_tables: Tensor
    """[B, N] int32."""


@dataclass(slots=True, kw_only=True)
class StepInputs:
    """The tensors of one step, all on the model's device. Written by `agent.step`, read by layers, which keep their
    plans here.

    T tokens belong to B rows. Decode rows (one token each) come first, then prefill rows. A captured step has room for
    more: its last decode rows may be absent, without a token, and the tokens of the padding are a prefill row. N is the
    width of the block tables: at least the blocks of the longest row; entries past a row's own blocks are unspecified
    but valid ids.
    """

    input_ids: Tensor
    """[T] int64."""
    positions: Tensor
    """[T] int64, absolute."""
    places: Tensor
    """[T] int64: block id * block_size + offset in the block, where the token's K and V go. As `block_tables`, of the
    first block group; `of_layer` has a layer's own."""
    num_decode: int
    """How many of the B rows, the first ones, have a single token and read their whole context, or are absent."""
    q_offsets: Tensor
    """[B + 1] int32: row b owns tokens q_offsets[b] to q_offsets[b + 1]."""
    kv_lens: Tensor
    """[B] int32: tokens of the row in the cache once this step has written its own; 0 of padding, -1 of a decode row
    that is absent."""
    block_tables: Tensor
    """[B, N] int32."""
    max_q_len: int
    """Most tokens of a prefill row; 1 when there is none."""
    caches: Sequence[Any]
    """By layer: what it keeps of the rows' tokens, as its `CacheSpec.cache` gives it."""
    more_groups: Sequence[GroupTables] = ()
    """Of the block groups after the first."""
    layer_groups: Sequence[int] = ()
    """By layer: its block group. Empty when there is one."""
    more: Mapping[Column, Tensor] = field(default_factory=dict)
    """The columns that the model's layers ask for, [T] or [B] each."""
    prompts: Sequence[tuple[int, int]] | None = None
    """Tokens of each prefill row, and of its context, where the host knows them: a captured step serves others."""
    image_features: Tensor | None = None
    """[F, hidden]: the features of the step's image tokens, in order; several times as wide where layers add theirs.
    `layers.images` has each token's row."""
    num_image_tokens: int | None = None
    """F, where all of the step's features are for its own tokens: not of parts of the step that `select` gives."""
    joint: Sequence[JointTokens] = ()
    """Tokens that see each other, of images. Not of parts of the step that `select` gives."""
    adapted: bool = False
    """Whether a token has an adapter, so that layers with adapters have to add theirs."""
    batch_invariant: bool = False
    """Whether a row's result may depend on nothing but the row: attention then takes the same steps for every row."""
    rotations: tuple[Rotation, ...] = field(default=(), init=False)
    """How far the tokens are turned, by each of the model's rotary embeddings. Written by the model before its first
    layer; this and what follows begins empty in a copy with other fields."""
    query_scale: Tensor | None = field(default=None, init=False)
    """[T, 1, 1] float32: what multiplies the tokens' queries, in models that scale them by position. Written by the
    model before its first layer."""
    layer_inputs: Tensor | None = field(default=None, init=False)
    """[T, layers, features]: what each layer has of the tokens besides the stream, in models whose layers have
    embeddings of their own. Written by the model before its first layer."""
    image_tokens: Tensor | None = field(default=None, init=False)
    """[F] int64: the tokens with features, in order. Written by the first layer that asks."""
    attention_plans: dict[Hashable, tuple[DecodePlan | None, PrefillPlan | None]] = field(
        default_factory=dict, init=False
    )
    """Attention window, or what else layers have in common -> the plans that they share, of the decode rows and of the
    prefill rows. Written by the first of them."""
    cache_writes: dict[int, Tensor] = field(default_factory=dict, init=False)
    """Number of KV heads -> `kernels.plan_cache_write` of the places. Written by the first layer with as many."""
    state_plan: StatePlan | None = field(default=None, init=False)
    """Where rows' states come from and go. Written by the first layer with a state."""
    group_steps: dict[int, StepInputs] = field(default_factory=dict, init=False)
    """Block group after the first -> the step as its layers see it. Written by the first of them."""

    def __getitem__(self, column: Column) -> Tensor:
        """Return the values of a column that a layer of this model asks for."""
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
                # Pieces end where a step does: to the last bit, what a token gets depends on how prompts are cut.
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
        """Return a step of these tokens and rows alone. `kv_lens`: other lengths than the rows have here."""

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
            num_image_tokens=None,
            joint=(),
        )


_OWN = (INPUT_IDS, POSITIONS, PLACES, KV_LENS, BLOCK_TABLES)
"""The columns that every model reads, as fields."""


@dataclass(slots=True, kw_only=True)
class SampledRows:
    """The tokens of a step whose hidden states are wanted, one each of R rows. The others' are not read after the last
    layer has written their keys and values, so that the rest of that layer is a decode step of these rows."""

    indices: Tensor
    """[R] int64: their indices among the step's tokens."""
    inputs: StepInputs
    """The R rows as a decode step. Of its columns the last layer reads kv_lens, block tables and `more` alone."""
