"""ModelConfig: the description of a decoder that a family's `configure` writes and `DecoderLM` builds a model from."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from asyncllm.kernels import Routing
from asyncllm.layers.attention import QKNormKind
from asyncllm.layers.linear_method import Activation
from asyncllm.layers.rotary import LogScaling, QueryScaling, RopeConfig
from asyncllm.vl.tower import TowerConfig

__all__ = ["ExpertsConfig", "ModelConfig", "ScoreHeadConfig"]


class ExpertsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sparse experts instead of MLPs."""

    layers: frozenset[int]
    """The layers that have experts."""
    count: int
    size: int
    """Inner features of an expert."""
    routing: Routing
    """How tokens choose and weight experts."""
    corrected: bool = False
    """Whether the checkpoint has a correction of the scores by which experts are chosen."""
    exact_router: bool = False
    """Whether the router's weight and logits are float32 in a 16-bit model."""
    scaled_inputs: bool = False
    """Whether the weights multiply the experts' inputs instead of their outputs."""
    shared_size: int = 0
    """Inner features of an additional MLP for all tokens; 0: none."""
    shared_gate: bool = False
    """Whether each token weights the shared MLP."""
    bias: bool = False
    """Whether the router and the experts have biases."""
    limit: float | None = None
    """Limit of the experts' gate, see `kernels.fused_experts`."""


class ScoreHeadConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A head that scores sequences, according to the checkpoint's tensors."""

    num_labels: int
    inner: bool = False
    """Whether the head begins with a layer of the hidden size and relu."""
    bias: bool = False


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A validated description of a decoder, with everything that `DecoderLM` needs to build it. Written by a family's
    `configure`; families add their own fields in a subclass."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    extra_layers: int = 0
    """Layers after the others in the checkpoint, which predict tokens beyond the next one and are not loaded."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    """Number of positions that training and rotary scaling allow."""
    beyond: str = ""
    """What the model does beyond `max_position`, for messages, if it is not implemented."""
    dtype: str
    """The checkpoint's dtype: float32, bfloat16 or float16; empty if config.json does not say, until `registry` fills
    it in."""
    norm_eps: float
    tied: bool
    """Whether the output embedding shares the token embedding's table."""
    stored_as_head: bool = False
    """The table that both read is stored only under the output embedding's name. Written by `head.resolve_head`."""
    has_head: bool = True
    """Whether there is an output embedding. Without one the model computes hidden states but no tokens. Written by
    `head.resolve_head`."""
    score_head: ScoreHeadConfig | None = None
    """The head of a class that scores sequences. Written by `head.resolve_head`."""
    label_names: Mapping[str, str] = {}
    """Number of a label -> its name, where config.json names some (`id2label`)."""
    rope: RopeConfig | None
    """None: no rotation of queries and keys."""
    layer_ropes: tuple[RopeConfig | None, ...] = ()
    """Per layer, if not all use `rope`; None: no rotation in that layer."""
    position_offset: int | None = None
    """Learned position embeddings are added to the tokens', with row p + offset for position p; None: there are
    none."""
    alibi: tuple[float, ...] = ()
    """ALiBi slope of each query head: the decrease of a key's score per position of distance."""
    windows: tuple[int | None, ...]
    """Per layer, how many of the latest positions a query sees; None: all."""
    chunks: tuple[int | None, ...] = ()
    """Per layer, the length of the chunks within which tokens attend to each other, or None for the whole context.
    Empty: no chunks."""
    qkv_bias: bool = False
    out_bias: bool = False
    """Whether attention's output projection has a bias."""
    mlp_bias: bool = False
    norm_bias: bool = True
    """Whether layer norms have a bias."""
    head_bias: bool = False
    """Whether the output embedding has a bias."""
    gated: bool = True
    """Whether MLPs have a gate."""
    activation: Activation = "silu"
    """Activation of the gate, or of a plain MLP."""
    parallel_norms: int | None = None
    """Number of norms if attention and MLP read the same stream: one shared or one each; None: the MLP follows
    attention."""
    embedding_norm: bool = False
    """Whether the embeddings are normalised before the first layer."""
    paired_rotary: bool = False
    """Whether the checkpoint's queries and keys are rotated in neighbouring pairs."""
    qk_norm: QKNormKind | None = None
    """Norms of queries and keys."""
    qkv_clip: float | None = None
    """Bound on the absolute values of queries, keys and values."""
    query_scaling: QueryScaling | LogScaling | None = None
    sinks: bool = False
    """Whether each query head has a logit that joins its softmax."""
    score_scale: float | None = None
    """Scale of attention scores; head_dim^-0.5 unless given."""
    score_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float | None = None
    branch_scale: float | None = None
    """Factor on the outputs that attention and MLP add to the residual stream."""
    logit_scale: float | None = None
    experts: ExpertsConfig | None = None
    vision: TowerConfig | None = None
    """The image encoder before the decoder. Written by `registry`."""
    num_parameters: int = 0
    """Written by `models.build.open_model` once the model is built."""

    @property
    def labels(self) -> tuple[str, ...]:
        """Name of each score of the head; empty: there is no such head."""
        count = 0 if self.score_head is None else self.score_head.num_labels
        return tuple(self.label_names.get(str(label), f"LABEL_{label}") for label in range(count))

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The rotary configs in use, each once."""
        return tuple(dict.fromkeys(rope for rope in self.layer_ropes or (self.rope,) if rope is not None))

    @property
    def dynamic_rope_from(self) -> int | None:
        """Prompt length above which a sequence's rotary base depends on it; None: never."""
        return self.rope.original_max_position if self.rope is not None and self.rope.by_prompt else None
