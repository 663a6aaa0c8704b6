"""What a decoder is: the description that a family's `configure` writes, and `DecoderLM` builds a model from."""

from __future__ import annotations

import msgspec

from asyncllm.kernels import Routing
from asyncllm.layers.attention import QKNormKind
from asyncllm.layers.linear_method import Activation
from asyncllm.layers.rotary import LogScaling, QueryScaling, RopeConfig
from asyncllm.vl.tower import TowerConfig

__all__ = ["ExpertsConfig", "ModelConfig", "ScoreHeadConfig"]


class ExpertsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sparse experts in the place of MLPs."""

    layers: frozenset[int]
    """Which have them."""
    count: int
    size: int
    """Of an expert's inner features."""
    routing: Routing
    """How tokens choose and weigh them."""
    corrected: bool = False
    """Whether the checkpoint holds a correction of the scores by which they are chosen."""
    exact_router: bool = False
    """Whether the router's weight and logits are float32 in a model of 16 bits."""
    scaled_inputs: bool = False
    """Whether the weights multiply what experts read, not what they give."""
    shared_size: int = 0
    """Inner features of an MLP that all tokens take besides; 0: none."""
    shared_gate: bool = False
    """Whether each token weighs it."""
    bias: bool = False
    """Of the router and of the experts."""
    limit: float | None = None
    """Bounds the inputs of the experts' gate, which is then gpt-oss's."""


class ScoreHeadConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A head that scores sequences, as the checkpoint's tensors have it."""

    num_labels: int
    inner: bool = False
    """Whether a layer of the hidden size with relu comes first."""
    bias: bool = False


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a decoder is, checked, and all that `DecoderLM` needs to build one. Written by a family's `configure`; what
    a family alone has it adds in a subclass."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    extra_layers: int = 0
    """Behind the others in the checkpoint, and left out: they guess the tokens after the next one."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    """Positions that training and rotary scaling allow."""
    dtype: str
    """The checkpoint's: float32, bfloat16 or float16; empty where config.json does not say, which `registry` mends."""
    norm_eps: float
    tied: bool
    """The output embedding reads the token embedding's table."""
    has_head: bool = True
    """Without an output embedding the model gives hidden states and no tokens. Written by `head.settle_head`."""
    score_head: ScoreHeadConfig | None = None
    """Of a class that scores sequences. Written by `head.settle_head`."""
    rope: RopeConfig | None
    """None: queries and keys are not turned."""
    layer_ropes: tuple[RopeConfig | None, ...] = ()
    """Per layer, where not all turn by `rope`; None: positions take no part."""
    position_offset: int | None = None
    """Learned embeddings of the positions are added to the tokens': that of position p is row p + offset; None: none
    are."""
    alibi: tuple[float, ...] = ()
    """Each query head's slope: what a key's score loses with each position that lies between."""
    windows: tuple[int | None, ...]
    """Per layer, how many latest positions a query sees; None: all."""
    chunks: tuple[int | None, ...] = ()
    """Per layer, the length of the chunks within which tokens see each other; None: all do. Empty: in no layer."""
    qkv_bias: bool = False
    out_bias: bool = False
    """Of attention's output projection."""
    mlp_bias: bool = False
    norm_bias: bool = True
    """Of layer norms."""
    head_bias: bool = False
    """Of the output embedding."""
    gated: bool = True
    """Whether MLPs have a gate."""
    activation: Activation = "silu"
    """Of the gate, or of the plain MLP."""
    parallel_norms: int | None = None
    """Attention and MLP read the same stream, under one norm or one each; None: the MLP reads what attention left."""
    embedding_norm: bool = False
    """Of the embeddings, before the first layer."""
    paired_rotary: bool = False
    """The checkpoint's queries and keys are turned in pairs of neighbours."""
    qk_norm: QKNormKind | None = None
    """Norms of queries and keys."""
    qkv_clip: float | None = None
    """Bounds queries, keys and values on both sides."""
    query_scaling: QueryScaling | LogScaling | None = None
    sinks: bool = False
    """A logit for each query head that takes part in its softmax."""
    score_scale: float | None = None
    """Of attention; head_dim^-0.5 unless given."""
    score_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float | None = None
    branch_scale: float | None = None
    """Multiplies what attention and MLP add to the residual stream."""
    logit_scale: float | None = None
    experts: ExpertsConfig | None = None
    vision: TowerConfig | None = None
    """What encodes images, in front of the decoder. Written by `registry`."""
    num_parameters: int = 0
    """Written by `registry.open_model` once the model is built."""

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """Those in use, each once."""
        return tuple(dict.fromkeys(rope for rope in self.layer_ropes or (self.rope,) if rope is not None))

    @property
    def dynamic_rope_from(self) -> int | None:
        """The length of prompts above which a sequence's rotary base depends on it; None: for none."""
        return self.rope.original_max_position if self.rope is not None and self.rope.by_prompt else None
