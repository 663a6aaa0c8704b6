"""Mamba and Falcon Mamba: selective state spaces only, without attention or MLPs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

from torch import nn

from asyncllm.layers.block import SingleBlock
from asyncllm.layers.mamba1 import Mamba
from asyncllm.layers.unit_norm import UnitNorm
from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.registry import register
from asyncllm.models.weights import WeightMap

__all__ = ["RECURRENT_WEIGHTS", "MambaLM", "ScanConfig", "recurrent_fields", "scan_fields", "scan_layer"]

_MIXER = "backbone.layers.{i}.mixer"

_MAX_POSITION = 2**20
"""States support contexts of any length; up to this one, block tables take little memory."""

RECURRENT_WEIGHTS = WeightMap(
    {
        "backbone.embeddings": "embed",
        # Names in the authors' own files.
        "backbone.embedding": "embed",
        "backbone.layers.{i}.norm": "layers.{i}.norm",
        f"{_MIXER}.in_proj": "layers.{i}.attn.inputs",
        f"{_MIXER}.conv1d": "layers.{i}.attn.conv",
        f"{_MIXER}.out_proj": "layers.{i}.attn.out",
        "backbone.norm_f": "norm",
        "lm_head": "head",
    }
)


class ScanConfig(ModelConfig, frozen=True, kw_only=True):
    """The config of a decoder with layers of the first Mamba."""

    state_size: int
    """Numbers in the state of each feature."""
    step_rank: int
    """Rank of the map to step sizes."""
    conv_length: int
    """Number of tokens that a convolution sees, including the newest."""
    conv_bias: bool
    scan_bias: bool
    """Whether the products around it have biases."""


class MambaLMConfig(ScanConfig, frozen=True, kw_only=True):
    map_norm_eps: float | None
    """Epsilon of the norms of the write vectors, read vectors and steps; None: no norms."""


@register(MambaForCausalLM="Mamba 130M to 2.8B", FalconMambaForCausalLM="Falcon Mamba 7B")
class MambaLM(DecoderLM):
    config: MambaLMConfig
    base_prefix = "backbone."
    weights = RECURRENT_WEIGHTS.replaced(
        {
            f"{_MIXER}.x_proj": "layers.{i}.attn.maps",
            f"{_MIXER}.dt_proj": "layers.{i}.attn.steps",
            f"{_MIXER}.A_log": "layers.{i}.attn.states:log_rate",
            f"{_MIXER}.D": "layers.{i}.attn.states:skip",
        }
    )
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "mamba",
        "vocab_size": 320,
        "hidden_size": 64,
        "expand": 3,
        "num_hidden_layers": 2,
        "state_size": 12,
        "use_bias": True,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        fields = recurrent_fields(hf, architecture, tied=True)
        return MambaLMConfig(
            **fields,
            **scan_fields(hf, fields["hidden_size"]),
            map_norm_eps=hf.number("mixer_rms_eps", 1e-6) if architecture.startswith("Falcon") else None,
        )

    def block(self, layer: int) -> SingleBlock:
        config = self.config
        eps = config.map_norm_eps
        norm = nn.Identity if eps is None else partial(UnitNorm, eps=eps)
        mixer = scan_layer(layer, config, inner_size=config.intermediate_size, norm=norm)
        return SingleBlock(norm=self.make_norm(), attn=mixer)


def recurrent_fields(hf: HFConfig, architecture: str, *, tied: bool) -> dict[str, Any]:
    """Return the fields of a ModelConfig without attention. Raises InvalidCheckpoint, UnsupportedModel."""
    hf.expect("hidden_act", "silu")
    # The width of states. There are no heads; a single one stands for them and is never read.
    inner = hf.fields.get("intermediate_size") or int(hf.number("expand", 2) * hf.integer("hidden_size"))
    absent = {"intermediate_size": inner, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 2}
    named = hf.named({"layer_norm_epsilon": "rms_norm_eps"}).changed(absent)
    return named.decoder(architecture, max_position=_MAX_POSITION, norm_eps=1e-5, tied=tied, rotary=False)


def scan_fields(hf: HFConfig, hidden_size: int) -> dict[str, Any]:
    """Return the fields of a ScanConfig. Raises InvalidCheckpoint."""
    rank = hf.fields.get("time_step_rank", "auto")
    return {
        "state_size": hf.integer("state_size", 16, maximum=1024),
        "step_rank": -(-hidden_size // 16) if rank == "auto" else hf.integer("time_step_rank"),
        "conv_length": hf.integer("conv_kernel", 4, minimum=2, maximum=16),
        "conv_bias": hf.flag("use_conv_bias", True),
        "scan_bias": hf.flag("use_bias", False),
    }


def scan_layer(layer: int, config: ScanConfig, *, inner_size: int, norm: Callable[[int], nn.Module]) -> Mamba:
    """Return the Mamba of a layer. `inner_size`: number of features with a state."""
    return Mamba(
        layer,
        config.hidden_size,
        inner_size=inner_size,
        state_size=config.state_size,
        step_rank=config.step_rank,
        conv_length=config.conv_length,
        conv_bias=config.conv_bias,
        bias=config.scan_bias,
        norm=norm,
    )
