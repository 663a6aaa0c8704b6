"""StepInputs: the one typed argument through which layers see the batch."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from asyncllm.kernels import DecodePlan, PrefillPlan, Rotation

__all__ = ["SampledRows", "StepInputs"]


@dataclass(slots=True, kw_only=True)
class StepInputs:
    """The tensors of one step, all on the model's device. Written by `agent.inputs`, read by layers, which keep
    their plans here.

    T tokens belong to B rows. Decode rows (one token each) come first, then prefill rows. A captured step has room for
    more: its last decode rows may be absent, without a token, and the tokens of the padding are a prefill row. N is the
    width of the block tables: at least the blocks of the longest row; entries past a row's own blocks are unspecified
    but valid ids.
    """

    input_ids: Tensor
    """[T] int64."""
    positions: Tensor
    """[T] int64, absolute."""
    slot_mapping: Tensor
    """[T] int64: block id * block_size + offset in the block, where the token's K and V go."""
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
    rope_lens: Tensor | None = None
    """[T] int64: prompt length of each token's sequence, which fixes its dynamic NTK base.
    None unless the model asks."""
    batch_invariant: bool = False
    """Whether a row's result may depend on nothing but the row: attention then takes the same steps for every row."""
    rotation: Rotation | None = field(default=None, init=False)
    """How far the tokens are turned, in all layers. Written by the model that first needs it; this and what follows
    begins empty in a copy with other fields (`dataclasses.replace`)."""
    attention_plans: dict[int | None, tuple[DecodePlan | None, PrefillPlan | None]] = field(
        default_factory=dict, init=False
    )
    """Attention window -> the plans that all layers with this window share, of the decode rows and of the prefill rows.
    Written by the first of them."""
    cache_writes: dict[int, Tensor] = field(default_factory=dict, init=False)
    """Number of KV heads -> `kernels.plan_cache_write` of the slot mapping. Written by the first layer with as many."""


@dataclass(slots=True, kw_only=True)
class SampledRows:
    """The tokens of a step whose hidden states are wanted, one each of R rows. Nobody reads the others' after the last
    layer has written their keys and values, so that the rest of that layer is a decode step of these rows."""

    indices: Tensor
    """[R] int64: their places among the step's tokens."""
    inputs: StepInputs
    """The R rows as a decode step; only what attention reads of it is of use."""
