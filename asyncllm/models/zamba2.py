"""Zamba 2: Mamba-2 in every layer, and in front of some of them one of a few transformer blocks that they share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from asyncllm.layers.mamba2 import Mamba2
from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.mamba_hybrid import MAMBA_WEIGHTS, MambaConfig, mamba_fields, mamba_sizes
from asyncllm.models.registry import register
from asyncllm.models.shared_block_model import SharedBlockLM, block_weights, hybrid_layers
from asyncllm.models.weights import WeightMap

__all__ = ["Zamba2", "Zamba2Config"]

_NORM_EPS = 1e-5
"""Epsilon of the norm in Mamba-2, which config.json does not have."""


class Zamba2Config(MambaConfig, frozen=True, kw_only=True):
    """The config. `attention_layers` are those with a shared block."""

    num_blocks: int
    """Number of shared blocks. The layers with one take them in turn."""
    rank: int
    """Rank of the products that each use adds to its block's."""
    adapted_attention: bool
    """Whether each use also adds products to q, k and v."""
    min_step: float


@register(Zamba2ForCausalLM="Zamba 2 1.2B, 2.7B, 7B")
class Zamba2(SharedBlockLM):
    config: Zamba2Config
    block_name = "shared_transformer"
    weights = block_weights(block_name, MAMBA_WEIGHTS, {"gate_up_proj": "[gate+up]"})
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "zamba2",
        "vocab_size": 320,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid", "hybrid"],
        "num_mem_blocks": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 128,
        "use_shared_attention_adapter": True,
        "adapter_rank": 12,
        "use_mem_rope": True,
        "add_bias_linear": True,
        "n_mamba_heads": 4,
        "mamba_ngroups": 2,
        "mamba_d_state": 24,
        "time_step_min": 0.4,
        "rms_norm_eps": 1e-3,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        # Its config class no longer stretches the rotation, as that of the first files did.
        hf.expect("use_long_context", False)
        hidden_size, num_heads = hf.integer("hidden_size"), hf.integer("num_attention_heads", 32, maximum=2**16)
        if 2 * hidden_size % num_heads:
            hf.invalid("num_attention_heads", f"which does not divide 2 hidden_size = {2 * hidden_size}")
        head_dim = 2 * hidden_size // num_heads
        sizes = {"attention_hidden_size": 2 * hidden_size, "attention_head_dim": head_dim, "head_dim": head_dim}
        for name, size in sizes.items():
            hf.expect(name, size)
        bias = hf.flag("add_bias_linear", False)
        mamba = hf.named(
            {"n_mamba_heads": "mamba_n_heads", "mamba_ngroups": "mamba_n_groups", "mamba_headdim": "mamba_d_head"}
        )
        usual = {"mamba_n_heads": 8, "mamba_d_state": 64, "mamba_conv_bias": True, "mamba_proj_bias": bias}
        fixed = ("mamba_conv_bias", "mamba_proj_bias")
        mamba = mamba.changed(
            {key: each for key, each in usual.items() if key in fixed or mamba.fields.get(key) is None}
        )
        fields = hf.changed({"head_dim": head_dim}).decoder(
            architecture,
            max_position=4096,
            norm_eps=1e-5,
            tied=True,
            rotary=hf.flag("use_mem_rope", False),
            intermediate_size=4 * hidden_size,
        )
        adapted = hf.flag("use_shared_attention_adapter", False)
        if adapted and fields["num_kv_heads"] != num_heads:
            hf.invalid("num_key_value_heads", f"where use_shared_attention_adapter asks for {num_heads}")
        attention_layers = hybrid_layers(hf, fields["num_layers"])
        hf.expect("hybrid_layer_ids", sorted(attention_layers))  # files have it beside layers_block_type
        return Zamba2Config(
            **fields,
            **mamba_fields(mamba, hidden_size),
            attention_layers=attention_layers,
            score_scale=(head_dim / 2) ** -0.5,
            activation=hf.activation("hidden_act", "gelu"),
            mlp_bias=bias,
            num_blocks=hf.integer("num_mem_blocks", 1),
            rank=hf.integer("adapter_rank", 128),
            adapted_attention=adapted,
            min_step=hf.number("time_step_min", 0.001),
        )

    @property
    def uses(self) -> Sequence[int]:
        return sorted(self.config.attention_layers)

    @property
    def num_blocks(self) -> int:
        return self.config.num_blocks

    @property
    def ranks(self) -> tuple[int | None, int | None]:
        return self.config.rank if self.config.adapted_attention else None, self.config.rank

    @property
    def weight_map(self) -> WeightMap:
        """The table with the products of each use, which the files have in the first layer with its block."""
        rows: dict[str, str] = {}
        for use, layer in enumerate(self.uses):
            source = f"layers.{self.uses[use % self.num_blocks]}.{self.block_name}"
            mine = f"layers.{layer}.shared"
            for number, half in enumerate(("down", "up")):
                for part in "qkv":
                    rows[f"{source}.self_attn.linear_{part}_adapter_list.{use}.{number}"] = (
                        f"{mine}.attn.added.{part}.{half}"
                    )
                rows[f"{source}.feed_forward.gate_up_proj_adapter_list.{use}.{number}"] = (
                    f"{mine}.mlp.added.{half}{'[gate+up]' if number else ''}"
                )
        return super().weight_map.replaced({**rows, **{f"model.{name}": target for name, target in rows.items()}})

    def state(self, place: int) -> Mamba2:
        sizes = {**mamba_sizes(self.config), "norm_eps": _NORM_EPS}
        return Mamba2(place, self.config.hidden_size, **sizes, min_step=self.config.min_step)
