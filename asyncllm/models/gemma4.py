"""Gemma 4, text: Gemma 3's blocks with plain norms, normalised values, heads of another size in the layers that see the
whole context, keys and values that the last layers share, and embeddings of each layer's own."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.layers.attention import Attention
from asyncllm.layers.layer_inputs import GatedLayerInput, LayerInputBlock, LayerInputs
from asyncllm.layers.mlp import GatedMLP
from asyncllm.layers.norm import RMSNorm
from asyncllm.layers.shared_keys import BorrowingAttention, NormedValueAttention
from asyncllm.layers.step_inputs import StepInputs
from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.gemma3 import Gemma3
from asyncllm.models.registry import register
from asyncllm.models.vision.parts import text_of
from asyncllm.models.weights import WeightMap

__all__ = ["LAYER_INPUT_WEIGHTS", "Gemma4", "Gemma4Config", "LayerInputLM", "sources_of", "text_weights"]

LAYER_INPUT_WEIGHTS = {
    "model.embed_tokens_per_layer": "layer_inputs.embed",
    "model.per_layer_model_projection": "layer_inputs.project",
    "model.per_layer_projection_norm": "layer_inputs.norm",
    "model.layers.{i}.per_layer_input_gate": "layers.{i}.layer_input.gate",
    "model.layers.{i}.per_layer_projection": "layers.{i}.layer_input.project",
    "model.layers.{i}.post_per_layer_input_norm": "layers.{i}.layer_input.norm",
}

_TOWERS = ("vision_tower", "audio_tower", "embed_vision", "embed_audio", "vision_embedder")


def text_weights(rows: dict[str, str]) -> WeightMap:
    """Return Gemma 3's table with these rows, for files of the text model and for those of all that the model reads, of
    which the rest is left out."""
    table = Gemma3.weights.replaced({**LAYER_INPUT_WEIGHTS, **rows})
    inner = {
        f"model.language_model.{name.removeprefix('model.')}": target
        for name, target in table.rows.items()
        if name.startswith("model.")
    }
    return table.replaced(inner).setting_aside(*(f"{prefix}{part}" for part in _TOWERS for prefix in ("", "model.")))


def sources_of(hf: HFConfig, windows: tuple[int | None, ...], shared: int) -> tuple[int | None, ...]:
    """Return for each layer which one's keys and values it reads; None: its own. The last `shared` layers read those of
    the last layer before them that sees as much."""
    first = len(windows) - shared
    last = {window: layer for layer, window in enumerate(windows[: max(0, first)])}
    if any(window not in last for window in windows[first:]):
        hf.invalid("num_kv_shared_layers", "which leaves layers without keys and values to read")
    return tuple(None if layer < first else last[window] for layer, window in enumerate(windows))


class Gemma4Config(ModelConfig, frozen=True, kw_only=True):
    """Heads of layers without a window, and what Gemma 3n brought."""

    full_head_dim: int
    full_kv_heads: int
    keys_as_values: bool
    """In layers without a window."""
    sources: tuple[int | None, ...]
    """Per layer, whose keys and values it reads, where these are not its own."""
    wide_mlp: bool
    """Whether the MLPs of layers that read another's are twice as wide."""
    layer_input_size: int
    """Features that each layer has of a token; 0: none."""
    layer_input_tokens: int
    """Rows of their table."""


class LayerInputLM(DecoderLM):
    """A decoder whose layers have embeddings of their own."""

    layer_inputs: LayerInputs | None

    def place(self, step: StepInputs) -> None:
        super().place(step)
        if self.layer_inputs is not None and step.layer_inputs is None:
            step.layer_inputs = self.layer_inputs(step.input_ids, self.embed(step.input_ids, step), step)


