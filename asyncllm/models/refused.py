"""Models that are refused by name, with the reason and the most similar supported class; the text models here."""

from __future__ import annotations

from collections.abc import Mapping

from asyncllm.models.vision.refused import NO_REFERENCE, REFUSED_VISION_MODELS, Refused

__all__ = ["REFUSED_MODELS", "REFUSED_TEXT_MODELS"]

_INDEX = "its kind of index of the tokens that each query attends to is not implemented"
_DIFFUSION = "it generates blocks of tokens by diffusion"
_STREAMS = "parallel residual streams are not implemented"
_DRAFTER = Refused("drafters of Gemma 4", "it only drafts tokens for another model", "Gemma4ForCausalLM")
_ENCODER = Refused("encoders", "its tokens also attend to later ones", "Qwen3ForCausalLM")
_HEARS = Refused("models of sounds", "audio is not supported", "Qwen2_5OmniForConditionalGeneration")
_ENCODED = Refused("encoder-decoders", "it attends to an encoder's output", "LlamaForCausalLM")

_ENCODERS = (
    "BertForMaskedLM",
    "BertForSequenceClassification",
    "BertGenerationDecoder",
    "BertLMHeadModel",
    "BertModel",
    "BigBirdForCausalLM",
    "CamembertForCausalLM",
    "Data2VecTextForCausalLM",
    "DistilBertModel",
    "ElectraForCausalLM",
    "ErnieForCausalLM",
    "MegatronBertForCausalLM",
    "ModernBertModel",
    "NomicBertModel",
    "RemBertForCausalLM",
    "RoCBertForCausalLM",
    "RoFormerForCausalLM",
    "RobertaForCausalLM",
    "RobertaModel",
    "RobertaPreLayerNormForCausalLM",
    "XLMRobertaForCausalLM",
    "XLMRobertaForSequenceClassification",
    "XLMRobertaModel",
    "XLMRobertaXLForCausalLM",
    "XLMWithLMHeadModel",
    "XLNetLMHeadModel",
    "XmodForCausalLM",
)
_BEHIND_ENCODERS = (
    "BartForCausalLM",
    "BartForConditionalGeneration",
    "BigBirdPegasusForCausalLM",
    "BigBirdPegasusForConditionalGeneration",
    "BlenderbotForCausalLM",
    "BlenderbotForConditionalGeneration",
    "BlenderbotSmallForCausalLM",
    "BlenderbotSmallForConditionalGeneration",
    "EncoderDecoderModel",
    "FSMTForConditionalGeneration",
    "LEDForConditionalGeneration",
    "LongT5ForConditionalGeneration",
    "M2M100ForConditionalGeneration",
    "MBartForCausalLM",
    "MBartForConditionalGeneration",
    "MT5ForConditionalGeneration",
    "MarianForCausalLM",
    "MarianMTModel",
    "MoshiForCausalLM",
    "MossTranscribeDiarizeForConditionalGeneration",
    "MusicgenForCausalLM",
    "MusicgenMelodyForCausalLM",
    "MvpForCausalLM",
    "MvpForConditionalGeneration",
    "NllbMoeForConditionalGeneration",
    "PLBartForCausalLM",
    "PLBartForConditionalGeneration",
    "PegasusForCausalLM",
    "PegasusForConditionalGeneration",
    "PegasusXForConditionalGeneration",
    "ProphetNetForCausalLM",
    "ProphetNetForConditionalGeneration",
    "SeamlessM4TForTextToText",
    "SeamlessM4Tv2ForTextToText",
    "SwitchTransformersForConditionalGeneration",
    "T5ForConditionalGeneration",
    "T5GemmaForConditionalGeneration",
    "TrOCRForCausalLM",
    "UMT5ForConditionalGeneration",
    "WhisperForCausalLM",
    "WhisperForConditionalGeneration",
)
_OF_SOUNDS = (
    "AudioFlamingo3ForConditionalGeneration",
    "CanaryForConditionalGeneration",
    "CohereAsrForConditionalGeneration",
    "DiaForConditionalGeneration",
    "FunAsrNanoForConditionalGeneration",
    "GlmAsrForConditionalGeneration",
    "GraniteSpeechForConditionalGeneration",
    "GraniteSpeechPlusForConditionalGeneration",
    "KyutaiSpeechToTextForConditionalGeneration",
    "MoonshineForConditionalGeneration",
    "MoonshineStreamingForConditionalGeneration",
    "MusicFlamingoForConditionalGeneration",
    "Nemotron3_5TranscribeForConditionalGeneration",
    "OmniASRForConditionalGeneration",
    "Pop2PianoForConditionalGeneration",
    "Qwen2AudioForConditionalGeneration",
    "Qwen3ASRForConditionalGeneration",
    "SeamlessM4TForSpeechToText",
    "SeamlessM4Tv2ForSpeechToText",
    "Speech2TextForConditionalGeneration",
    "SpeechEncoderDecoderModel",
    "SpeechT5ForSpeechToText",
    "UltravoxModel",
    "VibeVoiceAsrForConditionalGeneration",
    "VibeVoiceForConditionalGeneration",
    "VoxtralForConditionalGeneration",
    "VoxtralRealtimeForConditionalGeneration",
)

