"""Step 3.5 Flash: windows with more query heads in most layers, gated heads, experts by corrected sigmoid scores, and
limits of SwiGLU in the last layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from torch import nn

from asyncllm import kernels
from asyncllm.kernels import Routing
from asyncllm.layers.attention import Attention
from asyncllm.layers.clipped_mlp import ClippedMLP
from asyncllm.layers.gated_attention import HeadGatedAttention
from asyncllm.layers.moe import MoE
from asyncllm.layers.norm import OffsetRMSNorm
from asyncllm.models.config import MAX_EXPERTS, ExpertsConfig, HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.expert_rows import expert_rows, stacked_rows
from asyncllm.models.grouped_experts import sparse_layers
from asyncllm.models.qwen3 import QWEN3_WEIGHTS
from asyncllm.models.registry import register

__all__ = ["Step3p5", "Step3p5Config"]

_LAYER = "model.layers.{i}"
_KINDS = ("full_attention", "sliding_attention")
_WORDS = {
    "moe_num_experts": "n_routed_experts",
    "moe_top_k": "num_experts_per_tok",
    "num_attention_groups": "num_key_value_heads",
    "share_expert_dims": "share_expert_dim",
}
_BY_LAYER = (
    *("layer_types", "mlp_layer_types", "swiglu_limits", "swiglu_limits_shared", "rope_theta"),
    "partial_rotary_factors",
)
"""Lists with an entry per layer, and in published files one for each that predicts further tokens."""


class Step3p5Config(ModelConfig, frozen=True, kw_only=True):
    window_heads: int
    """Query heads of layers with a window."""
    limits: tuple[float | None, ...]
    """Limit of the experts' SwiGLU by layer."""
    mlp_limits: tuple[float | None, ...]
    """Limit of the SwiGLU of MLPs by layer, those for all tokens beside experts included."""


