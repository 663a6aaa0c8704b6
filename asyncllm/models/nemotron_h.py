"""Nemotron-H: Mamba-2, attention without positions, plain MLPs and plain experts, each in separate layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec
from torch import nn

from asyncllm.layers.block import AnyAttention, AnyBlock, SingleBlock
from asyncllm.layers.plain_moe import PlainMoE
from asyncllm.models.config import ExpertsConfig, HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.grouped_experts import grouped_experts, grouped_routing
from asyncllm.models.mamba_hybrid import MambaConfig, mamba_layer
from asyncllm.models.registry import register
from asyncllm.models.weights import WeightMap

__all__ = ["NemotronH"]

_MIXER = "backbone.layers.{i}.mixer"

_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
"""Letters of hybrid_override_pattern -> layer kinds."""

_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}
"""Names in config.json -> names in transformers 5, where they differ."""


class NemotronHConfig(MambaConfig, frozen=True, kw_only=True):
    kinds: tuple[str, ...]
    """Kind of each layer: linear_attention, full_attention, mlp or moe."""
    latent_size: int | None
    """Size of the projection that experts read instead of the whole token."""
    min_step: float
    """Minimum step size of Mamba-2."""


@register(NemotronHForCausalLM="Nemotron-H 4B, 8B, 47B, 56B, Nemotron Nano 2 9B, 12B, Nemotron 3 Nano 30B-A3B, Super")
class NemotronH(DecoderLM):
    config: NemotronHConfig
    base_prefix = "backbone."
    weights = WeightMap(
        {
            "backbone.embeddings": "embed",
            "backbone.layers.{i}.norm": "layers.{i}.norm",
            f"{_MIXER}.in_proj": "layers.{i}.attn.inputs",
            f"{_MIXER}.conv1d": "layers.{i}.attn.conv",
            f"{_MIXER}.A_log": "layers.{i}.attn.space:log_rate",
            f"{_MIXER}.dt_bias": "layers.{i}.attn.space:step_bias",
            f"{_MIXER}.D": "layers.{i}.attn.space:skip",
            f"{_MIXER}.norm": "layers.{i}.attn.norm",
            f"{_MIXER}.out_proj": "layers.{i}.attn.out",
            f"{_MIXER}.q_proj": "layers.{i}.attn.qkv[q]",
            f"{_MIXER}.k_proj": "layers.{i}.attn.qkv[k]",
            f"{_MIXER}.v_proj": "layers.{i}.attn.qkv[v]",
            f"{_MIXER}.o_proj": "layers.{i}.attn.out",
            f"{_MIXER}.up_proj": "layers.{i}.mlp.up",
            f"{_MIXER}.down_proj": "layers.{i}.mlp.down",
            f"{_MIXER}.gate": "layers.{i}.mlp.router",
            f"{_MIXER}.gate.e_score_correction_bias": "layers.{i}.mlp.correction:bias",
            f"{_MIXER}.experts.{{e}}.up_proj": "layers.{i}.mlp.gate_up[up,{e}]",
            f"{_MIXER}.experts.{{e}}.down_proj": "layers.{i}.mlp.down[{e}]",
            f"{_MIXER}.shared_experts.up_proj": "layers.{i}.mlp.shared.up",
            f"{_MIXER}.shared_experts.down_proj": "layers.{i}.mlp.shared.down",
            f"{_MIXER}.fc1_latent_proj": "layers.{i}.mlp.into",
            f"{_MIXER}.fc2_latent_proj": "layers.{i}.mlp.back",
            "backbone.norm_f": "norm",
            "lm_head": "head",
        }
    )
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "nemotron_h",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "max_position_embeddings": 128,
        "mlp_bias": True,
        "use_bias": True,
        "mamba_num_heads": 4,
        "mamba_head_dim": 24,
        "n_groups": 2,
        "ssm_state_size": 16,
        "conv_kernel": 4,
        "time_step_min": 0.6,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf.expect("mlp_hidden_act", "relu2")
        hf.expect("mamba_hidden_act", "silu")
        hf.expect("attention_bias", False)
        hf.expect("sliding_window")
        kinds = _kinds(hf)
        named = hf.named({"layer_norm_epsilon": "rms_norm_eps"}).changed({"num_hidden_layers": len(kinds)})
        fields = named.decoder(
            architecture, max_position=4096, head_dim=128, norm_eps=1e-5, rotary=False, intermediate_size=21504
        )
        heads, groups = hf.integer("mamba_num_heads", 128), hf.integer("n_groups", 8)
        if heads % groups:
            hf.invalid("n_groups", f"which does not divide mamba_num_heads = {heads}")
        return NemotronHConfig(
            **fields,
            experts=_experts(hf, kinds),
            latent_size=hf.optional_integer("moe_latent_size"),
            gated=False,
            activation="squared_relu",
            mlp_bias=hf.flag("mlp_bias", False),
            kinds=kinds,
            attention_layers=frozenset(layer for layer, kind in enumerate(kinds) if kind == "full_attention"),
            mamba_heads=heads,
            mamba_head_dim=hf.integer("mamba_head_dim", 64),
            mamba_groups=groups,
            mamba_state=hf.integer("ssm_state_size", 128),
            conv_length=hf.integer("conv_kernel", 4, minimum=2, maximum=16),
            conv_bias=hf.flag("use_conv_bias", True),
            mamba_bias=hf.flag("use_bias", False),
            min_step=hf.number("time_step_min", 0.001, positive=False),
        )

    def block(self, layer: int) -> AnyBlock:
        if self.config.kinds[layer] in ("mlp", "moe"):
            return SingleBlock(norm=self.make_norm(), mlp=self.mlp(layer))
        return SingleBlock(norm=self.make_norm(), attn=self.attention(layer))

    def mlp(self, layer: int) -> nn.Module:
        config, experts = self.config, self.config.experts
        if experts is None or layer not in experts.layers:
            return super().mlp(layer)
        return PlainMoE(
            config.hidden_size,
            experts.size,
            num_experts=experts.count,
            routing=experts.routing,
            shared_size=experts.shared_size,
            latent_size=config.latent_size,
            bias=config.mlp_bias,
        )

    def attention(self, layer: int) -> AnyAttention:
        # MLPs have no cache, and are not counted.
        place = sum(kind not in ("mlp", "moe") for kind in self.config.kinds[:layer])
        if layer in self.config.attention_layers:
            return super().attention(place)
        return mamba_layer(self.config, place, min_step=self.config.min_step)


def _kinds(hf: HFConfig) -> tuple[str, ...]:
    key = "layer_types" if hf.fields.get("layer_types") is not None else "layers_block_type"
    kinds: Sequence[Any] = hf.fields.get(key) or ()
    if not kinds:
        key = "hybrid_override_pattern"
        pattern = hf.fields.get(key)
        if not isinstance(pattern, str):
            hf.invalid(key, "where a letter for each layer belongs")
        kinds = [_LETTERS.get(letter) for letter in pattern]
    if not isinstance(kinds, list) or not all(kind in (*_KINDS, *_LETTERS.values()) for kind in kinds):
        hf.invalid(key, f"where a list of layer kinds out of {', '.join(_LETTERS.values())} belongs")
    return tuple(_KINDS.get(str(kind), str(kind)) for kind in kinds)


def _experts(hf: HFConfig, kinds: Sequence[str]) -> ExpertsConfig | None:
    """Return the experts, if any layer has them. Raises InvalidCheckpoint, UnsupportedModel."""
    if "moe" not in kinds:
        return None
    hf.expect("n_shared_experts", 1)
    experts = grouped_experts(
        hf.changed({"mlp_bias": False}),
        len(kinds),
        first=0,
        count=hf.integer("n_routed_experts", hf.fields.get("num_local_experts", 8)),
        shared=0,
        size=hf.integer("moe_intermediate_size", 7688),
        corrected=True,
        routing=grouped_routing(hf, top_k=2),
    )
    return msgspec.structs.replace(
        experts,
        layers=frozenset(layer for layer, kind in enumerate(kinds) if kind == "moe"),
        shared_size=hf.integer("moe_shared_expert_intermediate_size", 7688),
    )
