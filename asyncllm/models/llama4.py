"""Llama 4, text: layers that attend within chunks, layers without rotation, and experts that read scaled inputs."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.kernels import Routing
from asyncllm.layers.rotary import QueryScaling
from asyncllm.models.config import MAX_EXPERTS, ExpertsConfig, HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.expert_rows import expert_rows
from asyncllm.models.llama import LLAMA_WEIGHTS
from asyncllm.models.registry import register
from asyncllm.models.weights import WeightMap

__all__ = ["Llama4"]

_MLP = "model.layers.{i}.feed_forward"

_TEXT = (
    LLAMA_WEIGHTS.without(*(f"model.layers.{{i}}.mlp.{each}_proj" for each in ("gate", "up", "down")))
    .replaced(
        {
            f"{_MLP}.gate_proj": "layers.{i}.mlp.gate_up[gate]",
            f"{_MLP}.up_proj": "layers.{i}.mlp.gate_up[up]",
            f"{_MLP}.down_proj": "layers.{i}.mlp.down",
            f"{_MLP}.router": "layers.{i}.mlp.router",
            f"{_MLP}.experts.gate_up_proj": "layers.{i}.mlp.gate_up:weight[gate+up:stacked_transposed]",
            f"{_MLP}.experts.down_proj": "layers.{i}.mlp.down:weight[:stacked_transposed]",
            **expert_rows(f"{_MLP}.experts"),
            f"{_MLP}.shared_expert.gate_proj": "layers.{i}.mlp.shared.gate_up[gate]",
            f"{_MLP}.shared_expert.up_proj": "layers.{i}.mlp.shared.gate_up[up]",
            f"{_MLP}.shared_expert.down_proj": "layers.{i}.mlp.shared.down",
        }
    )
    .rows
)


@register(
    Llama4ForCausalLM="Llama 4, text",
    Llama4ForConditionalGeneration="Llama 4 Scout and Maverick, in files without a `vision_config`",
)
class Llama4(DecoderLM):
    weights = WeightMap(
        {**_TEXT, **{f"language_model.{pattern}": target for pattern, target in _TEXT.items()}},
        skipped=("vision_model", "multi_modal_projector"),
    )
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "llama4_text",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 48,
        "intermediate_size_mlp": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "max_position_embeddings": 256,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "interleave_moe_layer_step": 2,
        "no_rope_layer_interval": 3,
        "attention_chunk_size": 80,
        "floor_scale": 7,
        "attn_scale": 0.4,
        "attention_bias": True,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 1.0,
            "original_max_position_embeddings": 32,
        },
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        text = hf.fields.get("text_config")
        if text is not None and not isinstance(text, dict):
            hf.invalid("text_config", "where an object belongs")
        hf = hf.changed(text or {})
        hf.expect("hidden_act", "silu")
        fields = hf.decoder(architecture, max_position=131072, theta=500000.0, norm_eps=1e-5, head_dim=128)
        if fields["rope"].attention_factor != 1:
            hf.unsupported("rope_scaling", "Its factor of cosines and sines would be lost in the norm after them.")
        num_layers, bias = fields["num_layers"], hf.flag("attention_bias", False)
        size = fields["intermediate_size"]
        fields["intermediate_size"] = hf.integer("intermediate_size_mlp", 16384)
        interval = hf.integer("no_rope_layer_interval", 4)
        turns = hf.fields.get("no_rope_layers") or [int((layer + 1) % interval != 0) for layer in range(num_layers)]
        if not isinstance(turns, list) or len(turns) < num_layers or not all(each in (0, 1) for each in turns):
            hf.invalid("no_rope_layers", f"where a list of {num_layers} times 0 or 1 belongs")
        kinds = hf.fields.get("layer_types") or ["chunked_attention" if each else "full_attention" for each in turns]
        if not isinstance(kinds, list) or len(kinds) < num_layers:
            hf.invalid("layer_types", f"where a list of {num_layers} layer kinds belongs")
        if any(kind not in ("chunked_attention", "full_attention") for kind in kinds):
            hf.unsupported("layer_types", "Supported: 'chunked_attention', 'full_attention'.")
        chunk = hf.optional_integer("attention_chunk_size", 8192)
        # The published files have 4 instead of true.
        tuned = hf.fields.get("attn_temperature_tuning", True)
        if not isinstance(tuned, int):
            hf.invalid("attn_temperature_tuning", "where true or false belongs")
        scaling = QueryScaling(
            length=hf.integer("floor_scale", 8192), weight=hf.number("attn_scale", 0.1), ahead=1, nope_layers_only=True
        )
        return ModelConfig(
            **fields,
            layer_ropes=tuple(fields["rope"] if each else None for each in turns[:num_layers]),
            chunks=tuple(chunk if each == "chunked_attention" else None for each in kinds[:num_layers]),
            qkv_bias=bias,
            out_bias=bias,
            paired_rotary=True,
            qk_norm="unit" if hf.flag("use_qk_norm", True) else None,
            query_scaling=scaling if tuned else None,
            experts=_experts(hf, num_layers, size),
        )


def _experts(hf: HFConfig, num_layers: int, size: int) -> ExpertsConfig:
    step = hf.integer("interleave_moe_layer_step", 1)
    layers = hf.fields.get("moe_layers")
    if layers is None:
        layers = list(range(step - 1, num_layers, step))
    if not isinstance(layers, list) or not all(type(each) is int for each in layers):
        hf.invalid("moe_layers", "where a list of layers belongs")
    count = hf.integer("num_local_experts", 16, maximum=MAX_EXPERTS)
    return ExpertsConfig(
        layers=frozenset(layers),
        count=count,
        size=size,
        routing=Routing(hf.integer("num_experts_per_tok", 1, maximum=count), scores="sigmoid"),
        scaled_inputs=True,
        shared_size=size,
    )