REFUSED_TEXT_MODELS: Mapping[str, Refused] = {
    "ArcticForCausalLM": Refused("Snowflake Arctic", NO_REFERENCE, "MixtralForCausalLM"),
    "AriaTextForCausalLM": Refused(
        "Aria, text", "the tensor names of its experts are not supported", "MixtralForCausalLM"
    ),
    "AXK2ForCausalLM": Refused("A.X K2", _INDEX, "DeepseekV32ForCausalLM"),
    "BeamForCausalLM": Refused(
        "Beam 501B-A23B", "its weighting of the residual stream by depth is not implemented", "AfmoeForCausalLM"
    ),
    "BioGptForCausalLM": Refused("BioGPT", "its tokenizer, with Moses' rules, is not supported", "OPTForCausalLM"),
    "BitNetForCausalLM": Refused("BitNet b1.58 2B", "1.58-bit weights are not supported", "LlamaForCausalLM"),
    "BltForCausalLM": Refused("Byte Latent Transformer", "its byte patches are not implemented", "LlamaForCausalLM"),
    "CpmAntForCausalLM": Refused("CPM-Ant", "its position biases are not implemented", "MiniCPMForCausalLM"),
    "CTRLLMHeadModel": Refused(
        "CTRL", "its sinusoidal positions and transposed weights are not implemented", "GPT2LMHeadModel"
    ),
    "DeepseekV4ForCausalLM": Refused("DeepSeek-V4", _INDEX, "DeepseekV3ForCausalLM"),
    "DiffLlamaForCausalLM": Refused(
        "Differential Transformer", "differential attention is not implemented", "LlamaForCausalLM"
    ),
    "DogeForCausalLM": Refused("Doge", "its value-dependent masks are not implemented", "Qwen3ForCausalLM"),
    "DoryForCausalLM": Refused("Dory", "layers that run several times are not implemented", "LlamaForCausalLM"),
    "Dots3NoteForCausalLM": Refused("dots3 note", _INDEX, "DeepseekV32ForCausalLM"),
    "Emu3ForCausalLM": Refused("Emu3", "it generates images as tokens", "LlamaForCausalLM"),
    "FuyuForCausalLM": Refused("Fuyu 8B", "its image patches are not supported", "PersimmonForCausalLM"),
    "GitForCausalLM": Refused("GIT", "its tower is not implemented", "LlavaForConditionalGeneration"),
    "GPTNeoXJapaneseForCausalLM": Refused(
        "GPT-NeoX Japanese 2.7B", "its tokenizer is not supported", "GPTNeoXForCausalLM"
    ),
    "Grok1ModelForCausalLM": Refused("Grok 1", NO_REFERENCE, "MixtralForCausalLM"),
    "HrmTextForCausalLM": Refused(
        "HRM-Text 1B", "layers that run several times are not implemented", "LlamaForCausalLM"
    ),
    "HYV4ForCausalLM": Refused("Hy4 preview", _STREAMS, "HYV3ForCausalLM"),
    "Inkling2ForCausalLM": Refused(
        "Inkling 2", "distance logits and dynamic convolutions are not implemented", "Gemma3ForCausalLM"
    ),
    "Inkling2LoopForCausalLM": Refused(
        "Inkling 2 Loop", "layers that run several times are not implemented", "Gemma3ForCausalLM"
    ),
    "InklingForCausalLM": Refused("Inkling", "distance logits in attention are not implemented", "Gemma3ForCausalLM"),
    "InternLMXComposerForCausalLM": Refused(
        "InternLM-XComposer 1",
        "there is no reference implementation to test its tower against",
        "InternLMXComposer2ForCausalLM",
    ),
    "IQuestLoopCoderForCausalLM": Refused(
        "IQuest-Coder Loop", "layers that run twice are not implemented", "IQuestCoderForCausalLM"
    ),
    "JAISLMHeadModel": Refused("Jais 13B, 30B", NO_REFERENCE, "Jais2ForCausalLM"),
    "JetMoeForCausalLM": Refused("JetMoE 8B", "experts in attention are not implemented", "MixtralForCausalLM"),
    "MiniMaxM3VLForCausalLM": Refused("MiniMax-M3, text", _INDEX, "MiniMaxM2ForCausalLM"),
    "MixFormerSequentialForCausalLM": Refused(
        "the first files of Phi-1, Phi-1.5 and Phi-2", "its tensor names are not supported", "PhiForCausalLM"
    ),
    "MllamaForCausalLM": Refused("Llama 3.2 Vision, text", "it has cross attention to images", "LlamaForCausalLM"),
    "OuroForCausalLM": Refused(
        "Ouro 1.4B, 2.6B", "layers that run several times are not implemented", "LlamaForCausalLM"
    ),
    "PanguUltraMoEForCausalLM": Refused("openPangu Ultra", NO_REFERENCE, "DeepseekV3ForCausalLM"),
    "Phi3SmallForCausalLM": Refused("Phi-3-small", "its block-sparse attention is not implemented", "Phi3ForCausalLM"),
    "Plamo2ForCausalLM": Refused("PLaMo 2", NO_REFERENCE, "BambaForCausalLM"),
    "Plamo3ForCausalLM": Refused("PLaMo 3", NO_REFERENCE, "Gemma3ForCausalLM"),
    "Qwen4ExpForCausalLM": Refused("Qwen4 experimental", _INDEX, "Qwen3_5MoeForCausalLM"),
    "ReformerModelWithLMHead": Refused("Reformer", "LSH attention is not implemented", "GPT2LMHeadModel"),
    "RwkvForCausalLM": Refused("RWKV 4", "its recurrence is not implemented", "MambaForCausalLM"),
    "SDARForCausalLM": Refused("SDAR", _DIFFUSION, "Qwen3ForCausalLM"),
    "SDARMoeForCausalLM": Refused("SDAR with experts", _DIFFUSION, "Qwen3MoeForCausalLM"),
    "SolarForCausalLM": Refused(
        "Solar Pro 22B", "its skip connections across layers are not implemented", "LlamaForCausalLM"
    ),
    "Step3TextForCausalLM": Refused("Step 3", "its factorized queries are not implemented", "DeepseekV3ForCausalLM"),
    "TeleChat2ForCausalLM": Refused("TeleChat2", "its tensor names are not supported", "LlamaForCausalLM"),
    "TeleFLMForCausalLM": Refused("Tele-FLM", NO_REFERENCE, "LlamaForCausalLM"),
    "xLSTMForCausalLM": Refused("xLSTM 7B", "its recurrence is not implemented", "MambaForCausalLM"),
    "ZayaForCausalLM": Refused(
        "ZAYA1 8B", "attention over compressed, convolved keys is not implemented", "Qwen3MoeForCausalLM"
    ),
    "YuanForCausalLM": Refused("Yuan 2", "its filters in front of attention are not implemented", "LlamaForCausalLM"),
    "TeleChatForCausalLM": Refused("TeleChat 7B, 12B", "its tensor names are not supported", "LlamaForCausalLM"),
    "TeleChat3ForCausalLM": Refused("TeleChat3 36B", NO_REFERENCE, "LlamaForCausalLM"),
    "SkyworkForCausalLM": Refused("Skywork 13B", NO_REFERENCE, "LlamaForCausalLM"),
    "Phi4FlashForCausalLM": Refused(
        "Phi-4-mini-flash", "layers that share the state of another are not implemented", "Phi3ForCausalLM"
    ),
    "PanguProMoEV2ForCausalLM": Refused("openPangu Pro 2", NO_REFERENCE, "DeepseekV3ForCausalLM"),
    "OpenELMForCausalLM": Refused("OpenELM", "layers of several widths are not implemented", "Qwen3ForCausalLM"),
    "NemotronHPuzzleForCausalLM": Refused("Nemotron-H by Puzzle", NO_REFERENCE, "NemotronHForCausalLM"),
    "MotifForCausalLM": Refused("Motif 2.6B", "differential attention is not implemented", "LlamaForCausalLM"),
    "MossForCausalLM": Refused("MOSS 16B", NO_REFERENCE, "CodeGenForCausalLM"),
    "DiffusionGemmaForBlockDiffusion": Refused("Diffusion Gemma", _DIFFUSION, "Gemma4ForCausalLM"),
    "CodeShellForCausalLM": Refused("CodeShell 7B", NO_REFERENCE, "GPTBigCodeForCausalLM"),
    "Apertus1p5TextForCausalLM": Refused(
        "Apertus 1.5, text", "fewer logits than there are tokens are not implemented", "ApertusForCausalLM"
    ),
    **dict.fromkeys(("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM"), _DRAFTER),
    **dict.fromkeys(_ENCODERS, _ENCODER),
    **dict.fromkeys(_BEHIND_ENCODERS, _ENCODED),
    **dict.fromkeys(_OF_SOUNDS, _HEARS),
}
"""Architecture -> its description, for text models and for vision models of which only the decoder is missing."""

REFUSED_MODELS: Mapping[str, Refused] = {**REFUSED_TEXT_MODELS, **REFUSED_VISION_MODELS}
"""Architecture -> its description, for all refused models."""
