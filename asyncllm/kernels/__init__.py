"""The ops that layers may call: one function each, whose body is the plain torch reference and the CPU
implementation."""

from asyncllm.kernels.activation import ActivationKind, activate, gelu_tanh_mul, sigmoid, silu, silu_mul, softplus
from asyncllm.kernels.attention import (
    DecodePlan,
    PrefillPlan,
    paged_decode_attention,
    paged_joint_attention,
    paged_prefill_attention,
    plan_decode_attention,
    plan_prefill_attention,
)
from asyncllm.kernels.cache import KVCache, PagedKV, copy_blocks, fill_kv_cache, plan_cache_write
from asyncllm.kernels.embedding import embed, gather_rows
from asyncllm.kernels.expanded import expanded_prefill_attention, gather_lines, plan_expanded_prefill
from asyncllm.kernels.latent import (
    LatentKV,
    latent_decode_attention,
    latent_prefill_attention,
    plan_latent_decode,
    plan_latent_prefill,
    rope_fill_latent,
)
from asyncllm.kernels.linear import (
    linear,
    linear_by_head,
    linear_by_head_invariant,
    linear_exact,
    linear_invariant,
    linear_silu_mul,
)
from asyncllm.kernels.lora import (
    LoRAWeights,
    RowGroups,
    ShrunkRows,
    expand_lora,
    group_rows,
    linear_shrink_lora,
    shrink_lora,
)
from asyncllm.kernels.memory import gated_delta_rule, state_space
from asyncllm.kernels.moe import Routing, fused_experts, fused_experts_invariant, route
from asyncllm.kernels.norm import add_layer_norm, add_rms_norm, layer_norm, mean_squares, rms_norm
from asyncllm.kernels.packed import PackedWeight, linear_packed, linear_packed_silu_mul, packed_experts
from asyncllm.kernels.quantized_kv import KVFormat, QuantizedKV
from asyncllm.kernels.recurrent import Pieces, StatePlan, States, plan_states, short_convolution
from asyncllm.kernels.rotary import Rotation, apply_rotary, linear_rope_fill_kv, rope_fill_kv, rotation
from asyncllm.kernels.rounded import add_rms_norm_rounded, gate_rounded
from asyncllm.kernels.scaled import (
    RoundedRows,
    Rounding,
    ScaledWeight,
    linear_rounded,
    linear_rounded_silu_mul,
    linear_scaled,
    round_rows,
    scaled_experts,
)
from asyncllm.kernels.segments import Segments, rotate_heads, segment_attention, split_segments
from asyncllm.kernels.selective_scan import selective_scan
from asyncllm.kernels.step import DecodeInputs, prepare_decode, record_tokens, segments_finite

__all__ = [
    "ActivationKind",
    "DecodeInputs",
    "DecodePlan",
    "KVCache",
    "KVFormat",
    "LatentKV",
    "LoRAWeights",
    "PackedWeight",
    "PagedKV",
    "Pieces",
    "PrefillPlan",
    "QuantizedKV",
    "Rotation",
    "RoundedRows",
    "Rounding",
    "Routing",
    "RowGroups",
    "ScaledWeight",
    "Segments",
    "ShrunkRows",
    "StatePlan",
    "States",
    "activate",
    "add_layer_norm",
    "add_rms_norm",
    "add_rms_norm_rounded",
    "apply_rotary",
    "copy_blocks",
    "embed",
    "expand_lora",
    "expanded_prefill_attention",
    "fill_kv_cache",
    "fused_experts",
    "fused_experts_invariant",
    "gate_rounded",
    "gated_delta_rule",
    "gather_lines",
    "gather_rows",
    "gelu_tanh_mul",
    "group_rows",
    "latent_decode_attention",
    "latent_prefill_attention",
    "layer_norm",
    "linear",
    "linear_by_head",
    "linear_by_head_invariant",
    "linear_exact",
    "linear_invariant",
    "linear_packed",
    "linear_packed_silu_mul",
    "linear_rope_fill_kv",
    "linear_rounded",
    "linear_rounded_silu_mul",
    "linear_scaled",
    "linear_shrink_lora",
    "linear_silu_mul",
    "mean_squares",
    "packed_experts",
    "paged_decode_attention",
    "paged_joint_attention",
    "paged_prefill_attention",
    "plan_cache_write",
    "plan_decode_attention",
    "plan_expanded_prefill",
    "plan_latent_decode",
    "plan_latent_prefill",
    "plan_prefill_attention",
    "plan_states",
    "prepare_decode",
    "record_tokens",
    "rms_norm",
    "rope_fill_kv",
    "rope_fill_latent",
    "rotate_heads",
    "rotation",
    "round_rows",
    "route",
    "scaled_experts",
    "segment_attention",
    "segments_finite",
    "selective_scan",
    "short_convolution",
    "shrink_lora",
    "sigmoid",
    "silu",
    "silu_mul",
    "softplus",
    "split_segments",
    "state_space",
]
