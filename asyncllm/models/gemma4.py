"""Gemma 4, text: Gemma 3's blocks with plain norms, normalised values, heads of a different size in global layers, keys
and values shared by the last layers, and per-layer embeddings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from asyncllm.kernels import Routing
from asyncllm.layers.attention import Attention
from asyncllm.layers.layer_inputs import LayerInputBlock
from asyncllm.layers.mlp import GatedMLP
from asyncllm.layers.normed_experts import NormedMoE
from asyncllm.models.config import MAX_EXPERTS, ExpertsConfig, HFConfig
from asyncllm.models.expert_rows import expert_rows
from asyncllm.models.layer_input_model import LayerInputConfig, LayerInputLM, sources_of, text_part, text_weights
from asyncllm.models.registry import register

__all__ = ["Gemma4"]


class Gemma4Config(LayerInputConfig, frozen=True, kw_only=True):
    """The config, with the heads of layers without a window."""

    full_head_dim: int
    full_kv_heads: int
    keys_as_values: bool
    """Whether keys serve as values, in layers without a window."""
    wide_mlp: bool
    """Whether the MLPs of layers that read another layer's keys and values are twice as wide."""


@register(
    Gemma4ForCausalLM="Gemma 4 E2B, E4B, 26B-A4B, 31B: the text model",
    Gemma4ForConditionalGeneration="the same in files that hold its towers too; that of sounds is left out",
    Gemma4UnifiedForCausalLM="Gemma 4 12B: the text model",
    Gemma4UnifiedForConditionalGeneration="the same in files that hold what embeds images too, which is left out",
)
class Gemma4(LayerInputLM):
    weights = text_weights(
        {
            "model.layers.{i}.layer_scalar": "layers.{i}.stream_scale:value",
            "model.layers.{i}.router.proj": "layers.{i}.experts.router.proj",
            "model.layers.{i}.router.scale": "layers.{i}.experts.router.norm:weight",
            "model.layers.{i}.router.per_expert_scale": "layers.{i}.experts.scales:value",
            "model.layers.{i}.experts.gate_up_proj": "layers.{i}.experts.gate_up:weight[gate+up:stacked]",
            "model.layers.{i}.experts.down_proj": "layers.{i}.experts.down:weight[:stacked]",
            **expert_rows("model.layers.{i}.experts", "layers.{i}.experts"),
            "model.layers.{i}.post_feedforward_layernorm_1": "layers.{i}.beside_norm",
            "model.layers.{i}.pre_feedforward_layernorm_2": "layers.{i}.experts.input_norm",
            "model.layers.{i}.post_feedforward_layernorm_2": "layers.{i}.experts.output_norm",
        }
    )
    config: Gemma4Config
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "gemma4_text",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "global_head_dim": 24,
        "num_global_key_value_heads": 1,
        "max_position_embeddings": 128,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 320,
        "final_logit_softcapping": 3.0,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "rope_theta": 50000.0, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> Gemma4Config:
        hf = text_part(hf)
        hf.expect("hidden_activation", "gelu_pytorch_tanh")
        # This concerns image tokens.
        hf.expect("use_bidirectional_attention", False, "vision")
        ropes = {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        }
        hf = hf.changed({"rope_parameters": hf.fields.get("rope_parameters") or ropes})
        fields = hf.of_layers("sliding_attention").decoder(architecture, max_position=131072, head_dim=256, tied=True)
        num_layers, window = (
            fields["num_layers"],
            hf.integer("sliding_window", 1024 if "Unified" in architecture else 512),
        )
        fields["windows"] = hf.windows(num_layers, window, [bool((layer + 1) % 6) for layer in range(num_layers)])
        if fields["windows"][-1] is not None:
            hf.unsupported("layer_types", "Supported: a last layer of full_attention.")
        full = _full_heads(hf, fields)
        full_rope = full.of_layers("full_attention").decoder(architecture, partial_rotary=1.0)
        bias = hf.flag("attention_bias", False)
        # Gemma 4 12B has no such entry, and no per-layer inputs.
        size = hf.integer("hidden_size_per_layer_input", 0 if "Unified" in architecture else 256, minimum=0)
        return Gemma4Config(
            **fields,
            layer_ropes=tuple(full_rope["rope"] if each is None else fields["rope"] for each in fields["windows"]),
            qkv_bias=bias,
            out_bias=bias,
            activation="gelu_tanh",
            embedding_scale=fields["hidden_size"] ** 0.5,
            score_scale=1.0,
            logit_softcap=hf.optional_number("final_logit_softcapping"),
            qk_norm="head",
            full_head_dim=full_rope["head_dim"],
            full_kv_heads=full_rope["num_kv_heads"],
            keys_as_values=hf.flag("attention_k_eq_v", False),
            sources=sources_of(hf, fields["windows"], hf.integer("num_kv_shared_layers", 0, minimum=0)),
            wide_mlp=hf.flag("use_double_wide_mlp", False),
            layer_input_size=size,
            experts=_experts(hf, num_layers) if hf.flag("enable_moe_block", False) else None,
            layer_input_tokens=hf.integer("vocab_size_per_layer_input", 262144) if size else 0,
            image_layer_token=hf.integer("pad_token_id", 0, minimum=0),
        )

    def attention(self, layer: int) -> Attention:
        config = self.config
        if config.windows[layer] is not None:
            return super().attention(layer)
        heads = replace(self.attention_config(layer), num_kv_heads=config.full_kv_heads, head_dim=config.full_head_dim)
        attention = self.own_or_borrowed(layer, heads, keys_as_values=config.keys_as_values)
        # An image's tokens see each other only in windows.
        attention.sees_ahead = False
        return attention

    def mlp(self, layer: int) -> GatedMLP:
        config = self.config
        wide = config.wide_mlp and config.sources[layer] is not None
        size = config.intermediate_size * (2 if wide else 1)
        return GatedMLP(config.hidden_size, size, activation=config.activation)

    def block(self, layer: int) -> LayerInputBlock:
        return LayerInputBlock(
            **self.sandwich_parts(layer),
            layer_input=self.layer_input(layer),
            experts=self._beside(),
            beside_norm=None if self.config.experts is None else self.make_norm(),
        )

    def _beside(self) -> NormedMoE | None:
        config, experts = self.config, self.config.experts
        if experts is None:
            return None
        return NormedMoE(
            config.hidden_size,
            experts.size,
            num_experts=experts.count,
            routing=experts.routing,
            norm_eps=config.norm_eps,
        )


