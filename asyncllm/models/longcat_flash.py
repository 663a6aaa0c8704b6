"""LongCat-Flash: two latent attentions per layer, experts beside the second one, and experts that compute nothing."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.kernels import Routing
from asyncllm.layers.block import Block
from asyncllm.layers.mlp import GatedMLP
from asyncllm.layers.shortcut_block import IdentityMoE, ScaledLatentAttention, ShortcutBlock
from asyncllm.models.config import MAX_EXPERTS, ExpertsConfig, HFConfig, ModelConfig
from asyncllm.models.expert_rows import expert_rows
from asyncllm.models.latent import LATENT_WEIGHTS, LatentConfig, LatentDecoder, latent_fields
from asyncllm.models.registry import register
from asyncllm.models.weights import WeightMap

__all__ = ["LongcatFlash"]

_LAYER = "model.layers.{i}"
_HALVES = (("0", "layers.{i}"), ("1", "layers.{i}.second"))
_DENSE = {"0": "layers.{i}.dense", "1": "layers.{i}.second.mlp"}


class LongcatConfig(LatentConfig, frozen=True, kw_only=True):
    num_identities: int
    """Number of experts that return their input."""
    latent_scale: float
    """Factor of normed latents."""


@register(LongcatFlashForCausalLM="LongCat-Flash 560B-A27B")
class LongcatFlash(LatentDecoder):
    config: LongcatConfig
    weights = WeightMap(
        {
            **{name: row for name, row in LATENT_WEIGHTS.rows.items() if not name.startswith(_LAYER)},
            **{
                name.replace("self_attn", f"self_attn.{half}"): row.replace("layers.{i}", layer)
                for name, row in LATENT_WEIGHTS.rows.items()
                if "self_attn" in name
                for half, layer in _HALVES
            },
            **{f"{_LAYER}.input_layernorm.{half}": f"{layer}.attn_norm" for half, layer in _HALVES},
            **{f"{_LAYER}.post_attention_layernorm.{half}": f"{layer}.mlp_norm" for half, layer in _HALVES},
            **{
                f"{_LAYER}.mlps.{half}.{each}_proj": f"{mlp}.{target}"
                for half, mlp in _DENSE.items()
                for each, target in (("gate", "gate_up[gate]"), ("up", "gate_up[up]"), ("down", "down"))
            },
            f"{_LAYER}.mlp.router.classifier": "layers.{i}.mlp.router",
            f"{_LAYER}.mlp.router.e_score_correction_bias": "layers.{i}.mlp.correction:bias",
            **expert_rows(f"{_LAYER}.mlp.experts"),
        },
        skipped=("model.mtp",),
    )
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "longcat_flash",
        "vocab_size": 320,
        "hidden_size": 64,
        "ffn_hidden_size": 96,
        "expert_ffn_hidden_size": 32,
        "num_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        "q_lora_rank": 24,
        "kv_lora_rank": 40,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 8,
        "head_dim": 8,
        "v_head_dim": 16,
        "attention_bias": True,
        "n_routed_experts": 6,
        "zero_expert_num": 3,
        "moe_topk": 4,
        "routed_scaling_factor": 2.5,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf = hf.named({"num_layers": "num_hidden_layers", "ffn_hidden_size": "intermediate_size"})
        hf.expect("attention_method", "MLA", "mla")
        hf.expect("router_bias", False)
        hf.expect("norm_topk_prob", False)
        hf.expect("zero_expert_type", "identity")
        fields = latent_fields(hf, architecture, max_position=131072, theta=1e7, norm_eps=1e-5)
        hf.expect("qk_head_dim", fields["head_dim"])
        hidden_size, q_rank = fields["hidden_size"], fields["q_rank"]
        if q_rank is None:
            hf.invalid("q_lora_rank", "where an integer belongs")
        if hf.flag("mla_scale_q_lora", True):
            fields["score_scale"] *= (hidden_size / q_rank) ** 0.5
        count = hf.integer("n_routed_experts", 512, maximum=MAX_EXPERTS)
        identities = hf.integer("zero_expert_num", 256, minimum=0, maximum=MAX_EXPERTS)
        experts = ExpertsConfig(
            layers=frozenset(range(fields["num_layers"])),
            count=count,
            size=hf.integer("expert_ffn_hidden_size", 2048),
            routing=Routing(
                hf.integer("moe_topk", 12, maximum=count + identities), scale=hf.number("routed_scaling_factor", 6.0)
            ),
            corrected=True,
            exact_router=True,
        )
        return LongcatConfig(
            **fields,
            interleaved=True,
            experts=experts,
            num_identities=identities,
            latent_scale=(hidden_size / fields["kv_rank"]) ** 0.5 if hf.flag("mla_scale_kv_lora", True) else 1.0,
        )

    @property
    def weight_map(self) -> WeightMap:
        # transformers writes products of the experts that compute nothing.
        count = self.config.experts.count if self.config.experts is not None else 0
        numbers = range(count, count + self.config.num_identities)
        return super().weight_map.skipping(*(f"{_LAYER}.mlp.experts.{number}" for number in numbers))

    def block(self, layer: int) -> ShortcutBlock:
        first = self.block_parts(layer)
        # Each layer has two caches.
        first["attn"], attn = self.attention(2 * layer), self.attention(2 * layer + 1)
        second = Block(attn_norm=self.make_norm(), attn=attn, mlp_norm=self.make_norm(), mlp=self._dense())
        return ShortcutBlock(**first, dense=self._dense(), second=second)

    def attention(self, layer: int) -> ScaledLatentAttention:
        config = self.config
        return ScaledLatentAttention(
            layer, config.hidden_size, latent_scale=config.latent_scale, **self.attention_sizes()
        )

    def mlp(self, layer: int) -> IdentityMoE:
        config, experts = self.config, self.config.experts
        assert experts is not None
        return IdentityMoE(
            config.hidden_size,
            experts.size,
            num_experts=experts.count,
            num_identities=config.num_identities,
            routing=experts.routing,
        )

    def _dense(self) -> GatedMLP:
        return GatedMLP(self.config.hidden_size, self.config.intermediate_size)
