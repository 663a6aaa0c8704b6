"""Checkpoints of native models of transformers with the entries and names of the published files, which transformers
reads in other words or not at all."""

from __future__ import annotations

import torch

from tests.layout import Layout

__all__ = ["PUBLISHED"]

PUBLISHED: dict[str, Layout] = {
    "mimo_v2_flash_published": Layout(
        "mimo_v2_flash",
        "mimo_v2_flash",
        "mimo_v2_flash",
        "MiMoV2FlashForCausalLM",
        extra={
            **{"hybrid_layer_pattern": [0, 1, 1, 0], "moe_layer_freq": [0, 1, 0, 1], "layernorm_epsilon": 1e-3},
            **{"swa_num_key_value_heads": 4, "swa_num_attention_heads": 8, "swa_head_dim": 24, "swa_v_head_dim": 16},
            **{"add_full_attention_sink_bias": False, "add_swa_attention_sink_bias": True, "attention_bias": False},
            **{"sliding_window": 8, "sliding_window_size": 8, "rope_theta": 5000, "swa_rope_theta": 500},
            **{"scoring_func": "sigmoid", "topk_method": "noaux_tc", "n_shared_experts": None},
            **{"routed_scaling_factor": None, "n_group": 1, "topk_group": 1, "partial_rotary_factor": 0.334},
        },
        dropped=("layer_types", "rope_parameters"),
        words={"layernorm_epsilon": "rms_norm_eps"},
        native={
            "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"],
            "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
            "rope_parameters": {
                kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 0.334}
                for kind, theta in (("full_attention", 5000.0), ("sliding_attention", 500.0))
            },
        },
        rename=lambda tensors, fields: {**tensors, "model.mtp.layers.0.eh_proj.weight": torch.ones(64, 128)},
    ),
}
"""By the name under which `tests.checkpoints.build_checkpoint` writes it."""
