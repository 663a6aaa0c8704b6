"""Granite with sinks, a window in most layers, and rotary bases by layer."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.granite import Granite
from asyncllm.models.registry import register
from asyncllm.models.typed_fields import MAX_NUMBER

__all__ = ["GraniteSWA", "with_windows"]


@register(GraniteSWAForCausalLM="Granite SWASH 2B")
class GraniteSWA(Granite):
    weights = Granite.weights.replaced({"model.layers.{i}.self_attn.sinks": "layers.{i}.attn.sinks:sinks"})
    tiny: ClassVar[dict[str, Any]] = {
        **Granite.tiny,
        "model_type": "granite_swa",
        "num_hidden_layers": 4,
        "attention_bias": True,
        "mlp_bias": True,
        "sliding_window": 8,
        "layer_rope_theta": [5000.0, 100.0, 0, 5000.0],
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        return with_windows(hf, Granite.configure(_usual(hf), architecture))


def _usual(hf: HFConfig) -> HFConfig:
    """Return the file with its omitted entries filled in."""
    usual = {"max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}
    return hf.completed(usual)


def with_windows(hf: HFConfig, base: ModelConfig) -> ModelConfig:
    """Return the model with sinks, and with each layer's own window and rotation. Raises InvalidCheckpoint,
    UnsupportedModel."""
    num_layers = base.num_layers
    window = hf.optional_integer("sliding_window", 128)
    windows = hf.windows(num_layers, window, [layer % 4 != 0 for layer in range(num_layers)])
    rope, thetas = base.rope, hf.fields.get("layer_rope_theta")
    if thetas is None or rope is None:
        return msgspec.structs.replace(base, sinks=True, windows=windows)
    if not isinstance(thetas, list) or len(thetas) != num_layers or not all(map(_is_theta, thetas)):
        hf.invalid("layer_rope_theta", f"where a list of {num_layers} numbers, 0 or above 1, belongs")
    if hf.rope_scaling_factor:
        hf.unsupported("layer_rope_theta", "Bases of several kinds are not scaled: use rope_scaling_factor=0.")
    ropes = tuple(msgspec.structs.replace(rope, theta=float(theta)) if theta else None for theta in thetas)
    return msgspec.structs.replace(base, sinks=True, windows=windows, layer_ropes=ropes)


def _is_theta(value: Any) -> bool:
    return type(value) in (int, float) and (value == 0 or 1 < value <= MAX_NUMBER)
