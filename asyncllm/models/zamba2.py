"""Zamba 2: Mamba-2 in every layer, and in front of some of them one of a few transformer blocks that they share."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.layers.block import AnyBlock, SingleBlock
from asyncllm.layers.mamba2 import Mamba2
from asyncllm.layers.shared_block import HybridBlock, SharedBlock
from asyncllm.layers.shared_weights import SharedAttention, SharedMLP
from asyncllm.layers.step_inputs import StepInputs
from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.mamba_hybrid import MAMBA_WEIGHTS, MambaConfig, mamba_fields, mamba_sizes
from asyncllm.models.registry import register
from asyncllm.models.weights import WeightMap

__all__ = ["Zamba2", "Zamba2Config"]

_LAYER = "model.layers.{i}"
_SHARED = f"{_LAYER}.shared_transformer"

_KINDS = {"mamba": False, "linear_attention": False, "hybrid": True}
"""Kinds of layers in config.json, before transformers 5 and since -> whether a shared block is in front."""

_NORM_EPS = 1e-5
"""Epsilon of the norm in Mamba-2, which config.json does not have."""


class Zamba2Config(MambaConfig, frozen=True, kw_only=True):
    """The config. `attention_layers` are those with a shared block."""

    num_blocks: int
    """Number of shared blocks. The layers with one take them in turn."""
    rank: int
    """Rank of the products that each use adds to its block's."""
    adapted_attention: bool
    """Whether each use also adds products to q, k and v."""
    min_step: float


