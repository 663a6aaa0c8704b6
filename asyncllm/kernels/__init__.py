"""The ops that layers may call: one function each, whose body is the plain torch reference and the CPU back end."""

from asyncllm.kernels.activation import gelu_tanh_mul, silu_mul
from asyncllm.kernels.attention import (
    DecodePlan,
    PrefillPlan,
    paged_decode_attention,
    paged_prefill_attention,
    plan_decode_attention,
    plan_prefill_attention,
)
from asyncllm.kernels.cache import PagedKV, copy_blocks, fill_kv_cache, plan_cache_write
from asyncllm.kernels.embedding import embed, gather_rows
from asyncllm.kernels.linear import linear, linear_invariant, linear_silu_mul
from asyncllm.kernels.moe import fused_experts, route
from asyncllm.kernels.norm import add_rms_norm, layer_norm, rms_norm
from asyncllm.kernels.rotary import Rotation, apply_rotary, linear_rope_fill_kv, rope_fill_kv, rotation
from asyncllm.kernels.step import DecodeInputs, prepare_decode, segments_finite
from asyncllm.kernels.tokens import record_tokens

__all__ = [
    "DecodeInputs",
    "DecodePlan",
    "PagedKV",
    "PrefillPlan",
    "Rotation",
    "add_rms_norm",
    "apply_rotary",
    "copy_blocks",
    "embed",
    "fill_kv_cache",
    "fused_experts",
    "gather_rows",
    "gelu_tanh_mul",
    "layer_norm",
    "linear",
    "linear_invariant",
    "linear_rope_fill_kv",
    "linear_silu_mul",
    "paged_decode_attention",
    "paged_prefill_attention",
    "plan_cache_write",
    "plan_decode_attention",
    "plan_prefill_attention",
    "prepare_decode",
    "record_tokens",
    "rms_norm",
    "rope_fill_kv",
    "rotation",
    "route",
    "segments_finite",
    "silu_mul",
]
