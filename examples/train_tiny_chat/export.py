"""Writes the trained network as a checkpoint folder in the usual hub layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import nn

from .network import Network, Shape
from .tokenizer import BOS, CHAT_TEMPLATE, END_OF_TEXT, PAD, TURN_END


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes a file of settings."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def rounded_weights(network: nn.Module) -> dict[str, torch.Tensor]:
    """The weights as the checkpoint stores them."""
    state = network.state_dict()
    return {name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in state.items()}


def text_config(shape: Shape, tokenizer: Tokenizer) -> dict[str, Any]:
    """The entries of config.json that describe the text network."""
    ids = {token: tokenizer.token_to_id(token) for token in (PAD, BOS, END_OF_TEXT, TURN_END)}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.key_value_heads,
        "head_dim": shape.head_size,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": shape.positions,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": shape.norm_epsilon,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "bos_token_id": ids[BOS],
        "eos_token_id": [ids[TURN_END], ids[END_OF_TEXT]],
        "pad_token_id": ids[PAD],
        "use_cache": True,
        "torch_dtype": "bfloat16",
    }


def write_folder(
    network: nn.Module, tokenizer: Tokenizer, folder: Path, config: dict[str, Any], positions: int, chat_template: str
) -> None:
    """Writes configuration, weights and tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    ids = {token: tokenizer.token_to_id(token) for token in (PAD, BOS, END_OF_TEXT, TURN_END)}
    write_json(folder / "config.json", config)
    write_json(
        folder / "generation_config.json",
        {
            "bos_token_id": ids[BOS],
            "eos_token_id": [ids[TURN_END], ids[END_OF_TEXT]],
            "pad_token_id": ids[PAD],
            "do_sample": False,
            "max_new_tokens": 256,
        },
    )
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": TURN_END,
            "pad_token": PAD,
            "add_bos_token": True,
            "clean_up_tokenization_spaces": False,
            "model_max_length": positions,
            "chat_template": chat_template,
        },
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    save_file(rounded_weights(network), str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)


def export_checkpoint(network: Network, tokenizer: Tokenizer, folder: Path) -> None:
    """Writes the folder of ``tiny-chat``."""
    shape = network.shape
    write_folder(network, tokenizer, folder, text_config(shape, tokenizer), shape.positions, CHAT_TEMPLATE)