def _experts(hf: HFConfig, num_layers: int) -> ExpertsConfig:
    count = hf.integer("num_experts", maximum=MAX_EXPERTS)
    return ExpertsConfig(
        layers=frozenset(range(num_layers)),
        count=count,
        size=hf.integer("moe_intermediate_size"),
        routing=Routing(hf.integer("top_k_experts", maximum=count), renormalize=True),
    )


def _full_heads(hf: HFConfig, fields: dict[str, Any]) -> HFConfig:
    """Return the file as read by layers without a window: their heads have separate entries, or entries by layer in
    files written by transformers."""
    by_layer = hf.fields.get("per_layer_config")
    if by_layer is None:
        heads = {"head_dim": hf.integer("global_head_dim", 512)}
        if hf.flag("attention_k_eq_v", False):
            heads["num_key_value_heads"] = hf.integer("num_global_key_value_heads", fields["num_kv_heads"])
        return hf.changed(heads)
    full = {str(layer) for layer, window in enumerate(fields["windows"]) if window is None}
    given = list(by_layer.values()) if isinstance(by_layer, dict) and set(by_layer) == full else []
    first = given[0] if given else None
    if (
        not isinstance(first, dict)
        or not set(first) <= {"head_dim", "num_key_value_heads"}
        or given.count(first) < len(given)
    ):
        hf.unsupported("per_layer_config", "Supported: head_dim and num_key_value_heads, alike for all full_attention.")
    return hf.changed(first)
