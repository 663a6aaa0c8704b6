"""Published models that are none of ours, with what stands in the way and the nearest that works."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["REFUSED_DECODERS", "Refused"]


class Refused(NamedTuple):
    """What is said of an architecture."""

    models: str
    why: str
    nearest: str
    """The class of ours that is most like it."""
    key: str | None = None
    """The entry of config.json that it has and other models of its class have not."""


_INDEX = "its index of the tokens that each query attends to is not written yet"
_NO_ORACLE = "there is nothing to hold it to"
_DIFFUSION = "it guesses blocks of tokens at once, in several passes"
_LIGHTNING = "its linear attention of fixed decay is not written yet"
_STREAMS = "residual streams beside one another are not written yet"
_DRAFTER = Refused("drafters of Gemma 4", "it only guesses tokens ahead of another model", "Gemma4ForCausalLM")
_ENCODER = Refused("encoders", "its tokens attend to later ones too", "Qwen3ForCausalLM")
_ENCODED = Refused("decoders behind an encoder", "it attends to what an encoder gives", "LlamaForCausalLM")

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
    "BlenderbotForCausalLM",
    "BlenderbotSmallForCausalLM",
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
    "PLBartForCausalLM",
    "PegasusForCausalLM",
    "ProphetNetForCausalLM",
    "T5ForConditionalGeneration",
    "TrOCRForCausalLM",
    "WhisperForCausalLM",
    "WhisperForConditionalGeneration",
)

REFUSED_DECODERS: Mapping[str, Refused] = {
    "ArcticForCausalLM": Refused("Snowflake Arctic", _NO_ORACLE, "MixtralForCausalLM"),
    "AriaTextForCausalLM": Refused("Aria, text", "its experts' names are not read", "MixtralForCausalLM"),
    "AXK1ForCausalLM": Refused("A.X K1", "norms behind its experts are not written yet", "DeepseekV3ForCausalLM"),
    "AXK2ForCausalLM": Refused("A.X K2", _INDEX, "DeepseekV32ForCausalLM"),
    "BailingHybridForCausalLM": Refused("Ling and Ring 2.5", _LIGHTNING, "Qwen3NextForCausalLM"),
    "BeamForCausalLM": Refused(
        "Beam 501B-A23B", "additions that weigh the stream by depth are not written yet", "AfmoeForCausalLM"
    ),
    "BioGptForCausalLM": Refused("BioGPT", "its tokenizer, of Moses' rules, is not read", "OPTForCausalLM"),
    "BitNetForCausalLM": Refused("BitNet b1.58 2B", "weights of 1.58 bits are not read", "LlamaForCausalLM"),
    "BltForCausalLM": Refused(
        "Byte Latent Transformer", "its patches of bytes are not written yet", "LlamaForCausalLM"
    ),
    "CohereCompassForCausalLM": Refused(
        "North Micro, text", "rotations by kind of layer are not read in it yet", "Cohere2ForCausalLM"
    ),
    "CpmAntForCausalLM": Refused("CPM-Ant", "its biases of positions are not written yet", "MiniCPMForCausalLM"),
    "CTRLLMHeadModel": Refused("CTRL", "its sinusoids and transposed names are not written yet", "GPT2LMHeadModel"),
    "DeepseekV4ForCausalLM": Refused("DeepSeek-V4", _INDEX, "DeepseekV3ForCausalLM"),
    "DiffLlamaForCausalLM": Refused(
        "Differential Transformer", "differences of two attentions are not written yet", "LlamaForCausalLM"
    ),
    "DogeForCausalLM": Refused(
        "Doge", "its masks, which follow from the values, are not written yet", "Qwen3ForCausalLM"
    ),
    "Dots3NoteForCausalLM": Refused("dots3 note", _INDEX, "DeepseekV32ForCausalLM"),
    "Emu3ForCausalLM": Refused("Emu3", "it writes images as tokens", "LlamaForCausalLM"),
    "FuyuForCausalLM": Refused("Fuyu 8B", "its images' patches are not read", "PersimmonForCausalLM"),
    "GitForCausalLM": Refused("GIT", "its tower is not read", "LlavaForConditionalGeneration"),
    "GPTNeoXJapaneseForCausalLM": Refused("GPT-NeoX Japanese 2.7B", "its tokenizer is not read", "GPTNeoXForCausalLM"),
    "Grok1ModelForCausalLM": Refused("Grok 1", _NO_ORACLE, "MixtralForCausalLM"),
    "HrmTextForCausalLM": Refused(
        "HRM-Text 1B", "layers that run several times are not written yet", "LlamaForCausalLM"
    ),
    "HYV4ForCausalLM": Refused("Hy4 preview", _STREAMS, "HYV3ForCausalLM"),
    "Inkling2ForCausalLM": Refused(
        "Inkling 2", "logits of distances and dynamic convolutions are not written yet", "Gemma3ForCausalLM"
    ),
    "InklingForCausalLM": Refused(
        "Inkling", "logits of distances in attention are not written yet", "Gemma3ForCausalLM"
    ),
    "InternLMXComposerForCausalLM": Refused(
        "InternLM-XComposer 1", "there is nothing to hold its tower to", "InternLMXComposer2ForCausalLM"
    ),
    "IQuestLoopCoderForCausalLM": Refused(
        "IQuest-Coder Loop", "layers that run twice are not written yet", "IQuestCoderForCausalLM"
    ),
    "JAISLMHeadModel": Refused("Jais 13B, 30B", _NO_ORACLE, "Jais2ForCausalLM"),
    "JetMoeForCausalLM": Refused("JetMoE 8B", "experts in attention are not written yet", "MixtralForCausalLM"),
    "KimiLinearForCausalLM": Refused(
        "Kimi-Linear 48B-A3B", "memories that forget feature by feature are not written yet", "Qwen3NextForCausalLM"
    ),
    "Kolibri1ForCausalLM": Refused(
        "Kolibri 1", "experts that corrected logits choose are not written yet", "ExaoneMoeForCausalLM"
    ),
    "LongcatFlashForCausalLM": Refused(
        "LongCat-Flash",
        "layers of two attentions are not written yet",
        "DeepseekV3ForCausalLM",
    ),
    "MiMoV2FlashForCausalLM": Refused(
        "MiMo-V2-Flash", "attention with values of another width than keys is not written yet", "MiMoForCausalLM"
    ),
    "MiniMaxForCausalLM": Refused("MiniMax-Text-01, M1", _LIGHTNING, "MiniMaxM2ForCausalLM"),
    "MiniMaxM1ForCausalLM": Refused("MiniMax-M1", _LIGHTNING, "MiniMaxM2ForCausalLM"),
    "MiniMaxM3VLForCausalLM": Refused("MiniMax-M3, text", _INDEX, "MiniMaxM2ForCausalLM"),
    "MiniMaxText01ForCausalLM": Refused("MiniMax-Text-01", _LIGHTNING, "MiniMaxM2ForCausalLM"),
    "MixFormerSequentialForCausalLM": Refused(
        "the first files of Phi-1, Phi-1.5 and Phi-2", "its names are not read", "PhiForCausalLM"
    ),
    "MllamaForCausalLM": Refused("Llama 3.2 Vision, text", "it attends to images besides", "LlamaForCausalLM"),
    "ModernBertDecoderForCausalLM": Refused(
        "Ettin decoders", "its gates and norms are not written yet", "Gemma3ForCausalLM"
    ),
    "OuroForCausalLM": Refused(
        "Ouro 1.4B, 2.6B", "layers that run several times are not written yet", "LlamaForCausalLM"
    ),
    "PanguUltraMoEForCausalLM": Refused("openPangu Ultra", _NO_ORACLE, "DeepseekV3ForCausalLM"),
    "Phi3SmallForCausalLM": Refused("Phi-3-small", "its attention to blocks is not written yet", "Phi3ForCausalLM"),
    "Plamo2ForCausalLM": Refused("PLaMo 2", _NO_ORACLE, "BambaForCausalLM"),
    "Plamo3ForCausalLM": Refused("PLaMo 3", _NO_ORACLE, "Gemma3ForCausalLM"),
    "Qwen4ExpForCausalLM": Refused("Qwen4 experimental", _INDEX, "Qwen3_5MoeForCausalLM"),
    "RecurrentGemmaForCausalLM": Refused(
        "RecurrentGemma, Griffin", "its gated recurrence is not written yet", "Gemma2ForCausalLM"
    ),
    "ReformerModelWithLMHead": Refused("Reformer", "attention by hashes is not written yet", "GPT2LMHeadModel"),
    "RwkvForCausalLM": Refused("RWKV 4", "its recurrence is not written yet", "MambaForCausalLM"),
    "SDARForCausalLM": Refused("SDAR", _DIFFUSION, "Qwen3ForCausalLM"),
    "SDARMoeForCausalLM": Refused("SDAR with experts", _DIFFUSION, "Qwen3MoeForCausalLM"),
    "SolarForCausalLM": Refused(
        "Solar Pro 22B", "outputs of layers that come back further on are not written yet", "LlamaForCausalLM"
    ),
    "Step3TextForCausalLM": Refused("Step 3", "its factorized queries are not written yet", "DeepseekV3ForCausalLM"),
    "TeleChat2ForCausalLM": Refused("TeleChat2", "its names are not read", "LlamaForCausalLM"),
    "TeleFLMForCausalLM": Refused("Tele-FLM", _NO_ORACLE, "LlamaForCausalLM"),
    "xLSTMForCausalLM": Refused("xLSTM 7B", "its recurrence is not written yet", "MambaForCausalLM"),
    "Zamba2ForCausalLM": Refused("Zamba 2", "layers that share their weights are not written yet", "BambaForCausalLM"),
    "ZambaForCausalLM": Refused("Zamba", "layers that share their weights are not written yet", "JambaForCausalLM"),
    "ZayaForCausalLM": Refused(
        "ZAYA1 8B", "attention to compressed, convolved keys is not written yet", "Qwen3MoeForCausalLM"
    ),
    **dict.fromkeys(("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM"), _DRAFTER),
    **dict.fromkeys(_ENCODERS, _ENCODER),
    **dict.fromkeys(_BEHIND_ENCODERS, _ENCODED),
}
"""Architecture of text models, and of those with images whose decoder is what is missing -> what is said of it."""
