"""Gemma 3n, text: four residual streams, a low-rank product parallel to attention, sparse MLPs in the first layers, and
the features that it shares with Gemma 4."""

from __future__ import annotations

from statistics import NormalDist
from typing import Any, ClassVar

from torch import Tensor

from asyncllm.layers.alternating_updates import AltUp, AltUpBlock, LowRankResidual
from asyncllm.layers.mlp import GatedMLP, SparseMLP
from asyncllm.layers.norm import Norm
from asyncllm.layers.step_inputs import StepInputs
from asyncllm.layers.streams import MergingNorm, Spread
from asyncllm.models.config import HFConfig
from asyncllm.models.gemma3 import local_rope_of
from asyncllm.models.layer_input_model import LayerInputConfig, LayerInputLM, sources_of, text_part, text_weights
from asyncllm.models.registry import register

__all__ = ["Gemma3n"]

_MAX_STREAMS = 64


class Gemma3nConfig(LayerInputConfig, frozen=True, kw_only=True):
    """The config of the streams, and settings that differ by layer."""

    streams: int
    laurel_rank: int
    mlp_sizes: tuple[int, ...]
    sparsity: tuple[float, ...]
    """Expected fraction of zeros among a layer's gates."""


@register(
    Gemma3nForCausalLM="Gemma 3n E2B, E4B: the text model",
    Gemma3nForConditionalGeneration="the same in files that hold its towers too, which are left out",
)
class Gemma3n(LayerInputLM):
    weights = text_weights(
        {
            "model.altup_projections.{j}": "spread.projections.{j}",
            "model.altup_unembed_projections.{j}": "norm.projections.{j}",
            "model.norm": "norm.norm",
            "model.layers.{i}.altup.modality_router": "layers.{i}.altup.router",
            "model.layers.{i}.altup.router_norm": "layers.{i}.altup.router_norm",
            "model.layers.{i}.altup.prediction_coefs": "layers.{i}.altup.prediction",
            "model.layers.{i}.altup.correction_coefs": "layers.{i}.altup.correction",
            "model.layers.{i}.altup.correct_output_scale": "layers.{i}.altup:output_scale",
            "model.layers.{i}.laurel.linear_left": "layers.{i}.laurel.left",
            "model.layers.{i}.laurel.linear_right": "layers.{i}.laurel.right",
            "model.layers.{i}.laurel.post_laurel_norm": "layers.{i}.laurel.norm",
        }
    )
    config: Gemma3nConfig
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "gemma3n_text",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": [96, 96, 80, 96, 96],
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "max_position_embeddings": 128,
        "sliding_window": 8,
        "layer_types": [f"{kind}_attention" for kind in ("sliding", "full", "sliding", "sliding", "full")],
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 300,
        "altup_num_inputs": 3,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.7, 0.6, 0.0, 0.0, 0.7],
        "final_logit_softcapping": 3.0,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 50000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
    }

    def __init__(self, config: Gemma3nConfig) -> None:
        super().__init__(config)
        self.spread = Spread(config.hidden_size, config.streams)

    @property
    def stream_size(self) -> int:
        return self.config.streams * self.config.hidden_size

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> Gemma3nConfig:
        hf = text_part(hf)
        hf.expect("hidden_activation", "gelu_pytorch_tanh")
        hf.expect("use_bidirectional_attention", False)
        hf.expect("altup_active_idx", 0)
        hf.expect("altup_correct_scale", True)
        sizes = hf.fields.get("intermediate_size")
        first = sizes[0] if isinstance(sizes, list) and sizes else sizes
        fields = (
            hf.of_layers("full_attention")
            .changed({"intermediate_size": first})
            .decoder(architecture, max_position=32768, theta=1e6, head_dim=256, tied=True)
        )
        num_layers, window = fields["num_layers"], hf.integer("sliding_window", 512)
        fields["windows"] = hf.windows(num_layers, window, [bool((layer + 1) % 5) for layer in range(num_layers)])
        each = sizes if isinstance(sizes, list) else [sizes] * num_layers
        sparse = [0.95] * 10 + [0.0] * (num_layers - 10) if num_layers > 10 else [0.0] * num_layers
        sparsity = hf.changed({"sparsity": hf.fields.get("activation_sparsity_pattern") or sparse})
        local = hf.changed({"intermediate_size": first, "head_dim": fields["head_dim"]})
        local_rope, bias = local_rope_of(local, architecture), hf.flag("attention_bias", False)
        shares = sparsity.numbers("sparsity", num_layers)
        if max(shares) >= 1:
            hf.invalid("activation_sparsity_pattern", "where shares below 1 belong")
        return Gemma3nConfig(
            **fields,
            layer_ropes=tuple(fields["rope"] if window is None else local_rope for window in fields["windows"]),
            qkv_bias=bias,
            out_bias=bias,
            activation="gelu_tanh",
            embedding_scale=fields["hidden_size"] ** 0.5,
            score_scale=1.0,
            logit_softcap=hf.optional_number("final_logit_softcapping", 30.0),
            qk_norm="head",
            sources=sources_of(hf, fields["windows"], hf.integer("num_kv_shared_layers", 15, minimum=0)),
            layer_input_size=hf.integer("hidden_size_per_layer_input", 256),
            layer_input_tokens=hf.integer("vocab_size_per_layer_input", 262144),
            streams=hf.integer("altup_num_inputs", 4, minimum=2, maximum=_MAX_STREAMS),
            laurel_rank=hf.integer("laurel_rank", 64),
            mlp_sizes=_sizes(hf, each, num_layers),
            sparsity=shares,
        )

    def embedded(self, step: StepInputs) -> Tensor:
        """Return the residual streams before the first layer [T, streams * hidden]."""
        spread: Tensor = self.spread(super().embedded(step), step)
        return spread

    def last_norm(self) -> Norm:
        return MergingNorm(self.config.hidden_size, self.config.streams, norm=self.make_norm())

    def mlp(self, layer: int) -> GatedMLP:
        config, share = self.config, self.config.sparsity[layer]
        sizes = config.hidden_size, config.mlp_sizes[layer]
        if not share:
            return GatedMLP(*sizes, activation=config.activation)
        return SparseMLP(*sizes, deviations=NormalDist().inv_cdf(share), activation=config.activation)

    def block(self, layer: int) -> AltUpBlock:
        config, layer_input = self.config, self.layer_input(layer)
        assert layer_input is not None, "configure asks for a size above 0"
        return AltUpBlock(
            **self.sandwich_parts(layer),
            altup=AltUp(config.hidden_size, config.streams, norm=self.make_norm()),
            laurel=LowRankResidual(config.hidden_size, config.laurel_rank, norm=self.make_norm()),
            layer_input=layer_input,
        )


def _sizes(hf: HFConfig, sizes: list[Any], num_layers: int) -> tuple[int, ...]:
    """Return the inner features of each layer's MLP."""
    if len(sizes) != num_layers:
        hf.invalid("intermediate_size", f"where one number or a list of {num_layers} belongs")
    each = HFConfig({str(layer): size for layer, size in enumerate(sizes)}, source=f"{hf.source}: intermediate_size")
    return tuple(each.integer(str(layer)) for layer in range(num_layers))