@register(Step3p5ForCausalLM="Step 3.5 Flash")
class Step3p5(DecoderLM):
    config: Step3p5Config
    norm_class = OffsetRMSNorm
    # As published, and as transformers has them in memory.
    weights = QWEN3_WEIGHTS.replaced(
        {
            f"{_LAYER}.self_attn.g_proj": "layers.{i}.attn.gate",
            **{f"{_LAYER}.{place}.gate": "layers.{i}.mlp.router" for place in ("moe", "mlp")},
            f"{_LAYER}.moe.router_bias": "layers.{i}.mlp.correction:bias",
            f"{_LAYER}.mlp.gate.e_score_correction_bias": "layers.{i}.mlp.correction:bias",
            f"{_LAYER}.moe.gate_proj": "layers.{i}.mlp.gate_up[gate:stacked]",
            f"{_LAYER}.moe.up_proj": "layers.{i}.mlp.gate_up[up:stacked]",
            f"{_LAYER}.moe.down_proj": "layers.{i}.mlp.down[:stacked]",
            **expert_rows(f"{_LAYER}.moe.experts"),
            **stacked_rows(f"{_LAYER}.mlp.experts"),
            **{
                f"{_LAYER}.{place}.{each}_proj": f"layers.{{i}}.mlp.shared.{target}"
                for place in ("share_expert", "mlp.shared_experts")
                for each, target in (("gate", "gate_up[gate]"), ("up", "gate_up[up]"), ("down", "down"))
            },
        }
    )
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "step3p5",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_attention_groups": 2,
        "head_dim": 24,
        "max_position_embeddings": 128,
        "sliding_window": 8,
        "attention_other_setting": {
            "attention_type": "sliding_attention",
            "num_attention_heads": 6,
            "num_attention_groups": 2,
            "head_dim": 24,
        },
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "moe_layers_enum": "1,3",
        "moe_num_experts": 6,
        "moe_top_k": 3,
        "moe_intermediate_size": 32,
        "share_expert_dim": 48,
        "moe_router_scaling_factor": 2.5,
        "swiglu_limits": [0.0, 0.3, 0.0, 0.4],
        "swiglu_limits_shared": [0.0, 0.0, 0.5, 0.3],
        "rope_theta": [5000.0, 500.0, 500.0, 5000.0],
        "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5],
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf = _of_layers(_with_ropes(hf.named(_WORDS)))
        for name, value in (
            *(("hidden_act", "silu"), ("moe_router_activation", "sigmoid"), ("mlp_bias", False), ("sink", False)),
            *(("norm_expert_weight", True), ("use_moe_router_bias", True), ("use_head_wise_attn_gate", True)),
            *(("zero_centered", True), ("use_bidirectional_attention", False), ("use_rope_layers", [])),
        ):
            hf.expect(name, value)
        hf.expect("sparse_attention_config")

        def read(kind: str) -> dict[str, Any]:
            return hf.of_layers(kind).decoder(
                architecture, max_position=128000, norm_eps=1e-5, head_dim=128, partial_rotary=1.0
            )

        full, sliding = map(read, _KINDS)
        num_layers, num_kv_heads, head_dim = full["num_layers"], full["num_kv_heads"], full["head_dim"]
        full["windows"] = hf.windows(num_layers, hf.optional_integer("sliding_window"), [False] * num_layers)
        count, bias = hf.integer("n_routed_experts", 288, maximum=MAX_EXPERTS), hf.flag("attention_bias", False)
        experts = ExpertsConfig(
            layers=sparse_layers(hf, num_layers),
            count=count,
            size=hf.integer("moe_intermediate_size", 1280),
            routing=Routing(
                hf.integer("num_experts_per_tok", 8, maximum=count),
                scores="sigmoid",
                renormalize=True,
                scale=hf.number("moe_router_scaling_factor", 1.0),
            ),
            corrected=True,
            exact_router=True,
            shared_size=hf.integer("share_expert_dim", 1280),
        )
        return Step3p5Config(
            **full,
            layer_ropes=tuple((full if each is None else sliding)["rope"] for each in full["windows"]),
            qkv_bias=bias,
            out_bias=bias,
            qk_norm="head",
            score_scale=hf.number("query_pre_attn_scalar", head_dim) ** -0.5,
            experts=experts,
            extra_layers=hf.integer("num_nextn_predict_layers", 0, minimum=0),
            window_heads=_window_heads(hf, full["num_heads"], num_kv_heads, head_dim),
            limits=_limits(hf, "swiglu_limits", num_layers),
            mlp_limits=_limits(hf, "swiglu_limits_shared", num_layers),
        )

    def attention(self, layer: int) -> Attention:
        config, heads = self.config, self.attention_config(layer)
        if heads.window is not None:
            heads = replace(heads, num_heads=config.window_heads)
        return HeadGatedAttention(layer, config.hidden_size, heads, activation=kernels.sigmoid)

    def mlp(self, layer: int) -> nn.Module:
        config, experts = self.config, self.config.experts
        limit, mlp_limit = config.limits[layer], config.mlp_limits[layer]
        mlp = super().mlp(layer)
        if isinstance(mlp, MoE) and experts is not None:
            if limit is not None:
                mlp.limit, mlp.gate_up.clipped = -limit, True
            if mlp_limit is not None:
                mlp.shared = ClippedMLP(config.hidden_size, experts.shared_size, limit=mlp_limit)
        elif mlp_limit is not None:
            return ClippedMLP(config.hidden_size, config.intermediate_size, limit=mlp_limit)
        return mlp


