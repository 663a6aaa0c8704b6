"""The families that only their authors' code implements: the readers of config.json, and the models of each class."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from asyncllm.models.config import HFConfig
from asyncllm.models.vision.deepseek_ocr import read_deepseek_ocr
from asyncllm.models.vision.deepseek_vl2 import read_deepseek_vl2
from asyncllm.models.vision.dots_ocr import read_dots_ocr
from asyncllm.models.vision.eva import read_cogvlm, read_glm4v_9b
from asyncllm.models.vision.kimi_vl import read_kimi_k25, read_kimi_vl
from asyncllm.models.vision.mgm import read_mgm
from asyncllm.models.vision.minicpm_v import read_minicpm_v
from asyncllm.models.vision.molmo import read_molmo
from asyncllm.models.vision.parts import Composed
from asyncllm.models.vision.phi3_v import read_phi3_v
from asyncllm.models.vision.phi4 import read_phi4
from asyncllm.models.vision.qwen_visual import read_qwen_visual
from asyncllm.models.vision.xcomposer2 import read_xcomposer2

__all__ = ["PUBLISHED_MODELS", "PUBLISHED_READERS"]

PUBLISHED_READERS: Mapping[str, Callable[[HFConfig], Composed | None]] = {
    "ChatGLMForConditionalGeneration": read_glm4v_9b,
    "ChatGLMModel": read_glm4v_9b,
    "CogVLMForCausalLM": read_cogvlm,
    "DeepseekOCRForCausalLM": read_deepseek_ocr,
    "DeepseekVLV2ForCausalLM": read_deepseek_vl2,
    "DotsOCRForCausalLM": read_dots_ocr,
    "InternLMXComposer2ForCausalLM": read_xcomposer2,
    "KimiK25ForConditionalGeneration": read_kimi_k25,
    "KimiVLForConditionalGeneration": read_kimi_vl,
    "Kimi_K25ForConditionalGeneration": read_kimi_k25,
    "MGMLlamaForCausalLM": read_mgm,
    "MiniCPMV": read_minicpm_v,
    "MiniGeminiLlamaForCausalLM": read_mgm,
    "MolmoForCausalLM": read_molmo,
    "Phi3VForCausalLM": read_phi3_v,
    "Phi4MMForCausalLM": read_phi4,
    "Phi4MultimodalForCausalLM": read_phi4,
    "QWenLMHeadModel": read_qwen_visual,
}

PUBLISHED_MODELS: Mapping[str, str] = {
    "ChatGLMForConditionalGeneration": "GLM-4V-9B",
    "ChatGLMModel": "GLM-4V-9B",
    "CogVLMForCausalLM": "CogVLM, CogVLM2",
    "DeepseekOCRForCausalLM": "DeepSeek-OCR 3B",
    "DeepseekVLV2ForCausalLM": "DeepSeek-VL2, VL2-Small, VL2-Tiny",
    "DotsOCRForCausalLM": "dots.ocr 1.7B",
    "InternLMXComposer2ForCausalLM": "InternLM-XComposer2, 2-4KHD, 2.5",
    "KimiK25ForConditionalGeneration": "Kimi-K2.5 and K2.6; images only (authors' format)",
    "KimiVLForConditionalGeneration": "Kimi-VL-A3B",
    "Kimi_K25ForConditionalGeneration": "the same (transformers' format)",
    "MGMLlamaForCausalLM": "MGM 7B, 13B, 34B, 8B, and these HD, with both towers among the weights",
    "MiniCPMV": "MiniCPM-Llama3-V-2.5, MiniCPM-V-2.6, 4 and 4.5",
    "MiniGeminiLlamaForCausalLM": "the same, under their first name",
    "MolmoForCausalLM": "Molmo-7B-D, 7B-O and 72B of September 2024",
    "Phi3VForCausalLM": "Phi-3-vision, Phi-3.5-vision",
    "Phi4MMForCausalLM": "Phi-4-multimodal: text and images; images use the adapter in `vision-lora`",
    "Phi4MultimodalForCausalLM": "the same (transformers' format)",
    "QWenLMHeadModel": "Qwen-VL, the first generation",
}
"""Architecture -> the models that use it."""
