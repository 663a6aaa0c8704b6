"""Published models of images that are none of ours, with what stands in the way and the nearest that works."""

from __future__ import annotations

from collections.abc import Mapping

from asyncllm.models.refused import Refused

__all__ = ["REFUSED_MODELS"]

_NEAREST_LLAVA = "LlavaNextForConditionalGeneration"
_OWN_TOWER = "its tower is not written yet"

_NOTHING = "there is nothing to hold it to"
_NEITHER = "neither its tower nor its decoder is written yet"
_CROSS = "its decoder attends to an encoder"
_QUERIES = "its queries that read the tower are not written yet"
_DRAWS = "its images are words of a codebook, which is not written yet"

REFUSED_MODELS: Mapping[str, Refused] = {
    "AriaForConditionalGeneration": Refused("Aria", _NEITHER, "Idefics3ForConditionalGeneration"),
    "Blip2ForConditionalGeneration": Refused("BLIP-2", _QUERIES, _NEAREST_LLAVA),
    "BlipForConditionalGeneration": Refused("BLIP", _CROSS, _NEAREST_LLAVA),
    "ChameleonForConditionalGeneration": Refused("Chameleon", _DRAWS, "JanusForConditionalGeneration"),
    "CohereCompassForConditionalGeneration": Refused(
        "Cohere Compass", _OWN_TOWER, "Cohere2VisionForConditionalGeneration"
    ),
    "Cosmos3EdgeForConditionalGeneration": Refused("Cosmos 3 Edge", _NEITHER, "Qwen3VLForConditionalGeneration"),
    "Cosmos3OmniForConditionalGeneration": Refused("Cosmos 3 Omni", _NEITHER, "Qwen3VLForConditionalGeneration"),
    "DeepseekOCR2ForCausalLM": Refused("DeepSeek-OCR 2", _OWN_TOWER, "DeepseekOCRForCausalLM"),
    "DeepseekOcr2ForConditionalGeneration": Refused(
        "DeepSeek-OCR 2, as transformers has it", _OWN_TOWER, "DeepseekOCRForCausalLM"
    ),
    "Dots3NoteForConditionalGeneration": Refused("dots.note", _NEITHER, "DotsOCRForCausalLM"),
    "Eagle2_5_VLForConditionalGeneration": Refused("Eagle 2.5", _NOTHING, "InternVLChatModel"),
    "Emu3ForConditionalGeneration": Refused("Emu3", _DRAWS, "JanusForConditionalGeneration"),
    "Ernie4_5_VLMoeForConditionalGeneration": Refused(
        "ERNIE 4.5 VL", "its experts for images are not written yet", "Qwen2_5_VLForConditionalGeneration"
    ),
    "FastVlmForConditionalGeneration": Refused("FastVLM", _OWN_TOWER, _NEAREST_LLAVA),
    "Florence2ForConditionalGeneration": Refused("Florence-2", _CROSS, "PaddleOCRVLForConditionalGeneration"),
    "Glm5NextForConditionalGeneration": Refused("GLM-5 Next", _NEITHER, "Glm46VForConditionalGeneration"),
    "GOTQwenForCausalLM": Refused(
        "GOT-OCR 2.0, as its authors published it", _NOTHING, "GotOcr2ForConditionalGeneration"
    ),
    "Granite4VisionForConditionalGeneration": Refused("Granite Vision 4", _QUERIES, _NEAREST_LLAVA),
    "GraniteDoclingForConditionalGeneration": Refused(
        "Granite Docling, as transformers has it", _OWN_TOWER, "Idefics3ForConditionalGeneration"
    ),
    "H2OVLChatModel": Refused("H2OVL Mississippi", _NOTHING, "InternVLChatModel"),
    "HCXVisionForCausalLM": Refused("HyperCLOVA X SEED Vision", _NOTHING, "LlavaOnevisionForConditionalGeneration"),
    "HunYuanVLForConditionalGeneration": Refused("HunyuanOCR", _NEITHER, "PaddleOCRVLForConditionalGeneration"),
    "HyperCLOVAXVisionV2ForConditionalGeneration": Refused(
        "HyperCLOVA X SEED Think with images", _OWN_TOWER, "Qwen2_5_VLForConditionalGeneration"
    ),
    "Idefics2ForConditionalGeneration": Refused("Idefics2", _OWN_TOWER, "Idefics3ForConditionalGeneration"),
    "IdeficsForVisionText2Text": Refused(
        "IDEFICS",
        "its layers of cross attention keep images in a cache of another kind",
        "Idefics3ForConditionalGeneration",
    ),
    "Inkling2ForConditionalGeneration": Refused("Inkling 2", _NEITHER, "Qwen3VLForConditionalGeneration"),
    "InklingForConditionalGeneration": Refused("Inkling", _NEITHER, "Qwen3VLForConditionalGeneration"),
    "InstructBlipForConditionalGeneration": Refused("InstructBLIP", _QUERIES, _NEAREST_LLAVA),
    "InstructBlipVideoForConditionalGeneration": Refused(
        "InstructBLIP for videos", _QUERIES, "LlavaOnevisionForConditionalGeneration"
    ),
    "InternS1ProForConditionalGeneration": Refused("Intern-S1-Pro", _NOTHING, "Qwen3VLMoeForConditionalGeneration"),
    "KeyeForConditionalGeneration": Refused("Keye-VL", _NOTHING, "Qwen3VLForConditionalGeneration"),
    "KeyeVL1_5ForConditionalGeneration": Refused("Keye-VL 1.5", _NOTHING, "Qwen3VLForConditionalGeneration"),
    "Kosmos2_5ForConditionalGeneration": Refused("Kosmos-2.5", _QUERIES, "PaddleOCRVLForConditionalGeneration"),
    "Kosmos2ForConditionalGeneration": Refused("Kosmos-2", _QUERIES, _NEAREST_LLAVA),
    "Lfm3VlForConditionalGeneration": Refused("LFM3-VL", _NEITHER, "Lfm2VlForConditionalGeneration"),
    "Llama_Nemotron_Nano_VL": Refused("Llama Nemotron Nano VL", _NOTHING, "InternVLChatModel"),
    "LlavaLlamaModel": Refused("VILA", _OWN_TOWER, _NEAREST_LLAVA),
    "LlavaQwen2ForCausalLM": Refused("FastVLM, as its authors published it", _OWN_TOWER, "LlavaQwenForCausalLM"),
    "MGMGemmaForCausalLM": Refused("MGM 2B", "its decoder is not tried with its towers", "MGMLlamaForCausalLM"),
    "MGMMixtralForCausalLM": Refused("MGM 8x7B", "its decoder is not tried with its towers", "MGMLlamaForCausalLM"),
    "MiniCPMO": Refused("MiniCPM-o", "its parts that hear and speak are not told from the others", "MiniCPMV"),
    "MiniCPMOcrForConditionalGeneration": Refused("MiniCPM-OCR", _OWN_TOWER, "PaddleOCRVLForConditionalGeneration"),
    "MiniCPMV4_6ForConditionalGeneration": Refused("MiniCPM-V 4.6", _OWN_TOWER, "MiniCPMV"),
    "MiniCPMV4_7ForConditionalGeneration": Refused("MiniCPM-V 4.7", _OWN_TOWER, "MiniCPMV"),
    "MiniMaxM3SparseForConditionalGeneration": Refused("MiniMax M3", _NEITHER, "Qwen3VLMoeForConditionalGeneration"),
    "MistralLarge4ForConditionalGeneration": Refused("Mistral Large 4", _NEITHER, "Mistral3ForConditionalGeneration"),
    "MllamaForConditionalGeneration": Refused(
        "Llama 3.2 Vision", "its layers of cross attention keep images in a cache of another kind", _NEAREST_LLAVA
    ),
    "Molmo2ForConditionalGeneration": Refused(
        "Molmo 2", "tokens of all images of its prompts see each other", "MolmoForCausalLM"
    ),
    "MuseGlimmerForConditionalGeneration": Refused("Muse Glimmer", _NEITHER, "Llama4ForConditionalGeneration"),
    "MuseSparkForConditionalGeneration": Refused("Muse Spark", _NEITHER, "Llama4ForConditionalGeneration"),
    "NemotronH_Nano_VL_V2": Refused("Nemotron Nano VL 2", _NOTHING, "InternVLChatModel"),
    "NemotronH_Omni_Reasoning_V3": Refused("Nemotron 3 Omni", _OWN_TOWER, "InternVLChatModel"),
    "NVLM_D": Refused("NVLM-D", _NOTHING, "InternVLChatModel"),
    "Ovis": Refused("Ovis 1.6, 2, as their authors published them", _NOTHING, "Ovis2ForConditionalGeneration"),
    "Ovis2_5": Refused("Ovis 2.5", _NOTHING, "Qwen3VLForConditionalGeneration"),
    "PaliGemmaForConditionalGeneration": Refused(
        "PaliGemma", "its prompts' tokens see each other, texts too", "Gemma3ForConditionalGeneration"
    ),
    "PerceptionLMForConditionalGeneration": Refused("PerceptionLM", _OWN_TOWER, "InternVLForConditionalGeneration"),
    "Pix2StructForConditionalGeneration": Refused("Pix2Struct, DePlot", _CROSS, "PaddleOCRVLForConditionalGeneration"),
    "PixtralForConditionalGeneration": Refused(
        "Pixtral as its authors published it", "its names are not read", "LlavaForConditionalGeneration"
    ),
    "PPFormulaNetForConditionalGeneration": Refused("PP-FormulaNet", _CROSS, "PaddleOCRVLForConditionalGeneration"),
    "QianfanOCRForConditionalGeneration": Refused(
        "Qianfan-OCR, as transformers has it", "its names are not read", "InternVLChatModel"
    ),
    "Qwen4ExpForConditionalGeneration": Refused("Qwen4", _NEITHER, "Qwen3_5ForConditionalGeneration"),
    "SkyworkR1VChatModel": Refused("Skywork R1V", _NOTHING, "InternVLChatModel"),
    "Step3p7ForConditionalGeneration": Refused("Step 3.7", _NEITHER, "Glm4vMoeForConditionalGeneration"),
    "Step3VLForConditionalGeneration": Refused("Step3", _NEITHER, "Glm4vMoeForConditionalGeneration"),
    "T5Gemma2ForConditionalGeneration": Refused("T5Gemma 2", _CROSS, "Gemma3ForConditionalGeneration"),
    "UdopForConditionalGeneration": Refused("UDOP", _CROSS, "PaddleOCRVLForConditionalGeneration"),
    "UnlimitedOcrForConditionalGeneration": Refused("Unlimited-OCR", _OWN_TOWER, "DeepseekOCRForCausalLM"),
    "VideoLlama3ForConditionalGeneration": Refused("VideoLLaMA 3", _OWN_TOWER, "Qwen2_5_VLForConditionalGeneration"),
    "VideoLlavaForConditionalGeneration": Refused(
        "Video-LLaVA", "its tower for videos is not written yet", _NEAREST_LLAVA
    ),
    "VisionEncoderDecoderModel": Refused("Donut, Nougat, TrOCR", _CROSS, "PaddleOCRVLForConditionalGeneration"),
}
"""Architecture -> what is said of it."""
