"""Mamba-2 and Codestral Mamba: state spaces by head only, without attention or MLPs."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.layers.block import SingleBlock
from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.mamba import RECURRENT_WEIGHTS, recurrent_fields
from asyncllm.models.mamba_hybrid import MambaConfig, mamba_fields, mamba_layer
from asyncllm.models.registry import register

__all__ = ["Mamba2LM"]

_MIXER = "backbone.layers.{i}.mixer"

_WORDS = {
    "num_heads": "mamba_n_heads",
    "head_dim": "mamba_d_head",
    "n_groups": "mamba_n_groups",
    "state_size": "mamba_d_state",
    "conv_kernel": "mamba_d_conv",
    "expand": "mamba_expand",
    "use_conv_bias": "mamba_conv_bias",
    "use_bias": "mamba_proj_bias",
}
"""Entries of config.json -> their names in files of hybrids."""

_USUAL = {"num_heads": 128, "head_dim": 64, "n_groups": 8, "state_size": 128}


@register(Mamba2ForCausalLM="Mamba-2 130M to 2.7B, Codestral Mamba 7B")
class Mamba2LM(DecoderLM):
    config: MambaConfig
    base_prefix = "backbone."
    weights = RECURRENT_WEIGHTS.replaced(
        {
            f"{_MIXER}.A_log": "layers.{i}.attn.space:log_rate",
            f"{_MIXER}.dt_bias": "layers.{i}.attn.space:step_bias",
            f"{_MIXER}.D": "layers.{i}.attn.space:skip",
            f"{_MIXER}.norm": "layers.{i}.attn.norm",
        }
    )
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "mamba2",
        "vocab_size": 320,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_heads": 8,
        "head_dim": 16,
        "n_groups": 2,
        "state_size": 12,
        "use_bias": True,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf = hf.completed(_USUAL)
        fields = recurrent_fields(hf, architecture, tied=False)
        sizes = mamba_fields(hf.named(_WORDS), fields["hidden_size"], fields["intermediate_size"])
        return MambaConfig(**fields, **sizes, attention_layers=frozenset())

    def block(self, layer: int) -> SingleBlock:
        return SingleBlock(norm=self.make_norm(), attn=mamba_layer(self.config, layer))
