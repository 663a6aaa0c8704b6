"""Decoders with layers of a state space, some of which have a transformer block in front that they share: Zamba 1 and
2."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

from asyncllm.layers.block import AnyBlock, SingleBlock
from asyncllm.layers.shared_block import HybridBlock, SharedBlock
from asyncllm.layers.shared_weights import SharedAttention, SharedMLP
from asyncllm.layers.short_convolution import StateLayer
from asyncllm.layers.step_inputs import StepInputs
from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.weights import WeightMap

__all__ = ["SharedBlockLM", "block_weights", "hybrid_layers"]

_LAYER = "model.layers.{i}"

_KINDS = {"mamba": False, "linear_attention": False, "hybrid": True}
"""Kinds of layers in config.json, before transformers 5 and since -> whether a shared block is in front."""


def block_weights(block: str, state: Mapping[str, str], gate_up: Mapping[str, str]) -> WeightMap:
    """Return the weight table. `block`: name of shared blocks. `state`: rows of the state spaces, as in layers without
    a block. `gate_up`: name below feed_forward -> parts of gate and up."""
    shared = f"{_LAYER}.{block}"
    return WeightMap(
        {
            "model.embed_tokens": "embed",
            "lm_head": "head",
            "model.final_layernorm": "norm",
            f"{_LAYER}.input_layernorm": "layers.{i}.norm",
            f"{_LAYER}.mamba_decoder.input_layernorm": "layers.{i}.norm",
            **state,
            **{name.replace("}.mamba", "}.mamba_decoder.mamba"): target for name, target in state.items()},
            f"{_LAYER}.linear": "layers.{i}.linear",
            f"{shared}.input_layernorm": "layers.{i}.shared.attn_norm",
            **{f"{shared}.self_attn.{part}_proj": f"layers.{{i}}.shared.attn.qkv[{part}]" for part in "qkv"},
            f"{shared}.self_attn.o_proj": "layers.{i}.shared.attn.out",
            f"{shared}.pre_ff_layernorm": "layers.{i}.shared.mlp_norm",
            **{f"{shared}.feed_forward.{name}": f"layers.{{i}}.shared.mlp.gate_up{it}" for name, it in gate_up.items()},
            f"{shared}.feed_forward.down_proj": "layers.{i}.shared.mlp.down",
        }
    )


def hybrid_layers(hf: HFConfig, num_layers: int) -> frozenset[int]:
    """Return the layers with a shared block in front. Raises InvalidCheckpoint, UnsupportedModel."""
    key = "layer_types" if hf.fields.get("layer_types") is not None else "layers_block_type"
    kinds = hf.fields.get(key)
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        hf.invalid(key, f"where a list of {num_layers} layer kinds belongs")
    if not set(map(str, kinds)) <= _KINDS.keys():
        hf.unsupported(key, f"Supported: {', '.join(map(repr, _KINDS))}.")
    return frozenset(layer for layer, kind in enumerate(kinds) if _KINDS[kind])


class SharedBlockLM(DecoderLM):
    """The common parts: the layers, and the embeddings that shared blocks read beside the stream."""

    block_name: ClassVar[str]
    """Name of shared blocks in checkpoints."""

    def __init__(self, config: ModelConfig) -> None:
        self._shared: list[SharedBlock] = []
        super().__init__(config)
        del self._shared

    @property
    @abstractmethod
    def uses(self) -> Sequence[int]:
        """The layers with a shared block, in order."""

    @property
    def num_blocks(self) -> int:
        """Number of shared blocks. The layers with one take them in turn."""
        return 1

    @property
    def ranks(self) -> tuple[int | None, int | None]:
        """Ranks of the products that each use adds to its block's, in attention and in the MLP; None: no products."""
        return None, None

    @abstractmethod
    def state(self, place: int) -> StateLayer:
        """Return the state space of a layer, with the cache at `place`."""

    @property
    def weight_map(self) -> WeightMap:
        """The table without the copies of shared blocks that some files hold for layers after the first of each."""
        copies = self.uses[self.num_blocks :]
        return super().weight_map.skipping(
            *(f"{prefix}layers.{layer}.{self.block_name}" for layer in copies for prefix in ("", "model."))
        )

    @property
    def reads_token_ids(self) -> bool:
        return True

    def place(self, step: StepInputs) -> None:
        super().place(step)
        if step.layer_inputs is None:
            step.layer_inputs = self.embed(step.input_ids, step)[:, None]

    def block(self, layer: int) -> AnyBlock:
        config, hidden, uses = self.config, self.config.hidden_size, self.uses
        # A layer with a shared block has two caches.
        place = layer + sum(each < layer for each in uses)
        state = self.state(place)
        if layer not in uses:
            return SingleBlock(norm=self.make_norm(), attn=state)
        use = uses.index(layer)
        first = self._shared[use % self.num_blocks] if use >= self.num_blocks else None
        attention_rank, mlp_rank = self.ranks
        attn = SharedAttention(
            place + 1,
            2 * hidden,
            hidden,
            self.attention_config(layer),
            first=None if first is None else first.attn,
            rank=attention_rank,
        )
        mlp = SharedMLP(
            hidden,
            config.intermediate_size,
            activation=config.activation,
            bias=config.mlp_bias,
            first=None if first is None else first.mlp,
            rank=mlp_rank,
        )
        shared = SharedBlock(
            attn_norm=self.norm_class(2 * hidden, config.norm_eps) if first is None else first.attn_norm,
            attn=attn,
            mlp_norm=self.make_norm() if first is None else first.mlp_norm,
            mlp=mlp,
        )
        if first is None:
            self._shared.append(shared)
        return HybridBlock(norm=self.make_norm(), attn=state, shared=shared, hidden_size=hidden)
