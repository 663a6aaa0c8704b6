"""DecoderLM: embedding, blocks, final norm and output embedding, built from the config. A family overrides what
differs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Set
from itertools import islice
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from asyncllm.layers.attention import Attention, AttentionConfig
from asyncllm.layers.block import AnyAttention, AnyBlock, Block, BlockParts, ParallelBlock, SandwichParts
from asyncllm.layers.cache_spec import CacheSpec
from asyncllm.layers.chunked_attention import ChunkedAttention
from asyncllm.layers.embedding import Embedding, OutputEmbedding, PositionEmbedding, TiedOutputEmbedding
from asyncllm.layers.layer import Layer
from asyncllm.layers.layer_norm import LayerNorm
from asyncllm.layers.linear_method import Weighted
from asyncllm.layers.lora import group_adapters
from asyncllm.layers.mlp import GatedMLP, PlainMLP
from asyncllm.layers.moe import MoE
from asyncllm.layers.norm import Norm, RMSNorm
from asyncllm.layers.rotary import RotaryEmbedding
from asyncllm.layers.score_head import ScoreHead
from asyncllm.layers.shared_keys import BorrowingAttention
from asyncllm.layers.step_inputs import Column, SampledRows, StepInputs
from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.vision_language import with_tower
from asyncllm.models.weights import WeightMap
from asyncllm.quant.scheme import Scheme

__all__ = ["SCORE_ROWS", "DecoderLM", "OutputHead", "allocate"]

SCORE_ROWS: Mapping[str, str] = {
    "score": "score.out",
    "v_head": "score.out",
    "score.0": "score.inner",
    "score.2": "score.out",
}
"""Rows of a weight table for score heads: those of transformers, of InternLM2, and of Qwen2.5-Math-RM with two
layers."""


class OutputHead(Protocol):
    """The interface of output embeddings."""

    def __call__(self, x: Tensor, /) -> Tensor: ...

    def of_rank(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """See `OutputEmbedding.of_rank`."""


class DecoderLM(nn.Module):
    """A decoder-only language model over a paged cache.

    `models.build.open_model` builds it on the meta device, calls `allocate`, and fills it by `load_plan.load`.
    """

    weights: ClassVar[WeightMap]
    """Checkpoint modules -> ours."""
    base_prefix: ClassVar[str] = "model."
    """Prefix of the names of all weights except the head. Files saved without the head lack it."""
    head_name: ClassVar[str] = "lm_head.weight"
    """The checkpoint's output embedding tensor, which a tied model does not need."""
    norm_class: ClassVar[type[Norm]] = RMSNorm
    """Class of the norms around layers."""
    scales_images: ClassVar[bool] = False
    """Whether the embeddings' scale applies to image features and embeddings from callers too."""
    tiny: ClassVar[dict[str, Any]]
    """Entries of a config.json with every feature of the family switched on, small enough for tests."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = self.embedding()
        self.vision = None if config.vision is None else config.vision.build(config.hidden_size)
        self.positions = self.position_embedding()
        self.embed_norm = self.make_norm() if config.embedding_norm else None
        self.layers = nn.ModuleList(self.block(layer) for layer in range(config.num_layers))
        image_rows = None if config.vision is None else config.vision.image_rows
        if image_rows is not None:
            image_rows.attach(self.layers)
        self.norm = self.last_norm()
        self.head = self.output()
        self.score = self.score_head()
        self.rotaries: nn.ModuleList
        """One per entry of the config's `ropes`."""
        self.scheme: Scheme | None = None
        """How the weights in the checkpoint are quantized."""
        self.takes_embeddings = False
        """Whether prompts may hold embeddings instead of tokens. Written by `take_embeddings`."""
        self.expanded_modules: Set[str] = frozenset()
        """The checkpoint's modules that are expanded as they are read, although a method could multiply them."""

    @staticmethod
    @abstractmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        """Read config.json. Raises InvalidCheckpoint and UnsupportedModel."""

    def block(self, layer: int) -> AnyBlock:
        """Return the block of layer `layer`, counted from 0."""
        norms = self.config.parallel_norms
        if norms is None:
            return Block(**self.block_parts(layer))
        attn, mlp = self.attention(layer), self.mlp(layer)
        mlp_norm = self.make_norm() if norms == 2 else None
        return ParallelBlock(attn_norm=self.make_norm(), attn=attn, mlp_norm=mlp_norm, mlp=mlp)

    def block_parts(self, layer: int) -> BlockParts:
        """Return the parts of a `Block` for layer `layer`."""
        return {
            "attn_norm": self.make_norm(),
            "attn": self.attention(layer),
            "mlp_norm": self.make_norm(),
            "mlp": self.mlp(layer),
            "scale": self.config.branch_scale,
        }

    def sandwich_parts(self, layer: int) -> SandwichParts:
        """Return the parts of a `SandwichBlock` for layer `layer`."""
        return {
            **self.block_parts(layer),
            "attn_post_norm": self.make_norm(),
            "mlp_post_norm": self.make_norm(),
        }

    def make_norm(self) -> Norm:
        config = self.config
        if issubclass(self.norm_class, LayerNorm):
            return self.norm_class(config.hidden_size, config.norm_eps, bias=config.norm_bias)
        return self.norm_class(config.hidden_size, config.norm_eps)

    def last_norm(self) -> Norm:
        """Return the norm after the last block."""
        return self.make_norm()

    def embedding(self) -> nn.Module:
        """Return the token embedding."""
        config = self.config
        later = self.scales_images and config.vision is not None
        return Embedding(config.vocab_size, config.hidden_size, scale=None if later else config.embedding_scale)

    def position_embedding(self) -> PositionEmbedding | None:
        config = self.config
        if config.position_offset is None:
            return None
        return PositionEmbedding(config.max_position, config.hidden_size, offset=config.position_offset)

    def attention(self, layer: int) -> AnyAttention:
        """Return the attention of layer `layer`, counted from 0."""
        size, config = self.config.hidden_size, self.attention_config(layer)
        chunk = self.config.chunks[layer] if self.config.chunks else None
        return Attention(layer, size, config) if chunk is None else ChunkedAttention(layer, size, config, chunk=chunk)

    def attention_config(self, layer: int) -> AttentionConfig:
        """Return the attention config of layer `layer`, according to the model's config."""
        config = self.config
        rope = config.layer_ropes[layer] if config.layer_ropes else config.rope
        scaling = config.query_scaling
        return AttentionConfig(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            qkv_bias=config.qkv_bias,
            out_bias=config.out_bias,
            paired=config.rope.dim if config.paired_rotary and config.rope is not None else 0,
            rope=None if rope is None else config.ropes.index(rope),
            window=config.windows[layer],
            scale=config.score_scale,
            softcap=config.score_softcap,
            sinks=config.sinks,
            qkv_clip=config.qkv_clip,
            scale_queries=scaling is not None and (rope is None or not scaling.nope_layers_only),
            qk_norm=None if config.qk_norm == "unit" and rope is None else config.qk_norm,
            norm_class=self.norm_class,
            norm_eps=config.norm_eps,
            alibi=config.alibi,
        )

    def mlp(self, layer: int) -> nn.Module:
        config, experts = self.config, self.config.experts
        if experts is None or layer not in experts.layers:
            kind = GatedMLP if config.gated else PlainMLP
            return kind(
                config.hidden_size, config.intermediate_size, activation=config.activation, bias=config.mlp_bias
            )
        return MoE(
            config.hidden_size,
            experts.size,
            num_experts=experts.count,
            routing=experts.routing,
            corrected=experts.corrected,
            exact_router=experts.exact_router,
            scaled_inputs=experts.scaled_inputs,
            shared_size=experts.shared_size,
            shared_gate=experts.shared_gate,
            bias=experts.bias,
            limit=experts.limit,
        )

    def output(self) -> OutputHead:
        """Return the output embedding, a module."""
        config = self.config
        if config.tied or not config.has_head:
            assert isinstance(self.embed, Embedding), "a family with another embedding has another output too"
            return TiedOutputEmbedding(self.embed, scale=config.logit_scale, softcap=config.logit_softcap)
        return OutputEmbedding(
            config.hidden_size,
            config.vocab_size,
            bias=config.head_bias,
            scale=config.logit_scale,
            softcap=config.logit_softcap,
        )

    def score_head(self) -> ScoreHead | None:
        config = self.config.score_head
        if config is None:
            return None
        return ScoreHead(self.config.hidden_size, config.num_labels, inner=config.inner, bias=config.bias)

    @property
    def reads_token_ids(self) -> bool:
        """Whether layers look up further things by token id."""
        return False

    @property
    def stream_size(self) -> int:
        """Width of the residual stream."""
        return self.config.hidden_size

    @property
    def weight_map(self) -> WeightMap:
        """This model's table: a tied head needs no tensor, and the copy that some checkpoints carry is ignored."""
        table = self.weights.with_optional_prefix(self.base_prefix)
        if self.score is not None:
            table = table.replaced(SCORE_ROWS)
        if self.config.stored_as_head:
            table = table.replaced({self.head_name.removesuffix(".weight"): "embed"})
        elif self.config.tied or self.score is not None:
            table = table.ignoring(self.head_name)
        first, config = self.config.num_layers, self.config
        table = table.skipping(*(f"model.layers.{first + number}" for number in range(config.extra_layers)))
        return table if self.config.vision is None else with_tower(table, self.config.vision)

    @property
    def cache_specs(self) -> list[CacheSpec]:
        """The cache specs of the layers, in order. Layers that read another layer's cache come last and have none."""
        owners = (each for each in self.modules() if not isinstance(each, BorrowingAttention))
        return [module.cache_spec for module in owners if isinstance(module, AnyAttention)]

    @property
    def captured_context(self) -> int | None:
        """Number of tokens of the longest context that a captured step may have; None: of any length."""
        own = (getattr(module, "captured_context", None) for module in self.layers.modules())
        return min((each for each in own if each is not None), default=None)

    @property
    def step_columns(self) -> tuple[Column, ...]:
        """The columns that the layers read besides those of every model. Valid once the model is allocated."""
        return tuple(dict.fromkeys(column for module in self.modules() for column in getattr(module, "columns", ())))

    def allocate(self, dtype: torch.dtype, device: torch.device) -> None:
        """Replace the parameters by uninitialised ones of `dtype` on `device`. A layer may require its own dtype, and
        integers keep theirs."""
        allocate(self, dtype, device)
        self.place_rotaries(device)

    def place_rotaries(self, device: torch.device) -> None:
        """Move the inputs of rotations, which no checkpoint stores, to `device`."""
        self.rotaries = nn.ModuleList(RotaryEmbedding(rope, device) for rope in self.config.ropes)

    def make_batch_invariant(self) -> None:
        """Use products that round every row alike in any batch."""
        for module in self.modules():
            if isinstance(module, Weighted):
                module.method = module.method.batch_invariant()

    def forward(self, step: StepInputs) -> Tensor:
        """Return the hidden states of a step's tokens after the final norm [T, hidden], and write their keys and values
        to its caches, one per layer."""
        branch, residual = self._layers(step, len(self.layers))
        return self.norm.add(branch, residual)[0]

    def before_last(self, step: StepInputs, out: Tensor | None = None) -> Tensor:
        """Return the residual stream before the last layer [T, stream_size], in `out` if given.

        For callers that need the hidden states of some tokens and continue with `last_hidden`. The model has at least
        two layers.
        """
        branch, residual = self._layers(step, len(self.layers) - 1)
        return torch.add(residual, branch, out=out)

    def last_hidden(self, residual: Tensor, step: StepInputs, sampled: SampledRows) -> Tensor:
        """Return the hidden states of some tokens after the last layer and the final norm [R, hidden].

        The other tokens stop once the last layer has written their keys and values, which saves a prompt most of one
        layer.
        """
        self.place(step)
        if sampled.inputs.adapted:
            group_adapters(sampled.inputs)
        branch, selected = self.layers[-1](None, residual, step, sampled)
        hidden: Tensor = self.norm.add(branch, selected)[0]
        return hidden

    def place(self, step: StepInputs) -> None:
        """Compute, once for all layers, what they derive from the tokens' positions and adapters."""
        if not step.rotations:
            step.rotations = tuple(rotary(step) for rotary in self.rotaries)
        if self.config.query_scaling is not None and step.query_scale is None:
            step.query_scale = self.config.query_scaling.scales(step.positions)
        if step.adapted and step.adapter_groups is None:
            group_adapters(step)

    def embedded(self, step: StepInputs) -> Tensor:
        """Return the residual stream before the first layer [T, stream_size]."""
        residual: Tensor = self.embed(step.input_ids, step)
        if self.vision is not None:
            residual = self.vision.merge(residual, step)
            if self.scales_images and self.config.embedding_scale is not None:
                residual = residual * self.config.embedding_scale
        if self.positions is not None:
            residual = residual + self.positions(step)
        return residual if self.embed_norm is None else self.embed_norm(residual)

    def _layers(self, step: StepInputs, count: int) -> tuple[Tensor, Tensor]:
        """Return the output of the embedding and the first `count` layers: (branch, residual)."""
        self.place(step)
        residual = self.embedded(step)
        branch: Tensor | None = None
        for layer, block in enumerate(islice(self.layers, count)):
            branch, residual = block(branch, residual, step)
            if self.vision is not None:
                residual = self.vision.merge.add_after_layer(layer, residual, step)
        if branch is None:
            raise ValueError("a decoder needs at least one layer")
        return branch, residual

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, hidden] of `forward` -> logits [R, vocab] after the family's scale and softcap, in the model's
        dtype or float32."""
        return self.head(hidden)

    def rank_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """hidden [R, hidden] -> logits of this rank's tokens only, as `OutputEmbedding.of_rank`; without ranks, of all.
        `out` receives them if given, with that shape and dtype."""
        return self.head.of_rank(hidden, out)


def allocate(tree: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Replace the parameters of a module and its submodules by uninitialised ones, as `DecoderLM.allocate` does."""
    for module in tree.modules():
        own = getattr(module, "parameter_dtype", dtype)
        owns = module.parameter_dtypes if isinstance(module, Weighted) else {}
        for name, parameter in list(module.named_parameters(recurse=False)):
            kept = owns.get(name, own) if parameter.is_floating_point() else parameter.dtype
            empty = torch.empty(parameter.shape, dtype=kept, device=device)
            setattr(module, name, nn.Parameter(empty, requires_grad=False))
        if isinstance(module, Layer):
            module.place(device)