@register(
    Gemma4ForCausalLM="Gemma 4 E2B, E4B, 31B: the text model",
    Gemma4ForConditionalGeneration="the same in files that hold its towers too, which are left out",
)
class Gemma4(LayerInputLM):
    weights = text_weights({"model.layers.{i}.layer_scalar": "layers.{i}.stream_scale:value"})
    norm_class = RMSNorm
    config: Gemma4Config
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "gemma4_text",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "global_head_dim": 24,
        "num_global_key_value_heads": 1,
        "max_position_embeddings": 128,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 320,
        "final_logit_softcapping": 3.0,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "rope_theta": 50000.0, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
    }

    def __init__(self, config: Gemma4Config) -> None:
        super().__init__(config)
        size = config.layer_input_size
        self.layer_inputs = None
        if size:
            norm = RMSNorm(size, config.norm_eps)
            self.layer_inputs = LayerInputs(
                config.hidden_size, config.num_layers, size, vocab_size=config.layer_input_tokens, norm=norm
            )

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> Gemma4Config:
        if "text_config" in hf.fields:
            hf, _ = text_of(hf.changed({"tie_word_embeddings": hf.fields.get("tie_word_embeddings", True)}))
        hf.expect("hidden_activation", "gelu_pytorch_tanh")
        # Of images' tokens.
        hf.expect("use_bidirectional_attention", False, "vision")
        hf.expect("enable_moe_block", False)
        ropes = {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        }
        hf = hf.changed({"rope_parameters": hf.fields.get("rope_parameters") or ropes})
        fields = hf.of_layers("sliding_attention").decoder(architecture, max_position=131072, head_dim=256, tied=True)
        num_layers, window = fields["num_layers"], hf.integer("sliding_window", 512)
        fields["windows"] = hf.windows(num_layers, window, [bool((layer + 1) % 6) for layer in range(num_layers)])
        if fields["windows"][-1] is not None:
            hf.unsupported("layer_types", "Supported: a last layer of full_attention.")
        full = _full_heads(hf, fields)
        full_rope = full.of_layers("full_attention").decoder(architecture, partial_rotary=1.0)
        bias = hf.flag("attention_bias", False)
        size = hf.integer("hidden_size_per_layer_input", 256, minimum=0)
        return Gemma4Config(
            **fields,
            layer_ropes=tuple(full_rope["rope"] if each is None else fields["rope"] for each in fields["windows"]),
            qkv_bias=bias,
            out_bias=bias,
            activation="gelu_tanh",
            embedding_scale=fields["hidden_size"] ** 0.5,
            score_scale=1.0,
            logit_softcap=hf.optional_number("final_logit_softcapping"),
            qk_norm="head",
            full_head_dim=full_rope["head_dim"],
            full_kv_heads=full_rope["num_kv_heads"],
            keys_as_values=hf.flag("attention_k_eq_v", False),
            sources=sources_of(hf, fields["windows"], hf.integer("num_kv_shared_layers", 0, minimum=0)),
            wide_mlp=hf.flag("use_double_wide_mlp", False),
            layer_input_size=size,
            layer_input_tokens=hf.integer("vocab_size_per_layer_input", 262144) if size else 0,
        )

    @property
    def weight_map(self) -> WeightMap:
        """Layers that read another's keys have their projections in the files of some checkpoints."""
        unused = (
            f"{prefix}layers.{layer}.self_attn.{part}"
            for layer, source in enumerate(self.config.sources)
            if source is not None
            for part in ("k_proj", "v_proj", "k_norm", "v_norm")
            for prefix in ("", "model.", "model.language_model.")
        )
        return super().weight_map.setting_aside(*unused)

    def attention(self, layer: int) -> Attention:
        config = self.config
        full, source = config.windows[layer] is None, config.sources[layer]
        rope = config.layer_ropes[layer]
        options: dict[str, Any] = {
            "num_heads": config.num_heads,
            "num_kv_heads": config.full_kv_heads if full else config.num_kv_heads,
            "head_dim": config.full_head_dim if full else config.head_dim,
            "bias": config.qkv_bias,
            "rope": None if rope is None else config.ropes.index(rope),
            "window": config.windows[layer],
            "scale": config.score_scale,
            "norm_eps": config.norm_eps,
        }
        if source is not None:
            return BorrowingAttention(source, config.hidden_size, **options)
        keys_as_values = config.keys_as_values and full
        return NormedValueAttention(layer, config.hidden_size, keys_as_values=keys_as_values, **options)

    def mlp(self, layer: int) -> GatedMLP:
        config = self.config
        wide = config.wide_mlp and config.sources[layer] is not None
        size = config.intermediate_size * (2 if wide else 1)
        return GatedMLP(config.hidden_size, size, activation=config.activation)

    def block(self, layer: int) -> LayerInputBlock:
        config, layer_input = self.config, None
        if config.layer_input_size:
            layer_input = GatedLayerInput(layer, config.hidden_size, config.layer_input_size, norm=self.make_norm())
        return LayerInputBlock(
            attn_norm=self.make_norm(),
            attn=self.attention(layer),
            attn_post_norm=self.make_norm(),
            mlp_norm=self.make_norm(),
            mlp=self.mlp(layer),
            mlp_post_norm=self.make_norm(),
            layer_input=layer_input,
        )


def _full_heads(hf: HFConfig, fields: dict[str, Any]) -> HFConfig:
    """Return the file as layers without a window read it: their heads are given in entries of their own, or by layer
    where transformers has written it."""
    by_layer = hf.fields.get("per_layer_config")
    if by_layer is None:
        heads = {"head_dim": hf.integer("global_head_dim", 512)}
        if hf.flag("attention_k_eq_v", False):
            heads["num_key_value_heads"] = hf.integer("num_global_key_value_heads", fields["num_kv_heads"])
        return hf.changed(heads)
    full = {str(layer) for layer, window in enumerate(fields["windows"]) if window is None}
    given = list(by_layer.values()) if isinstance(by_layer, dict) and set(by_layer) == full else []
    first = given[0] if given else None
    if (
        not isinstance(first, dict)
        or not set(first) <= {"head_dim", "num_key_value_heads"}
        or given.count(first) < len(given)
    ):
        hf.unsupported("per_layer_config", "Supported: head_dim and num_key_value_heads, alike for all full_attention.")
    return hf.changed(first)
