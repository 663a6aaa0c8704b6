"""North Micro, text: Command R7B whose rotation is chosen by kind of layer, and rotates halves of a head."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from asyncllm.models.cohere import Cohere
from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.registry import register

__all__ = ["CohereCompass"]

_KINDS = ("full_attention", "sliding_attention")


def _without_sections(rope: dict[str, Any]) -> dict[str, Any]:
    """Return settings of a rotation without the entries for images."""
    return {key: value for key, value in rope.items() if key not in ("mrope_section", "mrope_interleaved")}


@register(CohereCompassForCausalLM="North Micro, text")
class CohereCompass(Cohere):
    tiny: ClassVar[dict[str, Any]] = {
        **Cohere.tiny,
        "model_type": "cohere_compass_text",
        "use_qk_norm": False,
        "num_hidden_layers": 4,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [4, 2, 2]},
            "full_attention": {"rope_type": "default", "rope_theta": 9000.0, "mrope_section": [4, 2, 2]},
        },
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf.expect("use_qk_norm", False)
        if hf.fields.get("logit_scale") is None:
            hf = hf.changed({"logit_scale": 1.0})
        nested = hf.fields.get("rope_parameters")
        # A kind of layer without settings is not rotated. Sections say which features take which coordinate of an
        # image; the coordinates of text are equal.
        own = nested if isinstance(nested, dict) else {}
        read = {
            kind: Cohere.configure(hf.changed({"rope_parameters": _without_sections(own[kind])}), architecture)
            for kind in _KINDS
            if isinstance(own.get(kind), dict)
        }
        if not read:
            hf.unsupported("rope_parameters", "Name the kinds of layers that each rotation is for.")
        config = next(iter(read.values()))
        kinds = hf.layer_kinds(config.num_layers, _KINDS, ["full_attention"] * config.num_layers)
        window = hf.optional_integer("sliding_window", 4096)
        return msgspec.structs.replace(
            config,
            paired_rotary=False,
            windows=tuple(window if kind == "sliding_attention" else None for kind in kinds),
            layer_ropes=tuple(read[kind].rope if kind in read else None for kind in kinds),
        )
