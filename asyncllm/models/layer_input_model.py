"""Decoders with per-layer embeddings and shared keys and values: Gemma 3n and 4."""

from __future__ import annotations

from dataclasses import replace

from asyncllm.layers.attention import Attention, AttentionConfig
from asyncllm.layers.images import IMAGE_ROWS
from asyncllm.layers.layer_inputs import GatedLayerInput, LayerInputs
from asyncllm.layers.norm import RMSNorm
from asyncllm.layers.shared_keys import BorrowingAttention, NormedValueAttention
from asyncllm.layers.step_inputs import StepInputs
from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.gemma3 import Gemma3
from asyncllm.models.vision.parts import text_of
from asyncllm.models.weights import WeightMap

__all__ = ["LayerInputConfig", "LayerInputLM", "sources_of", "text_part", "text_weights"]

_LAYER_INPUT_WEIGHTS = {
    "model.embed_tokens_per_layer": "layer_inputs.embed",
    "model.per_layer_model_projection": "layer_inputs.project",
    "model.per_layer_projection_norm": "layer_inputs.norm",
    "model.layers.{i}.per_layer_input_gate": "layers.{i}.layer_input.gate",
    "model.layers.{i}.per_layer_projection": "layers.{i}.layer_input.project",
    "model.layers.{i}.post_per_layer_input_norm": "layers.{i}.layer_input.norm",
}

_TOWERS = ("vision_tower", "audio_tower", "embed_vision", "embed_audio", "vision_embedder")


def text_weights(rows: dict[str, str]) -> WeightMap:
    """Return Gemma 3's table with these rows, for files of the text model alone and of the whole model, whose other
    parts are ignored."""
    table = Gemma3.weights.replaced({**_LAYER_INPUT_WEIGHTS, **rows})
    inner = {
        f"model.language_model.{name.removeprefix('model.')}": target
        for name, target in table.rows.items()
        if name.startswith("model.")
    }
    return table.replaced(inner).skipping(*(f"{prefix}{part}" for part in _TOWERS for prefix in ("", "model.")))


def text_part(hf: HFConfig) -> HFConfig:
    """Return the text model's entries of a file that may also have those of towers."""
    if "text_config" not in hf.fields:
        return hf
    return text_of(hf.changed({"tie_word_embeddings": hf.fields.get("tie_word_embeddings", True)}))[0]


def sources_of(hf: HFConfig, windows: tuple[int | None, ...], shared: int) -> tuple[int | None, ...]:
    """Return, for each layer, the layer whose keys and values it reads; None: its own. The last `shared` layers read
    those of the last layer before them with the same window."""
    first = len(windows) - shared
    last = {window: layer for layer, window in enumerate(windows[: max(0, first)])}
    if any(window not in last for window in windows[first:]):
        hf.invalid("num_kv_shared_layers", "which leaves layers without keys and values to read")
    return tuple(None if layer < first else last[window] for layer, window in enumerate(windows))


class LayerInputConfig(ModelConfig, frozen=True, kw_only=True):
    """The config of a decoder with per-layer embeddings, some of whose layers read other layers' keys and values."""

    sources: tuple[int | None, ...]
    """Per layer, the layer whose keys and values it reads; None: its own."""
    layer_input_size: int
    """Number of per-layer input features per token; 0: none."""
    layer_input_tokens: int
    """Number of rows of their table."""
    image_layer_token: int = 0
    """The token whose per-layer embedding the tokens of images take."""


class LayerInputLM(DecoderLM):
    """The common parts of Gemma 3n and 4: normalised values, per-layer embeddings, and layers that read the keys and
    values of others."""

    norm_class = RMSNorm
    config: LayerInputConfig

    def __init__(self, config: LayerInputConfig) -> None:
        super().__init__(config)
        size = config.layer_input_size
        self.layer_inputs = None
        if size:
            norm = RMSNorm(size, config.norm_eps)
            self.layer_inputs = LayerInputs(
                config.hidden_size, config.num_layers, size, vocab_size=config.layer_input_tokens, norm=norm
            )

    @property
    def reads_token_ids(self) -> bool:
        return self.layer_inputs is not None

    def place(self, step: StepInputs) -> None:
        super().place(step)
        if self.layer_inputs is not None and step.layer_inputs is None:
            ids = step.input_ids
            embedded = self.embed(ids, step)
            if self.vision is not None and step.image_features is not None:
                embedded = self.vision.merge(embedded, step)
                ids = ids.masked_fill(step[IMAGE_ROWS] >= 0, self.config.image_layer_token)
            step.layer_inputs = self.layer_inputs(ids, embedded, step)

    @property
    def weight_map(self) -> WeightMap:
        """The table without the key projections of layers that read another layer's keys, which some files still
        contain."""
        unused = (
            f"{prefix}layers.{layer}.self_attn.{part}"
            for layer, source in enumerate(self.config.sources)
            if source is not None
            for part in ("k_proj", "v_proj", "k_norm", "v_norm")
            for prefix in ("", "model.", "model.language_model.")
        )
        return super().weight_map.skipping(*unused)

    def attention(self, layer: int) -> Attention:
        return self.own_or_borrowed(layer, self.attention_config(layer))

    def own_or_borrowed(self, layer: int, heads: AttentionConfig, *, keys_as_values: bool = False) -> Attention:
        """Return attention with these heads over the layer's own keys and values, or over those of another layer."""
        hidden_size, source = self.config.hidden_size, self.config.sources[layer]
        heads = replace(heads, out_bias=heads.qkv_bias)
        if source is not None:
            return BorrowingAttention(source, hidden_size, heads)
        return NormedValueAttention(layer, hidden_size, heads, keys_as_values=keys_as_values)

    def layer_input(self, layer: int) -> GatedLayerInput | None:
        """Return the module that adds the layer's own input, if it has one."""
        hidden, size = self.config.hidden_size, self.config.layer_input_size
        return GatedLayerInput(layer, hidden, size, norm=self.make_norm()) if size else None
