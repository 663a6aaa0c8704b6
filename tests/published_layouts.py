"""Checkpoints of native models of transformers with the entries and names of the published files, which transformers
reads in other words or not at all."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention

from asyncllm.models.config import alibi_slopes
from tests import ling_layers
from tests.layout import Fields, Layout, Tensors

__all__ = ["PUBLISHED"]


def _take_published_rates(model: nn.Module) -> None:
    """MiniMax-Text-01's rotation of half of each head, and rates of forgetting that are ALiBi's slopes."""
    fields: Any = model.config
    slopes = torch.tensor(alibi_slopes(fields.num_attention_heads))[:, None, None]
    rotary = model.get_submodule("model.rotary_emb")
    frequencies = fields.rope_parameters["rope_theta"] ** -(torch.arange(6) / 6)
    rotary.inv_freq = torch.cat([frequencies, torch.zeros(6)])
    for module in model.modules():
        if isinstance(module, MiniMaxLightningAttention):
            last = fields.num_hidden_layers - 1
            module.slope_rate.copy_(slopes * (1 - module.layer_idx / (last + 1e-5) + 1e-5))
            decays = module.decay_factors(module.slope_rate)
            for name, decay in zip(("query_decay", "key_decay", "diagonal_decay"), decays, strict=True):
                getattr(module, name).copy_(decay)


def _halves_together(tensors: Tensors, fields: Fields) -> Tensors:
    """The rotated features of a head in front of the others, where the oracle has them in the front of each half."""
    order = torch.cat([torch.arange(first, first + 6) for first in (0, 12, 6, 18)])

    def ordered(name: str, tensor: Tensor) -> Tensor:
        turned = name.endswith(("q_proj.weight", "k_proj.weight"))
        return tensor.unflatten(0, (-1, 24))[:, order].flatten(0, 1) if turned else tensor

    derived = ("_decay", "slope_rate")
    return {name: ordered(name, tensor) for name, tensor in tensors.items() if not name.endswith(derived)}


def _stacked_experts(tensors: Tensors) -> Tensors:
    """The names and experts of Mixtral as transformers has them in memory."""
    stacked = {
        name.replace("block_sparse_moe", "mlp"): each for name, each in tensors.items() if ".experts." not in name
    }
    for layer in {name.partition(".block_sparse_moe.experts.")[0] for name in tensors if ".experts." in name}:
        experts = f"{layer}.block_sparse_moe.experts"
        w1, w2, w3 = (torch.stack([tensors[f"{experts}.{e}.w{part}.weight"] for e in range(6)]) for part in (1, 2, 3))
        stacked |= {f"{layer}.mlp.experts.gate_up_proj": torch.cat([w1, w3], 1), f"{layer}.mlp.experts.down_proj": w2}
    return stacked


class _Language(Layout):
    """The language model of a vision-language model."""

    def native_fields(self, fields: Fields) -> Fields:
        text = {**super().native_fields(fields), "model_type": self.model_type}
        tower = {"width": 16, "layers": 1, "heads": 2, "image_size": 28, "patch_size": 14}
        return {"model_type": self.native_type, "text_config": text, "vision_config": tower}


def _without_tower(tensors: Tensors, fields: Fields) -> Tensors:
    towers = ("vision_model.", "vit_large_projector.", "model.vision_model.", "model.multi_modal_projector.")
    return {
        **{name: tensor for name, tensor in tensors.items() if not name.startswith(towers)},
        "model.layers.4.eh_proj.weight": torch.ones(64, 128),
    }


_FACTORS = {
    **{"full_attn_alpha_factor": 1.7, "full_attn_beta_factor": 0.8},
    **{"linear_attn_alpha_factor": 1.4, "linear_attn_beta_factor": 0.9},
    **{"mlp_alpha_factor": 1.2, "mlp_beta_factor": 0.7},
}

_MIMO_V2: Fields = {
    **{"hybrid_layer_pattern": [0, 1, 1, 0], "moe_layer_freq": [0, 1, 0, 1], "layernorm_epsilon": 1e-3},
    **{"swa_num_key_value_heads": 4, "swa_num_attention_heads": 8, "swa_head_dim": 24, "swa_v_head_dim": 16},
    **{"add_full_attention_sink_bias": False, "add_swa_attention_sink_bias": True, "attention_bias": False},
    **{"sliding_window": 8, "sliding_window_size": 8, "swa_rope_theta": 500},
    **{"scoring_func": "sigmoid", "topk_method": "noaux_tc", "n_shared_experts": None},
    **{"routed_scaling_factor": None, "n_group": 1, "topk_group": 1},
}
_MIMO_V2_NATIVE: Fields = {
    "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"],
    "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
    "rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 0.334}
        for kind, theta in (("full_attention", 5000.0), ("sliding_attention", 500.0))
    },
}


def _mimo_v2(tensors: Tensors, fields: Fields) -> Tensors:
    """q, k and v of each group of heads in turn, as many groups in all layers as those without a window have KV heads;
    beside the parts of further predictions, images and sounds."""
    grouped: Tensors = {}
    for name, tensor in tensors.items():
        if "q_proj" in name:
            parts = (tensors[name.replace("q_proj", each)] for each in ("q_proj", "k_proj", "v_proj"))
            groups = [part.unflatten(0, (fields["num_key_value_heads"], -1)) for part in parts]
            grouped[name.replace("q_proj", "qkv_proj")] = torch.cat(groups, 1).flatten(0, 1)
        elif "k_proj" not in name and "v_proj" not in name:
            grouped[name] = tensor
    others = (
        "model.mtp.layers.0.eh_proj",
        "visual.patch_embed.proj",
        "audio_encoder.projection",
        "speech_embeddings.0",
    )
    return {**grouped, **{f"{each}.weight": torch.ones(8, 8) for each in others}}


PUBLISHED: dict[str, Layout] = {
    "step3p5": _Language(
        "step3p5",
        "step3p5",
        "step3p7",
        "Step3p5ForCausalLM",
        extra={"num_nextn_predict_layers": 1, "swiglu_limits": [0.0, 0.3, 0.0, 0.4, 0.0]},
        rename=_without_tower,
    ),
    "axk1_published": Layout(
        "axk1",
        "AXK1",
        "axk1",
        "AXK1ForCausalLM",
        extra={"first_k_dense_replace": 1, "moe_layer_freq": 1, "topk_method": "none", "num_nextn_predict_layers": 1},
        dropped=("mlp_layer_types",),
        native={"mlp_layer_types": ["dense", "sparse"]},
        rename=lambda tensors, fields: {
            **{name: tensor for name, tensor in tensors.items() if not name.endswith("correction_bias")},
            "model.layers.0.post_mlp_layernorm.weight": torch.ones(64),
            "model.layers.2.eh_proj.weight": torch.ones(64, 128),
        },
        oracle=lambda tensors: {
            name: torch.zeros_like(tensor) if name.endswith("correction_bias") else tensor
            for name, tensor in tensors.items()
        },
    ),
    "bailing_moe_v2_5": Layout(
        "bailing_moe_v2_5",
        "bailing_moe_v2_5",
        "llama",
        "BailingMoeV2_5ForCausalLM",
        native=ling_layers.NATIVE,
        rope=lambda fields: {"rope_theta": fields["rope_theta"]},
        patch=ling_layers.take_layers,
        rename=ling_layers.rename,
    ),
    "bailing_moe_v2_5_plain": Layout(
        "bailing_moe_v2_5",
        "bailing_hybrid",
        "llama",
        "BailingMoeV2_5ForCausalLM",
        extra={"linear_silu": False, "group_norm_size": 1, "num_nextn_predict_layers": 1, "num_key_value_heads": 1},
        native=ling_layers.NATIVE,
        rope=lambda fields: {"rope_theta": fields["rope_theta"]},
        patch=ling_layers.take_layers,
        rename=lambda tensors, fields: {
            **ling_layers.rename(tensors, fields),
            "model.layers.4.eh_proj.weight": torch.ones(96, 192),
        },
    ),
    "bailing_hybrid_published": Layout(
        "bailing_hybrid",
        "bailing_hybrid",
        "bailing_hybrid",
        "BailingMoeV3ForCausalLM",
        extra={"kda_safe_gate": False, "rms_norm_eps": 1e-3},
        dropped=("attention_bias", "kda_lower_bound"),
    ),
    "minimax_published": Layout(
        "minimax",
        "minimax_text_01",
        "minimax",
        "MiniMaxText01ForCausalLM",
        extra={
            **{"attn_type_list": [0, 1, 0, 0], "rotary_dim": 12, "postnorm": True, "shared_intermediate_size": 0},
            **{"layernorm_full_attention_alpha": 1.7, "layernorm_full_attention_beta": 0.8},
            **{"layernorm_linear_attention_alpha": 1.4, "layernorm_linear_attention_beta": 0.9},
            **{"layernorm_mlp_alpha": 1.2, "layernorm_mlp_beta": 0.7, "sliding_window": None},
        },
        dropped=("layer_types", "block_size", *_FACTORS),
        native={
            **_FACTORS,
            "layer_types": ["linear_attention", "full_attention", *["linear_attention"] * 2],
            "block_size": 16,
        },
        patch=_take_published_rates,
        rename=_halves_together,
        oracle=_stacked_experts,
    ),
    "zamba2_plain": Layout(
        "zamba2",
        "zamba2",
        "zamba2",
        "Zamba2ForCausalLM",
        # Kinds of layers as transformers 4 has them.
        extra={"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "num_key_value_heads": 2},
        dropped=("add_bias_linear", "num_mem_blocks", "use_mem_rope", "use_shared_attention_adapter"),
    ),
    "mimo_v2_flash_published": Layout(
        "mimo_v2_flash",
        "mimo_v2_flash",
        "mimo_v2_flash",
        "MiMoV2FlashForCausalLM",
        extra={**_MIMO_V2, "rope_theta": 5000, "partial_rotary_factor": 0.334},
        dropped=("layer_types", "rope_parameters"),
        words={"layernorm_epsilon": "rms_norm_eps"},
        native=_MIMO_V2_NATIVE,
        rename=lambda tensors, fields: {**tensors, "model.mtp.layers.0.eh_proj.weight": torch.ones(64, 128)},
    ),
    "mimo_v2": Layout(
        "mimo_v2_flash",
        "mimo_v2",
        "mimo_v2_flash",
        "MiMoV2ForCausalLM",
        extra={
            **_MIMO_V2,
            **{"attention_projection_layout": "fused_qkv", "moe_router_dtype": "bfloat16", "hybrid_block_size": None},
            "vision_config": {"model_type": "mimo_v2_vision"},
            "rope_parameters": {
                **{"rope_type": "default", "type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.334}
            },
        },
        dropped=("layer_types", "rope_parameters"),
        words={"layernorm_epsilon": "rms_norm_eps"},
        native=_MIMO_V2_NATIVE,
        rope=lambda fields: {},
        rename=_mimo_v2,
    ),
}
"""By the name under which `tests.checkpoints.build_checkpoint` writes it."""
