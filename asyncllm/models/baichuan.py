"""Baichuan: Llama with q, k and v in one tensor; 13B uses ALiBi; the rows of Baichuan2's head have length 1."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from asyncllm.layers.embedding import OutputEmbedding
from asyncllm.models.config import HFConfig, ModelConfig, alibi_slopes
from asyncllm.models.decoder import OutputHead
from asyncllm.models.llama import LLAMA_WEIGHTS, Llama
from asyncllm.models.registry import register

__all__ = ["Baichuan", "NormalizedOutputEmbedding"]

FIRST_VOCAB_SIZE = 64000
"""Vocabulary size of Baichuan. Baichuan2 has 125,696 tokens, and nothing else in config.json distinguishes them."""

LAYERS_OF_13B = 40


class BaichuanConfig(ModelConfig, frozen=True, kw_only=True):
    normalized_head: bool


class NormalizedOutputEmbedding(OutputEmbedding):
    """An output embedding whose rows, or with axis 0 its columns, are scaled to length 1 when they are loaded."""

    def __init__(self, hidden_size: int, vocab_size: int, *, axis: int = 1) -> None:
        super().__init__(hidden_size, vocab_size)
        self.axis = axis

    def load_part(self, suffix: str, part: str | None, index: int | None, tensor: Tensor) -> None:
        wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
        super().load_part(suffix, part, index, nn.functional.normalize(wide, dim=self.axis))

    def own_part(self, suffix: str, part: str | None, index: int | None) -> tuple[int, slice] | None:
        return None


@register(BaichuanForCausalLM="Baichuan 13B, Baichuan2 7B and 13B", BaiChuanForCausalLM="Baichuan 7B")
class Baichuan(Llama):
    config: BaichuanConfig
    weights = LLAMA_WEIGHTS.replaced({"model.layers.{i}.self_attn.W_pack": "layers.{i}.attn.qkv[q+k+v]"})
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "baichuan",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> BaichuanConfig:
        hf.expect("hidden_act", "silu")
        # The 13B models have no rotary positions, and therefore another name for the number of positions.
        alibi = hf.fields.get("max_position_embeddings") is None or hf.integer("num_hidden_layers") == LAYERS_OF_13B
        fields = hf.named({"model_max_length": "max_position_embeddings"} if alibi else {}).decoder(
            architecture, max_position=4096, rotary=not alibi
        )
        slopes = alibi_slopes(fields["num_heads"]) if alibi else ()
        # The class of Baichuan 7B is spelled BaiChuan; models derived from it keep that, whatever their vocabulary.
        first = architecture == "BaiChuanForCausalLM" or fields["vocab_size"] == FIRST_VOCAB_SIZE
        return BaichuanConfig(**fields, alibi=slopes, normalized_head=not first)

    def output(self) -> OutputHead:
        if self.config.normalized_head and not self.config.tied and self.config.has_head:
            return NormalizedOutputEmbedding(self.config.hidden_size, self.config.vocab_size)
        return super().output()
