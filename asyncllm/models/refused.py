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
_LIGHTNING = "its linear attention of fixed decay is not written yet"

REFUSED_DECODERS: Mapping[str, Refused] = {
    "AXK1ForCausalLM": Refused("A.X K1", "norms behind its experts are not written yet", "DeepseekV3ForCausalLM"),
    "ArcticForCausalLM": Refused("Snowflake Arctic", "there is nothing to hold it to", "MixtralForCausalLM"),
    "BailingHybridForCausalLM": Refused("Ling and Ring 2.5", _LIGHTNING, "Qwen3NextForCausalLM"),
    "BitNetForCausalLM": Refused("BitNet b1.58 2B", "weights of 1.58 bits are not read", "LlamaForCausalLM"),
    "DeepseekV32ForCausalLM": Refused("DeepSeek-V3.2", _INDEX, "DeepseekV3ForCausalLM"),
    "DeepseekV4ForCausalLM": Refused("DeepSeek-V4", _INDEX, "DeepseekV3ForCausalLM"),
    "GlmMoeDsaForCausalLM": Refused("GLM-5", _INDEX, "Glm4MoeLiteForCausalLM"),
    "InternLMXComposerForCausalLM": Refused(
        "InternLM-XComposer 1", "there is nothing to hold its tower to", "InternLMXComposer2ForCausalLM"
    ),
    "JetMoeForCausalLM": Refused("JetMoE 8B", "experts in attention are not written yet", "MixtralForCausalLM"),
    "KimiLinearForCausalLM": Refused(
        "Kimi-Linear 48B-A3B", "memories that forget feature by feature are not written yet", "Qwen3NextForCausalLM"
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
    "MiniMaxText01ForCausalLM": Refused("MiniMax-Text-01", _LIGHTNING, "MiniMaxM2ForCausalLM"),
    "MllamaForCausalLM": Refused("Llama 3.2 Vision, text", "it attends to images besides", "LlamaForCausalLM"),
    "OpenAIGPTLMHeadModel": Refused("GPT 1", "its norms behind additions are not written yet", "GPT2LMHeadModel"),
    "RecurrentGemmaForCausalLM": Refused(
        "RecurrentGemma, Griffin", "its gated recurrence is not written yet", "Gemma2ForCausalLM"
    ),
    "RwkvForCausalLM": Refused("RWKV 4", "its recurrence is not written yet", "MambaForCausalLM"),
    "XGLMForCausalLM": Refused("XGLM", "sinusoids as positions are not written yet", "OPTForCausalLM"),
    "Zamba2ForCausalLM": Refused("Zamba 2", "layers that share their weights are not written yet", "BambaForCausalLM"),
    "ZambaForCausalLM": Refused("Zamba", "layers that share their weights are not written yet", "JambaForCausalLM"),
    "xLSTMForCausalLM": Refused("xLSTM 7B", "its recurrence is not written yet", "MambaForCausalLM"),
}
"""Architecture of text models, and of those with images whose decoder is what is missing -> what is said of it."""
