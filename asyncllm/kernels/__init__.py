"""The ops that layers may call: one function each, whose body is the plain torch reference and the CPU back end."""

from asyncllm.kernels.activation import gelu_tanh_mul, silu_mul
from asyncllm.kernels.attention import (
    DecodePlan,
    paged_decode_attention,
    paged_prefill_attention,
    plan_decode_attention,
)
from asyncllm.kernels.cache import PagedKV, copy_blocks, fill_kv_cache, slot_lines
from asyncllm.kernels.linear import linear, linear_invariant
from asyncllm.kernels.moe import fused_experts, route
from asyncllm.kernels.norm import add_rms_norm, rms_norm
from asyncllm.kernels.rotary import Rotation, apply_rotary, rope_fill_kv

__all__ = [
    "DecodePlan",
    "PagedKV",
    "Rotation",
    "add_rms_norm",
    "apply_rotary",
    "copy_blocks",
    "fill_kv_cache",
    "fused_experts",
    "gelu_tanh_mul",
    "linear",
    "linear_invariant",
    "paged_decode_attention",
    "paged_prefill_attention",
    "plan_decode_attention",
    "rms_norm",
    "rope_fill_kv",
    "route",
    "silu_mul",
    "slot_lines",
]
