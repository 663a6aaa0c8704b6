"""Tiny checkpoints in the layout of the hub: random weights, every parameter perturbed, a small trained tokenizer."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from asyncllm.models.registry import families

__all__ = ["CHAT_TEMPLATE", "SPECIAL_TOKENS", "build_checkpoint", "write_tokenizer"]

SPECIAL_TOKENS = ("<|pad|>", "<|bos|>", "<|im_start|>", "<|im_end|>")
"""Ids 0 to 3."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_CORPUS = (
    "The quick brown fox jumps over the lazy dog. What is 17 + 25? The answer is 42. Tell me a story about the sea.",
    "Once upon a time there was a small engine that served every request in the order in which it came.",
    "How are you today? I am well, thank you. 你好，世界。 Grüße aus Köln. 🙂",
)


def build_checkpoint(
    family: str,
    folder: Path,
    *,
    legacy: bool = False,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **overrides: Any,
) -> Path:
    """Write a complete model folder and return it.

    `family` is a module of asyncllm.models ("llama", "qwen2", ...), whose `tiny` entries `overrides` replace in
    config.json. `legacy` writes the schema of before transformers 5 (rope_theta, rope_scaling, torch_dtype). The
    tokenizer knows the 256 bytes, SPECIAL_TOKENS and a few merges; vocab_size must be at least 260.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # its monitor thread outlives the test
    fields = {**_tiny(family), **overrides}
    tokens = {"bos_token_id": 1, "eos_token_id": 3, "pad_token_id": 0}
    source = {**fields, **tokens}
    if family == "internlm2":
        source |= {"model_type": "llama", "attention_bias": source.pop("bias")}
    config = AutoConfig.for_model(source.pop("model_type"), **source)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    offset = 0.0 if family == "gemma2" else 1.0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_perturbed(name, parameter, offset, seed))
    model.to(dtype).save_pretrained(folder)
    if family == "internlm2":
        _rename_to_internlm2(folder, fields)
    if legacy:
        _rewrite_as_legacy(folder / "config.json")
    _write_json(folder / "generation_config.json", {**tokens, "eos_token_id": [3]})
    write_tokenizer(folder, fields["vocab_size"])
    return folder


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """A byte-level BPE tokenizer of at most `vocab_size` tokens, with a ChatML template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    added = {
        str(index): {"content": token, "special": True, "normalized": False, "lstrip": False, "rstrip": False}
        for index, token in enumerate(SPECIAL_TOKENS)
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": added,
        "pad_token": "<|pad|>",
        "bos_token": "<|bos|>",
        "eos_token": "<|im_end|>",
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    _write_json(folder / "tokenizer_config.json", settings)


def _tiny(family: str) -> dict[str, Any]:
    for each in families().values():
        if each.__module__ == f"asyncllm.models.{family}":
            return dict(each.tiny)
    raise ValueError(f"no family in asyncllm.models.{family}")


def _perturbed(name: str, parameter: Tensor, offset: float, seed: int) -> Tensor:
    """Default initialisation hides bugs: norms of 1 and biases of 0 can be dropped, small matrices barely matter."""
    noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode()) + seed))
    return offset + 0.3 * noise if "norm" in name else 0.15 * noise


def _rename_to_internlm2(folder: Path, fields: Mapping[str, Any]) -> None:
    """Llama's tensors under InternLM2's names: q, k and v of each KV head's group one after the other in wqkv."""
    tensors = load_file(folder / "model.safetensors")
    names = {
        "model.embed_tokens": "model.tok_embeddings",
        "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "lm_head": "output",
    }
    num_kv_heads = fields["num_key_value_heads"]
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if "q_proj" in name:
            parts = (tensors[name.replace("q_proj", each)] for each in ("q_proj", "k_proj", "v_proj"))
            grouped = torch.cat([part.unflatten(0, (num_kv_heads, -1)) for part in parts], 1).flatten(0, 1)
            renamed[name.replace("self_attn.q_proj", "attention.wqkv")] = grouped.contiguous()
        elif "k_proj" not in name and "v_proj" not in name:
            for old, new in names.items():
                name = name.replace(old, new)
            renamed[name] = tensor
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= {"architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2", "bias": fields["bias"]}
    config |= {"auto_map": {"AutoModelForCausalLM": "modeling_internlm2.InternLM2ForCausalLM"}}
    _write_json(folder / "config.json", {key: value for key, value in config.items() if key != "attention_bias"})


def _rewrite_as_legacy(file: Path) -> None:
    config = json.loads(file.read_text(encoding="utf-8"))
    rope = config.pop("rope_parameters", None) or {}
    config["rope_theta"] = rope.pop("rope_theta", 10000.0)
    kind = rope.pop("rope_type", "default")
    config["rope_scaling"] = None
    if kind != "default":
        # Llama 3.1's files say rope_type, most older ones say type.
        config["rope_scaling"] = {"rope_type" if kind == "llama3" else "type": kind, **rope}
    if kind == "longrope":
        config["original_max_position_embeddings"] = config["rope_scaling"].pop("original_max_position_embeddings")
    config["torch_dtype"] = config.pop("dtype")
    config.pop("layer_types", None)
    _write_json(file, config)


def _write_json(file: Path, value: object) -> None:
    file.write_text(json.dumps(value, indent=2), encoding="utf-8")
