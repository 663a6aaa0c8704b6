"""Vision-language models that are refused by name, with the reason and the most similar supported class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["NO_REFERENCE", "REFUSED_VISION_MODELS", "Refused"]


class Refused(NamedTuple):
    """The description of an unsupported architecture."""

    models: str
    why: str
    nearest: str
    """The most similar supported architecture."""


NO_REFERENCE = "there is no reference implementation to test it against"

_NEAREST_LLAVA = "LlavaNextForConditionalGeneration"
_OWN_TOWER = "its tower is not implemented"

_NEITHER = "neither its tower nor its decoder is implemented"
_CROSS = "its decoder attends to an encoder"
_QUERIES = "the learned queries that read its tower are not implemented"
_DRAWS = "its images are tokens of a codebook, which is not implemented"

REFUSED_VISION_MODELS: Mapping[str, Refused] = {
    "Apertus1p5ForConditionalGeneration": Refused("Apertus 1.5", _DRAWS, "JanusForConditionalGeneration"),
    "AriaForConditionalGeneration": Refused("Aria", _NEITHER, "Idefics3ForConditionalGeneration"),
    "Blip2ForConditionalGeneration": Refused("BLIP-2", _QUERIES, _NEAREST_LLAVA),
    "BlipForConditionalGeneration": Refused("BLIP", _CROSS, _NEAREST_LLAVA),
    "ChameleonForConditionalGeneration": Refused("Chameleon", _DRAWS, "JanusForConditionalGeneration"),
    "CohereCompassForConditionalGeneration": Refused(
        "Cohere Compass", _OWN_TOWER, "Cohere2VisionForConditionalGeneration"
    ),
    "Cosmos3EdgeForConditionalGeneration": Refused("Cosmos 3 Edge", _NEITHER, "Qwen3VLForConditionalGeneration"),
    "Cosmos3OmniForConditionalGeneration": Refused(
        "Cosmos 3 Omni", "its tensor names are not supported", "Qwen3VLForConditionalGeneration"
    ),
    "DeepseekOCR2ForCausalLM": Refused("DeepSeek-OCR 2", _OWN_TOWER, "DeepseekOCRForCausalLM"),
    "DeepseekOcr2ForConditionalGeneration": Refused(
        "DeepSeek-OCR 2 (transformers' format)", _OWN_TOWER, "DeepseekOCRForCausalLM"
    ),
    "Dots3NoteForConditionalGeneration": Refused("dots.note", _NEITHER, "DotsOCRForCausalLM"),
    "Eagle2_5_VLForConditionalGeneration": Refused("Eagle 2.5", NO_REFERENCE, "InternVLChatModel"),
    "Emu3ForConditionalGeneration": Refused("Emu3", _DRAWS, "JanusForConditionalGeneration"),
    "Ernie4_5_VLMoeForConditionalGeneration": Refused(
        "ERNIE 4.5 VL", "its experts for images are not implemented", "Qwen2_5_VLForConditionalGeneration"
    ),
    "FastVlmForConditionalGeneration": Refused("FastVLM", _OWN_TOWER, _NEAREST_LLAVA),
    "Florence2ForConditionalGeneration": Refused("Florence-2", _CROSS, "PaddleOCRVLForConditionalGeneration"),
    "Glm5NextForConditionalGeneration": Refused("GLM-5 Next", _NEITHER, "Glm46VForConditionalGeneration"),
    "GOTQwenForCausalLM": Refused("GOT-OCR 2.0 (authors' format)", NO_REFERENCE, "GotOcr2ForConditionalGeneration"),
    "Granite4VisionForConditionalGeneration": Refused("Granite Vision 4", _QUERIES, _NEAREST_LLAVA),
    "GraniteDoclingForConditionalGeneration": Refused(
        "Granite Docling (transformers' format)", _OWN_TOWER, "Idefics3ForConditionalGeneration"
    ),
    "H2OVLChatModel": Refused("H2OVL Mississippi", NO_REFERENCE, "InternVLChatModel"),
    "HCXVisionForCausalLM": Refused("HyperCLOVA X SEED Vision", NO_REFERENCE, "LlavaOnevisionForConditionalGeneration"),
    "HunYuanVLForConditionalGeneration": Refused("HunyuanOCR", _NEITHER, "PaddleOCRVLForConditionalGeneration"),
    "HYV4VLForConditionalGeneration": Refused("Hy4 VL", _NEITHER, "Qwen3VLForConditionalGeneration"),
    "HyperCLOVAXVisionV2ForConditionalGeneration": Refused(
        "HyperCLOVA X SEED Think with images", _OWN_TOWER, "Qwen2_5_VLForConditionalGeneration"
    ),
    "Idefics2ForConditionalGeneration": Refused("Idefics2", _OWN_TOWER, "Idefics3ForConditionalGeneration"),
    "IdeficsForVisionText2Text": Refused(
        "IDEFICS",
        "its cross attention keeps images in another kind of cache",
        "Idefics3ForConditionalGeneration",
    ),
    "Inkling2ForConditionalGeneration": Refused("Inkling 2", _NEITHER, "Qwen3VLForConditionalGeneration"),
    "Inkling2LoopForConditionalGeneration": Refused("Inkling 2 Loop", _NEITHER, "Qwen3VLForConditionalGeneration"),
    "InklingForConditionalGeneration": Refused("Inkling", _NEITHER, "Qwen3VLForConditionalGeneration"),
    "InstructBlipForConditionalGeneration": Refused("InstructBLIP", _QUERIES, _NEAREST_LLAVA),
    "InstructBlipVideoForConditionalGeneration": Refused(
        "InstructBLIP for videos", _QUERIES, "LlavaOnevisionForConditionalGeneration"
    ),
    "InternS1ProForConditionalGeneration": Refused("Intern-S1-Pro", NO_REFERENCE, "Qwen3VLMoeForConditionalGeneration"),
    "KeyeForConditionalGeneration": Refused("Keye-VL", NO_REFERENCE, "Qwen3VLForConditionalGeneration"),
    "KeyeVL1_5ForConditionalGeneration": Refused("Keye-VL 1.5", NO_REFERENCE, "Qwen3VLForConditionalGeneration"),
    "Kosmos2_5ForConditionalGeneration": Refused("Kosmos-2.5", _QUERIES, "PaddleOCRVLForConditionalGeneration"),
    "Kosmos2ForConditionalGeneration": Refused("Kosmos-2", _QUERIES, _NEAREST_LLAVA),
    "Lfm3VlForConditionalGeneration": Refused("LFM3-VL", _OWN_TOWER, "Lfm2VlForConditionalGeneration"),
    "Llama_Nemotron_Nano_VL": Refused("Llama Nemotron Nano VL", NO_REFERENCE, "InternVLChatModel"),
    "LlavaLlamaModel": Refused("VILA", _OWN_TOWER, _NEAREST_LLAVA),
    "LlavaQwen2ForCausalLM": Refused("FastVLM (authors' format)", _OWN_TOWER, "LlavaQwenForCausalLM"),
    "MGMGemmaForCausalLM": Refused("MGM 2B", "its decoder is not tested with its towers", "MGMLlamaForCausalLM"),
    "MGMMixtralForCausalLM": Refused("MGM 8x7B", "its decoder is not tested with its towers", "MGMLlamaForCausalLM"),
    "MiniCPMO": Refused("MiniCPM-o", "its audio modules are not separated from the others", "MiniCPMV"),
    "MiniCPMOcrForConditionalGeneration": Refused("MiniCPM-OCR", _OWN_TOWER, "PaddleOCRVLForConditionalGeneration"),
    "MiniCPMV4_6ForConditionalGeneration": Refused("MiniCPM-V 4.6", _OWN_TOWER, "MiniCPMV"),
    "MiniCPMV4_7ForConditionalGeneration": Refused("MiniCPM-V 4.7", _OWN_TOWER, "MiniCPMV"),
    "MiniMaxM3SparseForConditionalGeneration": Refused("MiniMax M3", _NEITHER, "Qwen3VLMoeForConditionalGeneration"),
    "MiniMaxVL01ForConditionalGeneration": Refused("MiniMax-VL-01", _OWN_TOWER, _NEAREST_LLAVA),
    "MistralLarge4ForConditionalGeneration": Refused("Mistral Large 4", _NEITHER, "Mistral3ForConditionalGeneration"),
    "MllamaForConditionalGeneration": Refused(
        "Llama 3.2 Vision", "its cross attention keeps images in another kind of cache", _NEAREST_LLAVA
    ),
    "Molmo2ForConditionalGeneration": Refused(
        "Molmo 2", "tokens of all images in a prompt attend to each other", "MolmoForCausalLM"
    ),
    "MuseGlimmerForConditionalGeneration": Refused("Muse Glimmer", _NEITHER, "Llama4ForConditionalGeneration"),
    "MuseSparkForConditionalGeneration": Refused("Muse Spark", _NEITHER, "Llama4ForConditionalGeneration"),
    "NemotronH_Nano_VL_V2": Refused("Nemotron Nano VL 2", NO_REFERENCE, "InternVLChatModel"),
    "NemotronH_Omni_Reasoning_V3": Refused("Nemotron 3 Omni", _OWN_TOWER, "InternVLChatModel"),
    "NVLM_D": Refused("NVLM-D", NO_REFERENCE, "InternVLChatModel"),
    "Ovis": Refused("Ovis 1.6, 2 (authors' format)", NO_REFERENCE, "Ovis2ForConditionalGeneration"),
    "Ovis2_5": Refused("Ovis 2.5", NO_REFERENCE, "Qwen3VLForConditionalGeneration"),
    "PaliGemmaForConditionalGeneration": Refused(
        "PaliGemma", "all tokens of its prompts attend to each other, including text", "Gemma3ForConditionalGeneration"
    ),
    "PerceptionLMForConditionalGeneration": Refused("PerceptionLM", _OWN_TOWER, "InternVLForConditionalGeneration"),
    "Pix2StructForConditionalGeneration": Refused("Pix2Struct, DePlot", _CROSS, "PaddleOCRVLForConditionalGeneration"),
    "PixtralForConditionalGeneration": Refused(
        "Pixtral (authors' format)", "its tensor names are not supported", "LlavaForConditionalGeneration"
    ),
    "PPFormulaNetForConditionalGeneration": Refused("PP-FormulaNet", _CROSS, "PaddleOCRVLForConditionalGeneration"),
    "QianfanOCRForConditionalGeneration": Refused(
        "Qianfan-OCR (transformers' format)", "its tensor names are not supported", "InternVLChatModel"
    ),
    "Qwen4ExpForConditionalGeneration": Refused("Qwen4", _NEITHER, "Qwen3_5ForConditionalGeneration"),
    "SkyworkR1VChatModel": Refused("Skywork R1V", NO_REFERENCE, "InternVLChatModel"),
    "Step3p7ForConditionalGeneration": Refused("Step 3.7", _OWN_TOWER, "Glm4vMoeForConditionalGeneration"),
    "Step3VLForConditionalGeneration": Refused("Step3", _NEITHER, "Glm4vMoeForConditionalGeneration"),
    "T5Gemma2ForConditionalGeneration": Refused("T5Gemma 2", _CROSS, "Gemma3ForConditionalGeneration"),
    "UdopForConditionalGeneration": Refused("UDOP", _CROSS, "PaddleOCRVLForConditionalGeneration"),
    "UnlimitedOcrForConditionalGeneration": Refused("Unlimited-OCR", _OWN_TOWER, "DeepseekOCRForCausalLM"),
    "VideoLlama3ForConditionalGeneration": Refused("VideoLLaMA 3", _OWN_TOWER, "Qwen2_5_VLForConditionalGeneration"),
    "VideoLlavaForConditionalGeneration": Refused(
        "Video-LLaVA", "its tower for videos is not implemented", _NEAREST_LLAVA
    ),
    "VisionEncoderDecoderModel": Refused("Donut, Nougat, TrOCR", _CROSS, "PaddleOCRVLForConditionalGeneration"),
}
"""Architecture -> its description."""
