"""Vision-language models: a decoder of one of the text families and a vision tower.

`_READERS` maps an architecture to the reader of its config.json (`vision/`). The decoder is built as in its text
family; only its weight table gets further prefixes and the tower's rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from asyncllm.models.config import HFConfig
from asyncllm.models.vision.aya_vision import read_aya_vision, read_cohere2_vision
from asyncllm.models.vision.deepseek_vl_hybrid import read_deepseek_vl_hybrid, read_multi_modality
from asyncllm.models.vision.gemma3 import read_gemma3
from asyncllm.models.vision.gemma4 import read_gemma4
from asyncllm.models.vision.glm4v import read_glm4v, read_glm_ocr
from asyncllm.models.vision.got_ocr2 import read_got_ocr2
from asyncllm.models.vision.idefics3 import read_idefics3
from asyncllm.models.vision.intern_vl import read_intern_vl
from asyncllm.models.vision.lfm2_vl import read_lfm2_vl
from asyncllm.models.vision.llama4 import read_llama4
from asyncllm.models.vision.llava import read_deepseek_vl, read_janus, read_llava, read_onevision, read_vip_llava
from asyncllm.models.vision.llava_original import read_original_llava
from asyncllm.models.vision.ovis2 import read_ovis2
from asyncllm.models.vision.paddleocr_vl import read_paddleocr_vl
from asyncllm.models.vision.parts import Composed
from asyncllm.models.vision.pixtral import read_lighton_ocr, read_mistral3
from asyncllm.models.vision.published import PUBLISHED_MODELS, PUBLISHED_READERS
from asyncllm.models.vision.qwen_vl import read_exaone4_5, read_omni, read_qwen3_5, read_qwen3_vl, read_qwen_vl
from asyncllm.models.weights import WeightMap
from asyncllm.vl.tower import TowerConfig

__all__ = ["VISION_MODELS", "composed", "with_tower"]


def composed(hf: HFConfig, architecture: str) -> Composed | None:
    """Return the two parts of a vision-language model, or None for any other architecture.

    Raises InvalidCheckpoint, UnsupportedModel.
    """
    read = _READERS.get(architecture)
    return None if read is None else read(hf)


def with_tower(table: WeightMap, vision: TowerConfig) -> WeightMap:
    """Return a decoder's weight table, extended by the tower's rows and by the prefixes of old and new files."""

    def prefixed(pattern: str) -> list[str]:
        inner = pattern.removeprefix("model.")
        moved = [f"model.{part}_model.{inner}" for part in ("language", "text")] if inner != pattern else []
        return [pattern, f"{vision.decoder_source}.{pattern}", *moved]

    rows = {each: target for pattern, target in table.rows.items() for each in prefixed(pattern)}
    towers = {f"{prefix}{pattern}": target for pattern, target in vision.weights.items() for prefix in ("", "model.")}
    if vision.image_rows is not None:
        rows |= vision.image_rows.weights
    ignored = [f"{prefix}{name}" for name in table.ignored for prefix in ("", f"{vision.decoder_source}.")]
    unused = [f"{prefix}{name}" for name in vision.unused for prefix in ("", "model.")]
    # Tensors that the decoder alone ignores may belong to the tower.
    skipped = [name for name in table.skipped if not any(f"{row}.".startswith(f"{name}.") for row in towers)]
    whole = [each for name in skipped for each in prefixed(name)]
    return WeightMap({**rows, **towers}, ignored=ignored, skipped=[*whole, *unused])


_READERS: Mapping[str, Callable[[HFConfig], Composed | None]] = {
    **PUBLISHED_READERS,
    "AyaVisionForConditionalGeneration": read_aya_vision,
    "Cohere2VisionForConditionalGeneration": read_cohere2_vision,
    "DeepseekVLForConditionalGeneration": read_deepseek_vl,
    "DeepseekVLHybridForConditionalGeneration": read_deepseek_vl_hybrid,
    "Exaone4_5_ForConditionalGeneration": read_exaone4_5,
    "Gemma3ForConditionalGeneration": read_gemma3,
    "Gemma4ForConditionalGeneration": read_gemma4,
    "Glm46VForConditionalGeneration": read_glm4v,
    "Glm4vForConditionalGeneration": read_glm4v,
    "Glm4vMoeForConditionalGeneration": read_glm4v,
    "GlmOcrForConditionalGeneration": read_glm_ocr,
    "GotOcr2ForConditionalGeneration": read_got_ocr2,
    "Idefics3ForConditionalGeneration": read_idefics3,
    "InternS1ForConditionalGeneration": read_intern_vl,
    "InternVLChatModel": read_intern_vl,
    "InternVLForConditionalGeneration": read_intern_vl,
    "JanusForConditionalGeneration": read_janus,
    "Lfm2VlForConditionalGeneration": read_lfm2_vl,
    "LightOnOCRForConditionalGeneration": read_lighton_ocr,
    "LightOnOcrForConditionalGeneration": read_lighton_ocr,
    "Llama4ForConditionalGeneration": read_llama4,
    "LlavaForConditionalGeneration": read_llava,
    "LlavaLlamaForCausalLM": lambda hf: read_original_llava(hf, "llama"),
    "LlavaMistralForCausalLM": lambda hf: read_original_llava(hf, "mistral"),
    "LlavaNextForConditionalGeneration": lambda hf: read_llava(hf, tiled=True),
    "LlavaNextVideoForConditionalGeneration": lambda hf: read_llava(hf, tiled=True),
    "LlavaOnevisionForConditionalGeneration": read_onevision,
    "LlavaQwenForCausalLM": lambda hf: read_original_llava(hf, "qwen2"),
    "Mistral3ForConditionalGeneration": read_mistral3,
    "Ovis2ForConditionalGeneration": read_ovis2,
    "PaddleOCRVLForConditionalGeneration": read_paddleocr_vl,
    "MultiModalityCausalLM": read_multi_modality,
    **dict.fromkeys(
        ("Qwen2_5OmniModel", "Qwen2_5OmniForConditionalGeneration", "Qwen2_5OmniThinkerForConditionalGeneration"),
        lambda hf: read_omni(hf, lambda own: read_qwen_vl(own, gated=True)),
    ),
    **dict.fromkeys(
        ("Qwen3OmniMoeForConditionalGeneration", "Qwen3OmniMoeThinkerForConditionalGeneration"),
        lambda hf: read_omni(hf, lambda own: read_qwen3_vl(own, sparse=True)),
    ),
    "Qwen2VLForConditionalGeneration": read_qwen_vl,
    "Qwen3VLForConditionalGeneration": read_qwen3_vl,
    "Qwen3_5ForConditionalGeneration": read_qwen3_5,
    "Qwen3_5MoeForConditionalGeneration": lambda hf: read_qwen3_5(hf, sparse=True),
    "Qwen3VLMoeForConditionalGeneration": lambda hf: read_qwen3_vl(hf, sparse=True),
    "SmolVLMForConditionalGeneration": read_idefics3,
    "VipLlavaForConditionalGeneration": read_vip_llava,
    "Qwen2_5_VLForConditionalGeneration": lambda hf: read_qwen_vl(hf, gated=True),
}

VISION_MODELS: Mapping[str, str] = {
    **PUBLISHED_MODELS,
    "AyaVisionForConditionalGeneration": "Aya Vision 8B, 32B",
    "Cohere2VisionForConditionalGeneration": "Command A Vision",
    "DeepseekVLForConditionalGeneration": "DeepSeek-VL 1.3B (transformers' format)",
    "DeepseekVLHybridForConditionalGeneration": "DeepSeek-VL 7B (transformers' format)",
    "Exaone4_5_ForConditionalGeneration": "EXAONE 4.5 33B",
    "Gemma3ForConditionalGeneration": "Gemma 3 4B, 12B, 27B",
    "Gemma4ForConditionalGeneration": "Gemma 4 E2B, E4B, 26B-A4B, 31B: text and images",
    "Glm46VForConditionalGeneration": "GLM-4.6V-Flash, GLM-4.6V",
    "Glm4vForConditionalGeneration": "GLM-4.1V-9B",
    "Glm4vMoeForConditionalGeneration": "GLM-4.5V",
    "GlmOcrForConditionalGeneration": "GLM-OCR",
    "GotOcr2ForConditionalGeneration": "GOT-OCR 2.0 (transformers' format)",
    "Idefics3ForConditionalGeneration": "Idefics3",
    "InternS1ForConditionalGeneration": "Intern-S1, Intern-S1-mini",
    "InternVLChatModel": "InternVL-Chat 1.1, 1.2 and 1.5, InternVL2, InternVL2.5, InternVL3 and InternVL3.5, as their "
    "authors published them",
    "InternVLForConditionalGeneration": "the same (transformers' format)",
    "JanusForConditionalGeneration": "Janus, Janus-Pro 1B and 7B (transformers' format), answering in text",
    "Lfm2VlForConditionalGeneration": "LFM2-VL 450M, 1.6B, 3B and LFM2.5-VL",
    "LightOnOCRForConditionalGeneration": "LightOnOCR 1B (authors' format)",
    "LightOnOcrForConditionalGeneration": "the same (transformers' format)",
    "Llama4ForConditionalGeneration": "Llama 4 Scout and Maverick",
    "LlavaForConditionalGeneration": "LLaVA 1.5 (llava-hf's format); Pixtral 12B (transformers' format)",
    "LlavaLlamaForCausalLM": "LLaVA 1.5 and 1.6 (authors' format), with the tower among the weights; Yi-VL",
    "LlavaMistralForCausalLM": "LLaVA 1.6 with Mistral (authors' format)",
    "LlavaNextForConditionalGeneration": "LLaVA 1.6 (NeXT) (llava-hf's format); Granite Vision 3.1 to 3.3",
    "LlavaNextVideoForConditionalGeneration": "LLaVA-NeXT-Video 7B, 34B; images only",
    "LlavaOnevisionForConditionalGeneration": "LLaVA-OneVision (llava-hf's format)",
    "LlavaQwenForCausalLM": "LLaVA-OneVision, and LLaVA 1.6 with Qwen (authors' format)",
    "Mistral3ForConditionalGeneration": "Mistral Small 3.1 and 3.2",
    "Ovis2ForConditionalGeneration": "Ovis2 (transformers' format)",
    "PaddleOCRVLForConditionalGeneration": "PaddleOCR-VL 0.9B",
    "MultiModalityCausalLM": "DeepSeek-VL 1.3B and 7B, Janus and Janus-Pro (authors' format)",
    "Qwen2VLForConditionalGeneration": "Qwen2-VL",
    "Qwen2_5_VLForConditionalGeneration": "Qwen2.5-VL",
    "Qwen2_5OmniForConditionalGeneration": "Qwen2.5-Omni 3B, 7B: text and images, answered in text",
    "Qwen2_5OmniModel": "the same",
    "Qwen2_5OmniThinkerForConditionalGeneration": "the same, the thinker only",
    "Qwen3OmniMoeForConditionalGeneration": "Qwen3-Omni-30B-A3B: text and images, answered in text",
    "Qwen3OmniMoeThinkerForConditionalGeneration": "the same, the thinker only",
    "Qwen3VLForConditionalGeneration": "Qwen3-VL, dense",
    "Qwen3_5ForConditionalGeneration": "Qwen3.5, dense",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3.5-35B-A3B, 122B-A10B, 397B-A17B",
    "Qwen3VLMoeForConditionalGeneration": "Qwen3-VL-30B-A3B, Qwen3-VL-235B-A22B",
    "SmolVLMForConditionalGeneration": "SmolVLM, SmolVLM2; images only",
    "VipLlavaForConditionalGeneration": "ViP-LLaVA 7B, 13B (llava-hf's format)",
}
"""Architecture -> the models that use it."""
