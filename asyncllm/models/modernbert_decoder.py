"""Ettin decoders: ModernBERT's layers, which see earlier tokens only, and its head."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from asyncllm.layers.block import BlockParts
from asyncllm.layers.embedding import Embedding, OutputEmbedding, TiedOutputEmbedding
from asyncllm.layers.layer_norm import LayerNorm
from asyncllm.layers.norm import NoNorm
from asyncllm.layers.transformed_head import TransformedOutputEmbedding
from asyncllm.layers.unfused_gate import UnfusedGatedMLP
from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM, OutputHead
from asyncllm.models.registry import register
from asyncllm.models.weights import WeightMap

__all__ = ["ModernBertDecoder"]


class ModernBertDecoderConfig(ModelConfig, frozen=True, kw_only=True):
    dense_bias: bool
    """Whether the head's dense layer has a bias."""


@register(ModernBertDecoderForCausalLM="Ettin decoders")
class ModernBertDecoder(DecoderLM):
    config: ModernBertDecoderConfig
    weights = WeightMap(
        {
            "model.embeddings.tok_embeddings": "embed",
            "model.embeddings.norm": "embed_norm",
            "model.layers.{i}.attn_norm": "layers.{i}.attn_norm",
            "model.layers.{i}.attn.q_proj": "layers.{i}.attn.qkv[q]",
            "model.layers.{i}.attn.k_proj": "layers.{i}.attn.qkv[k]",
            "model.layers.{i}.attn.v_proj": "layers.{i}.attn.qkv[v]",
            "model.layers.{i}.attn.Wo": "layers.{i}.attn.out",
            "model.layers.{i}.mlp_norm": "layers.{i}.mlp_norm",
            "model.layers.{i}.mlp.Wi": "layers.{i}.mlp.gate_up[gate+up]",
            "model.layers.{i}.mlp.Wo": "layers.{i}.mlp.down",
            "model.final_norm": "norm",
            "lm_head.dense": "head.dense",
            "lm_head.norm": "head.norm",
            "decoder": "head.table",
            "decoder.bias": "head.logit_bias:bias",
        }
    )
    head_name = "decoder.weight"
    norm_class = LayerNorm
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "modernbert-decoder",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        "local_attention": 16,
        "norm_bias": True,
        "attention_bias": True,
        "mlp_bias": True,
        "classifier_bias": True,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 9000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModernBertDecoderConfig:
        hf = hf.named({"norm_eps": "rms_norm_eps"})
        hf.expect("classifier_activation", "gelu")

        def read(kind: str, theta: float) -> dict[str, Any]:
            return hf.of_layers(kind).decoder(architecture, max_position=8192, theta=theta, norm_eps=1e-5, tied=True)

        fields = read("full_attention", hf.number("global_rope_theta", 160000.0))
        local_rope = read("sliding_attention", hf.number("local_rope_theta", 10000.0))["rope"]
        every, layers = hf.integer("global_attn_every_n_layers", 3), range(fields["num_layers"])
        # An encoder's layer sees half of the window on either side.
        window = hf.integer("local_attention", 128, minimum=2) // 2
        hf.expect("sliding_window", window)  # transformers writes both
        fields["windows"] = hf.windows(len(layers), window, [layer % every > 0 for layer in layers])
        bias = hf.flag("attention_bias", False)
        return ModernBertDecoderConfig(
            **fields,
            layer_ropes=tuple(fields["rope"] if each is None else local_rope for each in fields["windows"]),
            embedding_norm=True,
            activation=hf.activation("hidden_activation", "gelu"),
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=hf.flag("mlp_bias", False),
            norm_bias=hf.flag("norm_bias", False),
            head_bias=hf.flag("decoder_bias", True),
            dense_bias=hf.flag("classifier_bias", False),
        )

    def block_parts(self, layer: int) -> BlockParts:
        parts = super().block_parts(layer)
        if layer == 0:
            parts["attn_norm"] = NoNorm()
        return parts

    def mlp(self, layer: int) -> nn.Module:
        config = self.config
        return UnfusedGatedMLP(
            config.hidden_size, config.intermediate_size, activation=config.activation, bias=config.mlp_bias
        )

    def output(self) -> OutputHead:
        config = self.config
        if not config.has_head:
            return super().output()
        table: OutputEmbedding | TiedOutputEmbedding
        if config.tied:
            assert isinstance(self.embed, Embedding), "the family has the usual embedding"
            table = TiedOutputEmbedding(self.embed)
        else:
            table = OutputEmbedding(config.hidden_size, config.vocab_size)
        norm = LayerNorm(config.hidden_size, config.norm_eps, bias=config.norm_bias)
        return TransformedOutputEmbedding(
            table, config.vocab_size, dense_bias=config.dense_bias, norm=norm, bias=config.head_bias
        )