@register(Zamba2ForCausalLM="Zamba 2 1.2B, 2.7B, 7B")
class Zamba2(DecoderLM):
    config: Zamba2Config
    weights = WeightMap(
        {
            "model.embed_tokens": "embed",
            "lm_head": "head",
            "model.final_layernorm": "norm",
            f"{_LAYER}.input_layernorm": "layers.{i}.norm",
            f"{_LAYER}.mamba_decoder.input_layernorm": "layers.{i}.norm",
            **MAMBA_WEIGHTS,
            **{name.replace(".mamba", ".mamba_decoder.mamba"): target for name, target in MAMBA_WEIGHTS.items()},
            f"{_LAYER}.linear": "layers.{i}.linear",
            f"{_SHARED}.input_layernorm": "layers.{i}.shared.attn_norm",
            **{f"{_SHARED}.self_attn.{part}_proj": f"layers.{{i}}.shared.attn.qkv[{part}]" for part in "qkv"},
            f"{_SHARED}.self_attn.o_proj": "layers.{i}.shared.attn.out",
            f"{_SHARED}.pre_ff_layernorm": "layers.{i}.shared.mlp_norm",
            f"{_SHARED}.feed_forward.gate_up_proj": "layers.{i}.shared.mlp.gate_up[gate+up]",
            f"{_SHARED}.feed_forward.down_proj": "layers.{i}.shared.mlp.down",
        }
    )
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "zamba2",
        "vocab_size": 320,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid", "hybrid"],
        "num_mem_blocks": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 128,
        "use_shared_attention_adapter": True,
        "adapter_rank": 12,
        "use_mem_rope": True,
        "add_bias_linear": True,
        "n_mamba_heads": 4,
        "mamba_ngroups": 2,
        "mamba_d_state": 24,
        "time_step_min": 0.4,
        "rms_norm_eps": 1e-3,
    }

    def __init__(self, config: ModelConfig) -> None:
        self._shared: list[SharedBlock] = []
        super().__init__(config)
        del self._shared

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        # Its config class no longer stretches the rotation, as that of the first files did.
        hf.expect("use_long_context", False)
        hidden_size, num_heads = hf.integer("hidden_size"), hf.integer("num_attention_heads", 32, maximum=2**16)
        if 2 * hidden_size % num_heads:
            hf.invalid("num_attention_heads", f"which does not divide 2 hidden_size = {2 * hidden_size}")
        head_dim = 2 * hidden_size // num_heads
        sizes = {"attention_hidden_size": 2 * hidden_size, "attention_head_dim": head_dim, "head_dim": head_dim}
        for name, size in sizes.items():
            hf.expect(name, size)
        bias = hf.flag("add_bias_linear", False)
        mamba = hf.named(
            {"n_mamba_heads": "mamba_n_heads", "mamba_ngroups": "mamba_n_groups", "mamba_headdim": "mamba_d_head"}
        )
        usual = {"mamba_n_heads": 8, "mamba_d_state": 64, "mamba_conv_bias": True, "mamba_proj_bias": bias}
        fixed = ("mamba_conv_bias", "mamba_proj_bias")
        mamba = mamba.changed(
            {key: each for key, each in usual.items() if key in fixed or mamba.fields.get(key) is None}
        )
        fields = hf.changed({"head_dim": head_dim}).decoder(
            architecture,
            max_position=4096,
            norm_eps=1e-5,
            tied=True,
            rotary=hf.flag("use_mem_rope", False),
            intermediate_size=4 * hidden_size,
        )
        adapted = hf.flag("use_shared_attention_adapter", False)
        if adapted and fields["num_kv_heads"] != num_heads:
            hf.invalid("num_key_value_heads", f"where use_shared_attention_adapter asks for {num_heads}")
        return Zamba2Config(
            **fields,
            **mamba_fields(mamba, hidden_size),
            attention_layers=_hybrid_layers(hf, fields["num_layers"]),
            score_scale=(head_dim / 2) ** -0.5,
            activation=hf.activation("hidden_act", "gelu"),
            mlp_bias=bias,
            num_blocks=hf.integer("num_mem_blocks", 1),
            rank=hf.integer("adapter_rank", 128),
            adapted_attention=adapted,
            min_step=hf.number("time_step_min", 0.001),
        )

    @property
    def weight_map(self) -> WeightMap:
        """The table with the products of each use, which the files have in the first layer with its block, and without
        the copies of blocks that some files hold for the others."""
        rows: dict[str, str] = {}
        uses = sorted(self.config.attention_layers)
        count = self.config.num_blocks
        for use, layer in enumerate(uses):
            source = f"layers.{uses[use % count]}.shared_transformer"
            mine = f"layers.{layer}.shared"
            for number, half in enumerate(("down", "up")):
                for part in "qkv":
                    rows[f"{source}.self_attn.linear_{part}_adapter_list.{use}.{number}"] = (
                        f"{mine}.attn.added.{part}.{half}"
                    )
                rows[f"{source}.feed_forward.gate_up_proj_adapter_list.{use}.{number}"] = (
                    f"{mine}.mlp.added.{half}{'[gate+up]' if number else ''}"
                )
        table = super().weight_map.replaced({**rows, **{f"model.{name}": target for name, target in rows.items()}})
        copies = (f"{prefix}layers.{layer}.shared_transformer" for layer in uses[count:] for prefix in ("", "model."))
        return table.skipping(*copies)

    def place(self, step: StepInputs) -> None:
        super().place(step)
        if step.layer_inputs is None:
            step.layer_inputs = self.embed(step.input_ids, step)[:, None]

    @property
    def reads_token_ids(self) -> bool:
        return True

    def block(self, layer: int) -> AnyBlock:
        config, hidden = self.config, self.config.hidden_size
        uses = sorted(config.attention_layers)
        # A layer with a shared block has two caches.
        place = layer + sum(each < layer for each in uses)
        sizes = {**mamba_sizes(config), "norm_eps": _NORM_EPS}
        state = Mamba2(place, hidden, **sizes, min_step=config.min_step)
        if layer not in config.attention_layers:
            return SingleBlock(norm=self.make_norm(), attn=state)
        use = uses.index(layer)
        first = self._shared[use % config.num_blocks] if use >= config.num_blocks else None
        attn = SharedAttention(
            place + 1,
            2 * hidden,
            hidden,
            self.attention_config(layer),
            first=None if first is None else first.attn,
            rank=config.rank if config.adapted_attention else None,
        )
        mlp = SharedMLP(
            hidden,
            config.intermediate_size,
            activation=config.activation,
            bias=config.mlp_bias,
            first=None if first is None else first.mlp,
            rank=config.rank,
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


def _hybrid_layers(hf: HFConfig, num_layers: int) -> frozenset[int]:
    """Return the layers with a shared block. Raises InvalidCheckpoint, UnsupportedModel."""
    key = "layer_types" if hf.fields.get("layer_types") is not None else "layers_block_type"
    kinds = hf.fields.get(key)
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        hf.invalid(key, f"where a list of {num_layers} layer kinds belongs")
    if not set(map(str, kinds)) <= _KINDS.keys():
        hf.unsupported(key, f"Supported: {', '.join(map(repr, _KINDS))}.")
    return frozenset(layer for layer, kind in enumerate(kinds) if _KINDS[kind])
