"""OPT: learned positions with an offset of 2, layer norms, ReLU; 350M has a narrow table and norms of the stream."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from asyncllm.layers.block import AnyBlock, StreamNormBlock
from asyncllm.layers.layer_norm import LayerNorm
from asyncllm.layers.norm import NoNorm, Norm
from asyncllm.layers.projected_embedding import ProjectedEmbedding, ProjectedOutputEmbedding
from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM, OutputHead
from asyncllm.models.registry import register
from asyncllm.models.weights import WeightMap

__all__ = ["OPT"]

_PROJECTIONS = {
    "model.decoder.embed_tokens": "embed.table",
    "model.decoder.project_in": "embed.project",
    "model.decoder.project_out": "head.project",
}


class OPTConfig(ModelConfig, frozen=True, kw_only=True):
    embedding_size: int
    """Width of the tokens' table."""
    post_norm: bool
    """Whether norms follow the additions to the stream instead of preceding the branches."""


@register(OPTForCausalLM="OPT 125M to 66B")
class OPT(DecoderLM):
    config: OPTConfig
    weights = WeightMap(
        {
            "model.decoder.embed_tokens": "embed",
            "model.decoder.embed_positions": "positions",
            "model.decoder.layers.{i}.self_attn_layer_norm": "layers.{i}.attn_norm",
            "model.decoder.layers.{i}.self_attn.q_proj": "layers.{i}.attn.qkv[q]",
            "model.decoder.layers.{i}.self_attn.k_proj": "layers.{i}.attn.qkv[k]",
            "model.decoder.layers.{i}.self_attn.v_proj": "layers.{i}.attn.qkv[v]",
            "model.decoder.layers.{i}.self_attn.out_proj": "layers.{i}.attn.out",
            "model.decoder.layers.{i}.final_layer_norm": "layers.{i}.mlp_norm",
            "model.decoder.layers.{i}.fc1": "layers.{i}.mlp.up",
            "model.decoder.layers.{i}.fc2": "layers.{i}.mlp.down",
            "model.decoder.final_layer_norm": "norm",
            "lm_head": "head",
        }
    )
    norm_class = LayerNorm
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "opt",
        "vocab_size": 320,
        "hidden_size": 64,
        "ffn_dim": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
        "word_embed_proj_dim": 64,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> OPTConfig:
        hf = hf.named({"ffn_dim": "intermediate_size"})
        hf.expect("layer_norm_elementwise_affine", True)
        hf.expect("_remove_final_layer_norm", False)
        bias = hf.flag("enable_bias", True)
        fields = hf.decoder(architecture, norm_eps=1e-5, tied=True, rotary=False)
        embedding_size = hf.integer("word_embed_proj_dim", fields["hidden_size"])
        if embedding_size != fields["hidden_size"] and not fields["tied"]:
            hf.unsupported("tie_word_embeddings", "A narrow table of tokens is the output embedding too.")
        return OPTConfig(
            **fields,
            position_offset=2,
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=bias,
            gated=False,
            activation=hf.activation("activation_function", "relu"),
            embedding_size=embedding_size,
            post_norm=not hf.flag("do_layer_norm_before", True),
        )

    @property
    def projects(self) -> bool:
        """Whether the tokens' table differs in width from the model."""
        return self.config.embedding_size != self.config.hidden_size

    @property
    def weight_map(self) -> WeightMap:
        table = super().weight_map
        if not self.projects:
            return table
        bare = {name.removeprefix(self.base_prefix): target for name, target in _PROJECTIONS.items()}
        return table.replaced({**_PROJECTIONS, **bare})

    def embedding(self) -> nn.Module:
        config = self.config
        if not self.projects:
            return super().embedding()
        return ProjectedEmbedding(config.vocab_size, config.embedding_size, config.hidden_size)

    def output(self) -> OutputHead:
        if isinstance(self.embed, ProjectedEmbedding):
            return ProjectedOutputEmbedding(self.embed, self.config.hidden_size)
        return super().output()

    def block(self, layer: int) -> AnyBlock:
        if not self.config.post_norm:
            return super().block(layer)
        return StreamNormBlock(**self.block_parts(layer))

    def last_norm(self) -> Norm:
        return NoNorm() if self.config.post_norm else super().last_norm()