def _of_layers(hf: HFConfig) -> HFConfig:
    """Return the file with lists of this model's layers alone, and with `mlp_layer_types`."""
    num_layers = hf.integer("num_hidden_layers")
    further = num_layers + hf.integer("num_nextn_predict_layers", 0, minimum=0)
    lists = {name: hf.fields.get(name) for name in _BY_LAYER}
    cut = {name: each[:num_layers] for name, each in lists.items() if isinstance(each, list) and len(each) == further}
    hf = hf.changed(cut)
    if hf.fields.get("mlp_layer_types") is not None:
        return hf
    listed = hf.fields.get("moe_layers_enum")
    items = listed.split(",") if isinstance(listed, str) else range(3, num_layers) if listed is None else listed
    if not isinstance(items, list | range) or not all(str(each).strip().isdecimal() for each in items):
        hf.invalid("moe_layers_enum", "where numbers of layers belong")
    sparse = {int(each) for each in items}
    return hf.changed({"mlp_layer_types": ["sparse" if layer in sparse else "dense" for layer in range(num_layers)]})


def _with_ropes(hf: HFConfig) -> HFConfig:
    """Return the file with the rotation of each kind of layers under `rope_parameters`, which published files give by
    layer, with a scaling for layers without a window."""
    if hf.fields.get("rope_parameters") is not None:
        return hf
    hf.expect("yarn_only_types", ["full_attention"])
    scaling = hf.fields.get("rope_scaling")
    ropes = {
        kind: {
            "rope_type": "default",
            **(scaling if kind == "full_attention" and isinstance(scaling, dict) else {}),
            "rope_theta": _of_kind(hf, "rope_theta", kind),
            "partial_rotary_factor": _of_kind(hf, "partial_rotary_factors", kind),
        }
        for kind in _KINDS
    }
    return hf.changed({"rope_parameters": ropes, "rope_theta": None, "rope_scaling": None})


def _of_kind(hf: HFConfig, name: str, kind: str) -> Any:
    """Return an entry's value for layers of one kind, from a list by layer, or one for all layers. Raises
    InvalidCheckpoint, UnsupportedModel."""
    values, kinds = hf.fields.get(name), hf.fields.get("layer_types")
    if not isinstance(values, list):
        return values
    if not isinstance(kinds, list) or len(values) != len(kinds):
        hf.invalid(name, "where as many numbers as in layer_types belong")
    each = [value for value, other in zip(values, kinds, strict=True) if other == kind]
    if any(value != each[0] for value in each):
        hf.unsupported(name, f"Supported: one value for all layers of {kind}.")
    return each[0] if each else None


def _window_heads(hf: HFConfig, num_heads: int, num_kv_heads: int, head_dim: int) -> int:
    """Return the number of query heads of layers with a window. Raises InvalidCheckpoint, UnsupportedModel."""
    own = hf.fields.get("attention_other_setting") or {}
    if not isinstance(own, dict):
        hf.invalid("attention_other_setting", "where an object belongs")
    other = HFConfig(own, source=f"{hf.source}: attention_other_setting")
    other.expect("attention_type", "sliding_attention")
    other.expect("num_attention_groups", num_kv_heads)
    for name in ("head_dim", "true_head_dim"):
        other.expect(name, head_dim)
    heads = hf.integer("num_sliding_attention_heads", other.integer("num_attention_heads", num_heads), maximum=2**16)
    if heads % num_kv_heads:
        hf.invalid("num_sliding_attention_heads", f"giving {heads}, where a multiple of {num_kv_heads} belongs")
    sliding = [layer for layer, kind in enumerate(hf.fields.get("layer_types") or []) if kind == "sliding_attention"]
    hf.expect("per_layer_config", {str(layer): {"num_attention_heads": heads} for layer in sliding})
    return heads


def _limits(hf: HFConfig, key: str, num_layers: int) -> tuple[float | None, ...]:
    """Return the limit of each layer, or None: 0 and null stand for none. Raises InvalidCheckpoint."""
    values = hf.fields.get(key) or [None] * num_layers
    if not isinstance(values, list) or len(values) != num_layers:
        hf.invalid(key, f"where a list of {num_layers} numbers belongs")
    each = HFConfig({str(layer): value for layer, value in enumerate(values)}, source=f"{hf.source}: {key}")
    return tuple(each.number(str(layer), 0.0, positive=False) or None for layer in range(num_layers))
